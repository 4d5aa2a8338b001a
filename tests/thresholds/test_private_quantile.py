"""The paid count finds the quantile from both sides, at the noise that a real step gives it."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from qclip import accounting, schedules
from qclip.thresholds import PrivateQuantile


def track(threshold, *, z, batch_size, steps, seed, medians=(1.0,)):
    """The unclipped probability of each group at each step, on log-normal norms with the given medians."""
    rng = np.random.default_rng(seed)
    state = threshold.start(len(medians))
    counts = accounting.split(z, threshold.noise_share).counts
    reached = []
    for step in range(steps):
        tau = threshold.clip_norms(state, step)
        reached.append([norm.cdf(math.log(t / m)) for t, m in zip(tau, medians, strict=True)])
        norms = np.exp(rng.normal(size=(rng.poisson(batch_size), 1))) * np.array(medians)
        query = threshold.count(state, step)
        centred = (norms <= np.array(query.radii)).sum(0) - query.centre * len(norms)
        noisy = centred + rng.normal(size=len(medians)) * counts * query.l2_bound
        state = threshold.update(state, step, tuple((noisy / batch_size + query.centre).tolist()))
    return np.array(reached)


@pytest.mark.parametrize("p", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("initial", [0.01, 100.0])
def test_it_reaches_the_true_quantile_from_both_sides(p, initial):
    # The mean of these 700 steps has a standard deviation of 0.0013 (over 40 seeds): 0.008 fails less than one in 1e8.
    reached = track(PrivateQuantile(p, initial=initial), z=1.0, batch_size=256, steps=1000, seed=1)
    assert reached[300:].mean() == pytest.approx(p, abs=0.008)
    assert (reached[0] - p) * (initial - 1) > 0


def test_groups_have_quantiles_of_their_own():
    reached = track(PrivateQuantile(0.5), z=1.0, batch_size=256, steps=1000, seed=2, medians=(0.02, 1.0, 50.0))
    assert reached[300:].mean(0) == pytest.approx([0.5] * 3, abs=0.008)


def test_a_scheduled_quantile_is_followed():
    rising = PrivateQuantile(lambda step: 0.2 if step < 400 else 0.8)
    reached = track(rising, z=0.0, batch_size=512, steps=800, seed=3)
    assert reached[200:400].mean() == pytest.approx(0.2, abs=0.03)
    assert reached[600:].mean() == pytest.approx(0.8, abs=0.03)


def test_the_count_costs_what_theory_says():
    """THEORY section 4: 1 % of the noise is sigma_b = 7.12 max(c, 1-c) z; K groups multiply it by sqrt(K)."""
    threshold = PrivateQuantile(0.5)
    counts = accounting.split(2.0, threshold.noise_share).counts
    assert counts * threshold.count((1.0,), 0).l2_bound == pytest.approx(7.12 * 0.5 * 2.0, rel=1e-3)
    assert counts * threshold.count((1.0,) * 9, 0).l2_bound == pytest.approx(3 * 7.12 * 0.5 * 2.0, rel=1e-3)


def test_it_stays_within_its_bounds():
    threshold = PrivateQuantile(0.5, tau_min=0.5, tau_max=2.0, initial=1.0)
    assert threshold.update((1.0, 1.0), 0, (1e9, -1e9)) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 0}, r"p = 0 must be in \(0, 1\)"),
        ({"p": 1.0}, r"p = 1.0 must be in \(0, 1\)"),
        ({"p": schedules.constant(2.0)}, r"p = 2.0 must be in \(0, 1\)"),
        ({"p": 0.5, "initial": 0}, r"initial = 0 must be in \[1e-06, 1e\+06\]"),
        ({"p": 0.5, "tau_min": 0}, "tau_min = 0 must be > 0"),
        ({"p": 0.5, "tau_min": 1.0, "tau_max": 0.5}, "initial = 0.1 must be in"),
        ({"p": 0.5, "learning_rate": -1}, "learning_rate = -1 must be > 0"),
        ({"p": 0.5, "centre": 1.5}, r"centre = 1.5 must be in \[0, 1\]"),
        ({"p": 0.5, "noise_share": 0}, "noise_share = 0 must be > 0"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivateQuantile(**arguments)
