"""Epsilon of Poisson-sampled Gaussian steps, and the noise that meets a target: Google's dp-accounting, asked safely.

Adjacency is add/remove one example, while all others are sampled as before: every step samples each example with
probability ``sample_rate`` and releases one sum with Gaussian noise of ``noise_multiplier`` times its sensitivity.
Instead of ``sample_rate`` and ``steps`` every function takes what people have in hand: ``examples`` and ``batch_size``,
and ``epochs``.

``accountant`` is "pld" (privacy loss distributions, tight) or "rdp" (Renyi divergences, looser and quicker). Neither
reports less than is spent: "pld" leaves room in delta for the rounding of its Fourier transforms, 2e-15 for each step,
and takes the bound by Renyi divergences where that is smaller, as it is for a delta of that size.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Final, Literal, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from qclip import _validate as check

Accountant = Literal["pld", "rdp"]
_ACCOUNTANTS: dict[str, Any] = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}
_INTERVAL: Final = 1e-4
"""How far apart the privacy losses are that a distribution is kept at; what lies between is rounded up."""
_ROUNDING: Final = 2e-15
"""How much of delta a step more may lose to the rounding of Fourier transforms. Seen were 0.5e-16 against the closed
form of Gaussians and 2.4e-16 for sampled ones against 80-bit numbers, up to a million steps."""
_CLOSE: Final = 1.0005
"""How close to the least noise a search ends, as a factor."""


def epsilon(
    *,
    noise_multiplier: float,
    delta: float,
    sample_rate: float | None = None,
    steps: int | None = None,
    examples: int | None = None,
    batch_size: float | None = None,
    epochs: float | None = None,
    accountant: Accountant = "pld",
) -> float:
    """The epsilon spent by the steps, never below the true one.

    0 steps cost 0; a noise multiplier of 0 costs infinity.

    >>> round(epsilon(noise_multiplier=1, sample_rate=0.01, steps=1000, delta=1e-5), 3)
    1.828
    >>> round(epsilon(noise_multiplier=1, examples=50_000, batch_size=500, epochs=10, delta=1e-5), 3)
    1.828
    """
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    rate, steps = sampling(sample_rate, steps, examples, batch_size, epochs)
    delta = _delta(delta)
    if steps == 0:
        return 0.0
    if z == 0:
        return math.inf
    return _spent(z, rate, steps, delta, accountant)


def delta(
    *,
    noise_multiplier: float,
    epsilon: float,
    sample_rate: float | None = None,
    steps: int | None = None,
    examples: int | None = None,
    batch_size: float | None = None,
    epochs: float | None = None,
    accountant: Accountant = "pld",
) -> float:
    """The delta at which the steps spend this epsilon.

    >>> f"{delta(noise_multiplier=1, epsilon=2, sample_rate=0.01, steps=1000):.1e}"
    '2.7e-06'
    """
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    target = check.nonnegative("epsilon", epsilon, "it is the privacy budget; 1 to 10 is usual")
    rate, steps = sampling(sample_rate, steps, examples, batch_size, epochs)
    if steps == 0:
        return 0.0
    if z == 0:
        return 1.0
    found = float(_composed(z, rate, steps, accountant).get_delta(target))
    if accountant == "rdp":
        return found
    return min(found + _ROUNDING * steps, float(_composed(z, rate, steps, "rdp").get_delta(target)))


def steps(
    *,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    sample_rate: float | None = None,
    examples: int | None = None,
    batch_size: float | None = None,
    accountant: Accountant = "pld",
    most: int = 10**7,
) -> int:
    """The largest number of steps (at most ``most``) that spends no more than epsilon; 0 if one is too many already.

    >>> steps(noise_multiplier=1, epsilon=2, delta=1e-5, sample_rate=0.01) > 1000
    True
    """
    target = check.positive("epsilon", epsilon, "it is the privacy budget; 1 to 10 is usual")
    rate, _ = sampling(sample_rate, 1, examples, batch_size, None)
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    spent = spending(z, rate, _delta(delta), accountant)
    enough, most = 1, check.count("most", most)
    while enough < most and spent(enough) <= target:
        enough = min(2 * enough, most)
    if spent(enough) <= target:
        return most
    low, high = enough // 2, enough  # spent(low) <= target < spent(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spent(middle) <= target else (low, middle)
    return low


def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sample_rate: float | None = None,
    steps: int | None = None,
    examples: int | None = None,
    batch_size: float | None = None,
    epochs: float | None = None,
    accountant: Accountant = "pld",
) -> float:
    """A noise multiplier whose epsilon is at most the target, and at most 0.1 % larger than needed.

    >>> z = noise_multiplier(epsilon=2, delta=1e-5, sample_rate=0.01, steps=1000)
    >>> 0.9 < z < 1
    True
    """
    target = check.positive("epsilon", epsilon, "it is the privacy budget; 1 to 10 is usual")
    rate, count = sampling(sample_rate, steps, examples, batch_size, epochs)
    return 0.0 if count == 0 else _calibrated(target, _delta(delta), rate, count, accountant)


@cache  # it takes a second or more, and runs are planned again when they are resumed or compared
def _calibrated(target: float, delta: float, rate: float, steps: int, accountant: Accountant) -> float:
    @cache
    def spent(z: float, interval: float = _INTERVAL) -> float:
        return _spent(z, rate, steps, delta, accountant, interval)

    def roughly(z: float) -> float:
        return spent(z, 10 * _INTERVAL) if accountant == "pld" else spent(z)

    # A coarse grid is asked in a tenth of the time and says a little too much: how much, the fine one says.
    guess = _least(roughly, target, _central_limit_guess(target, delta, rate, steps), 1.1, close=1.01)
    excess = roughly(guess) / spent(guess) if spent(guess) else 1.0
    guess = _least(roughly, target * excess, guess, 1.01, close=1.0001)
    return _least(spent, target, guess, _CLOSE)


class EpsilonCurve:
    """Epsilon against the number of steps, for progress and records: on a grid, each point asked once, rounded up.

    The value at n steps is that of the next grid point at or after n, so it is never below the epsilon of n steps, and
    the same at the last step. `epsilon` is the exact answer.

    >>> curve = EpsilonCurve(noise_multiplier=1, sample_rate=0.01, num_steps=1000, delta=1e-5)
    >>> curve(0), round(curve(1000), 3), curve(990) == curve(1000)
    (0.0, 1.828, True)
    """

    def __init__(
        self,
        *,
        noise_multiplier: float,
        sample_rate: float,
        num_steps: int,
        delta: float,
        accountant: Accountant = "pld",
        points: int = 40,
    ) -> None:
        self._spent = spending(noise_multiplier, sample_rate, delta, accountant)
        grid = np.linspace(0, 1, points + 1)[1:] ** 1.5 * num_steps  # finer at the start, where the curve is steep
        self._grid = sorted({max(1, math.ceil(value)) for value in grid} | {num_steps})

    def __call__(self, steps: int) -> float:
        """The epsilon of this many steps, or a little more."""
        if steps == 0:
            return 0.0
        place = self._grid[min(bisect_left(self._grid, steps), len(self._grid) - 1)]
        return self._spent(max(place, steps))  # past the plan's end: exact


def spending(z: float, sample_rate: float, delta: float, accountant: Accountant = "pld") -> Callable[[int], float]:
    """Epsilon as a function of the number of steps, each asked once; never below the accountant's own answer."""
    check.choice("accountant", accountant, _ACCOUNTANTS)

    @cache
    def spent(steps: int) -> float:
        if z == 0:
            return math.inf
        if accountant == "rdp":
            return _spent(z, sample_rate, steps, delta, accountant)
        # Most of a query's time is the first step, which is the same for all.
        composed = _one_step(z, sample_rate).self_compose(steps)
        exact = _with_room(composed.get_epsilon_for_delta, z, sample_rate, steps, delta)
        return exact * (1 + 1e-9)  # composed in another order than the accountant's

    return spent


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


