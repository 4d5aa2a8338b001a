"""The certificate without a lower bound on the unclipped fractions: one step, exactly; momentum, over all its paths."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from qclip.theory import Assumptions, weighted_certificate

PUBLIC = {"batch_size": 4, "noise_multiplier": 0, "dim": 2}
numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


def moments(atoms, weights, tau):
    """Gradient, sigma, clip factors, clipped mean and mean square, and the clipped fraction of a law of a few atoms."""
    grad = weights @ atoms
    norms = np.linalg.norm(atoms, axis=1)
    sigma = np.sqrt(weights @ ((atoms - grad) ** 2).sum(1))
    factor = np.where(norms <= tau, 1.0, tau / np.maximum(norms, 1e-300))
    clipped = factor[:, None] * atoms
    return grad, sigma, weights @ factor, weights @ clipped, weights @ (clipped**2).sum(1), weights @ (norms > tau)


def one_step(atoms, weights, tau, gamma, *, B=4, z=0.0, sampling="iid", kappa_ratio=False):
    """What the weighted inequality promises of one step on ``||x||^2 / 2``, and what happens, as (left, right)."""
    grad, sigma, a, mean, square, h = moments(atoms, weights, tau)
    d = atoms.shape[1]
    variance = (square if sampling == "poisson" else square - mean @ mean) / B + d * (z * tau / B) ** 2
    change = -gamma * grad @ mean + gamma**2 / 2 * (mean @ mean + variance)
    known = Assumptions(L=1, sigma=sigma, q=2, gap=0)
    found = weighted_certificate(
        known, [gamma], [tau], [h], batch_size=B, noise_multiplier=z, dim=d, sampling=sampling
    )  # fmt: skip
    # With a gap of 0 and one step: c gamma a G^2 <= what f gained + the terms, where c = found.c * (1 - h) / (1 - h).
    left = found.c * gamma * a * (grad @ grad) + change
    return left, found.c * gamma * (1 - h) * found.total, gamma * (sigma**2 + grad @ grad)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(numbers, numbers), min_size=2, max_size=5),
    st.lists(st.integers(1, 30), min_size=5, max_size=5),
    st.floats(0.01, 30),
    st.floats(0.01, 1.0),
    st.floats(0, 4),
    st.sampled_from(["iid", "poisson"]),
)
def test_one_step(atoms, weights, tau, gamma, z, sampling):
    atoms = np.array(atoms)
    weights = np.array(weights[: len(atoms)], dtype=float)
    weights /= weights.sum()
    if moments(atoms, weights, tau)[-1] >= 1:
        tau = float(np.linalg.norm(atoms, axis=1).min()) + 0.01
    left, right, scale = one_step(atoms, weights, tau, gamma, z=z, sampling=sampling)
    assert left <= right + 1e-9 * (1 + scale)


def test_an_adversary_attains_it():
    """The best of two-point laws, thresholds and steps comes within 1 % of the inequality, and no further."""

    def negative_ratio(v):
        a, b, w, tau, gamma = v[0], v[1], 1 / (1 + np.exp(-v[2])), np.exp(v[3]), 1 / (1 + np.exp(-v[4]))
        atoms, weights = np.array([[a, 0.0], [b, 0.0]]), np.array([w, 1 - w])
        if moments(atoms, weights, tau)[-1] >= 1:
            return 0.0
        left, right, _ = one_step(atoms, weights, tau, gamma, B=1000)
        return -left / max(right, 1e-12)

    rng = np.random.default_rng(0)
    best = min(minimize(negative_ratio, rng.normal(size=5), method="Nelder-Mead").fun for _ in range(60))
    assert -1 - 1e-6 <= best < -0.98


def test_momentum_over_all_paths():
    """SGD with momentum on a quadratic, over every path of two-point gradients: below its certificate."""
    rng, tightest = np.random.default_rng(0), 0.0
    for trial in range(150):
        r, w, mu = rng.uniform(0.5, 3), rng.uniform(0.05, 0.95), rng.choice([0.0, 0.5, 0.9])
        tau, x0, T = rng.uniform(0.1, 3), rng.normal(scale=2), 7
        gamma = (1 - mu) / (1 + 3 * mu / (1 - mu)) * rng.uniform(0.1, 0.999) / (2 if trial % 2 else 1)
        sums = np.zeros(3)  # a G^2, a and the clipped fraction, over the steps; expected over the paths
        for path in itertools.product([0, 1], repeat=T):
            x, v, along = x0, 0.0, np.zeros(3)
            for outcome in path:
                atoms = np.array([x + r * (1 - w), x - r * w])
                factor = np.minimum(1, tau / np.maximum(np.abs(atoms), 1e-12))
                a = w * factor[0] + (1 - w) * factor[1]
                along += a * x**2, a, w * (abs(atoms[0]) > tau) + (1 - w) * (abs(atoms[1]) > tau)
                v = mu * v + factor[outcome] * atoms[outcome]
                x -= gamma * v
            sums += w ** path.count(0) * (1 - w) ** path.count(1) * along
        numerator, denominator, clipped = sums[0], sums[1], sums[2] / T
        known = Assumptions(L=1, sigma=r * np.sqrt(w * (1 - w)), q=2, gap=x0**2 / 2)
        if clipped > 0.999:
            continue
        found = weighted_certificate(
            known, [gamma] * T, [tau] * T, [clipped] * T, batch_size=1, noise_multiplier=0, dim=1, momentum=mu,
            sampling="iid",
        )  # fmt: skip
        tightest = max(tightest, numerator / denominator / found.total)
    assert 0.2 < tightest <= 1


def test_early_steps_that_clip_everything_cost_their_length_only():
    """A start far below the quantile, where the other certificate has no least unclipped fraction to work with."""
    a = Assumptions(L=1, sigma=1, q=2, gap=1)
    taus, clipped = np.full(1000, 2.0), np.full(1000, 0.1)
    known = weighted_certificate(a, 0.1, taus, clipped, **PUBLIC).total
    taus[:10], clipped[:10] = 0.01, 1.3  # noisy: above 1 at some steps
    assert known < weighted_certificate(a, 0.1, taus, clipped, **PUBLIC).total < 1.2 * known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": Assumptions(L=1, sigma=1, q=1.5, gap=1)}, "q = 1.5 must be 2; without a lower bound"),
        ({"gammas": 1.5}, "largest gamma = 1.5 must be at most 1; lower the step size"),
        ({"gammas": 0.2, "momentum": 0.9}, r"largest gamma = 0.2.* must be at most 0.00357.* or the momentum"),
        ({"gammas": [0.1]}, "do not fit together; give one value per step"),
        ({"taus": [1.0, -1.0]}, "taus = -1.0 must be finite and > 0"),
        ({"clipped_fractions": [0.1, np.nan]}, "clipped_fractions has NaN"),
        ({"clipped_fractions": [1.0, 1.0]}, "mean clipped fraction = 1.0 must be below 1"),
        ({"momentum": 1.0}, r"momentum = 1.0 must be in \[0, 1\)"),
    ],
)
def test_refuses(change, message):
    good = {"a": Assumptions(L=1, sigma=1, q=2, gap=1), "gammas": 0.1, "taus": [1.0, 2.0]}
    good |= {"clipped_fractions": [0.1, 0.2], **PUBLIC}
    with pytest.raises(ValueError, match=message):
        weighted_certificate(**good | change)
