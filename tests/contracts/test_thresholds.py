"""What every threshold promises: one row for each."""

import json
import math
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

pytest.importorskip("matplotlib")

from qclip import schedules
from qclip.apps.experiments.tracking import Setting, follow
from qclip.thresholds import (
    Answer,
    BalancedThreshold,
    Conditions,
    Constant,
    ExactQuantile,
    GeometricQuantile,
    HistogramQuantile,
    PrivateQuantile,
    RollingQuantile,
    SlackQuantile,
)

FALLING = schedules.polynomial(0.9, -0.1)
THRESHOLDS = {
    "constant": Constant(2.0),
    "scheduled constant": Constant(schedules.polynomial(1.0, 0.25)),
    "geometric": GeometricQuantile(0.5),
    "geometric, off centre": GeometricQuantile(0.9, centre=0.25, noise_share=0.1),
    "geometric, scheduled": GeometricQuantile(FALLING),
    "private": PrivateQuantile(0.5),
    "private, high and dear": PrivateQuantile(0.95, noise_share=0.1, initial=3.0),
    "private, scheduled": PrivateQuantile(FALLING),
    "slack": SlackQuantile(0.5),
    "slack, near tau": SlackQuantile(0.9, outer_radius=0.98),
    "slack, scheduled": SlackQuantile(FALLING),
    "histogram": HistogramQuantile(0.5),
    "histogram, few radii": HistogramQuantile(0.9, radii=4, spacing=0.7, noise_share=0.1),
    "histogram, scheduled": HistogramQuantile(FALLING),
    "balanced": BalancedThreshold(),
    "balanced, high and dear": BalancedThreshold(noise_share=0.1, initial=3.0),
    "exact": ExactQuantile(0.5),
    "exact, of all data": ExactQuantile(0.9, over="dataset"),
    "exact, scheduled": ExactQuantile(FALLING),
    "rolling": RollingQuantile(0.5),
    "rolling, scheduled": RollingQuantile(FALLING, window=5),
}
PRIVATE = {name: threshold for name, threshold in THRESHOLDS.items() if threshold.private}
RAW = {name: threshold for name, threshold in THRESHOLDS.items() if not threshold.private}
LEARNT = {name: threshold for name, threshold in THRESHOLDS.items() if not isinstance(threshold, Constant)}
SCHEDULABLE = {name: each for name, each in THRESHOLDS.items() if not isinstance(each, BalancedThreshold)}
QUANTILES = {name: threshold for name, threshold in LEARNT.items() if name in SCHEDULABLE}


def each(table):
    return pytest.mark.parametrize("threshold", table.values(), ids=table)


groups = st.integers(1, 4)
seeds = st.integers(0, 2**32 - 1)


def answer(threshold, state, step, rng, *, wild=False):
    """An answer to what the threshold asks; wild ones are anything that is a number, and things that are not."""

    def grid(radii, scale=1.0):
        values = rng.uniform(-0.2, 1.2, (len(radii), len(radii[0]))) * scale
        if wild:
            odd = np.array([0.0, 1.0, 1e12, -1e12, 1e300, np.inf, -np.inf, np.nan])
            values = np.where(rng.random(values.shape) < 0.5, rng.choice(odd, values.shape), values)
        return tuple(map(tuple, values.tolist()))

    count, slack = (threshold.ask(state, step).count, threshold.ask(state, step).slack)
    num_groups = len(threshold.clip_norms(state, step))
    norms = np.exp(rng.normal(size=(rng.integers(0 if wild else 1, 9), num_groups)))
    if wild:
        norms[rng.random(norms.shape) < 0.3] = rng.choice([0.0, math.inf])
    return Answer(
        noisy_bins=grid(count.radii) if count else (),
        noisy_within=grid(slack.radii) if slack else (),
        raw_norms=norms,
        bins_std=float(rng.choice([0.0, 0.05, 3.0])),
        within_std=tuple((float(rng.choice([0.0, 0.05, 3.0])),) * len(row) for row in slack.radii) if slack else (),
        batch_size=float(rng.choice([1, 64, math.inf])),
        noise_power=tuple(rng.choice([0.0, 0.01, 3.0, 1e9], num_groups).tolist()),
    )