def _least(spent: Callable[[float], float], target: float, guess: float, factor: float, close: float = _CLOSE) -> float:
    """A noise multiplier that spends no more than the target, ``close`` to the least.

    The first step away from the guess is by this factor.
    """
    low, high = _bracket(spent, target, guess, factor)
    while high > low * close:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high


def _bracket(spent: Callable[[float], float], target: float, guess: float, factor: float) -> tuple[float, float]:
    """Two noise multipliers, the first spending more than the target and the second no more."""
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
                return high, high  # a budget so large that almost no noise meets it
    return low, high


def _central_limit_guess(target: float, delta: float, sample_rate: float, steps: int) -> float:
    """Where to start the search: many steps are close to one Gaussian release with this ratio of shift to noise."""
    tail = math.sqrt(2 * math.log(1 / delta))
    shift = math.sqrt(2 * target + tail**2) - tail  # solves shift^2/2 + shift tail = target
    return 1 / math.sqrt(math.log1p((shift / sample_rate) ** 2 / steps))


def sampling(
    sample_rate: float | None,
    steps: int | None,
    examples: int | None,
    batch_size: float | None,
    epochs: float | None,
) -> tuple[float, int]:
    """The sampling rate and the number of steps, from whichever form they were given in."""
    if (sample_rate is None) == (examples is None and batch_size is None):
        remedy = "give the rate, or examples= and batch_size="
        given = (sample_rate, examples, batch_size)
        raise check.refuse("sample_rate, examples, batch_size", given, "the first, or the other two", remedy)
    if sample_rate is None:
        if examples is None or batch_size is None:
            given = (examples, batch_size)
            raise check.refuse("examples, batch_size", given, "given together", "their ratio is the sampling rate")
        examples = check.count("examples", examples, "it is the size of the dataset")
        remedy = "it is the expected number of examples of a step"
        batch_size = check.between("batch_size", batch_size, 0, examples, remedy, closed="high")
        sample_rate = batch_size / examples
    rate = check.between("sample_rate", sample_rate, 0, 1, "it is batch size / dataset size", closed="high")
    if (steps is None) == (epochs is None):
        raise check.refuse("steps, epochs", (steps, epochs), "one given and one left out", "say how long in one way")
    if steps is None:
        length = check.nonnegative("epochs", epochs, "an epoch is 1 / sample rate steps, rounded up")
        return rate, math.ceil(length * steps_per_epoch(rate))
    return rate, check.count("steps", steps, "it is the number of optimizer steps", least=0)


