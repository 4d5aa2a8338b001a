"""Groups: who belongs where, at what threshold, and what is said when that is not clear."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qclip.engine.groups import Groups, l2_bound, partition

NAMES = ["scale", "body.0.weight", "body.0.bias", "body.1.weight", "head.weight", "head.bias"]


def test_flat_is_one_group():
    groups = partition(NAMES, "flat")
    assert groups.names == ("all",)
    assert groups.members == dict.fromkeys(NAMES, 0)
    assert len(groups) == 1


def test_per_layer_puts_the_parameters_of_a_module_together():
    groups = partition(NAMES, "per-layer")
    assert groups.names == ("scale", "body.0", "body.1", "head")
    assert [groups.members[name] for name in NAMES] == [0, 1, 1, 2, 3, 3]


def test_patterns_take_the_first_that_matches():
    groups = partition(NAMES, {"biases": "*.bias", "ends": ["head.*", "scale"], "rest": "*"})
    assert groups.names == ("biases", "ends", "rest")
    assert [groups.members[name] for name in NAMES] == [1, 2, 0, 2, 1, 0]


def test_patterns_tell_upper_from_lower_case():
    with pytest.raises(ValueError, match="'scale' has no group"):
        partition(["scale"], {"group": "Scale"})


@given(
    st.lists(st.text("ab.", min_size=1, max_size=6), unique=True), st.sampled_from(["flat", "per-layer", {"all": "*"}])
)
def test_every_parameter_belongs_to_exactly_one_group(names, spec):
    if not names and isinstance(spec, dict):
        return
    groups = partition(names, spec)
    assert list(groups.members) == names
    assert set(groups.members.values()) <= set(range(len(groups)))


@given(st.lists(st.integers(0, 3), max_size=8))
def test_memory_phases_are_as_short_as_groups_allow(chosen):
    groups = Groups(("a", "b", "c", "d"), {f"p{k}": group for k, group in enumerate(chosen)})
    found = list(groups.memory_phases().values())
    assert list(groups.memory_phases()) == list(groups.members)
    cuts = [k for k in range(1, len(chosen)) if set(chosen[:k]).isdisjoint(chosen[k:])]
    assert found == [sum(cut <= k for cut in cuts) for k in range(len(chosen))]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("layers", "groups = 'layers' must be one of 'flat', 'per-layer'; did you mean 'per-layer'"),
        ({"head": "head.*"}, r"'scale' has no group; add a group for it, or end with \{\"rest\": \"\*\"\}"),
        ({"all": "*", "tail": "tail.*"}, r"'tail' takes no parameter; check its pattern against the names in"),
        ({"all": "*", "late": "head.*"}, "'late' takes no parameter"),
        ({"all": "*", "none": []}, "'none' takes no parameter"),
        ({}, "'scale' has no group"),
    ],
)
def test_partition_refuses(spec, message):
    with pytest.raises(ValueError, match=message):
        partition(NAMES, spec)


@pytest.mark.parametrize(
    ("clip_norm", "clip_norms"),
    [
        (2, (2.0, 2.0)),
        (0.5, (0.5, 0.5)),
        ([1.0, 2.0], (1.0, 2.0)),
        ((1, 2), (1.0, 2.0)),
        ({"rest": 2.0, "head": 1.0}, (1.0, 2.0)),
    ],
)
def test_clip_norms_are_one_for_all_or_one_each(clip_norm, clip_norms):
    groups = partition(NAMES, {"head": "head.*", "rest": "*"})
    assert groups.clip_norms(clip_norm) == clip_norms


@pytest.mark.parametrize(
    ("clip_norm", "message"),
    [
        ([1.0], "clip_norm = '1 values' must be 2 values, one per group; the groups are head, rest"),
        ([1.0, 2.0, 3.0], "clip_norm = '3 values' must be 2 values"),
        (
            {"head": 1.0},
            r"must be one clip norm for each of \('head', 'rest'\); these names appear on one side only: \['rest'\]",
        ),
        ({"head": 1.0, "rest": 1.0, "tail": 1.0}, r"these names appear on one side only: \['tail'\]"),
        (0.0, "clip_norm = 0.0 must be > 0; it is the largest norm a clipped gradient may have"),
        (-1.0, "clip_norm = -1.0 must be > 0"),
        (1e-13, "clip_norm = 1e-13 must be >= 1e-12; smaller norms are lost in float32"),
        (math.nan, "clip_norm = nan must be finite"),
        (math.inf, "clip_norm = inf must be finite"),
        ([1.0, 0.0], "clip_norm = 0.0 must be > 0"),
        ({"head": 1.0, "rest": math.nan}, "clip_norm = nan must be finite"),
        ("1.0", "clip_norm = '1.0' must be a number"),
        (None, "clip_norm = None must be a number"),
    ],
)
def test_clip_norms_refuse(clip_norm, message):
    with pytest.raises(ValueError, match=message):
        partition(NAMES, {"head": "head.*", "rest": "*"}).clip_norms(clip_norm)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5))
def test_the_bound_is_the_norm_of_the_clip_norms(clip_norms):
    assert l2_bound(clip_norms) == pytest.approx(math.sqrt(sum(value**2 for value in clip_norms)))


def test_the_bound_does_not_overflow():
    assert l2_bound([3e200, 4e200]) == pytest.approx(5e200)
