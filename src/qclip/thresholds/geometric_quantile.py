"""A quantile tracked by a paid count and the geometric rule (Andrew et al., 2021)."""

from dataclasses import KW_ONLY, dataclass

from qclip import _validate as check
from qclip._validate import Floats
from qclip.schedules import Schedule
from qclip.thresholds._motion import check_range, level, moved
from qclip.thresholds.threshold import (
    Answer,
    Conditions,
    Count,
    Counted,
    Question,
    RawAccess,
    Threshold,
    check_ahead,
    counted_at_tau,
)


@dataclass(frozen=True)
class GeometricQuantile(Threshold[tuple[float, ...]]):
    """Clip each group near the ``p``-quantile of its own gradient norms, by the rule of the literature.

    >>> median = GeometricQuantile(0.5)
    >>> median.update((1.0,), 0, Answer(noisy_bins=((0.75,),)))  # three quarters are unclipped: move down
    (0.951229424500714,)

    At each step ``tau <- tau exp(-learning_rate (noisy unclipped fraction - p))``, within [tau_min, tau_max]. The state
    is the tau of each group. `PrivateQuantile` has the same cost and follows faster.

    Args:
        p: Fraction of examples left unclipped, a number or a schedule.
        initial: Tau at the first step. It crosses a factor of 100 in about 50 steps at p = 0.5.
        learning_rate: Step of log tau per unit of error; a larger one follows faster and jitters more.
        centre: Subtracted from each indicator; one half costs the least.
        noise_share: Cost of the counts, as growth of the gradient's noise. At 0.01 and one group the noise of the count
            has a standard deviation of 3.56 times the noise multiplier.
        tau_min: Lower bound of tau.
        tau_max: Upper bound of tau.
    """

    p: Schedule | float
    _: KW_ONLY
    initial: float = 0.1
    learning_rate: float = 0.2
    centre: float = 0.5
    noise_share: float = 0.01
    tau_min: float = 1e-6
    tau_max: float = 1e6

    def __post_init__(self) -> None:
        level(self.p, 0)
        check.positive("learning_rate", self.learning_rate, "0.2 is usual")
        check.between("centre", self.centre, 0, 1, "0.5 costs the least", closed="both")
        check.positive("noise_share", self.noise_share, "0.01 lets the gradient's noise grow by 1 %")
        check_range(self.initial, self.tau_min, self.tau_max)

    @property
    def raw_access(self) -> RawAccess:
        """None: tau depends on noisy counts only."""
        return "none"

    def check(self, conditions: Conditions) -> None:
        """Refuse a schedule that leaves (0, 1)."""
        check_ahead(lambda step: level(self.p, step), conditions.num_steps)

    def start(self, num_groups: int) -> tuple[float, ...]:
        """Return the initial tau of each group."""
        return (float(self.initial),) * num_groups

    def clip_norms(self, state: tuple[float, ...], step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """Return the state."""
        return tuple(state)

    def ask(self, state: tuple[float, ...], step: int) -> Question:
        """Count the norms within tau."""
        return Question(count=Count(tuple((tau,) for tau in state), self.centre))

    def unclipped(self, state: tuple[float, ...], step: int, answer: Answer) -> tuple[float, ...]:
        """Return the counted fractions."""
        return tuple(fraction for (fraction,) in answer.noisy_bins)

    def counted(self, state: tuple[float, ...], step: int, answer: Answer) -> tuple[Counted, ...]:
        """Return the counted fractions."""
        return counted_at_tau(answer, self.centre)

    def update(self, state: tuple[float, ...], step: int, answer: Answer) -> tuple[float, ...]:
        """Move each group's tau against its error."""
        p = level(self.p, step)
        changes = (-self.learning_rate * (noisy - p) for noisy in self.unclipped(state, step, answer))
        return tuple(moved(tau, change, self.tau_min, self.tau_max) for tau, change in zip(state, changes, strict=True))
