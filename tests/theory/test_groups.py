"""Sharing the noise among groups (against random and optimised shares) and the theorem for groups."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from qclip.theory import Assumptions, bound_groups, bound_private, group_noise, max_step_private

ONE = Assumptions(L=1, sigma=1, q=2, gap=1)
ALLOCATIONS = ("optimal", "equal", "proportional")


@st.composite
def groupings(draw):
    count = draw(st.integers(1, 6))
    taus = draw(st.lists(st.floats(1e-3, 1e3), min_size=count, max_size=count))
    dims = draw(st.lists(st.integers(1, 10**5), min_size=count, max_size=count))
    return np.array(taus), np.array(dims), draw(st.floats(0.01, 50))


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@given(groupings())
def test_every_allocation_costs_the_privacy_of_one_release(allocation, grouping):
    taus, dims, z = grouping
    noise = group_noise(taus, dims, z, allocation)
    # Each group alone is a release with z_k = std_k / tau_k; independent releases add 1/z^2.
    assert np.sum((taus / noise.stds) ** 2) == pytest.approx(1 / z**2)
    assert noise.power == pytest.approx(np.sum(dims * noise.stds**2))


@given(groupings())
def test_powers_in_closed_form(grouping):
    taus, dims, z = grouping
    powers = {
        "optimal": z**2 * (taus @ np.sqrt(dims)) ** 2,
        "equal": z**2 * (taus @ taus) * dims.sum(),
        "proportional": z**2 * taus.size * (dims @ taus**2),
    }
    for allocation, power in powers.items():
        assert group_noise(taus, dims, z, allocation).power == pytest.approx(power)


@given(groupings(), st.integers(0, 2**32 - 1))
def test_no_random_allocation_beats_the_optimal_one(grouping, seed):
    taus, dims, z = grouping
    shares = np.random.default_rng(seed).dirichlet(np.ones(taus.size), size=200)  # of the privacy 1/z^2
    powers = (dims * taus**2 * z**2 / np.maximum(shares, 1e-12)).sum(axis=1)
    assert group_noise(taus, dims, z).power <= powers.min() * (1 + 1e-9)
    for allocation in ("equal", "proportional"):
        assert group_noise(taus, dims, z).power <= group_noise(taus, dims, z, allocation).power * (1 + 1e-9)


def test_the_optimal_allocation_is_what_an_optimiser_finds():
    taus, dims, z = np.array([1.0, 0.2, 3.0]), np.array([100, 2000, 7]), 1.5

    def power(logits):
        share = np.exp(logits) / np.exp(logits).sum()
        return float(dims @ (z**2 * taus**2 / share)) / 1e4

    found = minimize(power, np.zeros(3), tol=1e-12)
    noise = group_noise(taus, dims, z)
    assert found.fun * 1e4 == pytest.approx(noise.power, rel=1e-6)
    share = np.exp(found.x) / np.exp(found.x).sum()
    np.testing.assert_allclose(z * taus / np.sqrt(share), noise.stds, rtol=1e-3)


def test_no_noise_is_no_noise():
    noise = group_noise([1.0, 2.0], [3, 4], 0)
    assert noise.power == 0
    np.testing.assert_array_equal(noise.stds, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"taus": [1, 0]}, r"taus\[1\] = 0.0 must be finite and > 0; a threshold is positive"),
        ({"taus": [1, math.nan]}, r"taus\[1\] = nan must be finite and > 0"),
        ({"dims": [4, 0]}, r"dims\[1\] = 0.0 must be .*; count the parameters of each group"),
        ({"dims": [4, 1.5]}, r"dims\[1\] = 1.5 must be whole, finite and > 0; count the parameters of each group"),
        ({"dims": [4]}, r"len\(dims\) = 1 must be len\(taus\) = 2; give one dimension per threshold"),
        ({"noise_multiplier": -1}, "noise_multiplier = -1 must be >= 0; 0 means no noise"),
        ({"allocation": "fair"}, "allocation = 'fair' must be one of 'optimal', 'equal', 'proportional'"),
    ],
)
def test_group_noise_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_noise(**{"taus": [1, 1], "dims": [4, 1], "noise_multiplier": 2.0} | arguments)


@st.composite
def grouped_runs(draw):
    count = draw(st.integers(1, 4))
    sigmas = np.array(draw(st.lists(st.floats(0.01, 3), min_size=count, max_size=count)))
    a = Assumptions(
        L=draw(st.floats(0.1, 10)), sigma=float(np.linalg.norm(sigmas)), q=draw(st.floats(1.05, 2)), gap=1
    )  # fmt: skip
    ps = draw(st.lists(st.floats(0.05, 0.95), min_size=count, max_size=count))
    public = {"batch_size": draw(st.floats(1, 100)), "noise_multiplier": draw(st.floats(0, 10))}
    dims = draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    sampling = draw(st.sampled_from(["poisson", "iid"]))
    limit = max_step_private(a, min(ps), **public, dim=sum(dims), sampling=sampling)
    gamma = draw(st.floats(0.01, 0.99)) * limit
    return a, gamma, ps, sigmas, {**public, "dims": dims, "sampling": sampling, "steps": draw(st.integers(1, 1000))}


@given(grouped_runs())
def test_groups_with_their_own_moments_are_never_worse(run):
    a, gamma, ps, sigmas, settings = run
    tight = bound_groups(a, gamma, ps, sigmas=sigmas, **settings)
    loose = bound_groups(a, gamma, ps, **settings)
    assert tight.total <= loose.total * (1 + 1e-9)


@given(grouped_runs())
def test_without_moments_it_is_the_flat_theorem_at_the_extreme_quantiles(run):
    a, gamma, ps, _, settings = run
    dims = settings.pop("dims")
    flat = bound_private(a, gamma, min(ps), p_hi=max(ps), dim=sum(dims), **settings)
    assert bound_groups(a, gamma, ps, dims=dims, **settings) == flat


@pytest.mark.parametrize("sigmas", [None, [1.7]])
@pytest.mark.parametrize("q", [1.4, 2.0])
def test_one_group_is_flat_clipping(q, sigmas):
    a = Assumptions(L=2, sigma=1.7, q=q, gap=3)
    run = {"batch_size": 8, "noise_multiplier": 1.5, "steps": 50}
    flat = bound_private(a, 0.01, 0.7, dim=20, **run)
    found = bound_groups(a, 0.01, [0.7], dims=[20], sigmas=sigmas, **run)
    terms = (flat.optimisation, flat.variance, flat.bias, flat.beta, flat.c)
    assert (found.optimisation, found.variance, found.bias, found.beta, found.c) == pytest.approx(terms)


def test_added_noise_by_hand():
    """q = 2: gamma L [ sum s_k^2/(2B) + (z/B)^2 (sum s_k sqrt(d_k / h_k))^2 ] over c, and s_k^2 min(p) h_k/(2 beta)."""
    run = {"dims": [4, 9], "batch_size": 10, "noise_multiplier": 2, "steps": 30}
    found = bound_groups(ONE, 0.02, [0.75, 0.96], 0.4, 0.2, sigmas=[0.6, 0.8], **run)
    noise = (0.6 * 2 / 0.5 + 0.8 * 3 / 0.2) ** 2 * 0.04
    assert found.optimisation == pytest.approx(1 / (0.02 * 30) / 0.2)
    assert found.variance == pytest.approx(0.02 * (1 / 20 + noise) / 0.2)
    assert found.bias == pytest.approx(0.75 * (0.36 * 0.25 + 0.64 * 0.04) / 0.8 / 0.2)


def test_varying_steps_weigh_by_their_size():
    run = {"dims": [4, 9], "batch_size": 10, "noise_multiplier": 2, "sigmas": [0.6, 0.8]}
    constants = {"beta": 0.4, "c": 0.2}
    varying = bound_groups(ONE, [0.01, 0.03], [0.75, 0.96], **constants, **run)
    small, large = (bound_groups(ONE, g, [0.75, 0.96], **constants, **run, steps=1) for g in (0.01, 0.03))
    assert varying.optimisation == pytest.approx(1 / 0.04 / 0.2)
    assert varying.variance == pytest.approx(0.25 * small.variance + 0.75 * large.variance)
    assert varying.bias == pytest.approx(large.bias)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ps": [0.5, 1.0]}, r"ps\[1\] = 1.0 must be in \(0, 1\); give one quantile per group"),
        ({"ps": [0.5]}, r"len\(ps\) = 1 must be len\(dims\) = 2; give one quantile per group"),
        ({"dims": [0, 3]}, r"dims\[0\] = 0.0 must be .*; count the parameters of each group"),
        ({"sigmas": [1.0]}, r"len\(sigmas\) = 1 must be len\(dims\) = 2; give one moment bound per group"),
        ({"sigmas": [0.5, -0.5]}, r"sigmas\[1\] = -0.5 must be finite and >= 0; give one moment bound per group"),
        ({"sigmas": [0.5, 0.5], "gammas": 5.0}, r"gamma = 5.0 must be below .* at p = 0.5; lower the step size"),
        ({"gammas": 5.0}, r"gamma = 5.0 must be below .* at p = 0.5; lower the step size"),
        ({"steps": None}, "steps = None must be a whole number"),
        ({"sampling": "shuffle"}, "sampling = 'shuffle' must be one of 'poisson', 'iid'"),
        ({"noise_multiplier": -1}, "noise_multiplier = -1 must be >= 0"),
        ({"beta": 0.6}, "beta = 0.6 must be at most p = 0.5"),
        ({"sigmas": [0.5, 0.5], "beta": 0}, "beta = 0 must be"),
        ({"sigmas": [0.5, 0.5], "c": 0}, "c = 0 must be"),
    ],
)
def test_bound_groups_refuses(arguments, message):
    good = {"gammas": 0.01, "ps": [0.5, 0.6], "dims": [2, 3], "batch_size": 4, "noise_multiplier": 1, "steps": 10}
    with pytest.raises(ValueError, match=message):
        bound_groups(ONE, **good | arguments)
