"""White-box and one-run audits of the real step: within the claim, close to it, and above it if the step is broken."""

import pytest

import qclip
from qclip import audit
from qclip.training import noise

EPSILON = 4.0
SURE = 0.999


@pytest.mark.parametrize("threshold", [None, qclip.Constant(1.0), qclip.PrivateQuantile(0.5)], ids=str)
def test_an_attacker_on_the_joint_release_stays_within_the_claim(threshold):
    """A bound exceeds the claim with a probability of 1 in 1000 at most; the seeds are fixed."""
    found = audit.white_box(threshold, epsilon=EPSILON, steps=2, runs=400, confidence=SURE)
    assert found.holds
    assert found.lower_bound > 0.4 * EPSILON
    assert found.runs == 400
    assert 0 <= found.clopper_pearson <= found.most


def test_a_canary_below_the_threshold_gains_no_more():
    assert audit.white_box(epsilon=EPSILON, steps=2, runs=200, canary_norm=0.5, confidence=SURE).holds


def test_a_canary_that_is_sampled_is_harder_to_find():
    found = audit.white_box(qclip.Constant(1.0), epsilon=EPSILON, steps=2, sample_rate=0.3, runs=200)
    assert found.clopper_pearson <= EPSILON


def test_noise_of_half_the_size_is_found(monkeypatch):
    """The attacker computes with the noise that is declared; the mechanism adds half of it."""
    release = noise.release

    def weak(value, noise_multiplier, source, **settings):
        return release(value, noise_multiplier / 2, source, **settings)

    monkeypatch.setattr(noise, "release", weak)
    assert not audit.white_box(qclip.Constant(1.0), epsilon=EPSILON, steps=2, runs=400).holds
    assert not audit.one_run(qclip.Constant(1.0), epsilon=EPSILON, canaries=1000).holds


def test_one_run_stays_within_the_claim():
    found = audit.one_run(epsilon=EPSILON, canaries=2000, confidence=SURE)
    assert found.holds
    assert found.lower_bound > 0.3 * EPSILON


@pytest.mark.slow
def test_no_audit_exceeds_its_claim_in_20_repetitions():
    """By chance alone one of these 40 bounds exceeds its claim with a probability of 4 % at most."""
    for seed in range(20):
        assert audit.white_box(epsilon=EPSILON, runs=1000, seed=seed, confidence=SURE).holds
        assert audit.one_run(epsilon=EPSILON, seed=seed, confidence=SURE).holds


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_ten_thousand_runs_show_four_fifths_of_the_claim(epsilon):
    found = audit.white_box(epsilon=epsilon)
    assert 0.8 * epsilon <= found.lower_bound <= epsilon


@pytest.mark.slow
def test_one_run_shows_half_of_the_claim():
    assert audit.one_run(epsilon=EPSILON).lower_bound >= 0.5 * EPSILON
