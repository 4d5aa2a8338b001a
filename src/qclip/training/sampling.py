"""Sampling: the examples of each logical step, as a function of a seed and the step."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy.stats
from numpy.typing import NDArray

_MANY = 2**17
"""From this many examples on, a Poisson draw costs as much as its examples, not as the data set."""
_MOST_PADDED = 1.1
"""Padded physical batches hold fewer slots than this for each example, on average."""


class Sampler(Protocol):
    """Draws the examples of a step from a seed and the step's number alone.

    A sampler has no state to save, and any step can be drawn again.
    """

    @property
    def seed(self) -> np.random.SeedSequence:
        """The seed of all draws."""
        ...

    def draw(self, step: int) -> NDArray[np.intp]:
        """Return the indices of the examples of this step, ascending; possibly none."""
        ...


@dataclass(frozen=True)
class PoissonSampler:
    """Poisson sampling: each example joins each step with probability ``sample_rate``.

    Guarantees:
        * Examples join independently of each other, and steps are independent.
        * A draw is a pure function of (seed, step): a step that failed is drawn again as it was.
        * The global generators are not touched.

    Edge cases:
        * The draw may be empty. The step then releases noise alone.
        * A rate of 1 draws every example at every step.
        * Of a large data set the number of examples is drawn first, then which: the same distribution, without a
          random number for every example.

    >>> sampler = PoissonSampler(10, 1.0, np.random.SeedSequence(0))
    >>> sampler.draw(step=0)
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    dataset_size: int
    sample_rate: float
    seed: np.random.SeedSequence

    def draw(self, step: int) -> NDArray[np.intp]:
        """Return the indices of the examples of this step, ascending; possibly none."""
        generator = generator_at(self.seed, step)
        if self.dataset_size < _MANY:
            return np.flatnonzero(generator.random(self.dataset_size) < self.sample_rate)
        number = generator.binomial(self.dataset_size, self.sample_rate)
        return np.sort(generator.choice(self.dataset_size, number, replace=False, shuffle=False))


@dataclass(frozen=True)
class UniformSampler:
    """Uniform sampling of ``batch_size`` different examples at every step: every subset is equally likely.

    Only for training without privacy: the accountant assumes Poisson sampling.

    >>> len(UniformSampler(10, 3, np.random.SeedSequence(0)).draw(step=0))
    3
    """

    dataset_size: int
    batch_size: int
    seed: np.random.SeedSequence

    def draw(self, step: int) -> NDArray[np.intp]:
        """Return the indices of the examples of this step, ascending."""
        return np.sort(
            generator_at(self.seed, step).choice(self.dataset_size, self.batch_size, replace=False, shuffle=False)
        )


def sampler(kind: str, num_examples: int, batch_size: int, sample_rate: float, seed: np.random.SeedSequence) -> Sampler:
    """Return a sampler of the given kind.

    Args:
        kind: "uniform" or "poisson".
        num_examples: The true number of examples of the data set.
        batch_size: The number of examples of a uniform draw.
        sample_rate: The probability of each example in a Poisson draw.
        seed: The seed of all draws.
    """
    if kind == "uniform":
        return UniformSampler(num_examples, batch_size, seed)
    return PoissonSampler(num_examples, sample_rate, seed)


def fixed_size(kind: str, dataset_size: int, batch_size: int) -> int:
    """Return the largest physical batch size for which padding costs less than a tenth of the work, on average.

    Large batches get a size that holds nearly every draw whole. Smaller ones are cut into several physical batches, so
    that only the last is padded.

    >>> fixed_size("poisson", 50_000, 256), fixed_size("poisson", 50_000, 4096), fixed_size("uniform", 50_000, 256)
    (55, 4311, 256)
    """
    if kind == "uniform":
        return batch_size
    rate = batch_size / dataset_size
    std = (batch_size * (1 - rate)) ** 0.5
    draw_sizes = np.arange(max(0, int(batch_size - 8 * std)), int(batch_size + 8 * std) + 2)
    probabilities = scipy.stats.binom.pmf(draw_sizes, dataset_size, rate)

    def slots_per_example(size: int) -> float:
        return float(probabilities @ (np.maximum(-(-draw_sizes // size), 1) * size)) / batch_size

    largest_draws = (batch_size + 0.5 * k * std for k in range(2, 8))
    candidates = {max(1, math.ceil(most / pieces)) for most in largest_draws for pieces in range(1, batch_size + 1)}
    return max((size for size in candidates if slots_per_example(size) < _MOST_PADDED), default=1)


def generator_at(seed: np.random.SeedSequence, *place: int) -> np.random.Generator:
    """Return the generator of a place (a step, a purpose), independent of the generators of other places."""
    return np.random.default_rng(np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *place)))
