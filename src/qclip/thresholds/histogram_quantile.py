"""A quantile of a noisy histogram of the norms around tau."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import TypedDict

import numpy as np
from scipy.optimize import isotonic_regression

from qclip import _validate as check
from qclip import accounting
from qclip._validate import Floats
from qclip.schedules import Schedule
from qclip.thresholds._lattice import OUTERMOST, Lattice, shifted
from qclip.thresholds._motion import NORMAL, attainable, check_range, clamp, gain, level, plausible
from qclip.thresholds.threshold import Answer, Conditions, Counted, Question, RawAccess, Threshold, check_ahead

PRIOR_STD = 0.2
"""Assumed standard deviation of the first guess of a fraction, from a log-normal distribution around tau."""


class HistogramGroup(TypedDict):
    """The state of a group."""

    tau: float
    lowest: int
    """The place of the first radius on the lattice ``exp(spacing * place)``."""
    within: tuple[float, ...]
    """The smoothed fraction of norms within each radius."""
    seen: tuple[int, ...]
    """The number of steps in each of them."""
    miss: float
    """The average excess of the fraction counted at tau over the one read off the histogram there."""


State = tuple[HistogramGroup, ...]
"""One entry per group."""


@dataclass(frozen=True)
class HistogramQuantile(Threshold[State]):
    """Clip each group at the ``p``-quantile of a smoothed noisy histogram of its gradient norms.

    - The norms are counted in bins of log radius around tau. The counts are averaged over as many steps as the noise
      requires and made monotone, and the quantile is interpolated between the radii. Tau jumps there at once, and
      follows any schedule of p without delay.
    - The norms within tau are counted too. The difference to the interpolated fraction, from norms that drift or a
      distribution that bends between two radii, is corrected for.
    - Where the quantile lies outside the histogram, tau goes to its end, and the histogram follows.
    - Many bins share the budget of one count: a fraction is 3.6 times as noisy as the count of `PrivateQuantile` at the
      same cost.

    Args:
        p: Fraction of examples left unclipped, a number or a schedule.
        initial: Tau at the first step. With little noise it crosses a factor of 100 in 5 steps.
        radii: Number of radii of the histogram around tau.
        spacing: Distance between radii, in log radius.
        noise_share: Cost of the counts, as growth of the gradient's noise.
        tau_min: Lower bound of tau.
        tau_max: Upper bound of tau.
    """

    p: Schedule | float
    _: KW_ONLY
    initial: float = 0.1
    radii: int = 12
    spacing: float = 0.25
    noise_share: float = 0.01
    tau_min: float = 1e-6
    tau_max: float = 1e6

    def __post_init__(self) -> None:
        level(self.p, 0)
        check.count("radii", self.radii, "12 radii reach a factor of 4 to both sides", least=2)
        check.between("spacing", self.spacing, 0, 3, "0.25 lets radii grow by factors of 1.28")
        check.positive("noise_share", self.noise_share, "0.01 lets the gradient's noise grow by 1 %")
        check_range(self.initial, self.tau_min, self.tau_max)
        check.between("tau_max", self.tau_max, 0, 1e20, f"the histogram ends at {OUTERMOST:g}")

    @property
    def raw_access(self) -> RawAccess:
        """None: tau depends on noisy counts only."""
        return "none"

    def check(self, conditions: Conditions) -> None:
        """Refuse a schedule that leaves (0, 1), and noise that is too large for the histogram.

        The standard deviation of the noise on the fraction within a radius may be up to 1, the whole batch, and
        10 min(p, 1 - p).
        """
        bound = self._lattice.count([(0, 1.0)] * len(conditions.dims)).l2_bound
        counts = accounting.split(conditions.noise_multiplier, self.noise_share).counts
        noise = counts * bound * self._lattice.spread / conditions.batch_size
        check_ahead(lambda step: attainable(level(self.p, step), noise, conditions), conditions.num_steps)

    def start(self, num_groups: int) -> State:
        """Return the initial tau of each group, with an empty histogram."""
        tau = float(self.initial)
        group = HistogramGroup(tau=tau, lowest=self._lowest(tau), within=(), seen=(), miss=0.0)
        return tuple(group.copy() for _ in range(num_groups))

    def clip_norms(self, state: State, step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """The tau of each group."""
        return tuple(group["tau"] for group in state)

    def ask(self, state: State, step: int) -> Question:
        """Count the norms between the radii, tau among them."""
        return Question(self._lattice.count((group["lowest"], group["tau"]) for group in state))

    def unclipped(self, state: State, step: int, answer: Answer) -> tuple[float, ...]:
        """Return the fraction counted within tau."""
        return tuple(self._read(group, bins)[1] for group, bins in zip(state, answer.noisy_bins, strict=True))

    def counted(self, state: State, step: int, answer: Answer) -> tuple[Counted, ...]:
        """Return the parts that clipping takes of the bins beyond tau."""
        return tuple(
            self._lattice.counted(group["lowest"], group["tau"], bins, answer.bins_std)
            for group, bins in zip(state, answer.noisy_bins, strict=True)
        )

    def update(self, state: State, step: int, answer: Answer) -> State:
        """Add the counts to the histogram and move tau to its quantile."""
        p = level(self.p, step)
        std = math.hypot(answer.bins_std * self._lattice.spread, 0.5 / math.sqrt(answer.batch_size))
        return tuple(
            self._next(group, p, *self._read(group, bins), std)
            for group, bins in zip(state, answer.noisy_bins, strict=True)
        )

    def _next(self, group: HistogramGroup, p: float, noisy: list[float], at_tau: float, std: float) -> HistogramGroup:
        within, seen = self._smoothed(group, p, noisy, std)
        scores, places = self._scores(within, p), group["lowest"] + np.arange(self.radii)

        read = NORMAL.cdf(float(np.interp(math.log(group["tau"]) / self.spacing, places, scores)))
        miss = group["miss"] + gain(std, p) / 2 * (plausible(at_tau, std) - read - group["miss"])
        aim = NORMAL.inv_cdf(clamp(p - miss, p / 4, 1 - (1 - p) / 4))
        tau = math.exp(self.spacing * float(np.interp(aim, scores, places)))
        inside = scores[0] < aim < scores[-1]

        moved = HistogramGroup(
            tau=clamp(tau, self.tau_min, self.tau_max),
            lowest=group["lowest"],
            within=within,
            seen=seen,
            miss=miss if inside else 0.0,  # an error made on the way there does not matter
        )
        return self._recentred(moved, p)

    def _smoothed(
        self, group: HistogramGroup, p: float, noisy: list[float], std: float
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return the fractions within the radii, averaged with this step's, and the number of steps in each."""
        seen = group["seen"] or (0,) * self.radii
        within = group["within"] or self._guess(group["tau"], group["lowest"], p)
        prior = (std / PRIOR_STD) ** 2  # the guess counts for this many steps
        rates = (max(gain(std, p), 1 / (1 + steps + prior)) for steps in seen)
        smoothed = (
            old + rate * (plausible(new, std) - old) for old, new, rate in zip(within, noisy, rates, strict=True)
        )
        return tuple(smoothed), tuple(steps + 1 for steps in seen)

    def _read(self, group: HistogramGroup, bins: tuple[float, ...]) -> tuple[list[float], float]:
        """Return the fractions within the radii, and within tau."""
        return self._lattice.read(group["lowest"], group["tau"], bins)

    def _scores(self, within: tuple[float, ...], p: float) -> list[float]:
        """Return the monotone fractions as normal scores: a straight line in log radius for log-normal norms."""
        low, high = min(0.02, p / 4), 1 - min(0.02, (1 - p) / 4)  # beyond, a score is nothing but noise
        return [NORMAL.inv_cdf(clamp(float(value), low, high)) for value in isotonic_regression(within).x]

    def _recentred(self, group: HistogramGroup, p: float) -> HistogramGroup:
        """Shift the histogram by whole places once tau is more than two places off its middle."""
        lowest = self._lowest(group["tau"])
        shift = lowest - group["lowest"]
        if abs(shift) <= 2:
            return group
        guess, before = self._guess(group["tau"], lowest, p), group["within"]
        below, above = [min(value, before[0]) for value in guess], [max(value, before[-1]) for value in guess]
        return HistogramGroup(
            tau=group["tau"],
            lowest=lowest,
            within=shifted(before, shift, below, above),
            seen=shifted(group["seen"], shift, unseen := (0,) * self.radii, unseen),
            miss=group["miss"],
        )

    def _lowest(self, tau: float) -> int:
        return round(math.log(tau) / self.spacing - (self.radii - 1) / 2)

    @property
    def _lattice(self) -> Lattice:
        return Lattice(self.radii, self.spacing)

    def _guess(self, tau: float, lowest: int, p: float) -> tuple[float, ...]:
        """Return the fractions of log-normal norms with unit spread whose p-quantile is tau."""
        score = NORMAL.inv_cdf(p) - math.log(tau)
        return tuple(NORMAL.cdf(score + self.spacing * (lowest + place)) for place in range(self.radii))