def after(threshold, num_groups, steps, rng, **how):
    """A state that is reached after some steps."""
    state = threshold.start(num_groups)
    for step in range(steps):
        state = threshold.update(state, step, answer(threshold, state, step, rng, **how))
    return state


def plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and plain(part) for key, part in value.items())
    return type(value) in {int, float} or (type(value) is tuple and all(map(plain, value)))


def finite(value):
    parts = value.values() if isinstance(value, dict) else value
    return all(map(finite, parts)) if isinstance(value, dict | tuple) else math.isfinite(value)


@each(THRESHOLDS)
def test_it_is_an_immutable_description(threshold):
    with pytest.raises(FrozenInstanceError):
        setattr(threshold, fields(threshold)[0].name, 1.0)


@each(THRESHOLDS)
@given(num_groups=groups, seed=seeds)
def test_its_norms_are_positive_and_finite_whatever_the_answers(threshold, num_groups, seed):
    rng = np.random.default_rng(seed)
    state = threshold.start(num_groups)
    for step in range(6):
        found = answer(threshold, state, step, rng, wild=True)
        norms = threshold.clip_norms(state, step, None if threshold.private else found.raw_norms)
        assert len(norms) == num_groups
        assert all(type(tau) is float and 1e-6 <= tau <= 1e6 for tau in norms)
        state = threshold.update(state, step, found)
        assert plain(state)
        assert threshold.private <= finite(state)


@each(THRESHOLDS)
@given(seed=seeds, steps=st.integers(0, 5))
def test_its_state_survives_a_file(threshold, seed, steps):
    state = after(threshold, 3, steps, np.random.default_rng(seed))
    restored = json.loads(json.dumps(state))
    norms = np.array([[1.0, 2.0, 3.0], [2.0, 0.5, math.inf]])
    for step in range(steps, steps + 3):
        raw_norms = None if threshold.private else norms
        assert threshold.clip_norms(restored, step, raw_norms) == threshold.clip_norms(state, step, raw_norms)
        assert threshold.ask(restored, step) == threshold.ask(state, step)
        found = answer(threshold, state, step, np.random.default_rng(step))
        assert threshold.unclipped(restored, step, found) == threshold.unclipped(state, step, found)
        assert threshold.clipped_length(restored) == threshold.clipped_length(state)
        state, restored = threshold.update(state, step, found), threshold.update(restored, step, found)


@each(THRESHOLDS)
def test_nothing_is_remembered_outside_the_state(threshold):
    state = after(threshold, 2, 3, np.random.default_rng(0))
    kept = json.dumps(state)
    found = answer(threshold, state, 3, np.random.default_rng(1))
    once = threshold.update(state, 3, found)
    after(threshold, 2, 4, np.random.default_rng(2))
    assert json.dumps(state) == kept
    assert threshold.update(state, 3, found) == once
    assert threshold.start(2) == threshold.start(2)


@each(PRIVATE)
@given(seed=seeds)
def test_a_private_threshold_does_not_look_at_raw_norms(threshold, seed):
    assert threshold.raw_access == "none"
    rng = np.random.default_rng(seed)
    state = after(threshold, 2, 2, rng)
    found = answer(threshold, state, 2, rng)
    norms = np.exp(rng.normal(size=(5, 2)))
    assert threshold.clip_norms(state, 2, norms) == threshold.clip_norms(state, 2, 100 * norms)
    assert threshold.clip_norms(state, 2, norms) == threshold.clip_norms(state, 2)
    told = [replace(found, raw_norms=norms, clip_norms=(1.0, 1.0)), replace(found, raw_norms=100 * norms)]
    assert threshold.update(state, 2, told[0]) == threshold.update(state, 2, told[1])
    assert threshold.unclipped(state, 2, told[0]) == threshold.unclipped(state, 2, told[1])
    after_each = [threshold.clipped_length(threshold.update(state, 2, each)) for each in told]
    assert after_each[0] == after_each[1]


