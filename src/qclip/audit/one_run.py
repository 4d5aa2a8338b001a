"""The one-run audit: many canaries in a single training, each there by the toss of a coin (Steinke et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from qclip import _validate as check
from qclip._validate import Floats
from qclip.audit import bounds
from qclip.thresholds import Threshold
from qclip.training import noise
from qclip.training.make import make_private
from qclip.training.recording import recorded_by
from qclip.training.sums import Key, NoisySum

FRACTIONS: Final = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.4)
"""The fractions of canaries to guess about; the best for the claim is chosen before the run."""


@dataclass(frozen=True)
class OneRunAudit:
    """What the attacker reached in a single run, beside what is claimed."""

    epsilon: float
    delta: float
    lower_bound: float
    """The lower bound on epsilon under Gaussian differential privacy, at `confidence`."""
    any_mechanism: float
    """The lower bound on epsilon that assumes nothing about the mechanism (Steinke et al.)."""
    confidence: float
    canaries: int
    guesses: int
    correct: int

    @property
    def holds(self) -> bool:
        """Whether both bounds are within the claim."""
        return max(self.lower_bound, self.any_mechanism) <= self.epsilon


def one_run(
    threshold: Threshold[Any] | None = None,
    *,
    epsilon: float,
    delta: float = 1e-5,
    steps: int = 4,
    canaries: int = 5000,
    confidence: float = 0.95,
    seed: int = 0,
) -> OneRunAudit:
    """Train once with `qclip.make_private`, and guess from its releases which canaries took part.

    Each canary's gradient has a coordinate of its own; it takes part in every step or in none. The attacker sees all
    released gradients, and guesses for the canaries with the largest and the smallest likelihood ratios.

    Args:
        threshold: The threshold of the run; by default that of `qclip.make_private`.
        epsilon: The claim to test.
        delta: Its delta.
        steps: The steps of the run.
        canaries: The number of canaries.
        confidence: The confidence of the bounds.
        seed: The seed of coins, sampling and noise.
    """
    canaries = check.count("canaries", canaries, "take 1000 or more", least=10)
    coins = np.random.default_rng((seed, 1)).random(canaries) < 0.5
    model = _Coordinates(canaries)
    there = torch.from_numpy(np.flatnonzero(coins))
    watch = _Watch(seed)
    settings: dict[str, Any] = {} if threshold is None else {"threshold": threshold}
    with recorded_by(watch):
        training = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            TensorDataset(there, torch.zeros(len(there))),
            loss=_steep,
            batch_size=canaries,
            dataset_size=canaries,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            **settings,
        )
        for batch in training.loader:
            training.step(*batch)
    scores = watch.log_ratios([record.tau[0] for record in training.history])
    guesses = _best_number(canaries, epsilon, delta, confidence)
    order = np.argsort(scores)
    half = guesses // 2
    correct = int(coins[order[-half:]].sum() + (~coins[order[:half]]).sum())
    return OneRunAudit(
        epsilon,
        delta,
        bounds.one_run_gaussian(canaries, 2 * half, correct, delta, confidence),
        bounds.one_run(canaries, 2 * half, correct, delta, confidence),
        confidence,
        canaries,
        2 * half,
        correct,
    )


class _Coordinates(nn.Module):
    """A model in which each example has a coordinate of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index]


def _steep(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return losses with gradients that every threshold clips."""
    return 1e6 * (outputs - targets)


class _Watch:
    """Keeps the released gradients of a run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._released: list[tuple[Floats, float]] = []

    def begin(self, training: Any) -> None:
        pass

    def drawn(self, step: int, indices: NDArray[np.intp]) -> NDArray[np.intp]:
        return indices

    def release(self, value: Any, noise_multiplier: float, source: Any, **settings: Any) -> NoisySum:
        released = noise.release(value, noise_multiplier, source, **settings)
        if (gradient := released.tensors.get(Key("gradient", "weight"))) is not None:
            self._released.append((gradient.double().numpy() * released.divisor, released.stds[0]))
        return replace(released)

    def log_ratios(self, clip_norms: Sequence[float]) -> Floats:
        """Return the logarithm of each canary's likelihood ratio over all steps."""
        pairs = zip(self._released, clip_norms, strict=True)
        return np.sum([tau * (seen - tau / 2) / std**2 for (seen, std), tau in pairs], axis=0)


def _best_number(canaries: int, epsilon: float, delta: float, confidence: float) -> int:
    """Return the number of guesses that shows most where the claim is tight: from public numbers alone."""
    mu = bounds.gaussian_mu(epsilon, delta)
    spread = np.linspace(-mu / 2 - 6, mu / 2 + 6, 20_001)
    tail = (stats.norm.sf(spread, mu / 2) + stats.norm.sf(spread, -mu / 2)) / 2  # of a score that is symmetric
    right = stats.norm.sf(spread, mu / 2) / 2

    def shown(number: int) -> float:
        cut = int(np.searchsorted(-tail, -number / 2 / canaries))
        share = right[cut] / tail[cut]
        return bounds.one_run_gaussian(canaries, number, round(share * number), delta, confidence)

    return max((max(2, 2 * round(fraction * canaries / 2)) for fraction in FRACTIONS), key=shown)
