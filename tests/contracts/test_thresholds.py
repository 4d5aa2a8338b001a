"""What every threshold promises: one row for each."""

import json
import math
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qclip import schedules
from qclip.thresholds import Constant, PrivateQuantile

THRESHOLDS = {
    "constant": Constant(2.0),
    "scheduled constant": Constant(schedules.polynomial(1.0, 0.25)),
    "private quantile": PrivateQuantile(0.5),
    "private quantile, off centre": PrivateQuantile(0.9, centre=0.25, noise_share=0.1),
    "private quantile, scheduled": PrivateQuantile(schedules.polynomial(0.9, -0.1)),
}
rows = pytest.mark.parametrize("threshold", THRESHOLDS.values(), ids=THRESHOLDS)
groups = st.integers(1, 4)
fractions = st.floats(-1e12, 1e12)


def plain(value):
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(plain(part) for part in value))


def answers(threshold, state, values):
    """An answer to what the threshold asks: a fraction for each radius."""
    count = threshold.count(state, 0)
    return () if count is None else tuple(values[: len(count.radii)])


@rows
def test_it_is_an_immutable_description(threshold):
    with pytest.raises(FrozenInstanceError):
        setattr(threshold, fields(threshold)[0].name, 1.0)


@rows
@given(num_groups=groups, history=st.lists(st.lists(fractions, min_size=4, max_size=4), max_size=6))
def test_its_norms_are_positive_and_finite_whatever_the_answers(threshold, num_groups, history):
    state = threshold.start(num_groups)
    for step, values in enumerate(history):
        norms = threshold.clip_norms(state, step)
        assert len(norms) == num_groups
        assert all(0 < tau < math.inf for tau in norms)
        state = threshold.update(state, step, answers(threshold, state, values))
        assert plain(state)


@rows
def test_nothing_is_remembered_outside_the_state(threshold):
    start = threshold.start(2)
    given_back = (0.3, 0.6) if threshold.count(start, 0) else ()
    once = threshold.update(start, 0, given_back)
    assert threshold.update(start, 0, given_back) == once
    assert threshold.start(2) == start
    saved = json.loads(json.dumps(once))
    restored = tuple(saved) if isinstance(saved, list) else saved
    assert threshold.clip_norms(restored, 1) == threshold.clip_norms(once, 1)


@rows
@given(
    num_groups=groups,
    norms=st.lists(st.lists(st.floats(0, allow_nan=False), min_size=4, max_size=4), min_size=1, max_size=8),
    gone=st.integers(0, 7),
)
def test_removing_one_example_moves_the_counts_by_their_bound_at_most(threshold, num_groups, norms, gone):
    count = threshold.count(threshold.start(num_groups), 0)
    if count is None:
        assert threshold.noise_share == 0
        return
    assert threshold.noise_share > 0
    inside = np.array(norms)[:, :num_groups] <= np.array(count.radii)
    counts = (inside - count.centre).sum(0)
    others = (np.delete(inside, gone % len(norms), axis=0) - count.centre).sum(0)
    assert np.linalg.norm(counts - others) <= count.l2_bound * (1 + 1e-12)


@rows
def test_it_says_whether_it_is_private(threshold):
    assert threshold.private is True