@each(RAW)
def test_one_that_looks_at_raw_norms_says_so(threshold):
    assert threshold.raw_access in {"physical_batch", "batch", "dataset"}
    norms = np.random.default_rng(0).lognormal(size=(50, 2))
    start = threshold.start(2)
    assert threshold.clip_norms(start, 0, 7 * norms) == pytest.approx(
        [7 * tau for tau in threshold.clip_norms(start, 0, norms)]
    )
    assert threshold.ask(start, 0).count is None
    assert threshold.ask(start, 0).slack is None


@each(THRESHOLDS)
def test_it_pays_if_and_only_if_it_counts(threshold):
    state = after(threshold, 2, 3, np.random.default_rng(0))
    assert (threshold.noise_share > 0) == (threshold.ask(state, 3).count is not None)
    assert threshold.noise_share >= 0
    share = threshold.share(Conditions(64, 100, 1.0, (10_000, 10_000)))
    assert threshold.noise_share <= share < math.inf
    assert (share > 0) == (threshold.noise_share > 0)


@each(THRESHOLDS)
@given(seed=seeds, num_groups=groups)
def test_what_it_asks_fits_its_thresholds(threshold, seed, num_groups):
    state = after(threshold, num_groups, 3, np.random.default_rng(seed), wild=True)
    question, tau = threshold.ask(state, 3), threshold.clip_norms(state, 3)
    for asked in filter(None, (question.count, question.slack)):
        assert len(asked.radii) == num_groups
        assert len({len(radii) for radii in asked.radii}) == 1
        assert all(list(radii) == sorted(radii) and radii[0] > 0 for radii in asked.radii)
    if question.slack is not None:
        assert all(radii[-1] < limit for radii, limit in zip(question.slack.radii, tau, strict=True))


norm_choices = st.lists(
    st.lists(st.floats(0, allow_nan=False) | st.integers(0, 30), min_size=4, max_size=4), min_size=1, max_size=8
)


def chosen_norms(choices, radii, num_groups):
    """Norms [examples, groups]; a whole number picks one of the group's radii, so that there are ties."""
    return np.array(
        [
            [
                radii[k][pick % len(radii[k])] if isinstance(pick, int) else pick
                for k, pick in enumerate(row[:num_groups])
            ]
            for row in choices
        ]
    )


@each({name: threshold for name, threshold in PRIVATE.items() if threshold.noise_share > 0})
@given(seed=seeds, num_groups=groups, choices=norm_choices, gone=st.integers(0, 7))
def test_removing_one_example_moves_the_paid_counts_by_their_bound_at_most(threshold, seed, num_groups, choices, gone):
    state = after(threshold, num_groups, seed % 3, np.random.default_rng(seed))
    count = threshold.ask(state, 3).count
    norms = chosen_norms(choices, count.radii, num_groups)
    within = (norms[:, :, None] <= np.array(count.radii)) & np.isfinite(norms)[:, :, None]
    centred = np.diff(within.astype(float), axis=2, prepend=0) - count.centre
    moved = centred.sum(0) - np.delete(centred, gone % len(norms), axis=0).sum(0)
    assert np.linalg.norm(moved) <= count.l2_bound * (1 + 1e-9)


