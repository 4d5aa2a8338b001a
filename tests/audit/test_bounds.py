"""Lower bounds on epsilon: valid as often as they say, and close where the mechanism is as bad as it may be."""

import math

import numpy as np
import pytest
from scipy import stats

from qclip.audit import bounds

DELTA = 1e-5


def test_the_gaussian_curve_is_that_of_the_accountant():
    from qclip import accounting

    z = 1.3
    spent = accounting.epsilon(noise_multiplier=z, sample_rate=1.0, steps=4, delta=DELTA)
    assert bounds.gaussian_epsilon(2 / z, DELTA) == pytest.approx(spent, rel=1e-3)
    assert bounds.gaussian_delta(2 / z, bounds.gaussian_epsilon(2 / z, DELTA)) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("mu", [0.0, 1e-6, 0.3, 5.0])
def test_epsilon_and_mu_invert_each_other(mu):
    epsilon = bounds.gaussian_epsilon(mu, DELTA)
    assert epsilon >= 0
    if epsilon > 0:
        assert bounds.gaussian_mu(epsilon, DELTA) == pytest.approx(mu, rel=1e-6)


def test_rates_are_bounded_from_above():
    assert bounds.upper_rate(5, 5, 0.95) == 1.0
    rate = bounds.upper_rate(3, 50, 0.95)
    assert stats.binom.cdf(3, 50, rate) == pytest.approx(0.05)  # what so few errors would then be worth


def scores(mu, runs, generator):
    """Log likelihood ratios of a mechanism that is exactly mu-GDP."""
    return (generator.normal(-(mu**2) / 2, mu, runs), generator.normal(mu**2 / 2, mu, runs))


@pytest.mark.parametrize("mu", [0.25, 1.0, 2.0])
def test_bounds_on_a_gaussian_mechanism_hold_and_are_close(mu):
    """Each of 200 audits exceeds the truth with a probability of 5 % at most: more than 21 do one time in 1e3."""
    generator = np.random.default_rng(0)
    truth = bounds.gaussian_epsilon(mu, DELTA)
    over = {"gaussian": 0, "skewed": 0, "clopper_pearson": 0}
    shown = []
    for _ in range(200):
        without, canary = scores(mu, 1000, generator)
        shown.append(bounds.gaussian(without, canary, DELTA))
        over["gaussian"] += shown[-1] > truth
        over["skewed"] += bounds.gaussian(without, canary**3, DELTA) > truth  # a worse attacker
        over["clopper_pearson"] += bounds.clopper_pearson(without, canary, DELTA) > truth
    assert max(over.values()) <= 21, over
    assert np.median(shown) > truth * (0.85 if mu >= 1 else 0.4)


@pytest.mark.parametrize("mu", [0.5, 1.5])
def test_one_run_bounds_hold_and_show_something(mu):
    """As above: more than 13 of 100 runs with 2000 canaries exceed it one time in 1e3."""
    generator = np.random.default_rng(1)
    truth = bounds.gaussian_epsilon(mu, DELTA)
    over, shown = {"gaussian": 0, "any": 0}, []
    for _ in range(100):
        coins = generator.random(2000) < 0.5
        score = generator.normal(np.where(coins, mu / 2, -mu / 2))
        order = np.argsort(score)
        correct = int(coins[order[-50:]].sum() + (~coins[order[:50]]).sum())
        shown.append(bounds.one_run_gaussian(2000, 100, correct, DELTA))
        over["gaussian"] += shown[-1] > truth
        over["any"] += bounds.one_run(2000, 100, correct, DELTA) > truth
    assert max(over.values()) <= 13, over
    assert np.median(shown) > 0.4 * truth


def test_randomised_response_bounds_the_one_run_audit():
    """Guesses of randomised response at epsilon are correct as often as the theorem allows, and not more."""
    epsilon = 2.0
    rate = 1 / (1 + math.exp(-epsilon))
    correct = int(stats.binom.ppf(0.5, 1000, rate))
    assert 0.85 * epsilon < bounds.one_run(1000, 1000, correct, 1e-12) < epsilon


def test_no_better_than_a_coin_shows_nothing():
    assert bounds.one_run(1000, 100, 50, DELTA) == 0
    assert bounds.one_run_gaussian(1000, 100, 0, DELTA) == 0
    generator = np.random.default_rng(2)
    assert bounds.gaussian(*generator.random((2, 500)), DELTA) < 0.5
    assert bounds.gaussian(np.zeros(500), np.zeros(500), DELTA) == 0
    assert bounds.clopper_pearson(*scores(1e-9, 500, generator), DELTA) < 0.2


def test_the_most_that_can_be_shown_is_reached_by_a_perfect_attacker():
    perfect = bounds.clopper_pearson(np.zeros(500), np.ones(500), DELTA)
    assert perfect == pytest.approx(bounds.most_epsilon(1000, DELTA))
