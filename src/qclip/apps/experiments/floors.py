"""Claims about what no analysis can improve: the exact bias floor, and problems as hard as the bound says."""

import numpy as np
from matplotlib.figure import Figure

from qclip import theory
from qclip.apps.experiments.claim import Effort, Outcome, claim
from qclip.apps.report.style import label, new_figure
from qclip.simulation.problems import TwoPoint
from qclip.simulation.simulate import simulate


@claim(
    "bias-floor-attained",
    "The bias floor of the sharp theorem, sigma^2 psi_q(p) / p^2, is attained for every q and p",
    "sharp theorem, section 7",
)
def bias_floor_attained(effort: Effort) -> Outcome:
    """Run Example 1 where its rarer gradient has probability 1 - p, until it stands still."""
    steps, gamma = effort.pick(10_000, 100_000), 0.01
    qs, levels = (1.1, 1.5, 2.0), (0.3, 0.6, 0.7, 0.9)
    exact, simple, bounded = (np.empty((len(qs), len(levels))) for _ in range(3))
    for k, p in enumerate(levels):
        problem = TwoPoint(2, max(p, 1 - p))
        root = problem.fixed_points(p)[-1]  # -r, and 0 for p < 1/2
        start = root + 0.5  # runs come down to it from the right
        run = simulate(problem, step_size=gamma, p=p, steps=steps, x0=[start], seeds=8, record=[], seed=effort.rng())
        settled = float(run.grad_norm2[-1].mean())
        for row, q in enumerate(qs):
            a = problem.assumptions([start], q)
            exact[row, k] = settled / theory.bias_floor(a, p)
            simple[row, k] = settled / (theory.lemma1_bias(a, p) / p) ** 2
            bounded[row, k] = run.mean() / theory.bound(a, gamma, p, steps=steps).total
    off = float(np.abs(exact - 1).max())

    def draw() -> Figure:
        figure, (ax,) = new_figure()
        for row, q in enumerate(qs):
            ax.plot(levels, exact[row], label=f"over the exact floor, q = {q:g}")
        for row, q in enumerate(qs):
            ax.plot(levels, simple[row], label=f"over that of Lemma 1, q = {q:g}")
        ax.set_ylim(0, 1.1)
        label(ax, "quantile p", "measured ||∇f||² / floor", "Example 1, where it stands still")
        return figure

    return Outcome(
        expected="measured over exact 1 for every q and p, and below .9 with Lemma 1's bias in place of the exact one",
        measured=f"largest distance from 1: {off:.1e}; with Lemma 1's bias {simple.min():.3f} to {simple.max():.3f}; "
        f"measured mean over the whole bound {bounded.min():.3f} to {bounded.max():.3f}",
        printed=bool(off < 1e-3 and simple.max() < 0.9 and bounded.max() <= 1),
        error=f"what is left of the start after {steps} steps of {gamma:g}",
        values={"largest_distance": off, "largest_simple": float(simple.max()), "tightest": float(bounded.max())},
        draw=draw,
    )
