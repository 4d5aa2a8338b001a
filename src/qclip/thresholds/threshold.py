"""The interface of thresholds: clip norms before a step, a question about its norms, and the next state."""

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
"""The raw norms that a threshold reads before a step; only "none" is private."""


@dataclass(frozen=True)
class Count:
    """A paid question: the number of norms in each bin between neighbouring radii, in each group.

    >>> Count(((1.0,), (1.0,), (2.0,), (5.0,)), centre=0.5).l2_bound
    1.0
    >>> round(Count(((1.0, 2.0, 3.0, 4.0),), centre=0.25).l2_bound ** 2, 9)
    0.75

    - The first bin begins at 0; norms above the last radius are in no bin.
    - Each example adds the indicators of its bins less ``centre``. The centre is public, and any choice is unbiased
      under Poisson sampling. One half has the least sensitivity for one bin, 1/M for M bins.
    """

    radii: Grid
    """Ascending in each group."""
    centre: float

    @property
    def l2_bound(self) -> float:
        """The largest L2 norm that one example can add to the counts of all groups together."""
        squares = (self._group_square(len(radii)) for radii in self.radii)
        return math.sqrt(math.fsum(squares))

    def _group_square(self, bins: int) -> float:
        c = self.centre
        return max((1 - c) ** 2 + (bins - 1) * c**2, bins * c**2)  # in one bin, or in none


ROUNDING_MARGIN = 2e-6
"""The part of its bound that an example with slack leaves unused: more than its norm and coordinates are rounded by."""


@dataclass(frozen=True)
class Slack:
    """A free question: the number of norms within each radius, released in the slack of unclipped examples.

    >>> [round(a, 6) for a in Slack(((3.0, 4.0),)).coefficients((5.0,))[0]]
    [2.645751, 2.999983]

    An example of norm at most r_j adds the coordinates ``a_k 1{norm <= r_k}`` to its clipped gradient, with
    ``a_k^2 = r_(k+1)^2 - r_k^2`` and the threshold after the last radius.

    Guarantees:
        - The extended vector is no longer than the threshold, so sensitivity, noise and cost do not change
          (docs/theory.md, section 11).
    """

    radii: Grid
    """Ascending in each group, below its threshold."""

    def coefficients(self, clip_norms: Sequence[float]) -> Grid:
        """Return the coordinate a_k of each radius; the clip norms are lowered by the rounding margin."""
        return tuple(
            _steps((*radii, (1 - ROUNDING_MARGIN) * tau)) for radii, tau in zip(self.radii, clip_norms, strict=True)
        )


