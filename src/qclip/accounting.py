"""Epsilon of Poisson-sampled Gaussian steps, and the noise that meets a target: Google's dp-accounting, asked safely.

Adjacency is add/remove one example; every step samples each example with probability ``sample_rate`` and releases one
sum with Gaussian noise of ``noise_multiplier`` times its sensitivity.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import dp_accounting
from dp_accounting import pld

from qclip import _validate as check


def epsilon(*, noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """The epsilon spent by ``steps`` steps, from the privacy loss distribution (never below the true one).

    0 steps cost 0; a noise multiplier of 0 costs infinity.

    >>> round(epsilon(noise_multiplier=1, sample_rate=0.01, steps=1000, delta=1e-5), 3)
    1.828
    """
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    sample_rate, steps, delta = _public(sample_rate, steps, delta)
    if steps == 0:
        return 0.0
    if z == 0:
        return math.inf
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return float(accountant.compose(_event(z, sample_rate, steps)).get_epsilon(delta))


def noise_multiplier(*, epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """A noise multiplier whose epsilon is at most the target, and at most 0.1 % larger than needed.

    >>> z = noise_multiplier(epsilon=2, delta=1e-5, sample_rate=0.01, steps=1000)
    >>> 0.9 < z < 1
    True
    """
    target = check.positive("epsilon", epsilon, "it is the privacy budget; 1 to 10 is usual")
    sample_rate, steps, delta = _public(sample_rate, steps, delta)
    if steps == 0:
        return 0.0

    @cache  # a query takes up to seconds
    def spent(z: float) -> float:
        return _epsilon(noise_multiplier=z, sample_rate=sample_rate, steps=steps, delta=delta)

    low, high = _bracket(spent, target, _central_limit_guess(target, delta, sample_rate, steps))
    found = dp_accounting.calibrate_dp_mechanism(
        pld.PLDAccountant,
        lambda z: _event(z, sample_rate, steps),
        target,
        delta,
        dp_accounting.ExplicitBracketInterval(low, high),
        tol=5e-4 * low,
    )
    found = float(found)
    while spent(found) > target:
        found *= 1 + 1e-4
    return found


class Split(NamedTuple):
    """Noise multipliers of the gradient sum and of the counts, each relative to the sensitivity of its own value."""

    gradient: float
    counts: float


def split(noise_multiplier: float, share: float = 0.01) -> Split:
    """Share one Gaussian release between the gradient and the counts: `merge` of the two is the noise multiplier again.

    The gradient's noise grows by ``share`` to pay for the counts. K counts of sensitivity s together have sensitivity
    ``sqrt(K) s``, which the counts' multiplier is to be multiplied by. Rounding goes to the safe side.

    >>> gradient, counts = split(2.0)
    >>> round(gradient, 2), round(counts, 2)
    (2.02, 14.25)
    """
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    share = check.nonnegative("share", share, "0.01 lets the gradient's noise grow by 1 %; 0 leaves nothing for counts")
    if share == 0:
        return Split(z, math.inf)
    growth = 1 + share
    gradient, counts = z * growth, z * growth / math.sqrt(share * (2 + share))
    while merge(gradient, counts) < z:
        gradient, counts = math.nextafter(gradient, math.inf), math.nextafter(counts, math.inf)
    return Split(gradient, counts)


def merge(*noise_multipliers: float) -> float:
    """The noise multiplier of one Gaussian release that is exactly as private as these together.

    ``z^-2`` is the sum of theirs. Merge *before* sampling is accounted for: sampling each by itself under-reports.

    >>> round(merge(3.0, 4.0), 9)
    2.4
    """
    inverses = [1 / z if z else math.inf for z in noise_multipliers]
    total = math.hypot(*inverses)
    return 1 / total if total else math.inf


_epsilon = epsilon  # the function, where an argument of that name hides it


def _bracket(spent: Callable[[float], float], target: float, guess: float) -> tuple[float, float]:
    """Two noise multipliers, the first spending more than the target and the second no more."""
    factor = 1.1
    low = high = guess
    if spent(guess) > target:
        while spent(high) > target:
            low, high, factor = high, high * factor, factor**2
            if high > 1e9 * guess:
                remedy = "raise epsilon or delta, or take fewer steps"
                raise check.refuse("epsilon", target, "large enough to be met by some noise", remedy)
    else:
        while spent(low) <= target:
            high, low, factor = low, low / factor, factor**2
            if low < 1e-6:
                return 1e-9, low  # a budget so large that almost no noise meets it
    return low, high


def _central_limit_guess(target: float, delta: float, sample_rate: float, steps: int) -> float:
    """Where to start the search: many steps are close to one Gaussian release with this ratio of shift to noise."""
    tail = math.sqrt(2 * math.log(1 / delta))
    shift = math.sqrt(2 * target + tail**2) - tail  # solves shift^2/2 + shift tail = target
    return 1 / math.sqrt(math.log1p((shift / sample_rate) ** 2 / steps))


def _public(sample_rate: float, steps: int, delta: float) -> tuple[float, int, float]:
    rate = check.between("sample_rate", sample_rate, 0, 1, "it is batch size / dataset size", closed="high")
    steps = check.count("steps", steps, "it is the number of optimizer steps", least=0)
    return rate, steps, check.between("delta", delta, 0, 1, "well below 1/(dataset size), such as 1e-5")


def _event(z: float, sample_rate: float, steps: int) -> dp_accounting.DpEvent:
    step = dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(z))
    return dp_accounting.SelfComposedDpEvent(step, steps)
