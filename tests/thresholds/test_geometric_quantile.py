"""The literature's rule, as printed, and what its count costs."""

import math

import pytest

from qclip import accounting
from qclip.thresholds import Answer, GeometricQuantile


def test_it_moves_as_printed():
    """tau <- tau exp(-eta (b - p)), in each group by its own count."""
    threshold = GeometricQuantile(0.9, learning_rate=0.3)
    moved = threshold.update((1.0, 5.0), 0, Answer(noisy_bins=((0.4,), (1.1,))))
    assert moved == pytest.approx((math.exp(0.15), 5 * math.exp(-0.06)))


def test_it_counts_within_tau():
    threshold = GeometricQuantile(0.5, centre=0.2)
    count = threshold.ask((1.0, 5.0), 0).count
    assert count.radii == ((1.0,), (5.0,))
    assert count.centre == 0.2
    assert threshold.unclipped((1.0, 5.0), 0, Answer(noisy_bins=((0.4,), (1.1,)))) == (0.4, 1.1)


def test_the_count_costs_what_theory_says():
    """docs/theory.md, section 11: 1 % of the noise is sigma_b = 7.12 max(c, 1-c) z; K groups multiply it by sqrt(K)."""
    threshold = GeometricQuantile(0.5)
    counts = accounting.split(2.0, threshold.noise_share).counts
    assert counts * threshold.ask((1.0,), 0).count.l2_bound == pytest.approx(7.12 * 0.5 * 2.0, rel=1e-3)
    assert counts * threshold.ask((1.0,) * 9, 0).count.l2_bound == pytest.approx(3 * 7.12 * 0.5 * 2.0, rel=1e-3)


def test_it_stays_within_its_bounds():
    threshold = GeometricQuantile(0.5, tau_min=0.5, tau_max=2.0, initial=1.0)
    assert threshold.update((1.0, 1.0), 0, Answer(noisy_bins=((1e9,), (-1e9,)))) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": -1}, "learning_rate = -1 must be > 0"),
        ({"centre": 1.5}, r"centre = 1.5 must be in \[0, 1\]"),
        ({"noise_share": 0}, "noise_share = 0 must be > 0"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GeometricQuantile(0.5, **arguments)
