"""Lower bounds on epsilon from an attacker's guesses, each at a stated confidence.

An attacker guesses whether a canary took part. The better the guesses, the larger epsilon must be; the bounds are
confidence bounds, so that by chance alone they exceed the true epsilon in at most ``1 - confidence`` of all audits.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from scipy import optimize, special, stats

from qclip._validate import Floats

NODES: Final = np.linspace(-10, 10, 401)
WEIGHTS: Final = stats.norm.pdf(NODES) / stats.norm.pdf(NODES).sum()
"""Of the mean of a smooth function of a standard normal number."""


def upper_rate(errors: Any, trials: int, confidence: float) -> Any:
    """Return the Clopper-Pearson upper bound on the rate of errors, for one number of errors or an array of them.

    >>> round(float(upper_rate(0, 100, 0.95)), 4)
    0.0295
    """
    errors = np.asarray(errors)
    return np.where(errors >= trials, 1.0, special.betaincinv(errors + 1, np.maximum(trials - errors, 1), confidence))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the delta of mu-Gaussian differential privacy at this epsilon: the exact curve of the Gaussian mechanism.

    >>> round(gaussian_delta(1.0, 1.0), 4)
    0.1269
    """
    if mu == 0:
        return 0.0
    near, far = special.ndtr(mu / 2 - epsilon / mu), special.log_ndtr(-mu / 2 - epsilon / mu)
    return float(max(near - math.exp(min(epsilon + far, 0.0)), 0.0))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the epsilon of mu-Gaussian differential privacy at this delta.

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    if mu <= 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1
    root: Any = optimize.brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-9)
    return float(root)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the mu of Gaussian differential privacy that meets epsilon at this delta.

    >>> round(gaussian_mu(gaussian_epsilon(0.7, 1e-5), 1e-5), 6)
    0.7
    """
    high = 10 + 2 * epsilon
    root: Any = optimize.brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 1e-9, high, xtol=1e-9)
    return float(root)


def epsilon_of_rates(false_positives: Any, false_negatives: Any, delta: float) -> Any:
    """Return the least epsilon that allows these error rates of a test for the canary; arrays are taken by element."""
    pairs = ((false_positives, false_negatives), (false_negatives, false_positives))
    ratios = [np.maximum(1 - delta - one, 0) / other for one, other in pairs]
    return np.log(np.maximum(np.maximum(*ratios), 1.0))


def most_epsilon(runs: int, delta: float, confidence: float = 0.95) -> float:
    """Return the most that `clopper_pearson` can show with so many runs: its bound if no guess is wrong.

    >>> round(most_epsilon(10_000, 1e-5), 2)
    6.52
    """
    error = upper_rate(0, runs // 4, (1 + confidence) / 2)
    return float(epsilon_of_rates(error, error, delta))


def clopper_pearson(without: Floats, canary: Floats, delta: float, confidence: float = 0.95) -> float:
    """Return the lower bound on epsilon of a threshold test, from scores of runs without and with the canary.

    It assumes nothing about the mechanism. One half of the runs chooses the threshold of the test, and the other half
    counts its errors.
    """
    each = (1 + confidence) / 2
    first, second = [(np.sort(scores[::2]), np.sort(scores[1::2])) for scores in (without, canary)]

    def bound(cuts: Floats, out: Floats, there: Floats) -> Floats:
        false_positives = upper_rate(len(out) - np.searchsorted(out, cuts), len(out), each)
        false_negatives = upper_rate(np.searchsorted(there, cuts), len(there), each)
        return epsilon_of_rates(false_positives, false_negatives, delta)

    cuts = np.unique(np.concatenate([first[0], second[0]]))
    best = cuts[np.argmax(bound(cuts, first[0], second[0]))]
    return float(bound(best, first[1], second[1]))


def gaussian(without: Floats, canary: Floats, delta: float, confidence: float = 0.95) -> float:
    """Return the lower bound on epsilon under Gaussian differential privacy, from scores without and with the canary.

    A composition of Gaussian releases at rate 1 has it. Then no score of a run separates the two kinds of runs better
    than normal numbers whose means are mu apart, so the share of pairs in which the run with the canary has the larger
    score is stochastically no larger than theirs. Its variance for these is exact, and the share is taken for normal,
    which errs on the safe side: it is skewed to the left. The rest is a confidence bound on mu.

    >>> scores = np.linspace(-3, 3, 5001)
    >>> round(gaussian(scores, scores + 1.3, 1e-5), 2)
    2.81
    """
    sizes = len(without), len(canary)
    ranks = stats.rankdata(np.concatenate([without, canary]))
    share = (ranks[sizes[0] :].sum() / sizes[1] - (sizes[1] + 1) / 2) / sizes[0]
    margin = float(special.ndtri(confidence))

    def rejected(mu: float) -> bool:
        expected = float(special.ndtr(mu / math.sqrt(2)))
        both = float(WEIGHTS @ special.ndtr(NODES + mu) ** 2)  # two of one kind on the right side of one of the other
        variance = (expected * (1 - expected) + (sum(sizes) - 2) * (both - expected**2)) / (sizes[0] * sizes[1])
        return share > expected + margin * math.sqrt(variance)

    return gaussian_epsilon(_largest_rejected(rejected, 10.0), delta)


def one_run(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Return the lower bound on epsilon of Steinke, Nasr and Jagielski (2023), from guesses in a single run.

    Each canary took part by the toss of a fair coin. It assumes nothing about the mechanism.

    >>> round(one_run(1000, 100, 100, 1e-5), 2)
    3.47
    """
    level = 1 - confidence

    def chance(epsilon: float) -> float:
        """The most probable that so many guesses are correct under epsilon and delta."""
        rate = 1 / (1 + math.exp(-epsilon))
        ahead = np.arange(1, correct + 1)
        masses = stats.binom.pmf(correct - ahead, guesses, rate).cumsum()
        slope = max(float((masses / ahead).max()), 0.0) if correct else 0.0
        return float(stats.binom.sf(correct - 1, guesses, rate)) + 2 * canaries * delta * slope

    return _largest_rejected(lambda epsilon: chance(epsilon) < level, 20.0)


def one_run_gaussian(canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95) -> float:
    """Return the lower bound on epsilon from guesses in a single run, under Gaussian differential privacy.

    The recursion of Mahloujifar, Melis and Chaudhuri (2024) for the numbers of correct guesses that the trade-off curve
    of a Gaussian mechanism allows; tighter than `one_run`, and valid for Gaussian releases at rate 1.

    >>> round(one_run_gaussian(1000, 100, 100, 1e-5), 2)
    5.55
    """
    level = 1 - confidence

    def impossible(mu: float) -> bool:
        """Whether so many correct guesses have a probability below the level under mu."""
        right, wrong = level * correct / canaries, level * (guesses - correct) / canaries
        for i in range(correct - 1, -1, -1):
            more = max(wrong, float(special.ndtr(special.ndtri(right) - mu)))
            right += i / (guesses - i) * (more - wrong)
            wrong = more
            if right + wrong > guesses / canaries:
                return True
        return False

    return gaussian_epsilon(_largest_rejected(impossible, 10.0) if correct else 0.0, delta)


def _largest_rejected(rejected: Callable[[float], bool], high: float) -> float:
    """Return the largest value that is rejected, for a test that rejects every value below one that it rejects."""
    if not rejected(0.0):
        return 0.0
    low = 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low
