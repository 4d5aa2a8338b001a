"""The style of the figures: one palette, one size, no need of a display."""

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from PIL import Image

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2563a8", "#d9822b", "#2e8b57", "#c23b3b", "#7b5aa6", "#7a7a7a"
MARKERS, DASHES, DENSE = "os^Dv*Px", ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1))), 40
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, "#00808a", "#8a6d3b", GREY)


def new_figure(columns: int = 1, *, width: float = 6.4, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """Return a figure with a row of axes."""
    figure = empty_figure(width=width, height=height)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    style_axes(axes)
    return figure, axes


def empty_figure(*, width: float, height: float) -> Figure:
    """Return a figure without axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Iterable[Axes]) -> None:
    """Give axes their frame, grid, colours and small labels."""
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.set_prop_cycle(color=CYCLE)
        ax.tick_params(labelsize=8)


def _tell_apart(ax: Axes) -> None:
    """Give the labelled lines of axes markers and dashes, so that they are told apart without their colours."""
    drawn = [line for line in ax.lines if line.get_transform() == ax.transData]  # not the guides of axhline
    ours = [line for line in drawn if isinstance(line.get_color(), str) and line.get_color() in CYCLE]  # not of a scale
    lines = [line for line in ours if not str(line.get_label()).startswith("_")]
    if len(lines) < 2:
        return
    for k, line in enumerate(lines):
        if line.get_linestyle() != "None":
            line.set_linestyle(DASHES[k % len(DASHES)])
        if line.get_marker() in ("None", "", "o"):
            line.set_marker(MARKERS[k % len(MARKERS)])
            line.set_markersize(4)
        number = len(np.atleast_1d(np.asarray(line.get_xdata())))
        if number > DENSE:  # a few markers along the line, not at the same places on all lines
            line.set_markevery((k * number // (8 * len(lines)), number // 8))


def label(ax: Axes, x: str, y: str, title: str = "", *, legend: bool = True) -> None:
    """Add axis labels, a title and, where lines are labelled, a legend; call it after drawing."""
    _tell_apart(ax)
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    for axis, (low, high) in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        if axis.get_scale() == "log" and high / low > 10:
            axis.set_minor_formatter(NullFormatter())  # the decades are enough, and minor labels collide
    if title:
        ax.set_title(title, fontsize=9.5)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7.5, frameon=False)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a small PNG, of at most 256 colours, which takes a third of the bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )
