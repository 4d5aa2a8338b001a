"""The history of a run: a record for each logical step, in public and released values only."""

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import nn


@dataclass(frozen=True)
class StepRecord:
    """A logical step, in public and released values only."""

    step: int
    tau: tuple[float, ...]
    """The threshold of each group."""
    noisy_unclipped: tuple[float, ...]
    """The noisy fraction of examples left unclipped in each group; empty where the threshold does not ask for it."""
    step_size: float
    """The learning rate of the (first) optimizer's first group, over the threshold where steps are normalized."""
    lost: tuple[str, ...] = ()
    """The groups whose threshold has lost its quantile by then (`qclip.training.lost_threshold`)."""


def record_of(row: Mapping[str, Any]) -> StepRecord:
    """Return the record that a checkpoint holds as plain data."""
    lost = row.get("lost", ())  # older checkpoints do not say
    return StepRecord(row["step"], tuple(row["tau"]), tuple(row["noisy_unclipped"]), row["step_size"], tuple(lost))


class History(Sequence[StepRecord]):
    """A read-only view of the records of a run, which grows with it; slices and copies are tuples, and do not.

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
        found = self._records[index]
        return tuple(found) if isinstance(found, list) else found

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

    __hash__ = None  # pyrefly: ignore - it grows

    def __repr__(self) -> str:
        count = len(self)
        if not count:
            return "<History: no step>"
        return f"<History: {count} step{'s' if count > 1 else ''}, the last {self[-1]!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self._records),)


_histories: "weakref.WeakKeyDictionary[nn.Module, list[History]]" = weakref.WeakKeyDictionary()


def remember(model: nn.Module, history: History) -> None:
    """Note a run of this model, for as long as the model exists."""
    _histories.setdefault(model, []).append(history)


def warn_of_earlier(model: nn.Module) -> None:
    """Say that releases of earlier runs are not in the epsilon of the next one."""
    steps = sum(map(len, _histories.get(model, [])))
    if steps:
        warnings.warn(
            f"this model has taken {steps} steps in earlier runs: epsilon() counts those of the new run only. "
            "Where they have seen the same people's data, epsilons and deltas add up",
            stacklevel=3,
        )
