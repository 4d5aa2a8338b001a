"""Runs as certificates see them: by hand without noise, and counts that are unbiased with the stated noise."""

import numpy as np
import pytest

from qclip.simulation.problems import Gaussian, HeavyTailedQuadratic, TwoPoint
from qclip.simulation.recorded import recorded_runs

QUIET = HeavyTailedQuadratic(1, Gaussian(0.0))
ALONE = {"steps": 3, "x0": [4.0], "p": 0.5, "batch_size": 2, "sampling": "iid", "seeds": 1, "learning_rate": 0.0}


def test_plain_normalized_and_momentum_steps_by_hand():
    """The gradient is x and clipped to 2, so that plain steps of .5 move by 1, normalized ones by .5."""
    plain = recorded_runs(QUIET, step_size=0.5, initial=2.0, **ALONE)
    assert plain.grad_norm2[0].tolist() == [16.0, 9.0, 4.0]
    assert plain.factors[0].tolist() == pytest.approx([0.5, 2 / 3, 1.0])
    assert plain.clipped[0].tolist() == [1.0, 1.0, 0.0]
    assert plain.weighted_means() == pytest.approx((8 + 6 + 4) / (0.5 + 2 / 3 + 1))
    unit = recorded_runs(QUIET, step_size=0.5, initial=2.0, normalized=True, **ALONE)
    assert unit.gammas[0].tolist() == [0.25] * 3
    assert np.sqrt(unit.grad_norm2[0]).tolist() == [4.0, 3.5, 3.0]
    heavy = recorded_runs(QUIET, step_size=0.5, initial=2.0, momentum=0.5, **ALONE)
    assert np.sqrt(heavy.grad_norm2[0]).tolist() == [4.0, 3.0, 1.5]  # velocities 2 and 3


def test_the_threshold_follows_the_count():
    runs = recorded_runs(QUIET, step_size=0.5, initial=2.0, **ALONE | {"learning_rate": 0.2})
    assert runs.taus[0, :2].tolist() == pytest.approx([2.0, 2.0 * np.exp(0.1)])


@pytest.mark.parametrize("sampling", ["iid", "poisson"])
def test_counts_are_unbiased_with_the_stated_noise(sampling):
    runs = recorded_runs(
        TwoPoint(2, 0.7), step_size=1e-9, steps=1, x0=[-1.9], p=0.5, initial=1.0, batch_size=8, count_noise=4.0,
        sampling=sampling, seeds=40_000,
    )  # fmt: skip
    # |x + 2| = .1 with probability .7, |x| = 1.9 otherwise: three tenths are clipped
    variance = 0.5**2 + (0.25 if sampling == "poisson" else 0.21) / 8
    assert runs.clipped.mean() == pytest.approx(0.3, abs=4.5 * variance**0.5 / 200)  # 1 in 10^5
    assert runs.clipped.var() == pytest.approx(variance, rel=0.04)  # 5 standard errors
    assert runs.count_noise == 0.5
