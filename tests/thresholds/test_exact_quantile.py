"""The quantile of raw norms, by its definition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qclip.thresholds import Answer, ExactQuantile

norms = st.lists(st.floats(1e-3, 1e3) | st.just(math.inf) | st.sampled_from([1.0, 2.0]), min_size=1, max_size=40)


@given(norms, st.floats(0.01, 0.99) | st.integers(1, 99).map(lambda percent: percent / 100))
def test_it_is_the_smallest_norm_that_enough_of_them_do_not_exceed(values, p):
    raw = np.array(values)[:, None]
    (tau,) = ExactQuantile(p).clip_norms((0.1,), 0, raw)
    reaching = [value for value in values if (raw <= value).mean() >= p]
    assert tau == min(*reaching, 1e6)


@pytest.mark.parametrize("percent", range(1, 100))
def test_rounding_does_not_move_it_to_the_next_norm(percent):
    raw = np.arange(1.0, 101.0)[::-1, None]
    assert ExactQuantile(percent / 100).clip_norms((0.1,), 0, raw) == (float(percent),)


def test_each_group_has_its_own_and_infinite_norms_are_the_largest():
    raw = np.array([[1.0, 10.0], [2.0, math.inf], [3.0, math.inf]])
    assert ExactQuantile(0.5).clip_norms((0.1, 0.1), 0, raw) == (2.0, 1e6)


def test_an_empty_batch_keeps_the_last():
    threshold, none = ExactQuantile(0.5, initial=0.3), np.zeros((0, 2))
    state = threshold.start(2)
    assert threshold.clip_norms(state, 0, none) == (0.3, 0.3)
    state = threshold.update(state, 0, Answer(raw_norms=np.array([[1.0, 4.0]])))
    assert threshold.clip_norms(state, 1, none) == (1.0, 4.0)
    assert threshold.update(state, 1, Answer(raw_norms=none)) == state
    assert threshold.unclipped(state, 1, Answer(raw_norms=none)) == ()


def test_over_all_data_the_fraction_is_that_of_the_batch_at_what_it_was_clipped_at():
    threshold = ExactQuantile(0.5, over="dataset")
    everything = np.arange(1.0, 101.0)[:, None]
    tau = threshold.clip_norms(threshold.start(1), 0, everything)
    assert tau == (50.0,)
    told = Answer(raw_norms=np.array([[10.0], [60.0], [70.0], [80.0]]), clip_norms=tau)
    assert threshold.unclipped(threshold.start(1), 0, told) == (0.25,)
    assert threshold.update(threshold.start(1), 0, told) == (50.0,)


def test_what_to_look_at_is_a_choice_of_two():
    with pytest.raises(ValueError, match="over = 'epoch' must be one of 'batch', 'dataset'"):
        ExactQuantile(0.5, over="epoch")
