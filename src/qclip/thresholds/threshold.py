"""What a threshold is: tau before the step, a question about the step, and the next state from its noisy answer."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Generic, Literal, TypeVar

import numpy as np

from qclip._validate import Floats
from qclip.schedules import Schedule

S = TypeVar("S")
Grid = tuple[tuple[float, ...], ...]
"""For each group, a value for each of its radii."""
RawAccess = Literal["none", "physical_batch", "batch", "dataset"]


@dataclass(frozen=True)
class Count:
    """A paid question: in each group, how many norms lie in each bin between neighbouring radii.

    The first bin begins at 0; norms above the last radius are in no bin. Each example adds the indicators of its bins
    less ``centre``. The centre is public, and any choice is unbiased under Poisson sampling: one half has the least
    sensitivity for one bin, 1/M for M of them.

    >>> Count(((1.0,), (1.0,), (2.0,), (5.0,)), centre=0.5).l2_bound
    1.0
    >>> round(Count(((1.0, 2.0, 3.0, 4.0),), centre=0.25).l2_bound ** 2, 9)
    0.75
    """

    radii: Grid
    """Ascending in each group."""
    centre: float

    @property
    def l2_bound(self) -> float:
        """The largest norm that one example can add to the counts of all groups together."""
        squares = (self._group_square(len(radii)) for radii in self.radii)
        return math.sqrt(math.fsum(squares))

    def _group_square(self, bins: int) -> float:
        c = self.centre
        return max((1 - c) ** 2 + (bins - 1) * c**2, bins * c**2)  # in one bin, or in none


ROOM = 2e-6
"""How much of its bound an example with slack leaves: more than the rounding of its norm and of its coordinates."""


@dataclass(frozen=True)
class Slack:
    """A free question: how many norms lie within each radius, told by what unclipped examples leave of their bound.

    An example of norm at most r_j may add the coordinates ``a_k 1{norm <= r_k}`` to its clipped gradient, with
    ``a_k^2 = r_(k+1)^2 - r_k^2`` and the threshold after the last radius: the extended vector is no longer than the
    threshold, so the sensitivity, the noise and the cost stay what they were (docs/theory.md, section 11).

    >>> [round(a, 6) for a in Slack(((3.0, 4.0),)).coefficients((5.0,))[0]]
    [2.645751, 2.999983]
    """

    radii: Grid
    """Ascending in each group, below its threshold."""

    def coefficients(self, clip_norms: Sequence[float]) -> Grid:
        """The coordinate a_k of each radius, for a threshold that is a little lower: norms and sums are rounded."""
        return tuple(_steps((*radii, (1 - ROOM) * tau)) for radii, tau in zip(self.radii, clip_norms, strict=True))


def _steps(radii: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(math.sqrt((high - low) * (high + low)) for low, high in pairwise(radii))


@dataclass(frozen=True)
class Question:
    """What a threshold wants to know of a step's norms."""

    count: Count | None = None
    slack: Slack | None = None


@dataclass(frozen=True)
class Answer:
    """What a threshold learns of a step: noisy fractions of the expected batch size, for what it asked.

    The size of the noise and of the batch are public, and travel with the fractions, so that a threshold knows how far
    to trust them. What is not said is taken to be exact.
    """

    noisy_bins: Grid = ()
    """The fraction in each bin of each group's `Count`."""
    noisy_within: Grid = ()
    """The fraction within each radius of each group's `Slack`."""
    raw_norms: Floats | None = None
    """[examples, groups]; only for thresholds that are not private."""
    bins_std: float = 0.0
    """The standard deviation of the noise in each of ``noisy_bins``."""
    within_std: Grid = ()
    """The same for each of ``noisy_within``; zeros where left out."""
    batch_size: float = math.inf
    """The expected batch size: the fractions also vary because the batch is a sample."""
    clip_norms: tuple[float, ...] = ()
    """What the step was clipped at; only for thresholds that are not private, and may be left out."""

    def __post_init__(self) -> None:
        if not self.within_std:
            object.__setattr__(self, "within_std", tuple((0.0,) * len(row) for row in self.noisy_within))


