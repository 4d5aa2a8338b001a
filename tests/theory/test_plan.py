"""The planner against searches over the written-out bound, and its own answers against each other."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import differential_evolution

from qclip import accounting
from qclip.theory import Assumptions, Privacy, bound, bound_private, max_step_private, plan

ONE = Assumptions(L=1, sigma=1, q=2, gap=1)
NOISY = {"batch_size": 64, "dim": 1000, "noise_multiplier": 2.0}


def squared_bias(q, p):
    """The largest squared bias over sigma^2 at mean clip factor p."""
    return (p * (1 - p)) ** (2 - 2 / q) / (p ** (q - 1) + (1 - p) ** (q - 1)) ** (2 / q)


def sharp(a, gamma_L, h, beta, steps, *, batch_size=1, dim=1, noise_multiplier=0.0, sampling="iid"):
    """The sharp bound at constant parameters, over arrays; infinite where the theorem is silent."""
    q, p, B, S_z = a.q, 1 - h, batch_size, dim * (noise_multiplier / batch_size) ** 2
    repeat = 1 + 1 / B if sampling == "poisson" else 1.0
    A = 2 ** (1 - q) * (1 - q / 2) / B
    c = p - beta / 2 - gamma_L * (S_z + A + repeat * p * (p - beta) / 2)
    variance = 2 ** (1 - q) * (h ** (1 - 2 / q) + (1 - q / 2) * h ** (2 - 2 / q)) / B + S_z * h ** (-2 / q)
    top = a.gap * a.L / (gamma_L * steps) + a.sigma**2 * (squared_bias(q, p) / (2 * beta) + gamma_L * variance)
    return np.where((c > 0) & (gamma_L <= 1 / repeat) & (beta <= p), top / np.where(c > 0, c, 1), np.inf)


def searched(a, steps, **public):
    """The least sharp bound over gamma, h >= 1/(steps batch_size) and beta."""

    def total(point):
        log_gamma, log_h, share = point
        h = np.exp(log_h)
        value = sharp(a, np.exp(log_gamma), h, share * (1 - h), steps, **public)
        return np.log(np.minimum(value, 1e300))

    box = [(-25, 0), (-math.log(steps * public.get("batch_size", 1)), -1e-6), (1e-6, 1)]
    found = differential_evolution(total, box, seed=0, tol=1e-12, maxiter=400)
    return math.exp(found.fun)


@pytest.mark.parametrize(
    ("a", "steps", "public"),
    [
        (ONE, 10_000, {}),
        (Assumptions(L=3, sigma=0.5, q=1.5, gap=2), 1000, {}),
        (Assumptions(L=1, sigma=5, q=1.2, gap=1), 300, {"batch_size": 8}),
        (ONE, 1000, {**NOISY, "sampling": "poisson"}),
        (Assumptions(L=2, sigma=3, q=1.4, gap=0.1), 5000, {**NOISY, "sampling": "iid"}),
        (Assumptions(L=1, sigma=0.01, q=2, gap=100), 50, {**NOISY, "sampling": "poisson"}),
    ],
)
def test_no_search_finds_a_better_plan(a, steps, public):
    found = plan(a, steps=steps, **public)
    assert found.bound.total == pytest.approx(searched(a, steps, **public), rel=1e-4)


@settings(max_examples=30)
@given(
    a=st.builds(
        Assumptions, L=st.floats(0.05, 20), sigma=st.floats(0.01, 10), q=st.floats(1.05, 2), gap=st.floats(0.01, 50)
    ),
    steps=st.integers(2, 10**6),
    z=st.sampled_from([0.0, 0.5, 8.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_random_parameters_beat_the_plan(a, steps, z, seed):
    public = {"batch_size": 32, "dim": 100, "noise_multiplier": z, "sampling": "poisson"}
    found = plan(a, steps=steps, **public)
    rng = np.random.default_rng(seed)
    h = np.exp(rng.uniform(-math.log(32 * steps), 0, 5000))
    gamma_L = np.exp(rng.uniform(-15, 0, 5000))
    totals = sharp(a, gamma_L, h, rng.uniform(0, 1, 5000) * (1 - h), steps, **public)
    # And around the plan, where it matters.
    near = np.exp(rng.normal(0, 0.1, (3, 1000)))
    h_near = np.clip((1 - found.p) * near[1], 1 / (32 * steps), 0.999)
    beta = np.minimum(found.bound.beta * near[2], 1 - h_near)
    close = sharp(a, found.gamma * a.L * near[0], h_near, beta, steps, **public)
    assert found.bound.total <= min(totals.min(), close.min()) * (1 + 1e-6)


def test_the_reference_value():
    found = plan(ONE, steps=10_000)
    assert found.bound.total == pytest.approx(0.0155, abs=5e-5)
    assert found.at_edge
    assert found.p == pytest.approx(1 - 1e-4)


@pytest.mark.parametrize("public", [{}, NOISY])
def test_the_plan_is_a_bound_at_its_own_parameters(public):
    found = plan(ONE, steps=2000, **public)
    again = bound_private(
        ONE, found.gamma, found.p, steps=2000, sampling=found.sampling,
        **{"batch_size": 1, "dim": 1, "noise_multiplier": 0} | public,
    )  # fmt: skip
    assert found.bound == again
    assert found.gamma < found.max_step
    assert found.max_step == max_step_private(
        ONE, found.p, batch_size=found.batch_size, noise_multiplier=found.noise_multiplier, dim=found.dim,
        sampling=found.sampling,
    )  # fmt: skip


def test_sampling_is_poisson_in_private_plans_only():
    assert plan(ONE, steps=10).sampling == "iid"
    assert plan(ONE, steps=10, **NOISY).sampling == "poisson"
    assert plan(ONE, steps=10, sampling="poisson").sampling == "poisson"
    assert plan(ONE, steps=10, **NOISY, sampling="iid").sampling == "iid"


def test_noise_keeps_the_quantile_away_from_one():
    """Without noise the bound would clip nothing; with it tau, and so p, has a price."""
    quiet, noisy = plan(ONE, steps=10_000), plan(ONE, steps=10_000, **NOISY)
    assert (quiet.at_edge, noisy.at_edge) == (True, False)
    assert 0.5 < noisy.p < quiet.p


def test_without_gradient_noise_the_plan_is_gradient_descent():
    """sigma = 0: only F0/(gamma T c) is left, least at gamma = 1/L and the largest p, where c = p - p^2/2."""
    found = plan(Assumptions(L=2, sigma=0, q=2, gap=3), steps=100)
    p = 1 - 1 / 100
    assert found.bound.total == pytest.approx(3 * 2 / (100 * (p - p**2 / 2)), rel=1e-4)


def test_closed_forms_of_a_private_plan():
    """k = S_z/T, T large: h = [2 beta sqrt(F0 L k)/((q-1) s)]^(q/(2q-1)) and gamma T = sqrt(F0/(k L)) h^(1/q)/s."""
    a, T, k = Assumptions(L=2, sigma=1.5, q=1.6, gap=3), 10**15, 1e-13
    found = plan(a, steps=T, batch_size=100, dim=10, noise_multiplier=100 * math.sqrt(k * T / 10))
    beta = found.bound.beta
    h = (2 * beta * math.sqrt(3 * 2 * k) / (0.6 * 1.5)) ** (1.6 / 2.2)
    assert 1 - found.p == pytest.approx(h, rel=0.02)
    assert found.gamma * T == pytest.approx(math.sqrt(3 / (k * 2)) * (1 - found.p) ** (1 / 1.6) / 1.5, rel=0.02)


@pytest.mark.parametrize("public", [{}, NOISY])
@pytest.mark.parametrize("target", [0.5, 0.05, 0.011])
def test_a_target_takes_the_fewest_steps_that_reach_it(target, public):
    found = plan(ONE, target=target, **public)
    assert found.bound.total <= target
    assert found == plan(ONE, steps=found.steps, **public)
    assert plan(ONE, steps=found.steps - 1, **public).bound.total > target


def test_the_steps_of_a_bound_are_found_again():
    for steps in (7, 500, 12_345):
        reached = plan(ONE, steps=steps).bound.total
        assert plan(ONE, target=reached * (1 + 1e-9)).steps == steps


def test_longer_plans_are_better_plans():
    totals = [plan(ONE, steps=steps, **NOISY).bound.total for steps in (2, 10, 100, 1000, 10**6)]
    assert totals == sorted(totals, reverse=True)


def sequences(coupled, steps):
    t = np.arange(1, steps + 1)
    return coupled.step_size * t**coupled.step_exponent, 1 - coupled.clipped_fraction * t**coupled.clipped_exponent


@pytest.mark.parametrize(
    ("a", "steps", "rel"),
    [(ONE, 500, 1e-9), (ONE, 20_000, 1e-3), (Assumptions(L=2, sigma=3, q=1.5, gap=1), 700, 1e-9)],
)
def test_coupled_bound_is_that_of_its_sequences(a, steps, rel):
    coupled = plan(a, steps=steps).coupled()
    gammas, ps = sequences(coupled, steps)
    assert coupled.bound.total == pytest.approx(bound(a, gammas, ps).total, rel=rel)


def test_coupled_exponents_are_the_sharp_ones():
    coupled = plan(Assumptions(L=1, sigma=1, q=1.5, gap=1), steps=100).coupled()
    assert (coupled.step_exponent, coupled.clipped_exponent) == pytest.approx((-0.6, -0.6))
    assert not coupled.constant_p


def test_coupled_private_plans_keep_the_quantile():
    base = plan(ONE, steps=500, **NOISY)
    coupled = base.coupled()
    assert coupled.constant_p
    assert coupled.step_exponent == -0.5
    gammas, ps = sequences(coupled, 500)
    explicit = bound_private(ONE, gammas, ps, **NOISY)
    assert coupled.bound.total == pytest.approx(explicit.total, rel=1e-9)
    assert coupled.bound.total >= base.bound.total


@pytest.mark.parametrize("a", [ONE, Assumptions(L=2, sigma=6, q=1.3, gap=0.5)])
def test_coupled_constants_are_near_the_best_ones(a):
    """A search over g, h and beta on the statement, step by step, finds nothing noticeably better."""
    steps = 400
    coupled = plan(a, steps=steps).coupled()
    t, q = np.arange(1, steps + 1), a.q

    def total(point):
        g, h = np.exp(point[:2])
        gamma_L, ht = g * t**coupled.step_exponent, h * t**coupled.clipped_exponent
        p, beta = 1 - ht, point[2] * (1 - h)
        A = 2 ** (1 - q) * (1 - q / 2)
        c = np.min(p - beta / 2 - gamma_L * (A + p * (p - beta) / 2))
        if c <= 0 or gamma_L[0] > 1:
            return 700.0
        variance = 2 ** (1 - q) * (ht ** (1 - 2 / q) + (1 - q / 2) * ht ** (2 - 2 / q))
        noise = gamma_L @ (squared_bias(q, p) / (2 * beta) + gamma_L * variance)
        return math.log((a.gap * a.L + a.sigma**2 * noise) / gamma_L.sum() / c)

    box = [(-12, 0), (-math.log(steps), -1e-6), (1e-6, 1)]
    best = math.exp(differential_evolution(total, box, seed=0, tol=1e-10, maxiter=300).fun)
    assert best * (1 - 1e-6) <= coupled.bound.total <= 1.01 * best


@pytest.mark.parametrize("steps", [2, 3, 10])
def test_coupled_short_runs(steps):
    base = plan(ONE, steps=steps)
    coupled = base.coupled()
    assert coupled.bound.total == pytest.approx(bound(ONE, *sequences(coupled, steps)).total, rel=1e-9)


def test_moves_are_the_plans_they_name():
    base = plan(ONE, steps=2000, **NOISY)
    named = {
        "twice the steps": plan(ONE, steps=4000, **NOISY),
        "twice the gradient noise sigma": plan(replace(ONE, sigma=2), steps=2000, **NOISY),
        "twice the gap f(x0) - inf f": plan(replace(ONE, gap=2), steps=2000, **NOISY),
        "twice the noise multiplier": plan(ONE, steps=2000, **NOISY | {"noise_multiplier": 4.0}),
    }
    moves = {move.change: move for move in base.moves()}
    assert moves.keys() == named.keys()
    for name, other in named.items():
        assert moves[name].step_size == pytest.approx(other.gamma / base.gamma)
        assert moves[name].clipped_fraction == pytest.approx((1 - other.p) / (1 - base.p))
        assert moves[name].bound == pytest.approx(other.bound.total / base.bound.total)
    assert moves["twice the steps"].bound < 1
    assert all(move.bound > 1 for name, move in moves.items() if name != "twice the steps")


def test_moves_of_a_long_run_follow_the_rate():
    """q = 2, no noise: everything is sqrt(F0 L s^2 / T), with gamma proportional to sqrt(F0/(L s^2 T))."""
    moves = {move.change: move for move in plan(ONE, steps=10**9).moves()}
    root = math.sqrt(2)
    assert moves["twice the steps"].bound == pytest.approx(1 / root, rel=0.01)
    assert moves["twice the steps"].step_size == pytest.approx(1 / root, rel=0.01)
    assert moves["twice the gap f(x0) - inf f"].bound == pytest.approx(root, rel=0.01)
    assert moves["twice the gradient noise sigma"].bound == pytest.approx(2, rel=0.01)
    assert "twice the noise multiplier" not in moves


def test_a_budget_sets_the_noise():
    budget = Privacy(epsilon=0.5, delta=1e-5, examples=6400)
    found = plan(ONE, steps=1000, batch_size=64, dim=100, privacy=budget)
    spent = accounting.epsilon(noise_multiplier=found.noise_multiplier, sample_rate=0.01, steps=1000, delta=1e-5)
    assert 0.49 < spent <= 0.5
    assert found.privacy == budget
    same = plan(ONE, steps=1000, batch_size=64, dim=100, noise_multiplier=found.noise_multiplier)
    assert (found.gamma, found.p, found.bound) == (same.gamma, same.p, same.bound)
    # Twice the steps cost more noise, twice the examples less.
    moves = {move.change: move.bound for move in found.moves()}
    fixed_noise = plan(ONE, steps=2000, batch_size=64, dim=100, noise_multiplier=found.noise_multiplier)
    assert moves["twice the steps"] > fixed_noise.bound.total / found.bound.total
    assert moves["twice the examples"] < 1


@pytest.mark.slow
def test_a_budget_and_a_target_set_the_steps():
    budget = Privacy(epsilon=2, delta=1e-5, examples=50_000)
    found = plan(ONE, target=0.1, batch_size=256, dim=100, privacy=budget)
    assert found.bound.total <= 0.1
    fewer = plan(ONE, steps=math.floor(0.95 * found.steps), batch_size=256, dim=100, privacy=budget)
    assert fewer.bound.total > 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"steps = None and target = None do not give one length; pass one of them"),
        ({"steps": 10, "target": 0.1}, r"steps = 10 and target = 0.1 do not give one length"),
        ({"steps": 1}, "steps = 1 must be >= 2; a plan needs at least 2 steps"),
        ({"steps": 2.5}, "steps = 2.5 must be a whole number"),
        ({"target": 0}, "target = 0 must be > 0; it is a value of the mean"),
        ({"target": math.nan}, "target = nan must be finite"),
        ({"steps": 9, "batch_size": 0}, "batch_size = 0 must be > 0"),
        ({"steps": 9, "dim": 0}, "dim = 0 must be >= 1"),
        ({"steps": 9, "noise_multiplier": -1}, "noise_multiplier = -1 must be >= 0"),
        ({"steps": 9, "sampling": "shuffle"}, "sampling = 'shuffle' must be one of 'poisson', 'iid'"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(ONE, **arguments)


@pytest.mark.parametrize(
    ("budget", "others", "message"),
    [
        ((0, 1e-5, 1000), {}, "epsilon = 0 must be > 0; it is the privacy budget"),
        ((1, 1.0, 1000), {}, r"delta = 1.0 must be in \(0, 1\); well below 1/\(dataset size\)"),
        ((1, 1e-5, 0), {}, "examples = 0 must be >= 1; it is the size of the dataset"),
        ((1, 1e-5, 10), {"batch_size": 20}, "batch_size = 20.0 must be at most examples = 10; lower the batch size"),
        ((1, 1e-5, 10), {"noise_multiplier": 1}, "noise_multiplier = 1 was given with privacy; pass"),
    ],
)
def test_refuses_budgets(budget, others, message):
    with pytest.raises(ValueError, match=message):
        plan(ONE, steps=10, privacy=Privacy(*budget), **others)


def test_a_target_out_of_reach_is_refused_with_what_can_be_reached():
    with pytest.raises(
        ValueError, match=r"target = 1e-12 must be above [0-9.e-]+, the bound at [0-9,]+ steps; .*raise"
    ):
        plan(ONE, target=1e-12)


def test_a_run_that_starts_at_the_minimum_needs_no_plan():
    with pytest.raises(ValueError, match=r"gap = 0.0 must be > 0; a run that starts at the minimum needs no plan"):
        plan(Assumptions(L=1, sigma=1, q=2, gap=0), steps=10)


def test_a_delta_that_allows_revealing_examples_is_warned_about(monkeypatch):
    monkeypatch.setattr(Privacy, "noise_multiplier", lambda self, batch_size, steps: 1.0)
    with pytest.warns(UserWarning, match=r"delta = 0.01 is not below 1/examples = 0.001"):
        plan(ONE, steps=10, batch_size=10, privacy=Privacy(1.0, 0.01, 1000))


def test_very_long_plans_have_schedules_too():
    found = plan(ONE, target=1e-5)
    assert found.bound.total <= 1e-5
    assert np.isfinite(found.coupled().bound.total)