@each({name: t for name, t in PRIVATE.items() if t.ask(t.start(1), 0).slack is not None})
@given(seed=seeds, num_groups=groups, choices=norm_choices)
def test_one_example_with_its_slack_is_no_longer_than_the_threshold(threshold, seed, num_groups, choices):
    state = after(threshold, num_groups, seed % 3, np.random.default_rng(seed))
    slack, tau = threshold.ask(state, 3).slack, np.array(threshold.clip_norms(state, 3))
    norms = chosen_norms(choices, [(*radii, limit) for radii, limit in zip(slack.radii, tau, strict=True)], num_groups)
    finite = np.isfinite(norms)
    clipped = np.where(finite, np.minimum(norms, tau), 0)  # an example without a finite gradient adds nothing
    told = np.array(slack.coefficients(tau.tolist())) * (
        (norms[:, :, None] <= np.array(slack.radii)) & finite[:, :, None]
    )
    extended = np.sqrt(clipped**2 + (told**2).sum(2))
    assert (extended <= tau).all()


@each(THRESHOLDS)
def test_it_tells_the_unclipped_fraction_of_each_group_or_nothing(threshold):
    state = after(threshold, 3, 2, np.random.default_rng(0))
    found = answer(threshold, state, 2, np.random.default_rng(1))
    told = threshold.unclipped(state, 2, found)
    assert len(told) == (0 if isinstance(threshold, Constant) else 3)
    assert all(type(fraction) is float and math.isfinite(fraction) for fraction in told)


@each(THRESHOLDS)
@given(seed=seeds)
def test_it_tells_the_clipped_length_of_each_group_or_nothing(threshold, seed):
    rng = np.random.default_rng(seed)
    state = after(threshold, 3, 2, rng)
    told = threshold.clipped_length(threshold.update(state, 2, answer(threshold, state, 2, rng, wild=True)))
    assert len(told) == (3 if isinstance(threshold, BalancedThreshold) else 0)
    assert all(type(length) is float and 0 <= length < math.inf for length in told)


LOG_NORMAL = stats.lognorm(1.0)
LEARNERS = {
    "geometric": GeometricQuantile,
    "private": PrivateQuantile,
    "slack": SlackQuantile,
    "histogram": HistogramQuantile,
}


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("start", [0.01, 100.0])
@pytest.mark.parametrize("kind", LEARNERS.values(), ids=LEARNERS)
def test_it_finds_the_true_quantile_from_both_sides(kind, start, p):
    # The mean of 8 runs of 300 steps has a standard deviation of at most 0.0015, and a bias of at most 0.001 (over 25
    # seeds): 0.008 fails less than one time in 1e5.
    first = start * LOG_NORMAL.ppf(p)
    slow = kind is GeometricQuantile and (start > 1) == (p > 0.5)  # 240 steps to get there at p = 0.9
    steps = 700 if slow else 400
    setting = Setting(256, 1.0, p)
    trace = follow(kind(p, initial=first), LOG_NORMAL, np.zeros(steps), setting, runs=8, rng=np.random.default_rng(1))
    assert (trace.distance[0] > 0).all() == (start > 1)
    assert trace.unclipped[-300:].mean() == pytest.approx(p, abs=0.008)


@pytest.mark.parametrize("kind", LEARNERS.values(), ids=LEARNERS)
def test_a_scheduled_quantile_is_followed(kind):
    def p(step):
        return 0.2 if step < 150 else 0.8

    # The means have standard deviations of at most 0.001 (over 25 seeds): 0.01 fails less than one time in 1e8.
    setting = Setting(1024, 1.0, 0.2)
    first = LOG_NORMAL.ppf(0.2)
    trace = follow(kind(p, initial=first), LOG_NORMAL, np.zeros(300), setting, runs=8, rng=np.random.default_rng(1))
    assert trace.unclipped[50:150].mean() == pytest.approx(0.2, abs=0.01)
    assert trace.unclipped[230:].mean() == pytest.approx(0.8, abs=0.01)


