"""A histogram around tau: what is read off it, how it moves along, and what it costs."""

import math

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("matplotlib")

from qclip import accounting
from qclip.apps.experiments.tracking import Setting, follow
from qclip.thresholds import Answer, Conditions, HistogramQuantile

LOG_NORMAL = stats.lognorm(1.0)


def exact(threshold, state, law):
    """The answer of an infinite batch without noise."""
    (radii,) = threshold.ask(state, 0).count.radii
    bins = np.diff(law.cdf(np.array(radii)), prepend=0)
    return Answer(noisy_bins=(tuple(bins.tolist()),))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("law", [LOG_NORMAL, stats.chi(20), stats.halfnorm(), stats.lognorm(0.1)], ids=range(4))
def test_the_quantile_is_read_off_at_once(law, p):
    threshold = HistogramQuantile(p, initial=float(law.ppf(p)) * 1.5)
    state = threshold.start(1)
    assert threshold.unclipped(state, 0, exact(threshold, state, law)) == pytest.approx(
        (law.cdf(threshold.initial),), abs=1e-9
    )
    state = threshold.update(state, 0, exact(threshold, state, law))
    assert law.cdf(threshold.clip_norms(state, 1)[0]) == pytest.approx(p, abs=0.06)
    for step in range(30):  # what the bend of the law between two radii hides is learnt from the count at tau
        state = threshold.update(state, step, exact(threshold, state, law))
    assert law.cdf(threshold.clip_norms(state, 1)[0]) == pytest.approx(p, abs=1e-3)


@pytest.mark.parametrize("start", [1e-3, 1e3])
def test_it_gets_there_from_anywhere(start):
    threshold = HistogramQuantile(0.5, initial=start)
    state = threshold.start(1)
    for step in range(8):  # a quarter of a decade more than half of the 12 radii, each
        state = threshold.update(state, step, exact(threshold, state, LOG_NORMAL))
    assert threshold.clip_norms(state, 8)[0] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("start", [0.2, 5.0])
def test_moving_along_it_keeps_what_it_knows_and_guesses_beyond(start):
    threshold = HistogramQuantile(0.5, initial=start)
    before = threshold.start(1)
    told = exact(threshold, before, LOG_NORMAL)
    (after,) = threshold.update(before, 0, told)
    shift = after["lowest"] - before[0]["lowest"]
    assert shift == pytest.approx(-math.log(start) / threshold.spacing, abs=2)
    radii = np.exp(threshold.spacing * (after["lowest"] + np.arange(threshold.radii)))
    kept = np.array(after["seen"]) > 0
    assert kept.sum() == threshold.radii - abs(shift)
    assert np.array(after["within"])[kept] == pytest.approx(LOG_NORMAL.cdf(radii[kept]), abs=1e-6)
    assert list(after["within"]) == sorted(after["within"])


def test_every_finite_norm_is_in_a_bin_and_tau_is_a_radius():
    threshold = HistogramQuantile(0.5, initial=0.123)
    count = threshold.ask(threshold.start(2), 0).count
    assert len(count.radii[0]) == threshold.radii + 2
    assert 0.123 in count.radii[0]
    assert count.radii[0][-1] == 1e30
    assert count.centre == pytest.approx(1 / 14)
    assert count.l2_bound == pytest.approx(math.sqrt(2 * (1 - 1 / 14)))


def test_noise_common_to_all_bins_does_not_matter():
    """All fractions add up to 1, so that what they have too much of together is noise."""
    threshold = HistogramQuantile(0.5, initial=1.0)
    state = threshold.start(1)
    (bins,) = exact(threshold, state, LOG_NORMAL).noisy_bins
    shifted = Answer(noisy_bins=(tuple(value + 0.03 for value in bins),))
    assert threshold.unclipped(state, 0, shifted) == pytest.approx((0.5,), abs=1e-9)


def test_a_jump_of_p_is_followed_at_once():
    threshold = HistogramQuantile(lambda step: 0.2 if step < 100 else 0.8, initial=float(LOG_NORMAL.ppf(0.2)))
    setting = Setting(1024, 1.0, 0.2)
    trace = follow(threshold, LOG_NORMAL, np.zeros(110), setting, runs=16, rng=np.random.default_rng(0))
    # The first step goes to the end of the histogram, the second to the quantile. The mean of 16 runs has a standard
    # deviation of 0.004 there (over 12 seeds): 0.03 fails less than one time in 1e8.
    assert trace.unclipped[102].mean() == pytest.approx(0.8, abs=0.03)


def test_its_noise_is_3_6_times_that_of_one_count():
    threshold = HistogramQuantile(0.5)
    bound = threshold.ask(threshold.start(1), 0).count.l2_bound
    counts = accounting.split(1.0, threshold.noise_share).counts
    rng = np.random.default_rng(0)
    noise = counts * bound * rng.standard_normal((4000, threshold.radii + 2))
    start = threshold.start(1)
    found = [threshold.unclipped(start, 0, Answer(noisy_bins=(tuple(row),)))[0] for row in noise.tolist()]
    # 4000 draws know a standard deviation up to 1.1 %: 6 % fails less than one time in 1e7.
    assert np.std(found) == pytest.approx(3.6 * 3.56, rel=0.06)


def test_noise_that_drowns_it_is_refused():
    with pytest.raises(ValueError, match=r"noise on the unclipped fraction .* \(batch size 8, noise multiplier 1"):
        HistogramQuantile(0.5).check(Conditions(8, 100, 1.0, (10,)))
    HistogramQuantile(0.5).check(Conditions(16, 100, 1.0, (10,)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"radii": 1}, "radii = 1 must be >= 2"),
        ({"spacing": 0}, r"spacing = 0 must be in \(0, 3\)"),
        ({"noise_share": 0}, "noise_share = 0 must be > 0"),
        ({"tau_max": 1e25}, r"tau_max = 1e\+25 must be in"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        HistogramQuantile(0.5, **arguments)
