"""The history of a run: a record for each logical step, in public and released values only."""

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

from torch import nn


@dataclass(frozen=True)
class StepRecord:
    """The record of one logical step: public and released values only."""

    step: int
    tau: tuple[float, ...]
    """The clip norm of each group."""
    noisy_unclipped: tuple[float, ...]
    """The noisy fraction of unclipped examples in each group; empty if the threshold does not estimate it."""
    step_size: float
    """The learning rate of the first optimizer's first group; over the clip norm with ``rescale_to_unit_norm``."""
    noise_power: tuple[float, ...] = ()
    """The expected squared norm of the noise on each group's mean gradient, over its squared clip norm: public."""
    clipped_length: tuple[float, ...] = ()
    """The mean length that clipping takes from a gradient, over the clip norm; empty if not estimated."""
    clipped: tuple[float, ...] = ()
    """What clipping takes in each group at most, 1 - E min(1, tau/||g||), counted without a bias; empty if it is not.

    The clipped fraction, or less where a histogram says more."""
    clipped_noise: tuple[float, ...] = ()
    """The standard deviation of the noise on each of ``clipped``."""
    clipped_reach: tuple[float, ...] = ()
    """The most by which one sampled example moves each of ``clipped``, times the batch size."""
    lost: tuple[str, ...] = ()
    """The groups whose threshold counts as lost after this step (`qclip.training.lost_threshold`)."""


def record_of(row: Mapping[str, Any]) -> StepRecord:
    """Return the record that a checkpoint stores as plain data."""
    known = {field.name for field in fields(StepRecord)}  # older checkpoints have fewer
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in row.items() if name in known
    }
    return StepRecord(**given)


class History(Sequence[StepRecord]):
    """A read-only view of the records of a run, which grows with the run. Slices and copies are plain tuples.

    >>> rows = [StepRecord(0, (1.0,), (), 0.1)]
    >>> history = History(rows)
    >>> rows.append(StepRecord(1, (2.0,), (), 0.1))
    >>> len(history), history[-1].tau
    (2, (2.0,))
    """

    def __init__(self, records: list[StepRecord]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        selected = self._records[index]
        return tuple(selected) if isinstance(selected, list) else selected

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)

    def __eq__(self, other: object) -> bool:
        match other:
            case History():
                return self._records == other._records
            case tuple():
                return tuple(self._records) == other
            case _:
                return NotImplemented

    __hash__ = None  # pyrefly: ignore - mutable

    def __repr__(self) -> str:
        num_steps = len(self)
        if not num_steps:
            return "<History: no step>"
        return f"<History: {num_steps} step{'s' if num_steps > 1 else ''}, the last {self[-1]!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self._records),)


_histories: "weakref.WeakKeyDictionary[nn.Module, list[History]]" = weakref.WeakKeyDictionary()


def remember(model: nn.Module, history: History) -> None:
    """Register a run of this model, for as long as the model exists."""
    _histories.setdefault(model, []).append(history)


def warn_of_earlier(model: nn.Module) -> None:
    """Warn if the model has steps of earlier runs, which the epsilon of the next run does not include."""
    num_steps = sum(map(len, _histories.get(model, [])))
    if num_steps:
        warnings.warn(
            f"this model has taken {num_steps} steps in earlier runs: epsilon() counts the steps of the new run only. "
            "If the runs share people's data, their epsilons and deltas add up",
            stacklevel=3,
        )
