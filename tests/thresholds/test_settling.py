"""Values that stand still, every one of them in every step: the quantile is reached, and then held.

The batch is the data, so nothing is sampled; a threshold is told its size, and takes it for a sample all the same.
"""

import numpy as np
import pytest

from qclip import accounting
from qclip.thresholds import Answer, Conditions, PrivateQuantile, SlackQuantile

SPACED = np.linspace(0, 10, 21)
EQUAL = np.full(20, 5.0)
PAID = 3.5616
"""The noise of a paid count at noise multiplier 1, when it may cost 1 %."""


def taus(threshold, still, *, steps, path=None, count_noise=0.0, seed=0):
    """Where tau stands before each step; ``count_noise`` is the standard deviation on the paid count.

    The values are ``exp(path[step])`` times what they are when they stand still.
    """
    path = np.zeros(steps) if path is None else path
    rng = np.random.default_rng(seed)
    B, z = len(still), count_noise / PAID
    gradient = accounting.split(z, threshold.noise_share).gradient
    state, found = threshold.start(1), []
    for step in range(steps):
        values = still * np.exp(path[step])
        (tau,) = threshold.clip_norms(state, step)
        found.append(tau)
        question = threshold.ask(state, step)
        noisy_bins, bins_std = (), 0.0
        if question.count is not None:
            bins_std = count_noise / B
            noisy_bins = (fractions(values, question.count.radii[0], bins_std, rng),)
        (radii,) = question.slack.radii
        stds = [gradient * tau / a / B for a in question.slack.coefficients((tau,))[0]]
        within = fractions(values, radii, np.array(stds), rng)
        answer = Answer(noisy_bins, (within,), bins_std=bins_std, within_std=(tuple(stds),), batch_size=B)
        state = threshold.update(state, step, answer)
    return np.array(found)


def fractions(values, radii, std, rng):
    found = (values[:, None] <= np.array(radii)).mean(0) + std * rng.standard_normal(len(radii))
    return tuple(found.tolist())


@pytest.mark.parametrize("count_noise", [0.0, 0.01])
@pytest.mark.parametrize("initial", [1.0, 10.0])
@pytest.mark.parametrize(
    ("values", "p", "target", "within"),
    [
        (SPACED, 0.5, 5.0, 0.25),
        (EQUAL, 0.5, 5.0, 0.5),
        (SPACED, 0.1, 1.0, 0.5),
        (SPACED, 0.25, 2.5, 0.5),
        (SPACED, 0.75, 7.5, 0.5),
        (SPACED, 0.9, 9.0, 0.5),
    ],
    ids=["median", "equal", "0.1", "0.25", "0.75", "0.9"],
)
def test_a_small_batch_settles_in_40_steps(values, p, target, within, initial, count_noise):
    # With noise, over 200 seeds: at most 0.86 of what is allowed, with a standard deviation of 0.01 of it.
    found = taus(PrivateQuantile(p, initial=initial), values, steps=51, count_noise=count_noise)
    assert np.abs(found[41:] - target).max() < within


@pytest.mark.parametrize("kind", [PrivateQuantile, SlackQuantile])
@pytest.mark.parametrize("initial", [1.0, 10.0])
@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
def test_the_way_in_is_not_taken_for_a_drift(kind, p, initial):
    """It would go on past the quantile, by 0.5 to 0.8 from afar."""
    threshold = kind(p, initial=initial)
    threshold.check(Conditions(101, 60, 0.0, (1,)))
    found = taus(threshold, np.linspace(0, 10, 101), steps=60) - 10 * p
    assert np.abs(found[15:]).max() < 0.35


def test_a_drift_is_still_learnt_once_the_place_is_known():
    """Without a velocity log tau lags behind a drift of 0.02 a step by 0.11; with one it was within 0.007."""
    path = 0.02 * np.arange(150)
    found = taus(PrivateQuantile(0.5, initial=5.0), SPACED, steps=150, path=path)
    assert np.abs(np.log(found / 5.0) - path)[110:].max() < 0.04


@pytest.mark.parametrize("jump", [0.01, 0.1, 10.0, 100.0])
def test_a_jump_is_a_new_way_in(jump):
    path = np.where(np.arange(140) < 80, 0.0, np.log(jump))
    found = taus(PrivateQuantile(0.5, initial=5.0), SPACED, steps=140, path=path)
    assert np.abs(np.log(found / 5.0) - path)[80 + 30 :].max() < 0.1
