"""A quantile tracked by a paid count: how many norms lie under tau, centred, with noise (after Andrew et al., 2021)."""

import math
from dataclasses import KW_ONLY, dataclass

from qclip import _validate as check
from qclip.schedules import Schedule
from qclip.thresholds.threshold import Count, Threshold, at


@dataclass(frozen=True)
class PrivateQuantile(Threshold[tuple[float, ...]]):
    """Clip each group near the ``p``-quantile of its own gradient norms, learnt privately as training goes.

    At each step the threshold moves by ``tau <- tau exp(-learning_rate (noisy unclipped fraction - p))``, within
    [tau_min, tau_max]. The state is the tau of each group.

    p: the fraction of examples left unclipped, a number or a schedule; 0.5 is a good choice.
    initial: tau at the first step. It crosses a factor of 100 in about 50 steps at p = 0.5, so it need not be tuned.
    learning_rate: larger follows faster and jitters more.
    centre: subtracted from each indicator; one half costs the least.
    noise_share: what the counts cost, as growth of the gradient's noise. At 0.01 and one group the noise of the count
        has a standard deviation of 3.56 times the noise multiplier.

    >>> median = PrivateQuantile(0.5)
    >>> median.update((1.0,), 0, (0.75,))  # three quarters are unclipped: move down
    (0.951229424500714,)
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
        self.quantile(0)
        check.positive("learning_rate", self.learning_rate, "0.2 is usual")
        check.between("centre", self.centre, 0, 1, "0.5 costs the least", closed="both")
        check.positive("noise_share", self.noise_share, "0.01 lets the gradient's noise grow by 1 %")
        check.positive("tau_min", self.tau_min)
        check.positive("tau_max", self.tau_max)
        check.between("initial", self.initial, self.tau_min, self.tau_max, "widen tau_min, tau_max", closed="both")

    @property
    def private(self) -> bool:
        """It sees noisy counts only."""
        return True

    def start(self, num_groups: int) -> tuple[float, ...]:
        """The initial value for each group."""
        return (float(self.initial),) * num_groups

    def clip_norms(self, state: tuple[float, ...], step: int) -> tuple[float, ...]:
        """The state itself."""
        return state

    def count(self, state: tuple[float, ...], step: int) -> Count | None:
        """How many norms are within tau."""
        return Count(state, self.centre)

    def update(self, state: tuple[float, ...], step: int, noisy_unclipped: tuple[float, ...]) -> tuple[float, ...]:
        """Move each group's tau against its error."""
        p = self.quantile(step)
        return tuple(self._moved(tau, noisy - p) for tau, noisy in zip(state, noisy_unclipped, strict=True))

    def _moved(self, tau: float, error: float) -> float:
        change = min(max(-self.learning_rate * error, -700.0), 700.0)  # exp overflows past 709
        return min(max(tau * math.exp(change), self.tau_min), self.tau_max)

    def quantile(self, step: int) -> float:
        """The quantile aimed at, p, at this step."""
        return check.quantile("p", at(self.p, step))
