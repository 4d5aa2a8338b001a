"""Epsilon of Poisson-sampled Gaussian steps, and the noise that meets a target. Built on Google's dp-accounting.

Adjacency is add/remove one example, while all others are sampled as before. Every step samples each example with
probability ``sample_rate`` and releases one sum with Gaussian noise of ``noise_multiplier`` times its sensitivity.

Instead of ``sample_rate``, every function takes ``examples`` and ``batch_size``; instead of ``steps``, ``epochs``.

Guarantee: neither accountant reports less than is spent. "pld" keeps a rounding margin in delta for its Fourier
transforms, 2e-15 for each step, and takes the Renyi bound where that is smaller, as it is for a delta of that size.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any, Final, Literal, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp

from qclip import _validate as check

__all__ = [
    "Accountant",
    "EpsilonCurve",
    "Spending",
    "Split",
    "delta",
    "epsilon",
    "merge",
    "noise_multiplier",
    "sampling",
    "spending",
    "split",
    "steps",
    "steps_per_epoch",
    "together",
]

Accountant = Literal["pld", "rdp"]
_ACCOUNTANTS: dict[str, Any] = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}
_INTERVAL: Final = 1e-4
"""Discretization interval of privacy loss distributions; losses are rounded up to the grid."""
_COARSE: Final = 10 * _INTERVAL  # of searches that need not be exact
_ROUNDING: Final = 2e-15
"""Rounding margin in delta for each step, for the Fourier transforms. The largest errors measured were 0.5e-16 against
the closed form of Gaussians and 2.4e-16 for sampled Gaussians against 80-bit floats, up to a million steps."""
_CLOSE: Final = 1.0005
"""A search for the least noise ends within this factor of it."""


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
    """Return the epsilon that the steps spend at this delta.

    >>> round(epsilon(noise_multiplier=1, sample_rate=0.01, steps=1000, delta=1e-5), 3)
    1.828
    >>> round(epsilon(noise_multiplier=1, examples=50_000, batch_size=500, epochs=10, delta=1e-5), 3)
    1.828

    Args:
        noise_multiplier: Standard deviation of the noise on the sum, relative to its sensitivity; 0 means no noise.
        delta: Delta of the guarantee, in (0, 1).
        sample_rate: Probability with which a step draws each example.
        steps: Number of optimizer steps.
        examples: Size of the data set; with ``batch_size``, instead of ``sample_rate``.
        batch_size: Expected batch size; with ``examples``, instead of ``sample_rate``.
        epochs: Length in epochs of 1 / sample_rate steps, rounded up; instead of ``steps``.
        accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi divergences, looser and quicker).

    Guarantees and edge cases:
        - The value is never below the true epsilon.
        - 0 steps cost 0.
        - A noise multiplier of 0 costs infinity.

    Raises:
        Refusal: An argument is out of bounds, or the sampling rate or the length is given twice or not at all.
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
    """Return the delta at which the steps spend this epsilon.

    >>> f"{delta(noise_multiplier=1, epsilon=2, sample_rate=0.01, steps=1000):.1e}"
    '2.7e-06'

    Args:
        noise_multiplier: Standard deviation of the noise on the sum, relative to its sensitivity; 0 means no noise.
        epsilon: Epsilon of the guarantee, the privacy budget.
        sample_rate: Probability with which a step draws each example.
        steps: Number of optimizer steps.
        examples: Size of the data set; with ``batch_size``, instead of ``sample_rate``.
        batch_size: Expected batch size; with ``examples``, instead of ``sample_rate``.
        epochs: Length in epochs of 1 / sample_rate steps, rounded up; instead of ``steps``.
        accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi divergences, looser and quicker).

    Guarantees and edge cases:
        - The value is never below the true delta.
        - 0 steps cost 0.
        - A noise multiplier of 0 costs 1.

    Raises:
        Refusal: An argument is out of bounds, or the sampling rate or the length is given twice or not at all.
    """
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    target = check.nonnegative("epsilon", epsilon, "it is the privacy budget; 1 to 10 is usual")
    rate, steps = sampling(sample_rate, steps, examples, batch_size, epochs)
    if steps == 0:
        return 0.0
    if z == 0:
        return 1.0
    tight = float(_composed(z, rate, steps, accountant).get_delta(target))
    if accountant == "rdp":
        return tight
    return min(tight + _ROUNDING * steps, float(_composed(z, rate, steps, "rdp").get_delta(target)))


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
    """Return the largest number of steps that spends no more than epsilon; 0 where a single step spends more.

    >>> steps(noise_multiplier=1, epsilon=2, delta=1e-5, sample_rate=0.01) > 1000
    True

    Args:
        noise_multiplier: Standard deviation of the noise on the sum, relative to its sensitivity; 0 means no noise.
        epsilon: Epsilon of the guarantee, the privacy budget.
        delta: Delta of the guarantee, in (0, 1).
        sample_rate: Probability with which a step draws each example.
        examples: Size of the data set; with ``batch_size``, instead of ``sample_rate``.
        batch_size: Expected batch size; with ``examples``, instead of ``sample_rate``.
        accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi divergences, looser and quicker).
        most: Upper end of the search.

    Raises:
        Refusal: An argument is out of bounds, or the sampling rate is given twice or not at all.
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
    """Return a noise multiplier that meets the budget, at most 0.1 % above the least one.

    >>> z = noise_multiplier(epsilon=2, delta=1e-5, sample_rate=0.01, steps=1000)
    >>> 0.9 < z < 1
    True

    Args:
        epsilon: Epsilon of the guarantee, the privacy budget.
        delta: Delta of the guarantee, in (0, 1).
        sample_rate: Probability with which a step draws each example.
        steps: Number of optimizer steps.
        examples: Size of the data set; with ``batch_size``, instead of ``sample_rate``.
        batch_size: Expected batch size; with ``examples``, instead of ``sample_rate``.
        epochs: Length in epochs of 1 / sample_rate steps, rounded up; instead of ``steps``.
        accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi divergences, looser and quicker).

    Guarantees and edge cases:
        - `epsilon` of the result is at most the target.
        - 0 steps need no noise.

    Raises:
        Refusal: An argument is out of bounds, or no noise meets the budget.
    """
    target = check.positive("epsilon", epsilon, "it is the privacy budget; 1 to 10 is usual")
    rate, count = sampling(sample_rate, steps, examples, batch_size, epochs)
    return 0.0 if count == 0 else _calibrated(target, _delta(delta), rate, count, accountant)


@cache  # a search takes a second or more, and runs are planned again when they are resumed or compared
def _calibrated(target: float, delta: float, rate: float, steps: int, accountant: Accountant) -> float:
    @cache
    def spent(z: float, interval: float = _INTERVAL) -> float:
        return _spent(z, rate, steps, delta, accountant, interval)

    def roughly(z: float) -> float:
        return spent(z, _COARSE) if accountant == "pld" else spent(z)

    # A coarse grid takes a tenth of the time and overestimates epsilon a little; the fine grid tells by how much.
    guess = _least(roughly, target, central_limit_noise(target, delta, rate, steps), 1.05, close=1.01)
    excess = roughly(guess) / spent(guess) if spent(guess) else 1.0
    guess = _least(roughly, target * excess, guess, 1.01, close=1.0001)
    return _least(spent, target, guess, _CLOSE)


@cache
def quick_noise_multiplier(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return a noise multiplier that meets the budget, about 1 % above the least one, in a tenth of the time.

    For comparisons of many plans; a run takes `noise_multiplier`.
    """
    # What the grid adds to epsilon grows with the steps and with the square of the interval.
    interval = max(_INTERVAL, _COARSE * min(1, math.sqrt(5000 / steps)))
    guess = central_limit_noise(epsilon, delta, sample_rate, steps)
    return _least(lambda z: _spent(z, sample_rate, steps, delta, "pld", interval), epsilon, guess, 1.05, close=1.005)