def settled(threshold, steps, wrong=None):
    """The tau of one run on exact answers, three of which may be wrong."""
    state = threshold.start(1)
    for step in range(steps):
        question = threshold.ask(state, step)
        count, slack = (() if asked is None else asked.radii[0] for asked in (question.count, question.slack))
        bins = tuple(np.diff(LOG_NORMAL.cdf(count), prepend=0).tolist())
        within = tuple(LOG_NORMAL.cdf(slack).tolist())
        if wrong is not None and 30 <= step < 33:
            bins, within = (wrong,) * len(bins), (wrong,) * len(within)
        known = {"bins_std": 0.05, "within_std": ((0.05,) * len(within),), "batch_size": 256}
        public = {"noise_power": (0.1,)}
        state = threshold.update(state, step, Answer((bins,), (within,), **known, **public))
    return threshold.clip_norms(state, steps)[0]


@pytest.mark.parametrize("wrong", [1e12, -1e12, math.nan])
@pytest.mark.parametrize(
    ("threshold", "steps"),
    [
        (PrivateQuantile(0.5, initial=1.0), 120),
        (SlackQuantile(0.5, initial=1.0), 120),
        (HistogramQuantile(0.5, initial=1.0), 120),
        (BalancedThreshold(), 200),  # with this noise it averages over 40 steps
    ],
    ids=lambda value: "" if isinstance(value, int) else type(value).__name__,
)
def test_a_wild_answer_is_recovered_from(threshold, steps, wrong):
    """Noise cannot give such an answer, but if it comes, its effect passes."""
    undisturbed = settled(threshold, steps)
    assert math.log(settled(threshold, steps, wrong)) == pytest.approx(math.log(undisturbed), abs=0.1)
    if not isinstance(threshold, BalancedThreshold):
        assert undisturbed == pytest.approx(1.0, abs=0.1)


@each(LEARNT)
@given(seed=seeds)
def test_it_keeps_its_bounds(threshold, seed):
    bounded = replace(threshold, tau_min=0.9, tau_max=1.1, initial=1.0)
    rng = np.random.default_rng(seed)
    state = after(bounded, 2, 5, rng, wild=True)
    for norms in (None, np.full((3, 2), 1e9), np.zeros((3, 2))):
        given_norms = None if bounded.private else norms
        assert all(0.9 <= tau <= 1.1 for tau in bounded.clip_norms(state, 5, given_norms))


@each(QUANTILES)
@pytest.mark.parametrize(
    ("p", "message"),
    [
        (0, r"p = 0 must be in \(0, 1\)"),
        (1.0, r"p = 1.0 must be in \(0, 1\)"),
        (math.nan, "p = nan must be finite"),
        (schedules.constant(2.0), r"p = 2.0 must be in \(0, 1\)"),
    ],
    ids=["0", "1", "nan", "schedule"],
)
def test_a_bad_quantile_is_refused(threshold, p, message):
    with pytest.raises(ValueError, match=message):
        replace(threshold, p=p)


@each(LEARNT)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initial": 0}, r"initial = 0 must be in \[1e-06, 1e\+06\]"),
        ({"tau_min": 0}, "tau_min = 0 must be > 0"),
        ({"tau_max": math.inf}, "tau_max = inf must be finite"),
        ({"tau_min": 1.0, "tau_max": 0.5}, "initial = .* must be in"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_bad_bounds_are_refused(threshold, change, message):
    with pytest.raises(ValueError, match=message):
        replace(threshold, **change)


@each(SCHEDULABLE)
def test_a_schedule_that_goes_wrong_later_is_refused_before_the_run(threshold):
    name = "tau" if isinstance(threshold, Constant) else "p"
    later = replace(threshold, **{name: lambda step: 0.5 if step < 900 else 1.5 - 3 * (name == "tau")})
    later.check(Conditions(4096, 900, 0.1, (1000,)))
    with pytest.raises(ValueError, match=rf"{name} = -?1.5 must be"):
        later.check(Conditions(4096, 1000, 0.1, (1000,)))
