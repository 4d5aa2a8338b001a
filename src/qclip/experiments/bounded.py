"""Measured means beside bounds: the shape that most theorems' claims share."""

import numpy as np

from qclip.experiments.claim import Outcome


def against_bound(ratios: dict[str, list[float]], what: str) -> Outcome:
    """The outcome of runs whose ``Trajectories.upper() / bound`` are given for each problem: all must be at most 1."""
    worst = max(max(values) for values in ratios.values())
    runs = sum(map(len, ratios.values()))

    def draw():  # noqa: ANN202
        from qclip.report.style import label, new_figure

        figure, (ax,) = new_figure(height=3.0)
        for row, values in enumerate(ratios.values()):
            ax.plot(values, np.full(len(values), row), "o", markersize=3.5, alpha=0.7)
        ax.axvline(1, color="k", linewidth=0.8)
        ax.set_xscale("log")
        ax.set_yticks(range(len(ratios)), list(ratios), fontsize=8)
        label(ax, "(measured mean + 3 standard errors) / bound", "", what)
        return figure

    return Outcome(
        expected="measured mean of ||grad f||^2 at most the bound, in every run",
        measured=f"largest ratio of measured (plus 3 standard errors) to bound: {worst:.3f} over {runs} runs",
        printed=bool(worst <= 1),
        error="3 standard errors over the seeds are included",
        values={"largest_ratio": float(worst), "runs": float(runs)},
        draw=draw,
    )
