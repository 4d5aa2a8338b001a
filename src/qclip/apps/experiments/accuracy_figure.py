"""The figure of the accuracy experiment: each grid, and the automatic runs as a band."""

from matplotlib.figure import Figure

from qclip.apps.experiments.accuracy_table import Results, point
from qclip.apps.report.style import BLUE, ORANGE, label, new_figure


def draw(results: Results) -> Figure:
    """Draw the accuracy against the learning rate, p and C, one seed each, beside that of the automatic runs."""
    figure, axes = new_figure(3, width=9.0, height=3.0)
    automatic = [100 * run.accuracy for run in results.finalists[results.settings.epsilon][0].runs if not run.error]
    titles = {
        "learning rate": "balanced threshold",
        "p": "a quantile, at the best rate",
        "C": "a constant, at the best rate",
    }
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        runs = [run for run in results.grids.get(name, []) if not run.error]
        points = [point(name, run) for run in runs]
        ax.plot(points, [100 * run.accuracy for run in runs], color=BLUE, marker="o", ms=4, label="the grid, one seed")
        if automatic:
            ax.axhspan(min(automatic), max(automatic), color=ORANGE, alpha=0.35, label="nothing tuned, all seeds")
        if name != "p":
            ax.set_xscale("log")
        label(ax, name, "held-out accuracy (%)" if ax is axes[0] else "", title, legend=ax is axes[0])
    for ax in axes[1:]:
        ax.sharey(axes[0])
    return figure
