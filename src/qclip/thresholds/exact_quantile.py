"""The quantile of the norms of the batch, or of the whole data set: the paper's ideal. Not private."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.schedules import Schedule
from qclip.thresholds._motion import check_range, clamp, level
from qclip.thresholds.threshold import Answer, Conditions, Counted, Question, RawAccess, Threshold, check_ahead


@dataclass(frozen=True)
class ExactQuantile(Threshold[tuple[float, ...]]):
    """Clip each group at the lower empirical ``p``-quantile of its gradient norms. The run's epsilon is infinite.

    The state is the last tau of each group. A gradient that is not finite has the largest norm.

    Args:
        p: Fraction of examples left unclipped, a number or a schedule.
        over: "batch" for the norms of the step; "dataset" for the norms of all the data at the step's parameters, which
            costs a pass over the data in each step.
        initial: Tau of a first step without examples; later steps without examples keep the last tau.
        tau_min: Lower bound of tau.
        tau_max: Upper bound of tau.
    """

    p: Schedule | float
    over: Literal["batch", "dataset"] = "batch"
    _: KW_ONLY
    initial: float = 0.1
    tau_min: float = 1e-6
    tau_max: float = 1e6

    def __post_init__(self) -> None:
        level(self.p, 0)
        check.choice("over", self.over, ("batch", "dataset"))
        check_range(self.initial, self.tau_min, self.tau_max)

    @property
    def raw_access(self) -> RawAccess:
        """The raw norms of the batch, or of all the data."""
        return self.over

    @property
    def noise_share(self) -> float:
        """0: nothing is counted."""
        return 0.0

    def check(self, conditions: Conditions) -> None:
        """Refuse a schedule that leaves (0, 1)."""
        check_ahead(lambda step: level(self.p, step), conditions.num_steps)

    def start(self, num_groups: int) -> tuple[float, ...]:
        """Return the initial tau of each group."""
        return (float(self.initial),) * num_groups

    def clip_norms(self, state: tuple[float, ...], step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """Return the quantile of the raw norms, or the last tau where there are none."""
        if raw_norms is None or len(raw_norms) == 0:
            return tuple(state)
        return raw_quantile(raw_norms, level(self.p, step), self.tau_min, self.tau_max)

    def ask(self, state: tuple[float, ...], step: int) -> Question:
        """Return an empty question: the raw norms are enough."""
        return Question()

    def unclipped(self, state: tuple[float, ...], step: int, answer: Answer) -> tuple[float, ...]:
        """Return the raw fraction of the batch; empty for a batch without examples."""
        return raw_unclipped(answer.raw_norms, self.update(state, step, answer))

    def counted(self, state: tuple[float, ...], step: int, answer: Answer) -> tuple[Counted, ...]:
        """Return 1 - p, an upper bound, for the quantile of the whole data set; that of a batch says nothing."""
        taus = self.update(state, step, answer)
        if self.over != "dataset" or max(taus) >= self.tau_max:
            return ()
        return (Counted(1 - level(self.p, step)),) * len(taus)

    def update(self, state: tuple[float, ...], step: int, answer: Answer) -> tuple[float, ...]:
        """Return the clip norms of the step, from the answer or computed again from its norms."""
        return tuple(answer.clip_norms) or self.clip_norms(state, step, answer.raw_norms)


def raw_quantile(raw_norms: Floats, p: float, tau_min: float, tau_max: float) -> tuple[float, ...]:
    """Return the lower p-quantile of each group, ``inf {t : F(t) >= p}``, clamped to the bounds.

    >>> raw_quantile(np.array([[3.0], [1.0], [np.inf], [2.0]]), 0.5, 1e-6, 1e6)
    (2.0,)

    Args:
        raw_norms: Gradient norms, [examples, groups], of at least one example; infinite where not finite.
        p: The quantile.
        tau_min: Lower bound of the result.
        tau_max: Upper bound of the result.
    """
    count = len(raw_norms)
    index = int(np.searchsorted(np.arange(1, count + 1) / count, p))  # the first k with k / count >= p, rounding apart
    return tuple(clamp(float(tau), tau_min, tau_max) for tau in np.sort(raw_norms, axis=0)[index])


def raw_unclipped(raw_norms: Floats | None, clip_norms: tuple[float, ...]) -> tuple[float, ...]:
    """Return the fraction of norms within each group's threshold; empty where there are no norms."""
    if raw_norms is None or len(raw_norms) == 0:
        return ()
    return tuple((np.asarray(raw_norms) <= np.array(clip_norms)).mean(axis=0).tolist())
