"""Runs as a certificate sees them: DP-SGD with a threshold that follows noisy counts, many seeds at once.

`qclip.simulation.simulate` clips at exact quantiles or given thresholds. Here the threshold follows the noisy count of
unclipped examples by the rule of Andrew et al., steps may be normalized or have momentum, and the record is kept with
what it hides: the gradient and the mean clip factor of every step.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from qclip import _validate as check
from qclip._validate import Floats
from qclip.simulation.problems import Problem
from qclip.simulation.problems.noise import clip_factor
from qclip.theory.bounds import Sampling


@dataclass(frozen=True)
class RecordedRuns:
    """The records of runs, [seeds, steps] each, and the truth behind them."""

    gammas: Floats
    taus: Floats
    clipped: Floats
    """The noisy counted fraction of clipped examples."""
    count_noise: float
    """The standard deviation of its noise."""
    grad_norm2: Floats
    """``||grad f(x_t)||^2``: not in the record."""
    factors: Floats = field(repr=False)
    """The mean clip factor a_t: not in the record."""

    def weighted_means(self) -> Floats:
        """Return the mean of ``||grad f||^2`` with weights ``gamma_t a_t`` of each run, [seeds]."""
        weights = self.gammas * self.factors
        return (weights * self.grad_norm2).sum(1) / weights.sum(1)


def recorded_runs(
    problem: Problem,
    *,
    step_size: float,
    steps: int,
    x0: ArrayLike,
    p: float,
    initial: float,
    batch_size: int,
    noise_multiplier: float = 0.0,
    count_noise: float = 0.0,
    learning_rate: float = 0.2,
    normalized: bool = False,
    momentum: float = 0.0,
    sampling: Sampling = "poisson",
    seeds: int = 64,
    seed: int | np.random.Generator = 0,
) -> RecordedRuns:
    """Run DP-SGD at a threshold that moves by ``exp(-learning_rate (counted unclipped fraction - p))`` a step.

    Args:
        problem: The problem, with exact moments.
        step_size: The step size; over the threshold if ``normalized``.
        steps: Number of steps.
        x0: Initial point, [d].
        p: The quantile that the threshold follows.
        initial: The threshold of the first step.
        batch_size: Expected batch size.
        noise_multiplier: Standard deviation of the noise on the clipped sum, relative to the threshold.
        count_noise: Standard deviation of the noise on the count, in examples.
        learning_rate: Of the threshold.
        normalized: Whether steps are divided by the threshold.
        momentum: Momentum of the steps.
        sampling: "poisson" for Poisson batch sizes, "iid" for batches of one size.
        seeds: Number of independent runs.
        seed: Seed or generator of all random draws.
    """
    rng = np.random.default_rng(seed)
    B, d = check.count("batch_size", batch_size), problem.dim
    x = np.broadcast_to(problem.point(x0, "x0"), (seeds, d)).copy()
    tau, velocity = np.full(seeds, float(initial)), np.zeros((seeds, d))
    gammas, taus, clipped, squares, factors = (np.empty((steps, seeds)) for _ in range(5))
    for t in range(steps):
        sizes = rng.poisson(B, seeds) if sampling == "poisson" else np.full(seeds, B)
        drawn = np.arange(int(sizes.max(initial=1) or 1)) < sizes[:, None]
        g = problem.example_gradients(x, problem.draw(rng, drawn.shape))
        norms = np.linalg.norm(g, axis=-1)
        update = np.einsum("sn,snd->sd", clip_factor(norms, tau[:, None]) * drawn, g) / B
        update += noise_multiplier / B * tau[:, None] * rng.standard_normal((seeds, d))
        centred = (((norms <= tau[:, None]) - 0.5) * drawn).sum(1) + count_noise * rng.standard_normal(seeds)
        unclipped = centred / B + 0.5
        gammas[t], taus[t] = (step_size / tau if normalized else step_size), tau
        clipped[t], squares[t] = 1 - unclipped, (problem.grad(x) ** 2).sum(-1)
        factors[t] = problem.clip_moments(x, tau).mean_factor
        velocity = momentum * velocity + update / (tau[:, None] if normalized else 1.0)
        x = x - step_size * velocity
        tau = tau * np.exp(-learning_rate * (unclipped - p))
    return RecordedRuns(gammas.T, taus.T, clipped.T, count_noise / B, squares.T, factors.T)
