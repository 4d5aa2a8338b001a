"""The figures of a run: threshold, unclipped fraction, costs, learning rate, epsilon and held-out scores."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from qclip._validate import Floats
from qclip.apps.report.page import image
from qclip.apps.report.record import Record
from qclip.apps.report.style import BLUE, CYCLE, ORANGE, RED, label, new_figure, save

WIDTH, HEIGHT = 8.4, 3.0
FEW = len(CYCLE)
"""Up to this many groups or runs have a colour of their own; more take theirs from a scale."""
SCALE = colormaps["viridis"]


def threshold_path(record: Record) -> Figure:
    """Draw the threshold of each group against the steps, on a logarithmic axis."""
    figure, (ax,) = new_figure(width=WIDTH, height=HEIGHT)
    _lines(ax, record, record.taus)
    _shade_lost(ax, record)
    log_axis(ax, record.taus)
    label(ax, "step", "threshold")
    _name_groups(figure, ax, record)
    return figure


def unclipped_fraction(record: Record) -> Figure:
    """Draw the noisy unclipped fraction: its points for few groups, its running means, and the target."""
    figure, (ax,) = new_figure(width=WIDTH, height=HEIGHT)
    noisy = record.noisy_unclipped
    if len(record.groups) <= FEW:
        for index in range(noisy.shape[1]):
            ax.plot(record.steps, noisy[:, index], ".", color=CYCLE[index], alpha=0.3, markersize=4)
    means = running_mean(noisy, window(len(record.steps)))
    _lines(ax, record, means)
    _shade_lost(ax, record)
    if record.targets is not None:
        marker = "_" if len(record.steps) == 1 else ""
        style = {"linestyle": "--", "color": "black", "linewidth": 1.1, "marker": marker, "markersize": 12}
        ax.plot(record.steps, record.targets, label="target p", **style)
    ax.set_ylim(*_fraction_limits(means, record.targets))
    label(ax, "step", "fraction unclipped")
    _name_groups(figure, ax, record)
    return figure


def costs(record: Record) -> Figure:
    """Draw the length of the noise and the bound on the bias of each step's mean gradient, on a logarithmic axis."""
    figure, (ax,) = new_figure(width=WIDTH, height=HEIGHT)
    lines = {"noise": (record.noise, BLUE), "bias, at most": (record.bias, ORANGE)}
    for name, (lengths, color) in lines.items():
        if (lengths > 0).any():
            ax.plot(record.steps, lengths, marker=line_marker(record), color=color, linewidth=1.6, label=name)
    drawn = np.concatenate([record.noise, record.bias])
    log_axis(ax, drawn[drawn > 0])
    step_axis(ax, record.steps)
    label(ax, "step", "length")
    return figure


def learning_rate(record: Record) -> Figure:
    """Draw the learning rate that the run found, in units of the threshold."""
    assert record.learning_rates is not None
    figure, (ax,) = new_figure(width=WIDTH, height=2.2)
    ax.plot(record.steps, record.learning_rates, marker=line_marker(record), color=BLUE, linewidth=1.6)
    ax.set_ylim(bottom=0)
    step_axis(ax, record.steps)
    label(ax, "step", "learning rate")
    return figure


def epsilon_spent(record: Record) -> Figure:
    """Draw the epsilon spent against the steps, and the budget where one was given."""
    figure, (ax,) = new_figure(width=WIDTH, height=HEIGHT)
    done, spent = _computed(record)
    ax.plot(done, spent, ".-", color=BLUE, linewidth=1.4, markersize=4, label="spent")
    budget = budget_of(record)
    if budget is not None:
        ax.axhline(budget, linestyle="--", color=RED, linewidth=1.1, label=f"budget {budget:g}")
    planned = record.summary.num_steps
    ax.set_xlim(-0.03 * planned, 1.03 * planned)  # an unfinished run shows the steps ahead
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(ax, "steps done", "epsilon", legend=False)
    ax.legend(fontsize=7.5, frameon=False, loc="lower right")
    return figure


def held_out(record: Record) -> Figure:
    """Draw up to three held-out metrics against the epochs, or the steps where no epochs were recorded."""
    metrics = record.metrics[:3]
    figure, axes = new_figure(len(metrics), width=WIDTH, height=HEIGHT)
    by_epoch = all(score.epoch is not None for score in record.scores)
    for ax, metric in zip(axes, metrics, strict=True):
        scores = [score for score in record.scores if metric in score.values]
        at = [score.epoch if by_epoch and score.epoch is not None else score.step for score in scores]
        ax.plot(at, [score.values[metric] for score in scores], ".-", color=BLUE, linewidth=1.4, markersize=5)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        label(ax, "epoch" if by_epoch else "steps done", metric.replace("_", " "))
    return figure


def calibration(bins: Sequence[Sequence[float]]) -> Figure:
    """Draw the share that came true against the predicted probability; a bin is (mean, share, number)."""
    figure, (ax,) = new_figure(width=4.2, height=3.4)
    mean, share, count = np.array(bins).T
    most = min(1.0, 1.15 * max(mean.max(), share.max()))  # probabilities of a rare class are all small
    ax.plot([0, most], [0, most], "--", color="black", linewidth=0.9)
    ax.plot(mean, share, "-", color=BLUE, linewidth=1.0)
    ax.scatter(mean, share, s=12 + 30 * count / count.max(), color=BLUE, zorder=3)
    ax.set_xlim(-0.03 * most, 1.03 * most)
    ax.set_ylim(-0.03 * most, 1.03 * most)
    label(ax, "predicted probability", "share that came true")
    return figure


