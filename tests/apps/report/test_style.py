"""Figures that can be read without their colours."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from qclip.apps.report.style import RED, label, new_figure


def test_labelled_lines_differ_in_more_than_colour():
    _, (ax,) = new_figure()
    for k in range(5):
        ax.plot(np.arange(10), np.arange(10) + k, label=f"line {k}")
    ax.plot(np.arange(500), np.arange(500), "o-", label="many points")
    ax.plot([0, 1], [0, 1], color=np.array([0.1, 0.2, 0.3, 1.0]), label="a colour of a scale")
    ax.axhline(3, color=RED, label="a guide")
    label(ax, "x", "y")
    *lines, scaled, guide = ax.lines
    assert len({line.get_marker() for line in lines}) == 6
    assert len({str(line.get_linestyle()) + str(line.get_marker()) for line in lines}) == 6
    assert lines[-1].get_markevery() is not None  # not one for each of 500 points
    assert guide.get_marker() == scaled.get_marker() == "None"


def test_a_single_line_stays_as_it_is():
    _, (ax,) = new_figure()
    (line,) = ax.plot([1, 2], [3, 4], label="alone")
    label(ax, "x", "y")
    assert (line.get_marker(), line.get_linestyle()) == ("None", "-")
