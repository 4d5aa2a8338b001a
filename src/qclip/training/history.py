"""The history of a run: a record for each logical step, in public and released values only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload


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