def steps_per_epoch(sample_rate: float) -> int:
    """The steps in which each example is drawn once on average, rounded up.

    >>> steps_per_epoch(0.1), steps_per_epoch(2048 / 60_000)
    (10, 30)
    """
    return math.ceil(1 / sample_rate - 1e-9)  # 1 / 0.1 may come out just above 10


def _delta(delta: float) -> float:
    return check.between("delta", delta, 0, 1, "well below 1/(dataset size), such as 1e-5")


def _spent(
    z: float, sample_rate: float, steps: int, delta: float, accountant: Accountant, interval: float = _INTERVAL
) -> float:
    ask = _composed(z, sample_rate, steps, accountant, interval).get_epsilon
    return float(ask(delta)) if accountant == "rdp" else _with_room(ask, z, sample_rate, steps, delta)


def _with_room(tight: Callable[[float], float], z: float, sample_rate: float, steps: int, delta: float) -> float:
    """The epsilon that privacy loss distributions give for delta less what rounding may have lost of it."""
    room = _ROUNDING * steps
    found = float(tight(delta - room)) if delta > room else math.inf
    if delta > 1000 * room:
        return found
    return min(found, float(_composed(z, sample_rate, steps, "rdp").get_epsilon(delta)))


@lru_cache(maxsize=32)  # of a search, and what is asked of its result
def _composed(
    z: float, sample_rate: float, steps: int, accountant: Accountant, interval: float = _INTERVAL
) -> dp_accounting.PrivacyAccountant:
    check.choice("accountant", accountant, _ACCOUNTANTS)
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    grid = {"value_discretization_interval": interval} if accountant == "pld" else {}
    return _ACCOUNTANTS[accountant](neighboring_relation=relation, **grid).compose(_event(z, sample_rate, steps))


@lru_cache(maxsize=4)
def _one_step(z: float, sample_rate: float) -> pld.privacy_loss_distribution.PrivacyLossDistribution:
    return pld.privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=sample_rate, value_discretization_interval=_INTERVAL
    )


def _event(z: float, sample_rate: float, steps: int) -> dp_accounting.DpEvent:
    step = dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(z))
    return dp_accounting.SelfComposedDpEvent(step, steps)
