"""What a threshold is: tau before the step, a question about the step, and the next state from its noisy answer."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from qclip.schedules import Schedule

S = TypeVar("S")


@dataclass(frozen=True)
class Count:
    """A sum a threshold asks for: in each group, over the examples, ``1{norm <= radius} - centre``.

    The centre is public, and any choice is unbiased under Poisson sampling; one half has the least sensitivity.

    >>> Count((1.0, 1.0, 2.0, 5.0), centre=0.5).l2_bound
    1.0
    """

    radii: tuple[float, ...]
    """One for each group."""
    centre: float

    @property
    def l2_bound(self) -> float:
        """The largest norm that one example can add to the counts of all groups together."""
        return math.sqrt(len(self.radii)) * max(self.centre, 1 - self.centre)


class Threshold(ABC, Generic[S]):
    """Where to clip at each step.

    An implementation is a frozen dataclass: a description. What it learns is its state, a plain value (numbers and
    tuples of numbers) that the run keeps and hands back. A step asks in this order: `clip_norms`, `count`, then
    `update` with what the mechanism released. A private threshold promises that its clip norms and its state are
    functions of earlier *noisy* answers only, and that the norms are positive and finite whatever the answers were.
    """

    @property
    @abstractmethod
    def private(self) -> bool:
        """Whether tau depends on the data through noisy answers only; if not, the run's epsilon is infinite."""

    @property
    @abstractmethod
    def noise_share(self) -> float:
        """By how much the gradient's noise grows to pay for the counts: 0.01 is 1 %; 0 where nothing is asked."""

    @abstractmethod
    def start(self, num_groups: int) -> S:
        """The state before the first step."""

    @abstractmethod
    def clip_norms(self, state: S, step: int) -> tuple[float, ...]:
        """The threshold tau of each group at this step (counted from 0)."""

    @abstractmethod
    def count(self, state: S, step: int) -> Count | None:
        """What to count at this step, if anything."""

    @abstractmethod
    def update(self, state: S, step: int, noisy_unclipped: tuple[float, ...]) -> S:
        """The state after the step, from the noisy fraction of examples within each counted radius (none: empty)."""


def at(schedule: Schedule | float, step: int) -> float:
    """The value of a schedule, or of a plain number, at this step."""
    return schedule(step) if callable(schedule) else schedule