def picture(figure: Figure, alternative: str) -> str:
    """Return a figure embedded in a page."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "figure.png"
        save(figure, path)
        return image(path, alternative)


def budget_of(record: Record) -> float | None:
    """Return the epsilon of the run's budget; None without one."""
    budget = record.summary.settings.get("epsilon")
    return float(budget) if isinstance(budget, int | float) else None


def window(steps: int) -> int:
    """Return the width of a running mean: a tenth of the run, odd, from 5 to 101."""
    return min(max(steps // 10, 5), 101) | 1


def running_mean(values: Floats, width: int) -> Floats:
    """Return the mean over ``width`` neighbours (fewer at the ends) of each row of [n, K], without missing values.

    >>> running_mean(np.array([[1.0], [np.nan], [5.0]]), 3).tolist()
    [[1.0], [3.0], [5.0]]
    """
    finite = np.isfinite(values)
    zero = np.zeros((1, values.shape[1]))
    sums = np.concatenate([zero, np.cumsum(np.where(finite, values, 0), axis=0)])
    counts = np.concatenate([zero, np.cumsum(finite, axis=0)])
    centre, half = np.arange(len(values)), width // 2
    low, high = np.maximum(centre - half, 0), np.minimum(centre + half + 1, len(values))
    inside = counts[high] - counts[low]
    return np.where(inside > 0, (sums[high] - sums[low]) / np.maximum(inside, 1), np.nan)


def log_axis(ax: Axes, values: Floats) -> None:
    """Make the y axis logarithmic, with plain numbers, and wide enough that a constant does not look like noise."""
    ax.set_yscale("log")
    low, high = float(values.min()), float(values.max())
    middle, half = np.sqrt(low * high), max(np.sqrt(high / low) * 1.15, 2.0)
    ax.set_ylim(middle / half, middle * half)
    decades = 2 * np.log10(half)
    ticks = (1,) if decades > 3 else (1, 2, 5) if decades > 1 else (1, 2, 3, 4, 6, 8)
    ax.yaxis.set_major_locator(LogLocator(subs=ticks, numticks=12))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def step_axis(ax: Axes, steps: Floats) -> None:
    """Put whole numbers on the x axis, with margins around a single step."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(steps) == 1:
        ax.set_xlim(steps[0] - 1, steps[0] + 1)


def line_marker(record: Record) -> str:
    """Return the marker of a line: a dot where there is one step, which would be invisible otherwise."""
    return "o" if len(record.steps) == 1 else ""


def _lines(ax: Axes, record: Record, values: Floats) -> None:
    """Draw a line per group of [n, K]; a dot each where there is one step."""
    names, marker = record.groups, line_marker(record)
    few = len(names) <= FEW
    for index, name in enumerate(names):
        color = CYCLE[index] if few else SCALE(index / (len(names) - 1))
        shown = name if few and len(names) > 1 else None
        width = 1.6 if few else 0.8
        ax.plot(record.steps, values[:, index], marker=marker, color=color, linewidth=width, label=shown)
    step_axis(ax, record.steps)


def _shade_lost(ax: Axes, record: Record) -> None:
    """Shade the steps at which the threshold was lost."""
    height = {"transform": ax.get_xaxis_transform(), "color": ORANGE, "alpha": 0.15, "linewidth": 0}
    ax.fill_between(record.steps, 0, 1, where=record.lost, step="mid", **height)


def _name_groups(figure: Figure, ax: Axes, record: Record) -> None:
    """Put the names of the groups beside the axes, or a scale of their numbers where there are many."""
    count = len(record.groups)
    if count > FEW:
        norm = BoundaryNorm(np.arange(count + 1) + 0.5, SCALE.N)
        bar = figure.colorbar(ScalarMappable(norm, SCALE), ax=ax, pad=0.01, aspect=30, spacing="proportional")
        bar.set_label("number of the group", fontsize=8)
        bar.set_ticks([1, *range(count // 5, count, count // 5), count])
        bar.ax.minorticks_off()
        bar.ax.tick_params(labelsize=7.5)
    elif count > 1:
        ax.legend(
            fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), title="group", title_fontsize=7.5
        )


def _computed(record: Record) -> tuple[Floats, Floats]:
    """Return steps and epsilon at the start and where epsilon was computed; between them, records are rounded up."""
    ends = np.append(np.diff(record.epsilons) != 0, True)
    return np.append(0, record.steps[ends] + 1), np.append(0.0, record.epsilons[ends])


def _fraction_limits(means: Floats, targets: Floats | None) -> tuple[float, float]:
    """Return limits that show the means and the target; noisy points may lie outside them, and outside [0, 1]."""
    shown = means if targets is None else np.concatenate([means.ravel(), targets])
    return min(-0.02, float(np.nanmin(shown)) - 0.05), max(1.02, float(np.nanmax(shown)) + 0.05)
