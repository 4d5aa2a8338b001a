"""The threshold that balances the noise it costs against the bias it causes: no quantile to choose."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import TypedDict

import numpy as np
from scipy.optimize import isotonic_regression

from qclip import _validate as check
from qclip import accounting
from qclip._validate import Floats
from qclip.thresholds._lattice import Lattice, shifted
from qclip.thresholds._motion import check_range, clamp, facts, plausible
from qclip.thresholds.threshold import Answer, Conditions, Counted, Question, RawAccess, Threshold

LATTICE = Lattice(18, 0.4)
"""It spans a factor of 900. Wider, and its radii are seen for longer; narrower, and rare long gradients are beyond."""
FIRST_PLACE = 6
"""The place of tau on a new lattice: most radii lie above, where the bias is measured."""
PLACES = (2, 10)
"""The lattice stays while tau is between these places: a radius that leaves it loses its average."""
LEAST_WEIGHT, LARGEST_WEIGHT, MUCH_NOISE = 0.1, 1.0, 0.1
"""The weight of the noise power S against the squared bias: the least for S far below `MUCH_NOISE`, the largest far
above. In the theorem it is gamma L, the step size times the smoothness, which nobody knows: the noise of a step is
averaged with that of its neighbours, the bias is not. Measured: a class of 1 % in a table (S = 0.001) needs 0.1, or its
gradients are clipped away; a small network (S = 1) did best near 1, a larger one did not care."""
LEAST_POWER, LARGEST_POWER = 1e-5, 0.3
"""Bounds on the weighted noise power. Without any noise, nothing would hold tau back. And the power grows with the
number of parameters, its harm does not: a large network loses little by noise in the many directions that its loss
hardly feels. Measured on networks of up to 22 million parameters, S up to 14: with 1 instead of 0.3, the same accuracy,
at a loss up to a third higher."""
DOUBT = 1.0
"""Fractions above a radius count as far as they exceed this many standard deviations of their own noise."""
SLOWEST, FASTEST = 0.02, 0.1
"""Bounds on the rate at which the histogram forgets."""
RATE = 0.1
"""The part of the distance to the best threshold that log tau moves in a step, after the first ones."""
REACH = 8
"""Norms more than this many places above tau, a factor of 25, count as so long: farther fractions are mostly noise."""
FINE = 8
"""Candidates for tau per place of the lattice."""
SMALL_MODEL, SMALL_MODEL_SHARE = 50.0, 0.1
"""The noise share of a small model times its parameters, and its largest value: the fewer parameters, the smaller the
noise, and the smaller the bias that has to be measured."""
LARGEST_SHARE = 0.25
"""The largest noise share that the histogram takes by itself where the batch is small."""


class BalancedGroup(TypedDict):
    """The state of a group."""

    tau: float
    lowest: int
    """The place of the first radius on the lattice."""
    within: tuple[float, ...]
    """The smoothed fraction of norms within each radius."""
    seen: tuple[int, ...]
    """The number of steps in each of them."""
    clipped_length: float
    """The mean length that the last step clipped from a gradient, over its tau."""


State = tuple[BalancedGroup, ...]
"""One entry per group."""


@dataclass(frozen=True)
class BalancedThreshold(Threshold[State]):
    """Clip each group where the noise of a larger threshold would cost as much as its smaller bias would save.

    >>> norms = [1.0] * 90 + [20.0] * 10  # a tenth of the gradients are long
    >>> def learnt(noise_power, threshold=BalancedThreshold()):
    ...     state = threshold.start(1)
    ...     for step in range(100):
    ...         edges = (0.0, *threshold.ask(state, step).count.radii[0])
    ...         bins = tuple((np.histogram(norms, edges)[0] / len(norms)).tolist())
    ...         state = threshold.update(state, step, Answer((bins,), noise_power=(noise_power,)))
    ...     return round(threshold.clip_norms(state, 100)[0], 1)
    >>> learnt(noise_power=0.001), learnt(noise_power=0.1), learnt(noise_power=10.0)
    (21.1, 3.2, 1.4)

    For a threshold tau, the mean gradient of a step carries

    - noise of power ``S tau^2``, where S = d z^2 / B^2 is public: parameters d, noise multiplier z, batch size B;
    - a bias of at most R(tau), the mean of ``max(norm - tau, 0)``: the length that clipping takes away.

    Tau follows the minimum of ``w S tau^2 + R(tau)^2``. w S grows from 0.1 S to at most 0.3 with the noise. So there is
    no quantile to choose: with much noise most examples are clipped, with little noise hardly any, and a few long
    gradients among many short ones, as those of a rare class, keep tau up. A quantile would follow the short ones.

    - R is read off a smoothed noisy histogram of the norms, in 20 bins of log radius around tau.
    - Without noise, clipping takes away 0.1 to 0.5 % of tau on average.

    Args:
        initial: Tau at the first step. It crosses a factor of 100 in a few steps.
        noise_share: Cost of the histogram, as growth of the gradient's noise. It is more in two cases: up to 0.1 in
            models of fewer than 5000 parameters, whose noise is small, and up to 0.25 where the batch is so small for
            its noise that the histogram would be lost in it.
        tau_min: Lower bound of tau.
        tau_max: Upper bound of tau.
    """

    _: KW_ONLY
    initial: float = 0.1
    noise_share: float = 0.01
    tau_min: float = 1e-6
    tau_max: float = 1e6

    def __post_init__(self) -> None:
        check.positive("noise_share", self.noise_share, "0.01 lets the gradient's noise grow by 1 %")
        check_range(self.initial, self.tau_min, self.tau_max)
        check.between("tau_max", self.tau_max, 0, 1e20, "a wider histogram would overflow")

    @property
    def raw_access(self) -> RawAccess:
        """None: tau depends on noisy counts only."""
        return "none"

    def share(self, conditions: Conditions) -> float:
        """Return the noise share that the histogram needs: ``noise_share`` or more."""
        usual = max(self.noise_share, min(SMALL_MODEL_SHARE, SMALL_MODEL / sum(conditions.dims)))
        largest = conditions.batch_size / _sensitivity(conditions)  # multiplier, for a noise of 1 on a fraction
        ratio = largest / conditions.noise_multiplier if conditions.noise_multiplier > 0 else math.inf
        needed = ratio / math.sqrt(ratio**2 - 1) - 1 if 1 < ratio < math.inf else 0.0
        return max(usual, min(needed, LARGEST_SHARE))

    def check(self, conditions: Conditions) -> None:
        """Refuse noise that is too large for the histogram, even at a noise share of 0.25.

        The standard deviation of the noise on the fraction within a radius may be up to 1, the whole batch.
        """
        counts = accounting.split(conditions.noise_multiplier, self.share(conditions)).counts
        noise = counts * _sensitivity(conditions) / conditions.batch_size
        if noise > 1 + 1e-9:
            raise check.Refusal(
                f"the noise on the unclipped fraction has a standard deviation of {noise:.2f}, above 1 "
                f"({facts(conditions)}); take a larger batch, a larger noise_share, fewer groups, or Constant(tau)"
            )

    def start(self, num_groups: int) -> State:
        """Return the initial tau of each group, with an empty histogram."""
        tau = float(self.initial)
        group = BalancedGroup(tau=tau, lowest=_lowest(tau), within=(), seen=(), clipped_length=0.0)
        return tuple(group.copy() for _ in range(num_groups))

    def clip_norms(self, state: State, step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """Return the tau of each group."""
        return tuple(group["tau"] for group in state)

    def ask(self, state: State, step: int) -> Question:
        """Count the norms between the radii, tau among them."""
        return Question(LATTICE.count(((group["lowest"], group["tau"]) for group in state), centred=False))

    def unclipped(self, state: State, step: int, answer: Answer) -> tuple[float, ...]:
        """Return the fraction counted within tau."""
        return tuple(
            LATTICE.read(group["lowest"], group["tau"], bins, _noise_part(answer))[1]
            for group, bins in zip(state, answer.noisy_bins, strict=True)
        )

    def counted(self, state: State, step: int, answer: Answer) -> tuple[Counted, ...]:
        """Return the parts that clipping takes of the bins beyond tau."""
        return tuple(
            LATTICE.counted(group["lowest"], group["tau"], bins, answer.bins_std, _noise_part(answer))
            for group, bins in zip(state, answer.noisy_bins, strict=True)
        )

    def clipped_length(self, state: State) -> tuple[float, ...]:
        """Return the mean excess over the tau of the last step, in units of that tau."""
        return tuple(group["clipped_length"] for group in state)

    def update(self, state: State, step: int, answer: Answer) -> State:
        """Add the counts to the histogram and move tau towards the best threshold."""
        noise_part = _noise_part(answer)
        return tuple(
            self._next(group, _smoothed(group, bins, answer.bins_std, noise_part, power), power)
            for group, bins, power in zip(state, answer.noisy_bins, _powers(state, answer), strict=True)
        )

    def _next(self, group: BalancedGroup, histogram: "Histogram", power: float) -> BalancedGroup:
        tau = group["tau"]
        radii, excess = histogram.excess(tau)
        best = float(radii[np.argmin(power * radii**2 + excess**2)])
        rate = max(RATE, 1 / (1 + sorted(histogram.seen)[LATTICE.size // 2] / 2))
        moved = math.exp((1 - rate) * math.log(tau) + rate * math.log(best))
        return _recentred(
            BalancedGroup(
                tau=clamp(moved, self.tau_min, self.tau_max),
                lowest=histogram.lowest,
                within=histogram.within,
                seen=histogram.seen,
                clipped_length=float(np.interp(tau, radii, excess)) / tau,
            )
        )


@dataclass(frozen=True)
class Histogram:
    """A smoothed histogram of norms."""

    lowest: int
    within: tuple[float, ...]
    seen: tuple[int, ...]
    noise: Floats
    """The standard deviation of the noise of each fraction beyond a radius."""

    def excess(self, tau: float) -> tuple[Floats, Floats]:
        """Return a fine grid of radii and the mean excess over each: the integral of the fraction beyond it.

        Fractions in doubt count as 0. Norms beyond the last radius, or the reach of tau, count as one place longer.
        """
        last_place = min(LATTICE.size - 1, max(1, math.ceil(_place(tau)) - self.lowest + REACH))
        certain = np.clip(isotonic_regression(self.within).x + DOUBT * self.noise, 0.0, 1.0)
        places = np.linspace(0, last_place, last_place * FINE + 1)
        beyond = 1 - np.interp(places, np.arange(LATTICE.size), np.maximum.accumulate(certain))
        radii = np.exp(LATTICE.spacing * (self.lowest + places))
        pieces = np.diff(radii) * (beyond[1:] + beyond[:-1]) / 2
        last = beyond[-1] * radii[-1] * math.expm1(LATTICE.spacing)
        return radii, np.append(np.cumsum(pieces[::-1])[::-1], 0.0) + last


def _sensitivity(conditions: Conditions) -> float:
    """Return the noise on the number within a radius at noise multiplier 1."""
    return LATTICE.count([(0, 1.0)] * len(conditions.dims), centred=False).l2_bound * LATTICE.spread


def _powers(state: State, answer: Answer) -> list[float]:
    """Return the weighted noise power of each group."""
    least = min(max(LEAST_POWER, (answer.bins_std * LATTICE.spread) ** 2), LARGEST_POWER)
    powers = answer.noise_power or (0.0,) * len(state)
    return [clamp(_weight(power) * power, least, LARGEST_POWER) for power in powers]


def _weight(power: float) -> float:
    return LEAST_WEIGHT + (LARGEST_WEIGHT - LEAST_WEIGHT) * power / (power + MUCH_NOISE)


def _noise_part(answer: Answer) -> float:
    """Return the part of the variance of the sum of all bins that is noise; the rest is the size of the sample.

    Counts are not centred, or else a batch that is larger than expected would be read as norms in every empty bin.
    """
    noise, sampling = LATTICE.num_bins * answer.bins_std**2, 1 / answer.batch_size
    return noise / (noise + sampling) if noise > 0 else 0.0


def _smoothed(group: BalancedGroup, bins: tuple[float, ...], std: float, noise_part: float, power: float) -> Histogram:
    """Return the histogram of a group, averaged with the counts of this step."""
    noisy, _ = LATTICE.read(group["lowest"], group["tau"], bins, noise_part)
    noise = std * LATTICE.spread
    # The bias to be measured is about sqrt(power) tau: the larger that is, the less averaging it takes.
    forgetting = clamp(0.01 * math.sqrt(power) / noise, SLOWEST, FASTEST) if noise > 0 else FASTEST
    before, steps = group["within"] or (0.5,) * LATTICE.size, group["seen"] or (0,) * LATTICE.size
    within = tuple(
        old + max(forgetting, 1 / (1 + n)) * (plausible(new, noise) - old)
        for old, new, n in zip(before, noisy, steps, strict=True)
    )
    seen = tuple(n + 1 for n in steps)
    # A fraction beyond a radius is a sum of bins less its share of the noise in their total.
    bins_beyond = np.arange(LATTICE.size, 0, -1) + 1
    averaged = np.maximum(1 / np.array(seen), forgetting / (2 - forgetting))
    relative = np.sqrt(averaged * bins_beyond * (1 - noise_part * bins_beyond / LATTICE.num_bins))
    return Histogram(group["lowest"], within, seen, std * relative)


def _place(tau: float) -> float:
    return math.log(tau) / LATTICE.spacing


def _lowest(tau: float) -> int:
    return round(_place(tau)) - FIRST_PLACE


def _recentred(group: BalancedGroup) -> BalancedGroup:
    """Move the lattice by whole places if tau is near an end of it."""
    low, high = PLACES
    if low <= _place(group["tau"]) - group["lowest"] <= high:
        return group
    lowest, before = _lowest(group["tau"]), group["within"]
    unseen = (0,) * LATTICE.size
    below, above = (before[0],) * LATTICE.size, (before[-1],) * LATTICE.size
    places = lowest - group["lowest"]
    return BalancedGroup(
        tau=group["tau"],
        lowest=lowest,
        within=shifted(before, places, below, above),
        seen=shifted(group["seen"], places, unseen, unseen),
        clipped_length=group["clipped_length"],
    )
