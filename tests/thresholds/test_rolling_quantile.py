"""A buffer of past norms."""

import numpy as np
import pytest

from qclip.thresholds import Answer, RollingQuantile


def column(*values):
    return np.array(values, dtype=float)[:, None]


def test_it_looks_at_past_steps_only():
    threshold = RollingQuantile(0.5)
    state = threshold.update(threshold.start(1), 0, Answer(raw_norms=column(1, 2, 3)))
    assert threshold.clip_norms(state, 1, column(100, 200, 300)) == (2.0,)


def test_the_first_step_looks_at_its_own_norms():
    threshold = RollingQuantile(0.5, initial=0.7)
    assert threshold.clip_norms(threshold.start(1), 0, column(4, 5, 6)) == (5.0,)
    assert threshold.clip_norms(threshold.start(1), 0, np.zeros((0, 1))) == (0.7,)
    assert threshold.clip_norms(threshold.start(1), 0) == (0.7,)


def test_it_keeps_the_last_ones():
    threshold = RollingQuantile(0.5, window=4)
    state = threshold.start(2)
    for step in range(3):
        rows = 3 * step + np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
        state = threshold.update(state, step, Answer(raw_norms=rows))
    assert state == ((6.0, 7.0, 8.0, 9.0), (33.0, 16.0, 26.0, 36.0))


def test_the_fraction_is_that_of_the_step():
    threshold = RollingQuantile(0.5)
    state = threshold.update(threshold.start(1), 0, Answer(raw_norms=column(1, 2, 3)))
    assert threshold.unclipped(state, 1, Answer(raw_norms=column(1, 2, 2, 5))) == (0.75,)
    assert threshold.unclipped(state, 1, Answer(raw_norms=column(1, 2, 2, 5), clip_norms=(1.0,))) == (0.25,)


@pytest.mark.parametrize("window", [0, -5, 2.5])
def test_a_window_holds_something(window):
    with pytest.raises(ValueError, match=rf"window = {window} must be"):
        RollingQuantile(0.5, window=window)