def _steps(radii: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(math.sqrt((high - low) * (high + low)) for low, high in pairwise(radii))


@dataclass(frozen=True)
class Question:
    """The question of a threshold about a step's norms; empty where it asks nothing."""

    count: Count | None = None
    slack: Slack | None = None


@dataclass(frozen=True)
class Answer:
    """The noisy answer to a `Question`, as fractions of the expected batch size.

    The noise level and the batch size are public. They travel with the fractions, so that a threshold knows how far to
    trust them. Fractions without a standard deviation count as exact.
    """

    noisy_bins: Grid = ()
    """The fraction in each bin of each group's `Count`."""
    noisy_within: Grid = ()
    """The fraction within each radius of each group's `Slack`."""
    raw_norms: Floats | None = None
    """Raw norms, [examples, groups]; only for thresholds that are not private."""
    bins_std: float = 0.0
    """Standard deviation of the noise in each of ``noisy_bins``."""
    within_std: Grid = ()
    """The same for each of ``noisy_within``; zeros where left out."""
    batch_size: float = math.inf
    """The expected batch size: the fractions also vary because the batch is a sample."""
    clip_norms: tuple[float, ...] = ()
    """The clip norms of the step; only for thresholds that are not private, and optional."""
    noise_power: tuple[float, ...] = ()
    """The expected squared norm of the noise on each group's mean gradient, over its squared clip norm: public."""

    def __post_init__(self) -> None:
        if not self.within_std:
            object.__setattr__(self, "within_std", tuple((0.0,) * len(row) for row in self.noisy_within))


@dataclass(frozen=True)
class Counted:
    """An unbiased estimate of an upper bound on what clipping takes, 1 - E min(1, tau/||g||), with its errors.

    The clipped fraction is such a bound; a histogram gives a closer one. A certificate averages them over the run.
    """

    clipped: float
    noise: float = 0.0
    """Standard deviation of its Gaussian noise."""
    reach: float = 0.0
    """The most by which one sampled example moves it, times the batch size; 0 where it is not a count of a sample."""


@dataclass(frozen=True)
class Conditions:
    """The public facts of a run, from which a threshold tells beforehand whether it can work."""

    batch_size: int
    num_steps: int
    noise_multiplier: float
    """Noise multiplier of gradient and counts together."""
    dims: tuple[int, ...]
    """The number of parameters of each group."""

    @property
    def group_multipliers(self) -> Floats:
        """The noise multiplier of each group's gradient sum, while all thresholds are equal, [groups]."""
        roots = np.sqrt(np.asarray(self.dims, dtype=np.float64))
        return self.noise_multiplier * np.sqrt(roots.sum() / roots)


class Threshold(ABC, Generic[S]):
    """The clip norms of each step.

    An implementation is a frozen dataclass: a description. Its state is a plain value (numbers, and tuples and dicts of
    them) that the run keeps, hands back and writes to checkpoints. A step calls `clip_norms` and `ask`, then
    `unclipped` and `update` with the released answer.

    Guarantees of a private threshold:
        - Its clip norms and its state are functions of earlier *noisy* answers only.
        - Its clip norms are positive and finite, whatever the answers were.
    """

    @property
    @abstractmethod
    def raw_access(self) -> RawAccess:
        """The raw norms that `clip_norms` reads: none, the step's first physical batch, its batch, or the data set."""

    @property
    @abstractmethod
    def noise_share(self) -> float:
        """The growth of the gradient's noise that pays for the counts: 0.01 is 1 %; 0 without paid counts."""

    def share(self, conditions: Conditions) -> float:
        """Return the noise share of a run; by default `noise_share`."""
        return self.noise_share

    @abstractmethod
    def check(self, conditions: Conditions) -> None:
        """Refuse a run in which this threshold cannot work, before the run starts.

        Raises:
            Refusal: The noise is too large for the batch, or a schedule leaves its range.
        """

    @abstractmethod
    def start(self, num_groups: int) -> S:
        """Return the state before the first step."""

    @abstractmethod
    def clip_norms(self, state: S, step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """Return the threshold tau of each group at this step.

        Args:
            state: The state before the step.
            step: The step, counted from 0.
            raw_norms: The norms that `raw_access` names, [examples, groups]; None for private thresholds.
        """

    @abstractmethod
    def ask(self, state: S, step: int) -> Question:
        """Return the question to release an answer to at this step."""

    @abstractmethod
    def unclipped(self, state: S, step: int, answer: Answer) -> tuple[float, ...]:
        """Return the noisy fraction of examples that the step left unclipped, per group; empty without a question."""

    def clipped_length(self, state: S) -> tuple[float, ...]:
        """Return an estimate of the mean length that the last step clipped from a gradient, over its tau, per group.

        It bounds the bias of the step. Empty by default: not every threshold can tell.
        """
        return ()

    def counted(self, state: S, step: int, answer: Answer) -> tuple[Counted, ...]:
        """Return for each group an unbiased estimate of a bound on what clipping takes: the clipped fraction, or less.

        Empty by default: not every threshold counts without a bias.
        """
        return ()

    @abstractmethod
    def update(self, state: S, step: int, answer: Answer) -> S:
        """Return the state after the step."""

    @property
    def private(self) -> bool:
        """Whether tau depends on the data through noisy answers only; otherwise the run's epsilon is infinite."""
        return self.raw_access == "none"


def at(schedule: Schedule | float, step: int) -> float:
    """Return the value of a schedule, or of a number, at this step."""
    return schedule(step) if callable(schedule) else schedule


def check_ahead(value: Schedule, num_steps: int) -> None:
    """Evaluate a schedule that refuses bad values at up to 10^4 of the run's steps, before the run."""
    for step in np.unique(np.linspace(0, max(num_steps - 1, 0), min(max(num_steps, 1), 10_000)).astype(int)):
        value(int(step))


def counted_at_tau(answer: Answer, centre: float) -> tuple[Counted, ...]:
    """Return the clipped fractions of an answer whose only bin ends at tau."""
    reach = max(centre, 1 - centre)
    return tuple(Counted(1 - fraction, answer.bins_std, reach) for (fraction,) in answer.noisy_bins)


def refusal(threshold: "Threshold[S]", conditions: Conditions) -> str:
    """Return why the threshold cannot work under these conditions; empty where it can."""
    try:
        threshold.check(conditions)
    except ValueError as error:
        return str(error)
    return ""


def describe(threshold: "Threshold[S]") -> dict[str, float | str]:
    """Describe the threshold by its name and settings, for records and comparisons; schedules are named.

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
