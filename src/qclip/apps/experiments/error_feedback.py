"""The claim about error feedback: without privacy it removes the bias of clipping."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from qclip.apps.experiments.claim import Effort, Outcome, claim
from qclip.apps.report.style import label, new_figure
from qclip.simulation.problems import TwoPoint
from qclip.simulation.simulate import simulate


@claim(
    "error-feedback",
    "Without privacy, error feedback leaves QC-SGD the variance of SGD and no bias",
    "section 22; the paper's open question",
)
def error_feedback(effort: Effort) -> Outcome:
    """Run Example 1 at a small step size with and without the memory, and plain SGD."""
    problem, gamma, steps = TwoPoint(2, 0.7), 0.01, effort.pick(4000, 20_000)
    methods: dict[str, dict[str, Any]] = {
        "QC-SGD": {"p": 0.7},
        "with error feedback": {"p": 0.7, "error_feedback": True},
        "plain SGD": {},
    }
    curves, late = {}, {}
    for name, how in methods.items():
        run = simulate(
            problem, step_size=gamma, steps=steps, x0=[-1.9], seeds=64, record=range(0, steps, steps // 200),
            seed=effort.rng(), **how,
        )  # fmt: skip
        curves[name] = run.grad_norm2.mean(1)
        late[name] = float(run.grad_norm2[len(run.steps) // 2 :].mean())
    own = gamma * problem.sigma(2) ** 2 / (2 - gamma)

    def draw() -> Figure:
        figure, (ax,) = new_figure()
        for name, curve in curves.items():
            ax.semilogy(run.steps, np.maximum(curve, 1e-6), label=name, markevery=0.1)
        label(ax, "step", "||∇f||²", "Example 1, γ = 0.01, p = 0.7")
        return figure

    return Outcome(
        expected=f"without it .36 (within 2 %), with it SGD's variance {own:.4f} (within 15 %)",
        measured=", ".join(f"{name} {value:.4f}" for name, value in late.items()),
        printed=bool(
            abs(late["QC-SGD"] / 0.36 - 1) < 0.02
            and abs(late["with error feedback"] / own - 1) < 0.15
            and abs(late["plain SGD"] / own - 1) < 0.15
        ),
        error="64 seeds over the second half of the run",
        values={**late, "sgd_variance": own},
        draw=draw,
    )
