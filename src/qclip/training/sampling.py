"""Sampling: which examples join each logical step, as a function of a seed and the step."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy.stats
from numpy.typing import NDArray


class Sampler(Protocol):
    """Who joins a step: a function of the seed and the step, so there is no state to save and a step can be redrawn."""

    @property
    def seed(self) -> np.random.SeedSequence:
        """What it draws from."""
        ...

    def draw(self, step: int) -> NDArray[np.intp]:
        """The indices of the examples of this step, ascending; there may be none."""
        ...


@dataclass(frozen=True)
class PoissonSampler:
    """Draws each of ``dataset_size`` examples with probability ``sample_rate``, independently, at every step.

    >>> sampler = PoissonSampler(10, 1.0, np.random.SeedSequence(0))
    >>> sampler.draw(step=0)
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    dataset_size: int
    sample_rate: float
    seed: np.random.SeedSequence

    def draw(self, step: int) -> NDArray[np.intp]:
        """The indices of the examples of this step, ascending; there may be none."""
        return np.flatnonzero(generator_at(self.seed, step).random(self.dataset_size) < self.sample_rate)


@dataclass(frozen=True)
class UniformSampler:
    """Draws ``batch_size`` different examples of ``dataset_size`` at every step, each subset as likely as any other.

    For training without privacy: the accounting is that of Poisson sampling.

    >>> len(UniformSampler(10, 3, np.random.SeedSequence(0)).draw(step=0))
    3
    """

    dataset_size: int
    batch_size: int
    seed: np.random.SeedSequence

    def draw(self, step: int) -> NDArray[np.intp]:
        """The indices of the examples of this step, ascending."""
        return np.sort(
            generator_at(self.seed, step).choice(self.dataset_size, self.batch_size, replace=False, shuffle=False)
        )


def sampler(kind: str, examples: int, batch_size: int, sample_rate: float, seed: np.random.SeedSequence) -> Sampler:
    """Uniform sampling of ``batch_size`` of the examples, or Poisson sampling at the rate, however many there are."""
    if kind == "uniform":
        return UniformSampler(examples, batch_size, seed)
    return PoissonSampler(examples, sample_rate, seed)


def fixed_size(kind: str, dataset_size: int, batch_size: int) -> int:
    """The largest size of physical batches for which filling each up to that size costs less than a tenth of the work.

    One that holds nearly every draw whole serves large batches; smaller ones are cut, so that only the last is filled.

    >>> fixed_size("poisson", 50_000, 256), fixed_size("poisson", 50_000, 4096), fixed_size("uniform", 50_000, 256)
    (55, 4311, 256)
    """
    if kind == "uniform":
        return batch_size
    rate = batch_size / dataset_size
    spread = (batch_size * (1 - rate)) ** 0.5
    sizes = np.arange(max(0, int(batch_size - 8 * spread)), int(batch_size + 8 * spread) + 2)
    chances = scipy.stats.binom.pmf(sizes, dataset_size, rate)

    def filled(size: int) -> float:
        return float(chances @ (np.maximum(-(-sizes // size), 1) * size)) / batch_size

    whole = (batch_size + 0.5 * room * spread for room in range(2, 8))
    candidates = {max(1, math.ceil(most / parts)) for most in whole for parts in range(1, batch_size + 1)}
    return max((size for size in candidates if filled(size) < _FILLED), default=1)


_FILLED = 1.1
"""How many rows may be computed for one that counts."""


def generator_at(seed: np.random.SeedSequence, *place: int) -> np.random.Generator:
    """Return a generator for this place (a step, a purpose): independent of those of other places."""
    return np.random.default_rng(np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *place)))
