"""Measured means beside bounds, as most claims about theorems need them.

A bound that is never close is hardly tested. So every such claim also runs three probes, each of which makes one term
of the bound matter. As a control, the bound must break when any one term is left out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from qclip._validate import Floats
from qclip.apps.experiments.claim import Outcome
from qclip.apps.report.style import label, new_figure
from qclip.simulation.problems import Gaussian, HeavyTailedQuadratic, Problem, TwoPoint
from qclip.simulation.simulate import Trajectories
from qclip.theory import Bound

TERMS = ("optimisation", "variance", "bias")


@dataclass(frozen=True)
class BoundCheck:
    """The mean of ||grad f||^2 of a run plus three standard errors, and its bound."""

    problem: str
    measured: float
    bound: Bound

    @classmethod
    def of(cls, problem: str, run: Trajectories, bound: Bound) -> "BoundCheck":
        """Compare a run with its bound."""
        return cls(problem, run.upper(), bound)


@dataclass(frozen=True)
class Probe:
    """A run that one term of the bound dominates."""

    name: str
    problem: Problem
    x0: Floats
    p: float
    gamma: float
    steps: int
    public: dict[str, Any]  # batch size and noise
    beta: float | None = None


def probes(*, private: bool) -> list[Probe]:
    """Return one probe for each term; with ``private`` the variance is that of the added noise."""
    alone = {"batch_size": 1, "noise_multiplier": 0.0}
    descent, two = HeavyTailedQuadratic(1, Gaussian(1e-3)), TwoPoint(2, 0.7)
    noisy = HeavyTailedQuadratic(5, Gaussian(5**-0.5)) if private else HeavyTailedQuadratic(1, Gaussian(1.0))
    step, public = (0.2, {"batch_size": 4, "noise_multiplier": 2.0}) if private else (0.3, alone)
    return [
        Probe("probe: optimisation", descent, np.array([1.0]), 0.9, 0.01, 100, alone),
        # A fixed beta: the best one trades variance for bias, and would hide a missing variance term.
        Probe("probe: variance", noisy, noisy.minimiser, 0.99, step, 1000, public, beta=0.4),
        Probe("probe: bias", two, two.minimiser, 0.7, 0.01, 10_000, alone),
    ]


def against_bound(rows: list[BoundCheck], what: str) -> Outcome:
    """Return the outcome of runs that must stay below their bounds, and of controls that must not."""
    worst = max(row.measured / row.bound.total for row in rows)
    control = {term: max(row.measured / (row.bound.total - getattr(row.bound, term)) for row in rows) for term in TERMS}
    names = list(dict.fromkeys(row.problem for row in rows))

    def draw() -> Figure:
        figure, (ax,) = new_figure(height=3.6)
        for index, name in enumerate(names):
            ratios = [row.measured / row.bound.total for row in rows if row.problem == name]
            ax.plot(ratios, np.full(len(ratios), index), "o", markersize=3.5, alpha=0.7)
        ax.axvline(1, color="k", linewidth=0.8)
        ax.set_xscale("log")
        ax.set_yticks(range(len(names)), names, fontsize=8)
        label(ax, "(measured mean + 3 standard errors) / bound", "", what)
        return figure

    return Outcome(
        expected="every run below its bound; with any one term left out, some run above it",
        measured=f"largest ratio to the bound {worst:.3f} over {len(rows)} runs; without "
        + ", ".join(f"{term} {ratio:.3g}" for term, ratio in control.items()),
        printed=bool(worst <= 1 and min(control.values()) > 1),
        error="3 standard errors over the seeds are included",
        values={"largest_ratio": worst, "runs": float(len(rows)), **{f"without {t}": r for t, r in control.items()}},
        draw=draw,
    )
