"""A quantile tracked by a paid count at tau and a free count below it: the default."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, TypedDict

from qclip import _validate as check
from qclip import accounting
from qclip._validate import Floats
from qclip.schedules import Schedule
from qclip.thresholds._motion import (
    RESTART,
    attainable,
    check_range,
    clamp,
    level,
    moved,
    plausible,
    pursue,
    usual_slope,
)
from qclip.thresholds.threshold import (
    Answer,
    Conditions,
    Count,
    Counted,
    Question,
    RawAccess,
    Slack,
    Threshold,
    check_ahead,
    counted_at_tau,
)

RADIUS = 0.75
"""Radius of the free count, relative to tau: nearer 1 says more about the fraction at tau, farther is less noisy."""
LOG_RATIO = -math.log(RADIUS)
MEMORY = 0.02
"""Rate at which the average difference of the two fractions forgets; it starts as a plain mean."""


class CountedGroup(TypedDict):
    """The state of a group."""

    tau: float
    velocity: float
    between: float
    """The average fraction of norms between the free count's radius and tau."""
    seen: int
    """The number of steps in that average."""


State = tuple[CountedGroup, ...]
"""One entry per group."""


class Reading(NamedTuple):
    """The two fractions of one group, with the standard deviations of their noise."""

    counted: float
    within: float
    counted_std: float
    within_std: float
    batch_size: float

    @property
    def difference_variance(self) -> float:
        """The variance of the paid fraction less the free one."""
        return self.counted_std**2 + self.within_std**2 + 0.25 / self.batch_size

    def count_weight(self, p: float) -> float:
        """Return the weight of the paid count in the best mean of the two; their sampling errors are correlated."""
        B = self.batch_size
        count, slack, shared = self.counted_std**2 + 0.25 / B, self.within_std**2 + p / B, p / (2 * B)
        total = count + slack - 2 * shared
        return clamp((slack - shared) / total, 0.0, 1.0) if total > 0 else 1.0


@dataclass(frozen=True)
class PrivateQuantile(Threshold[State]):
    """Clip each group near the ``p``-quantile of its own gradient norms. Nothing needs to be tuned.

    >>> median = PrivateQuantile(0.5, initial=1.0)
    >>> answer = Answer(
    ...     noisy_bins=((0.75,),), noisy_within=((0.6,),), bins_std=0.06, within_std=((0.03,),), batch_size=64
    ... )
    >>> (group,) = median.update(median.start(1), 0, answer)  # three quarters are unclipped: move down
    >>> round(group["tau"], 3)
    0.81

    - Two noisy counts locate tau: a paid one at tau, and a free one at 3/4 of tau in the slack of unclipped examples.
      The paid one is unbiased. The free one, shifted by their average difference, removes part of its noise.
    - The same difference estimates the slope of the distribution function at tau, which turns an error of the fraction
      into a step of log tau, as in Newton's method. Where it is too noisy, the slope of a log-normal distribution
      takes its place.
    - The step is damped as the noise requires, least in the first steps, and a velocity follows norms that drift.

    Args:
        p: Fraction of examples left unclipped, a number or a schedule.
        initial: Tau at the first step. It crosses a factor of 100 in 15 to 21 steps (more with a lot of noise).
        noise_share: Cost of the paid count, as growth of the gradient's noise. At 0.01 and one group the noise of the
            count has a standard deviation of 3.56 times the noise multiplier.
        tau_min: Lower bound of tau.
        tau_max: Upper bound of tau.
    """

    p: Schedule | float
    _: KW_ONLY
    initial: float = 0.1
    noise_share: float = 0.01
    tau_min: float = 1e-6
    tau_max: float = 1e6

    def __post_init__(self) -> None:
        level(self.p, 0)
        check.positive("noise_share", self.noise_share, "0.01 lets the gradient's noise grow by 1 %")
        check_range(self.initial, self.tau_min, self.tau_max)

    @property
    def raw_access(self) -> RawAccess:
        """None: tau depends on noisy counts only."""
        return "none"

    def check(self, conditions: Conditions) -> None:
        """Refuse a schedule that leaves (0, 1), and noise that is too large for the count.

        The standard deviation of the noise on the counted fraction may be up to 1, the whole batch, and
        10 min(p, 1 - p).
        """
        bound = Count(((1.0,),) * len(conditions.dims), 0.5).l2_bound
        counts = accounting.split(conditions.noise_multiplier, self.noise_share).counts
        noise = counts * bound / conditions.batch_size
        check_ahead(lambda step: attainable(level(self.p, step), noise, conditions), conditions.num_steps)

    def start(self, num_groups: int) -> State:
        """Return the initial tau of each group, at rest."""
        return tuple(
            CountedGroup(tau=float(self.initial), velocity=0.0, between=0.0, seen=0) for _ in range(num_groups)
        )

    def clip_norms(self, state: State, step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """Return the tau of each group."""
        return tuple(group["tau"] for group in state)

    def ask(self, state: State, step: int) -> Question:
        """Count the norms within tau, paid for, and within 3/4 of tau, for free."""
        taus = self.clip_norms(state, step)
        return Question(Count(tuple((tau,) for tau in taus), 0.5), Slack(tuple((RADIUS * tau,) for tau in taus)))

    def unclipped(self, state: State, step: int, answer: Answer) -> tuple[float, ...]:
        """Return the paid fractions, which are unbiased."""
        return tuple(fraction for (fraction,) in answer.noisy_bins)

    def counted(self, state: State, step: int, answer: Answer) -> tuple[Counted, ...]:
        """Return the counted fractions."""
        return counted_at_tau(answer, 0.5)

    def update(self, state: State, step: int, answer: Answer) -> State:
        """Move each group's tau towards its quantile."""
        p = level(self.p, step)
        within = zip(answer.noisy_within, answer.within_std, strict=True)
        return tuple(
            self._next(group, p, Reading(counted, free, answer.bins_std, std, answer.batch_size))
            for group, (counted,), ((free,), (std,)) in zip(state, answer.noisy_bins, within, strict=True)
        )

    def _next(self, group: CountedGroup, p: float, reading: Reading) -> CountedGroup:
        variance = reading.difference_variance
        seen = group["seen"] + 1
        difference = plausible(reading.counted, variance**0.5) - plausible(reading.within, variance**0.5)
        between = group["between"] + max(MEMORY, 1 / seen) * (difference - group["between"])

        weight = reading.count_weight(p)
        fraction = weight * reading.counted + (1 - weight) * (reading.within + between)
        noise = math.hypot(weight * reading.counted_std, (1 - weight) * reading.within_std)
        std = math.hypot(noise, 0.5 / reading.batch_size**0.5)

        slope = _slope(between, variance * max(1 / seen, MEMORY / (2 - MEMORY)), p)
        error = plausible(fraction, std) - p
        change, velocity, lost = pursue(group["velocity"], error, slope, std, p, seen)
        tau = moved(group["tau"], change, self.tau_min, self.tau_max)
        return CountedGroup(tau=tau, velocity=velocity, between=between, seen=min(seen, RESTART) if lost else seen)


def _slope(between: float, variance: float, p: float) -> float:
    """Return the slope of the unclipped fraction in log tau: as measured, or the usual one where that is noisy.

    It is the mean of the two by their precisions; the usual slope counts as known up to a factor of about 2. It is at
    least a quarter of the usual slope: far from the quantile no norms lie between the radii, and steps stay bounded.
    """
    usual = usual_slope(p)
    trust = usual**2 / (usual**2 + variance / LOG_RATIO**2)
    return max(usual / 4, usual + trust * (between / LOG_RATIO - usual))