class EpsilonCurve:
    """Epsilon as a function of the number of steps, for progress bars and records: computed on a grid, rounded up.

    >>> curve = EpsilonCurve(noise_multiplier=1, sample_rate=0.01, num_steps=1000, delta=1e-5)
    >>> curve(0), round(curve(1000), 3), curve(990) == curve(1000)
    (0.0, 1.828, True)

    The value at n steps is that of the next grid point at or after n, so it is never below the epsilon of n steps, and
    equal to it at the last step. `epsilon` gives the exact value anywhere.

    Args:
        noise_multiplier: Standard deviation of the noise on the sum, relative to its sensitivity.
        sample_rate: Probability with which a step draws each example.
        num_steps: Planned number of steps, the last grid point.
        delta: Delta of the guarantee.
        accountant: "pld" or "rdp".
        points: Number of grid points.
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
        """Return the epsilon of this many steps, or a little more."""
        if steps == 0:
            return 0.0
        place = self._grid[min(bisect_left(self._grid, steps), len(self._grid) - 1)]
        return self._spent(max(place, steps))  # past the plan's end: exact


def spending(z: float, sample_rate: float, delta: float, accountant: Accountant = "pld") -> Callable[[int], float]:
    """Return epsilon as a function of the number of steps, cached; it is never below the accountant's own value.

    Args:
        z: Noise multiplier.
        sample_rate: Probability with which a step draws each example.
        delta: Delta of the guarantee.
        accountant: "pld" or "rdp".
    """
    check.choice("accountant", accountant, _ACCOUNTANTS)

    @cache
    def spent(steps: int) -> float:
        if z == 0:
            return math.inf
        if accountant == "rdp":
            return _spent(z, sample_rate, steps, delta, accountant)
        # The distribution of one step takes most of the time, and is the same for all.
        composed = _one_step(z, sample_rate).self_compose(steps)
        exact = _with_margin(composed.get_epsilon_for_delta, z, sample_rate, steps, delta)
        return exact * (1 + 1e-9)  # composed in another order than the accountant's

    return spent


class Spending(NamedTuple):
    """What one run releases: Poisson-sampled Gaussian steps."""

    noise_multiplier: float
    sample_rate: float
    steps: int


def together(runs: Iterable[Spending], delta: float, accountant: Accountant = "pld") -> float:
    """Return the epsilon that several runs on the same data spend together.

    Each run may depend on the releases of those before it, as tuning does. With "pld" the result is tighter than the
    sum of their epsilons; the order does not matter.

    >>> run = Spending(noise_multiplier=1.0, sample_rate=0.01, steps=1000)
    >>> round(together([run], 1e-5), 3), round(together([run, run, run], 1e-5), 3)
    (1.828, 3.192)

    Args:
        runs: The runs; one without steps costs nothing, one without noise infinity.
        delta: Delta of the joint guarantee.
        accountant: "pld" (tight) or "rdp".
    """
    runs = [run for run in runs if run.steps]
    delta = _delta(delta)
    check.choice("accountant", accountant, _ACCOUNTANTS)
    if not runs:
        return 0.0
    if any(run.noise_multiplier == 0 for run in runs):
        return math.inf

    def spent(kind: str, at: float) -> float:
        relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        grid = {"value_discretization_interval": _INTERVAL} if kind == "pld" else {}
        composed = _ACCOUNTANTS[kind](neighboring_relation=relation, **grid)
        for run in runs:
            composed = composed.compose(_event(*run[:2], run.steps))
        return float(composed.get_epsilon(at))

    margin = _ROUNDING * sum(run.steps for run in runs)
    if accountant == "rdp" or delta <= margin:
        return spent("rdp", delta)
    tight = spent("pld", delta - margin)
    return tight if delta > 1000 * margin else min(tight, spent("rdp", delta))


class Split(NamedTuple):
    """Noise multipliers of the gradient sum and of the counts, each relative to the sensitivity of its own value."""

    gradient: float
    counts: float


def split(noise_multiplier: float, share: float = 0.01) -> Split:
    """Split one Gaussian release between the gradient and the counts.

    >>> gradient, counts = split(2.0)
    >>> round(gradient, 2), round(counts, 2)
    (2.02, 14.25)

    Args:
        noise_multiplier: Noise multiplier of the whole release.
        share: Growth of the gradient's noise that pays for the counts: 0.01 is 1 %, 0 leaves nothing for counts.

    Returns:
        The two noise multipliers. That of the counts is relative to their joint sensitivity: K counts of sensitivity s
        have sensitivity ``sqrt(K) s`` together.

    Guarantees:
        - `merge` of the two is at least ``noise_multiplier``: rounding goes to the safe side.
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
    """Return the noise multiplier of one Gaussian release that is exactly as private as these together.

    Its ``z^-2`` is the sum of theirs. Merge *before* accounting for the sampling: accounting for each release by
    itself under-reports.

    >>> round(merge(3.0, 4.0), 9)
    2.4
    """
    inverses = [1 / z if z else math.inf for z in noise_multipliers]
    total = math.hypot(*inverses)
    return 1 / total if total else math.inf


