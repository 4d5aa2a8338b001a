"""The claim that no analysis of quantile clipping at constant p can be better than the sharp theorem by much."""

import numpy as np
from matplotlib.figure import Figure

from qclip import theory
from qclip.apps.experiments.claim import Effort, Outcome, bars, claim
from qclip.simulation.problems import Gaussian, HeavyTailedQuadratic, TwoPoint
from qclip.simulation.simulate import simulate


@claim(
    "lower-bound-probes",
    "At constant p each term of the sharp bound is attained up to a constant by some problem of the class",
    "section 21",
)
def lower_bound_probes(effort: Effort) -> Outcome:
    """Run the three problems of the lower bound, the noisy one with rare jumps that make its quantile large."""
    rng, scale = effort.rng(), effort.pick(1, 4)
    # Optimisation: curvature 1/(gamma T), no noise.
    gamma, steps = 0.01, 2000 * scale
    flat = HeavyTailedQuadratic(spectrum=[1 / (gamma * steps)], noise=Gaussian(0.0))
    run = simulate(flat, step_size=gamma, p=0.5, steps=steps, x0=[1.0], seeds=1, record=[])
    optimisation = run.mean() / (float(flat.loss(np.array([1.0]))) / (gamma * steps))

    # Variance: dp noise at the quantile of rare symmetric jumps, sigma h^(-1/2).
    h, z, B, d, step = 0.1, 2.0, 4, 3, 2e-3
    sigma, jump = 1.0, h**-0.5
    steps, seeds = 5000 * scale, 64
    power = d * (z / B) ** 2
    x, total = np.zeros((seeds, d)), 0.0
    mass = h * (1 + 1e-6)
    for t in range(steps):
        sign = rng.choice([-1.0, 1.0], (seeds, B)) * (rng.random((seeds, B)) < mass)
        g = np.repeat(x[:, None], B, axis=1)
        g[..., 0] += jump * sign
        # The lower (1-h)-quantile: 0-jumps have mass 1 - mass < 1 - h, so it is the smaller of the two jumped norms.
        tau = np.minimum(*(np.linalg.norm(x + np.eye(d)[0] * side, axis=1) for side in (jump, -jump)))
        norms = np.linalg.norm(g, axis=2)
        clipped = np.minimum(1, tau[:, None] / np.maximum(norms, 1e-300))[..., None] * g
        if t >= steps // 2:
            total += float((x**2).sum(1).mean()) / (steps - steps // 2)
        x = x - step * (clipped.mean(1) + z / B * tau[:, None] * rng.standard_normal((seeds, d)))
    variance = total / (step * power * sigma**2 / h)

    # Bias: Example 1 at omega = p.
    two, p = TwoPoint(2, 0.7), 0.7
    run = simulate(two, step_size=0.01, p=p, steps=2000 * scale, x0=[-2.0], seeds=8, record=[], seed=rng)
    bias = float(run.grad_norm2[-1].mean()) / theory.bias_floor(two.assumptions([-2.0]), p)
    found = {"optimisation": optimisation, "variance": variance, "bias": bias}

    def draw() -> Figure:
        return bars({f"{name}, over its term": value for name, value in found.items()}, "measured / term")

    return Outcome(
        expected="optimisation at least .86 F0/(gamma T), variance at least 1/2 of gamma L S_z sigma^2/h, "
        "bias the floor",
        measured=", ".join(f"{name} {value:.3f}" for name, value in found.items()),
        printed=bool(0.85 < optimisation <= 1 and 0.47 < variance < 1 and abs(bias - 1) < 1e-2),
        error=".01 for the lower order of the optimisation, .03 for that of the variance and its 64 seeds",
        values=found,
        draw=draw,
    )
