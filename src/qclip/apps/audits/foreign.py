"""Faults of other libraries, and whether an audit catches them: in the libraries themselves, or restated.

The attacker is pointed at the library where it is installed (`qclip.apps.audits.installed`). Otherwise at a rule of a
few lines: none of these is anybody's code, each is the release that a documented fault comes to, for many runs at once.
The attacker is told all but the noise and whether the canary took part, as in `qclip.audit.white_box`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from qclip._validate import Floats
from qclip.apps.audits import installed
from qclip.audit import bounds

DELTA: Final = 1e-5
CLAIM: Final = 1.0
"""The epsilon that every rule below would claim."""
Z: Final = 1 / bounds.gaussian_mu(CLAIM, DELTA)
"""The noise multiplier of one Gaussian release that is worth the claim."""
OTHERS: Final = 32
"""Examples beside the canary."""

Scores = Callable[[np.random.Generator, int, bool], Floats]
"""Returns the attacker's score of each run, with the canary or without: the higher, the more it looks like one."""


Check = Callable[[np.random.Generator], tuple[bool, str]]
"""Returns whether a fault shows, and how, where it is not for an attacker who guesses."""


@dataclass(frozen=True)
class Rule:
    """What releases with the fault: a library, or a few lines."""

    scores: Scores | None = None
    gaussian: bool = False
    """Whether the release is Gaussian, which allows a sharper bound."""
    check: Check | None = None
    most_runs: int | None = None
    """As many runs as take seconds."""


@dataclass(frozen=True)
class Fault:
    """A fault of a library, and what finds it."""

    name: str
    library: str
    source: str
    """Where the fault is documented or was measured."""
    restated: Rule
    package: str = ""
    """What has to be installed to run the library itself; empty where that is not possible."""
    run: Rule | None = None

    def rule(self) -> tuple[Rule, str]:
        """Return the rule to attack, and "run" or "restated"."""
        if self.run is not None and installed.available(self.package):
            return self.run, "run"
        return self.restated, "restated"


def no_clipping(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
    """The sum is not clipped, and its noise is made for a clip norm of 1: the canary's gradient has norm 30."""
    return 30.0 * canary + Z * generator.standard_normal(runs)


def realised_size(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
    """The noisy sum is divided by the number of examples that were drawn: the length of the noise tells that number."""
    dims, size = 100_000, OTHERS + canary
    squared_length = (Z / size) ** 2 * generator.chisquare(dims, runs)
    return -squared_length


def next_threshold(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
    """The noise is scaled by the threshold after its update, which a count of the same step decides.

    The exact count is one smaller for a clipped canary, and moves the threshold by a factor; the noise of many
    coordinates tells it.
    """
    dims, unclipped = 100_000, OTHERS // 2
    fraction = unclipped / (OTHERS + canary)
    threshold = math.exp(-0.2 * (fraction - 0.5))
    return (Z * threshold) ** 2 * generator.chisquare(dims, runs)


def exact_fraction(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
    """The exact fraction of unclipped updates is returned beside the noisy mean."""
    return np.full(runs, -(OTHERS // 2) / (OTHERS + canary)) + 0 * generator.random(runs)


def half_charged_count(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
    """Gradient and count are both released, and the count has less noise than it is charged for.

    One example moves the two together by 2.22 standard deviations where 1.25 are accounted for: the ratio that was
    measured, at the claim of this page.
    """
    return _gaussian(generator, runs, canary, 2.22 / 1.25 / Z)


def empty_batch(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
    """A Poisson draw without examples leaves the threshold as it is, without noise: only the canary can change it.

    The data set has nothing else, and the canary joins each of 20 steps with probability 0.2.
    """
    joined = generator.random((runs, 20)) < 0.2 * canary
    return joined.any(1).astype(float)


def constant_seed(generator: np.random.Generator) -> tuple[bool, str]:
    """The noise of every run follows from a seed that is printed in the source: it can be subtracted."""
    del generator
    first, second = [np.random.default_rng(42).standard_normal(1000) * Z for _ in range(2)]
    return bool((first == second).all()), "two runs have the same noise: subtracted, it leaves the raw sum"


def inverted_sign(generator: np.random.Generator) -> tuple[bool, str]:
    """The threshold rises where too few updates are clipped: it runs away from the quantile instead of to it."""
    seen = []
    for start in (0.1, 10.0):
        threshold = start
        for _ in range(40):
            norms = np.exp(0.5 * generator.standard_normal(100))  # their median is 1
            fraction = (norms <= threshold).mean() + generator.standard_normal() / 100
            threshold *= math.exp(0.2 * (fraction - 0.5))
        seen.append(threshold)
    lost = all(not 0.8 < threshold < 1.25 for threshold in seen)
    return lost, f"from 0.1 and 10, thresholds of {seen[0]:.2g} and {seen[1]:.2g} after 40 rounds; the median is 1"


FAULTS: Final = (
    Fault(
        "ghost clipping with an adaptive threshold does not clip",
        "Opacus 1.6",
        "measured",
        Rule(no_clipping),
        "opacus",
        Rule(installed.ghost_adaptive(Z), most_runs=200),
    ),
    Fault(
        "the noisy count is divided by the realised batch size",
        "Opacus 1.6",
        "measured; arXiv 2605.15648",
        Rule(realised_size),
        "opacus",
        Rule(installed.realised_size(Z), gaussian=True, most_runs=4000),
    ),
    Fault(
        "threshold with an inverted sign",
        "Flower 1.41",
        "measured",
        Rule(check=inverted_sign),
        "flwr",
        Rule(check=installed.inverted_sign),
    ),
    Fault(
        "noise scaled by the next threshold",
        "Flower 1.41",
        "measured",
        Rule(next_threshold),
        "flwr",
        Rule(installed.next_threshold(Z), gaussian=True, most_runs=600),
    ),
    Fault(
        "exact clipped fraction in the metrics",
        "Flower 1.41",
        "measured",
        Rule(exact_fraction),
        "flwr",
        Rule(installed.exact_fraction, most_runs=200),
    ),
    Fault("constant seed of the trainer's noise", "opaque", "read", Rule(check=constant_seed)),
    Fault("empty batch leaves the threshold without noise", "opaque", "read", Rule(empty_batch)),
    Fault("count charged at half of its cost", "opaque", "measured", Rule(half_charged_count, gaussian=True)),
)


def lower_bound(scores: Scores, *, gaussian: bool, runs: int, seed: int = 0) -> float:
    """Return the lower bound on epsilon from so many runs, half of them with the canary."""
    generator = np.random.default_rng(seed)
    without, canary = (scores(generator, runs // 2, there) for there in (False, True))
    return (bounds.gaussian if gaussian else bounds.clopper_pearson)(without, canary, DELTA)


def honest(generator: np.random.Generator, runs: int, canary: bool) -> Floats:
    """One Gaussian release as it is claimed: the control."""
    return _gaussian(generator, runs, canary, 1 / Z)


def _gaussian(generator: np.random.Generator, runs: int, canary: bool, moved: float) -> Floats:
    """Return log likelihood ratios of a release that the canary moves by so many standard deviations."""
    return moved * (moved * (canary - 0.5) + generator.standard_normal(runs))
