"""The page that compares runs: one table, the settings that differ, and joint figures."""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qclip.apps.report import page
from qclip.apps.report.compare import RunComparison
from qclip.apps.report.figures import FEW, SCALE, WIDTH, line_marker, log_axis, picture, running_mean, window
from qclip.apps.report.page import caption
from qclip.apps.report.record import Record
from qclip.apps.report.run import STYLE
from qclip.apps.report.style import CYCLE, label, new_figure

Runs = Mapping[str, Record]
Colors = Mapping[str, Any]


def write_comparison(comparison: RunComparison, out: Path) -> Path:
    """Write the page and return its path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page.page("qclip runs compared", [STYLE, *_body(comparison)]), encoding="utf-8")
    return out


def _body(comparison: RunComparison) -> Iterator[str]:
    runs, rows = comparison.runs, comparison.rows()
    yield f"<h1>{len(runs)} runs compared</h1>"
    lead = "Each epsilon covers its own run only: choosing among runs on the same data spends more, not counted here."
    yield f'<p class="lead">{lead}</p>'
    for name, error in comparison.broken.items():
        yield f'<p class="note"><b>{escape(name)}</b> is left out: {escape(error)}</p>'
    if rows:
        table = page.table(list(rows[0]), [[escape(text) for text in row.values()] for row in rows])
        yield table.replace("<table>", '<table class="wide">', 1)
    differences = comparison.differences()
    if differences:
        yield "<h2>Settings that differ</h2>"
        yield page.definitions((key.replace("_", " "), text) for key, text in differences.items())
    colors = _colors(runs)
    for metric in comparison.metrics:
        yield from _scores({name: run for name, run in runs.items() if metric in run.metrics}, colors, metric)
    yield from _thresholds({name: record for name, record in runs.items() if len(record.steps)}, colors)
    yield from _unclipped({name: record for name, record in runs.items() if record.asked}, colors)


def _scores(runs: Runs, colors: Colors, metric: str) -> Iterator[str]:
    yield f"<h2>Held-out {escape(metric.replace('_', ' '))}</h2>"
    yield caption(
        "Left: against the epsilon spent. Right: against the steps.",
        "" if all(record.private for record in runs.values()) else "Dashed: the final score of a run without privacy.",
    )
    figure, (by_epsilon, by_step) = new_figure(2, width=WIDTH, height=3.4)
    for name, record in runs.items():
        _score_lines(by_epsilon, by_step, record, metric, name, colors[name])
    label(by_epsilon, "epsilon spent", metric.replace("_", " "), legend=False)
    by_epsilon.set_xlim(left=0)
    label(by_step, "steps done", "", legend=False)
    by_step.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, by_step)
    yield picture(figure, f"held-out {metric} against epsilon and steps")


def _score_lines(by_epsilon: Axes, by_step: Axes, record: Record, metric: str, name: str, color: Any) -> None:
    scores = [score for score in record.scores if metric in score.values]
    values = [score.values[metric] for score in scores]
    by_step.plot([score.step for score in scores], values, ".-", color=color, linewidth=1.3, markersize=4, label=name)
    if record.private:  # epsilon is recorded on a grid: of scores at one epsilon the last, which paid for it
        last = {score.epsilon: value for score, value in zip(scores, values, strict=True)}
        by_epsilon.plot(list(last), list(last.values()), ".-", color=color, linewidth=1.3, markersize=4)
    else:
        by_epsilon.axhline(values[-1], linestyle="--", color=color, linewidth=1.1)


def _thresholds(runs: Runs, colors: Colors) -> Iterator[str]:
    if not runs:
        return
    yield "<h2>The thresholds</h2>"
    grouped = any(len(record.groups) > 1 for record in runs.values())
    yield caption(
        "The thresholds at which per-example gradients were clipped, on a logarithmic axis.",
        "For a run with several groups: the median over the groups, and their range." if grouped else "",
    )
    figure, (ax,) = new_figure(width=WIDTH, height=3.4)
    for name, record in runs.items():
        ax.plot(
            record.steps,
            np.median(record.taus, axis=1),
            marker=line_marker(record),
            color=colors[name],
            linewidth=1.5,
            label=name,
        )
        if len(record.groups) > 1:
            ax.fill_between(
                record.steps, record.taus.min(axis=1), record.taus.max(axis=1), color=colors[name], alpha=0.12
            )
    log_axis(ax, np.concatenate([record.taus.ravel() for record in runs.values()]))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(ax, "step", "threshold", legend=False)
    _legend(figure, ax)
    yield picture(figure, "thresholds against steps")


def _unclipped(runs: Runs, colors: Colors) -> Iterator[str]:
    if not runs:
        return
    yield "<h2>Fraction of unclipped examples</h2>"
    aiming = [record for record in runs.values() if record.targets is not None]
    some = "" if len(aiming) == len(runs) else " of the runs that have one"
    yield caption(
        "Running means of the noisy fractions (over the groups too).",
        f"Dashed: the target p{some}." if aiming else "",
        "Runs whose threshold does not measure the fraction are not shown.",
    )
    figure, (ax,) = new_figure(width=WIDTH, height=3.4)
    for name, record in runs.items():
        means = running_mean(record.noisy_unclipped, window(len(record.steps))).mean(axis=1)
        ax.plot(record.steps, means, marker=line_marker(record), color=colors[name], linewidth=1.5, label=name)
        if record.targets is not None:
            ax.plot(record.steps, record.targets, "--", color=colors[name], linewidth=0.9, alpha=0.7)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(ax, "step", "fraction unclipped", legend=False)
    _legend(figure, ax)
    yield picture(figure, "fraction unclipped against steps")


def _colors(runs: Runs) -> Colors:
    """Return a colour for each run, the same in every figure."""
    count = len(runs)
    if count <= FEW:
        return dict(zip(runs, CYCLE, strict=False))
    scale = colormaps["tab20"] if count <= 20 else SCALE
    return {name: scale(index if count <= 20 else index / (count - 1)) for index, name in enumerate(runs)}


def _legend(figure: Figure, ax: Axes) -> None:
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=7.5, frameon=False)
