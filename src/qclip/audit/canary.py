"""The white-box canary audit: can an attacker who sees every release tell whether one example took part?

The canary's gradient points where no other gradient does, as in Nasr et al. (2023). The attacker knows everything but
the noise and a bit: all other gradients, the thresholds, and each step's joint release of gradient, counts and slack.
So its best test is the likelihood ratio, and what it finds is as close to epsilon as the accountant is tight.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from qclip import _validate as check
from qclip import accounting
from qclip._validate import Floats
from qclip.audit import bounds
from qclip.federated.updates import Layout
from qclip.thresholds import BalancedThreshold, Conditions, Threshold
from qclip.training import noise
from qclip.training.step import StepRule, StepState, ask, release
from qclip.training.sums import BoundedSum, Key, LogicalStep, NoisySum, RawSums, raw_sums

NUM_DIMS: Final = 8
"""Coordinates of the audited gradient. One would do: the noise on the others tells the attacker nothing."""


@dataclass(frozen=True)
class CanaryAudit:
    """What the attacker reached, beside what is claimed."""

    epsilon: float
    """The epsilon that is claimed, at `delta`."""
    delta: float
    lower_bound: float
    """The lower bound on epsilon under Gaussian differential privacy, at `confidence`."""
    clopper_pearson: float
    """The lower bound on epsilon that assumes nothing about the mechanism."""
    most: float
    """The most that the second bound can show with so many runs."""
    confidence: float
    steps: int
    sample_rate: float
    scores_without: Floats = field(repr=False)
    """The log likelihood ratio of each run without the canary."""
    scores_with: Floats = field(repr=False)

    @property
    def runs(self) -> int:
        """The number of runs."""
        return len(self.scores_without) + len(self.scores_with)

    @property
    def holds(self) -> bool:
        """Whether both bounds are within the claim."""
        return max(self.lower_bound, self.clopper_pearson) <= self.epsilon


def white_box(
    threshold: Threshold[Any] | None = None,
    *,
    epsilon: float,
    delta: float = 1e-5,
    steps: int = 2,
    sample_rate: float = 1.0,
    batch_size: int = 64,
    runs: int = 10_000,
    canary_norm: float = math.inf,
    confidence: float = 0.95,
    seed: int = 0,
) -> CanaryAudit:
    """Return how well the joint releases of private steps tell whether a canary took part.

    Each run is the real step (`qclip.training.step`) with noise and threshold of its own, calibrated as a
    run of `qclip.make_private`. A fair coin decides whether the canary takes part.

    Args:
        threshold: The threshold; by default `qclip.BalancedThreshold`.
        epsilon: The claim to test.
        delta: Its delta.
        steps: The steps of a run.
        sample_rate: The probability with which the canary joins a step, if it takes part. Below 1, the releases are not
            Gaussian, and only `CanaryAudit.clopper_pearson` is a bound.
        batch_size: The expected number of examples of a step.
        runs: The number of runs; a few milliseconds each.
        canary_norm: The norm of the canary's gradient over the clip norm; a large one is clipped, and adds the most.
        confidence: The confidence of the bounds.
        seed: The seed of coins and noise.
    """
    threshold = BalancedThreshold() if threshold is None else threshold
    runs = check.count("runs", runs, "take 1000 or more", least=20)
    z = accounting.noise_multiplier(epsilon=epsilon, delta=delta, sample_rate=sample_rate, steps=steps)
    conditions = Conditions(batch_size, steps, z, (NUM_DIMS,))
    threshold.check(conditions)
    layout = Layout.of({"weight": torch.zeros(NUM_DIMS)}, "flat")
    others = _others(batch_size, seed)
    attack = _Attack()
    rule = StepRule(
        threshold,
        members={Key("gradient", "weight"): 0},
        dims=(NUM_DIMS,),
        dtypes={Key("gradient", "weight"): torch.float32},
        batch_size=batch_size,
        noise=accounting.split(z, threshold.share(conditions)),
        mechanism=attack.release,
    )
    coins, draws, *noises = np.random.SeedSequence(seed).spawn(2 + runs)
    takes_part = np.random.default_rng(coins).random(runs) < 0.5
    joins = np.random.default_rng(draws).random((runs, steps)) < sample_rate
    scores = np.zeros(runs)
    for run, own in enumerate(noises):
        source, state = noise.NoiseSource(own), StepState(0, threshold.start(1))
        for step in range(steps):
            query = ask(state, rule)
            logical = LogicalStep(query)
            raw = logical.add(layout.clipped(others, logical.clip_norms), batch_size).reduced()
            canary = raw_sums(
                layout.clipped(_canary(canary_norm, raw.clip_norms[0]), raw.clip_norms), 1, query
            ).reduced()
            attack.begin(raw, canary)
            joined = bool(takes_part[run] and joins[run, step])
            state = release(state, attack.sums(joined=joined), query, rule, source).state
            scores[run] += attack.score(sample_rate)
    without, there = scores[~takes_part], scores[takes_part]
    return CanaryAudit(
        epsilon,
        delta,
        bounds.gaussian(without, there, delta, confidence),
        bounds.clopper_pearson(without, there, delta, confidence),
        bounds.most_epsilon(runs, delta, confidence),
        confidence,
        steps,
        sample_rate,
        without,
        there,
    )


def _others(batch_size: int, seed: int) -> dict[str, Tensor]:
    """Return the gradients of the other examples: norms over two decades, and nothing in the first coordinate."""
    generator = np.random.default_rng((seed, 1))
    rows = generator.standard_normal((batch_size, NUM_DIMS))
    rows[:, 0] = 0.0
    rows *= 10 ** generator.uniform(-1, 1, (batch_size, 1)) / np.linalg.norm(rows, axis=1, keepdims=True)
    return {"weight": torch.from_numpy(rows).float()}


def _canary(norm: float, clip_norm: float) -> dict[str, Tensor]:
    gradient = torch.zeros(1, NUM_DIMS)
    gradient[0, 0] = min(norm, 1e6) * clip_norm
    return {"weight": gradient}


class _Attack:
    """Sees the releases of a step, and knows its sums without the canary and what the canary adds to them."""

    def begin(self, without: RawSums, canary: RawSums) -> None:
        """Begin a step."""
        self._known = [(without.gradient, canary.gradient)]
        if without.counts is not None and canary.counts is not None:
            self._known.append((without.counts, canary.counts))
        self._without, self._log_ratio = without, 0.0
        self._left = list(self._known)

    def sums(self, *, joined: bool) -> RawSums:
        """Return the sums of the step, with or without the canary."""
        if not joined:
            return self._without
        gradient, *counts = [value + canary for value, canary in self._known]
        return replace(self._without, gradient=gradient, counts=counts[0] if counts else None)

    def release(self, value: BoundedSum, noise_multiplier: float, source: Any, **settings: Any) -> NoisySum:
        """Release a sum as always, and read the logarithm of the likelihood ratio off the result."""
        released = noise.release(value, noise_multiplier, source, **settings)
        without, canary = self._left.pop(0)
        for key, shift in canary.tensors.items():
            seen = released.tensors[key].double() * released.divisor - without.tensors[key].double()
            variance = released.stds[value.members[key]] ** 2
            self._log_ratio += float((shift.double() * (seen - shift.double() / 2)).sum()) / variance
        return released

    def score(self, sample_rate: float) -> float:
        """Return the logarithm of the likelihood ratio of the step, in which the canary joins at this rate."""
        return (
            self._log_ratio
            if sample_rate == 1
            else float(np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + self._log_ratio))
        )