def _least(spent: Callable[[float], float], target: float, guess: float, factor: float, close: float = _CLOSE) -> float:
    """Return a noise multiplier that spends no more than the target, within the factor ``close`` of the least.

    The search leaves the guess by ``factor`` at first.
    """
    low, high = _bracket(spent, target, guess, factor)
    while high > low * close:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high


def _bracket(spent: Callable[[float], float], target: float, guess: float, factor: float) -> tuple[float, float]:
    """Return two noise multipliers, the first spending more than the target and the second no more."""
    low = high = guess
    if spent(guess) > target:
        while spent(high) > target:
            low, high, factor = high, high * factor, factor**2
            if high > 1e9 * guess:
                raise check.Refusal(
                    f"epsilon = {target!r} cannot be met by any noise; raise epsilon or delta, or take fewer steps"
                )
    else:
        while spent(low) <= target:
            high, low, factor = low, low / factor, factor**2
            if low < 1e-6:
                return high, high  # the budget is so large that almost no noise is needed
    return low, high


def central_limit_noise(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return the noise multiplier that meets the budget if the privacy losses of the steps add up to a Gaussian one.

    By the central limit theorem of composition many steps are close to one Gaussian release, whose ratio of shift to
    noise is ``sample_rate sqrt(steps (exp(1/z^2) - 1))``. The value is 1 to 10 % below that of the accountant for 20
    epochs or more and a third below for a single epoch, and takes no time: good enough to search by, never to promise.
    """
    return 1 / math.sqrt(math.log1p((_gaussian_shift(epsilon, delta) / sample_rate) ** 2 / steps))


@lru_cache(maxsize=32)
def _gaussian_shift(epsilon: float, delta: float) -> float:
    """Return the ratio of shift to noise at which one Gaussian release spends the budget."""
    budget = pld.common.DifferentialPrivacyParameters(epsilon, delta)
    return 1 / pld.privacy_loss_mechanism.GaussianPrivacyLoss.from_privacy_guarantee(budget).standard_deviation


def sampling(
    sample_rate: float | None, steps: int | None, examples: int | None, batch_size: float | None, epochs: float | None
) -> tuple[float, int]:
    """Return the sampling rate and the number of steps, from whichever form they were given in.

    Raises:
        Refusal: One of the two is missing or given twice, or a value is out of bounds.
    """
    given = tuple(value is not None for value in (sample_rate, examples, batch_size))
    if given not in ((True, False, False), (False, True, True)):
        raise check.Refusal(
            f"sample_rate = {sample_rate!r}, examples = {examples!r} and batch_size = {batch_size!r} do not give one "
            "sampling rate; pass sample_rate alone, or examples and batch_size together"
        )
    if sample_rate is None:
        examples = check.count("examples", examples, "it is the size of the dataset")
        remedy = "it is the expected number of examples of a step"
        batch_size = check.between("batch_size", batch_size, 0, examples, remedy, closed="high")
        sample_rate = batch_size / examples
    rate = check.between("sample_rate", sample_rate, 0, 1, "it is batch size / dataset size", closed="high")
    if (steps is None) == (epochs is None):
        raise check.Refusal(
            f"steps = {steps!r} and epochs = {epochs!r} do not give one length; pass exactly one of them"
        )
    if steps is None:
        length = check.nonnegative("epochs", epochs, "an epoch is 1 / sample rate steps, rounded up")
        return rate, math.ceil(length * steps_per_epoch(rate))
    return rate, check.count("steps", steps, "it is the number of optimizer steps", least=0)


def steps_per_epoch(sample_rate: float) -> int:
    """Return the number of steps in which each example is drawn once on average, rounded up.

    >>> steps_per_epoch(0.1), steps_per_epoch(2048 / 60_000)
    (10, 30)
    """
    return math.ceil(1 / sample_rate - 1e-9)  # 1 / 0.1 may come out just above 10


def _delta(delta: float) -> float:
    return check.between("delta", delta, 0, 1, "well below 1/(dataset size), such as 1e-5")


def _spent(
    z: float, sample_rate: float, steps: int, delta: float, accountant: Accountant, interval: float = _INTERVAL
) -> float:
    at = _composed(z, sample_rate, steps, accountant, interval).get_epsilon
    return float(at(delta)) if accountant == "rdp" else _with_margin(at, z, sample_rate, steps, delta)


def _with_margin(tight: Callable[[float], float], z: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return epsilon at delta less the rounding margin, or the Renyi bound where that is smaller."""
    margin = _ROUNDING * steps
    epsilon = float(tight(delta - margin)) if delta > margin else math.inf
    if delta > 1000 * margin:
        return epsilon
    return min(epsilon, float(_composed(z, sample_rate, steps, "rdp").get_epsilon(delta)))


@lru_cache(maxsize=32)  # a search, and queries about its result
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