@dataclass(frozen=True)
class Conditions:
    """The public facts of a run, for a threshold to say beforehand whether it can work."""

    batch_size: int
    num_steps: int
    noise_multiplier: float
    """Of gradient and counts together."""
    dims: tuple[int, ...]
    """The number of parameters of each group."""

    @property
    def group_multipliers(self) -> Floats:
        """The noise of each group's gradient sum, relative to its threshold, while the thresholds are all alike."""
        roots = np.sqrt(np.asarray(self.dims, dtype=np.float64))
        return self.noise_multiplier * np.sqrt(roots.sum() / roots)


class Threshold(ABC, Generic[S]):
    """Where to clip at each step.

    An implementation is a frozen dataclass: a description. What it learns is its state, a plain value (numbers, and
    tuples and dicts of them) that the run keeps, hands back, and writes to checkpoints. A step asks in this order:
    `clip_norms`, `ask`, then `unclipped` and `update` with what the mechanism released. A private threshold promises
    that its clip norms and its state are functions of earlier *noisy* answers only, and that the norms are positive
    and finite whatever the answers were.
    """

    @property
    @abstractmethod
    def raw_access(self) -> RawAccess:
        """What raw norms `clip_norms` is given: of the step's first part, its whole batch, the data set; or nothing."""

    @property
    @abstractmethod
    def noise_share(self) -> float:
        """By how much the gradient's noise grows to pay for the counts: 0.01 is 1 %; 0 where nothing is paid for."""

    @abstractmethod
    def check(self, conditions: Conditions) -> None:
        """Refuse a run in which this threshold cannot work, before anything is computed."""

    @abstractmethod
    def start(self, num_groups: int) -> S:
        """The state before the first step."""

    @abstractmethod
    def clip_norms(self, state: S, step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """The threshold tau of each group at this step (from 0); ``raw_norms``: [examples, groups] of what it sees."""

    @abstractmethod
    def ask(self, state: S, step: int) -> Question:
        """What to learn at this step."""

    @abstractmethod
    def unclipped(self, state: S, step: int, answer: Answer) -> tuple[float, ...]:
        """The noisy fraction of examples that this step left unclipped in each group; empty where it does not ask."""

    @abstractmethod
    def update(self, state: S, step: int, answer: Answer) -> S:
        """The state after the step."""

    @property
    def private(self) -> bool:
        """Whether tau depends on the data through noisy answers only; if not, the run's epsilon is infinite."""
        return self.raw_access == "none"


def at(schedule: Schedule | float, step: int) -> float:
    """The value of a schedule, or of a plain number, at this step."""
    return schedule(step) if callable(schedule) else schedule


def check_ahead(value: Schedule, num_steps: int) -> None:
    """Evaluate a schedule that refuses bad values at the run's steps (10^4 of them at most), before the run."""
    for step in np.unique(np.linspace(0, max(num_steps - 1, 0), min(max(num_steps, 1), 10_000)).astype(int)):
        value(int(step))


def refusal(threshold: "Threshold[S]", conditions: Conditions) -> str:
    """Why the threshold cannot work under these conditions; empty where it can."""
    try:
        threshold.check(conditions)
    except ValueError as error:
        return str(error)
    return ""


def describe(threshold: "Threshold[S]") -> dict[str, float | str]:
    """The threshold in plain words, for records and to compare with: its name and settings, schedules by their names.

    >>> from qclip.thresholds import Constant
    >>> describe(Constant(2.0))
    {'name': 'Constant', 'tau': 2.0}
    """
    assert is_dataclass(threshold)
    settings = ((field.name, getattr(threshold, field.name)) for field in fields(threshold))
    return {"name": type(threshold).__name__} | {name: _plain(value) for name, value in settings}


def _plain(value: object) -> float | str:
    if isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value)  # not numpy's
    if is_dataclass(value) or not callable(value):
        return repr(value)
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
