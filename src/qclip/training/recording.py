"""Recordings: what an audit sees of the runs that are made inside it, and what it may change in them.

A run asks once, when it is made, whether it is being recorded. `qclip.audit.replay` is the one user: it records a
run, and replays its releases to runs on neighbouring data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qclip.training.sampling import Sampler

if TYPE_CHECKING:
    from qclip.training.sums import NoisySum


class Recording(Protocol):
    """Sees the draws and the raw sums of a run, and decides what is released."""

    @property
    def seed(self) -> int:
        """The seed of runs that are given none."""
        ...

    def begin(self, training: Any) -> None:
        """See a run that was made."""
        ...

    def drawn(self, step: int, indices: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the indices that take part in a step, given those that were drawn."""
        ...

    def release(self, value: Any, noise_multiplier: float, source: Any, **settings: Any) -> "NoisySum":
        """Return the release of a raw sum; the arguments are those of `qclip.training.noise.release`."""
        ...


_CURRENT: ContextVar[Recording | None] = ContextVar("recording", default=None)


def current() -> Recording | None:
    """Return the recording of runs that are made now; None outside of an audit."""
    return _CURRENT.get()


@contextmanager
def recorded_by(recording: Recording) -> Iterator[None]:
    """Let a recording see the runs that are made inside."""
    token = _CURRENT.set(recording)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@dataclass(frozen=True)
class RecordedSampler:
    """A sampler whose draws a recording sees and may reduce."""

    sampler: Sampler
    recording: Recording

    @property
    def seed(self) -> np.random.SeedSequence:
        """The seed of all draws."""
        return self.sampler.seed

    def draw(self, step: int) -> NDArray[np.intp]:
        """Return the indices of the examples of this step, ascending; possibly none."""
        return self.recording.drawn(step, self.sampler.draw(step))
