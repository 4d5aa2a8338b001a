"""The theorems' bounds: the statements evaluated by hand, the errata's counterexamples, and what must be monotone.

That the theorems hold is checked from first principles in test_first_principles.py.
"""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar

from qclip.simulation.problems import HeavyTailedQuadratic, Pareto
from qclip.simulation.simulate import simulate
from qclip.theory import FORMS, Assumptions, Bound, bias_floor, bound, bound_private, max_step, max_step_private

ONE = Assumptions(L=1, sigma=1, q=2, gap=1)
PUBLIC = {"batch_size": 16, "noise_multiplier": 2.0, "dim": 10}

assumptions = st.builds(
    Assumptions, L=st.floats(0.05, 20), sigma=st.floats(0.01, 10), q=st.floats(1.01, 2), gap=st.floats(0, 50)
)
quantiles = st.floats(0.02, 0.98)
shares = st.floats(0.01, 0.99)
lengths = st.integers(1, 10**6)
forms = st.sampled_from(FORMS)
publics = st.fixed_dictionaries(
    {
        "batch_size": st.floats(1, 500),
        "noise_multiplier": st.floats(0, 20),
        "dim": st.integers(1, 10**4),
        "form": st.sampled_from(["sharp", "corrected"]),
        "sampling": st.sampled_from(["poisson", "iid"]),
    }
)


def theorem_1(a, gammas, ps, beta, c):
    """Equation gen_res of the paper, term by term, divided by c."""
    Gamma = sum(gammas)
    variance = sum(g * (1 - p) ** (-2 / a.q) * 2 * a.L * g for g, p in zip(gammas, ps, strict=True))
    bias = sum(g * (1 - p) ** (-2 / a.q) * (1 - p) ** 2 / beta for g, p in zip(gammas, ps, strict=True))
    return 2 * a.gap / Gamma / c, a.sigma**2 * variance / Gamma / c, a.sigma**2 * bias / Gamma / c


def theorem_2(a, gammas, ps, beta, c, B, z):
    """Equation dp_sgd_res of the paper, with sigma_DP = z/B."""
    Gamma, S = sum(gammas), 1 / B + (z / B) ** 2
    variance = sum(g * (1 - p) ** (-2 / a.q) * 2 * g * a.L * S for g, p in zip(gammas, ps, strict=True))
    bias = sum(g * (1 - p) ** (-2 / a.q) * (1 - p) ** 2 / (2 * beta) for g, p in zip(gammas, ps, strict=True))
    return a.gap / Gamma / c, a.sigma**2 * variance / Gamma / c, a.sigma**2 * bias / Gamma / c


def corrected(a, gammas, ps, beta, c, B, z, d):
    Gamma, S = sum(gammas), 1 / B + d * z**2 / B**2
    variance = sum(g * (1 - p) ** (-2 / a.q) * g * a.L * (S + (1 - p) ** 2) for g, p in zip(gammas, ps, strict=True))
    bias = sum(g * (1 - p) ** (2 - 2 / a.q) / (2 * beta) for g, p in zip(gammas, ps, strict=True))
    return a.gap / Gamma / c, a.sigma**2 * variance / Gamma / c, a.sigma**2 * bias / Gamma / c


def squared_bias(q, p):
    """The largest squared bias over sigma^2 at mean clip factor p."""
    return (p * (1 - p)) ** (2 - 2 / q) / (p ** (q - 1) + (1 - p) ** (q - 1)) ** (2 / q)


def sharp(a, gammas, ps, beta, c, B, z, d):
    Gamma, S_z, q = sum(gammas), d * z**2 / B**2, a.q
    variance = bias = 0.0
    for g, p in zip(gammas, ps, strict=True):
        h = 1 - p
        sampled = 2 ** (1 - q) * (h ** (1 - 2 / q) + (1 - q / 2) * h ** (2 - 2 / q)) / B
        variance += g * g * a.L * (sampled + S_z * h ** (-2 / q))
        bias += g * squared_bias(q, p) / (2 * beta)
    return a.gap / Gamma / c, a.sigma**2 * variance / Gamma / c, a.sigma**2 * bias / Gamma / c


RUN = ([0.01, 0.02, 0.005], [0.6, 0.7, 0.9], 0.3, 0.2)


@pytest.mark.parametrize("q", [1.3, 2.0])
def test_statements_by_hand(q):
    a = Assumptions(L=2, sigma=1.5, q=q, gap=3)
    pairs = [
        (bound(a, *RUN, form="printed"), theorem_1(a, *RUN)),
        (bound(a, *RUN, form="corrected"), corrected(a, *RUN, 1, 0, 1)),
        (bound(a, *RUN), sharp(a, *RUN, 1, 0, 1)),
        (bound_private(a, *RUN, **PUBLIC, form="printed"), theorem_2(a, *RUN, 16, 2)),
        (bound_private(a, *RUN, **PUBLIC, form="corrected"), corrected(a, *RUN, 16, 2, 10)),
        (bound_private(a, *RUN, **PUBLIC), sharp(a, *RUN, 16, 2, 10)),
    ]
    for found, terms in pairs:
        assert (found.optimisation, found.variance, found.bias) == pytest.approx(terms)
        assert (found.beta, found.c) == (0.3, 0.2)


def test_bounded_variance_needs_no_power_of_the_clipped_fraction_without_noise():
    """q = 2, sharp: F0/(gamma T) + s^2 (p h/(2 beta) + gamma L/(2B)), over c."""
    found = bound_private(ONE, 0.1, 0.9, 0.5, 0.2, steps=50, batch_size=4, noise_multiplier=0, dim=1)
    terms = (found.optimisation, found.variance, found.bias)
    assert terms == pytest.approx((1 / 5 / 0.2, 0.1 / 8 / 0.2, 0.9 * 0.1 / 1 / 0.2))


@pytest.mark.parametrize("q", [1.1, 1.5, 2.0])
@pytest.mark.parametrize("p", [0.3, 0.9])
def test_small_steps_leave_the_exact_floor(q, p):
    """Example 1 stands still there (test_lemmas.py): a bias term that is smaller by any factor would be false."""
    a = Assumptions(L=1, sigma=2, q=q, gap=0)
    assert bound(a, 1e-12, p, steps=1).total == pytest.approx(bias_floor(a, p), rel=1e-5)


@pytest.mark.parametrize(("q", "p", "beta", "c"), [(2, 0.8, 0.3, 0.2), (1.4, 0.5, 0.1, 0.3), (1.9, 0.99, 0.9, 0.01)])
def test_largest_steps_by_hand(q, p, beta, c):
    a, B, z, d = Assumptions(L=3, sigma=1, q=q, gap=1), 16, 2, 10
    S_print, S, S_z = 1 / B + (z / B) ** 2, 1 / B + d * (z / B) ** 2, d * (z / B) ** 2
    A = 2 ** (1 - q) * (1 - q / 2)
    room, square = p - beta / 2 - c, p * (p - beta) / 2
    assert max_step(a, p, beta, c, "printed") == pytest.approx((2 * p - beta - c) / (2 * 3))
    assert max_step(a, p, beta, c, "corrected") == pytest.approx(room / (3 * (1 + 1)))
    assert max_step(a, p, beta, c, "sharp") == pytest.approx(min(1, room / (A + square)) / 3)
    at = (a, p, beta, c)
    assert max_step_private(*at, **PUBLIC, form="printed") == pytest.approx(room / (2 * 3 * S_print))
    assert max_step_private(*at, **PUBLIC, form="corrected") == pytest.approx(room / (3 * (1 + S)))
    iid = min(1, room / (S_z + A / B + square))
    poisson = min(1 / (1 + 1 / B), room / (S_z + A / B + (1 + 1 / B) * square))
    assert max_step_private(*at, **PUBLIC, sampling="iid") == pytest.approx(iid / 3)
    assert max_step_private(*at, **PUBLIC, sampling="poisson") == pytest.approx(poisson / 3)


def test_erratum_c_a_large_batch():
    """Deterministic f = x^2/2 from x = 1 at the step the print allows: the left side is 4e50, the bound .001."""
    a, beta, c = Assumptions(L=1, sigma=0, q=2, gap=0.5), 0.2, 0.3
    public = {"batch_size": 100, "noise_multiplier": 0, "dim": 1}
    gamma = max_step_private(a, 0.9, beta, c, **public, form="printed")
    assert gamma == pytest.approx(25)
    x, squares = 1.0, []
    for _ in range(20):
        squares.append(x**2)
        x -= gamma * x
    left = c * np.mean(squares)
    printed = bound_private(a, gamma, 0.9, beta, c, steps=20, **public, form="printed")
    assert printed.total * c == pytest.approx(0.001)
    assert left == pytest.approx(4.2e50, rel=0.01)
    for form in ("corrected", "sharp"):
        with pytest.raises(ValueError, match=r"gamma = 25\.0.* must be at most"):
            bound_private(a, gamma, 0.9, beta, c, steps=20, **public, form=form)


def test_erratum_d_the_dimension():
    """Without sampling noise tau = ||x||, so ||x||^2 grows by (1 - gamma)^2 + d gamma^2 a step, exactly."""
    a, beta, c, d = Assumptions(L=1, sigma=0, q=2, gap=0.5), 0.2, 0.2, 200
    public = {"batch_size": 1, "noise_multiplier": 1, "dim": d}
    gamma = max_step_private(a, 0.5, beta, c, **public, form="printed")
    growth = (1 - gamma) ** 2 + d * gamma**2
    assert (gamma, growth) == pytest.approx((0.05, 1.4025))
    left = c * np.mean(growth ** np.arange(60))
    printed = bound_private(a, gamma, 0.5, beta, c, steps=60, **public, form="printed")
    assert printed.total * c == pytest.approx(1 / 6)
    assert left == pytest.approx(5.4e6, rel=0.01)
    with pytest.raises(ValueError, match=r"gamma = 0\.05.* must be at most"):
        bound_private(a, gamma, 0.5, beta, c, steps=60, **public)


@pytest.mark.parametrize("q", [1.4, 2.0])
def test_erratum_f_the_quantile_that_balances_variance_and_bias(q):
    a, gamma, beta = Assumptions(L=3, sigma=1, q=q, gap=1), 0.002, 0.5

    def both(h):
        found = bound(a, gamma, 1 - h, beta, 0.3, steps=10, form="printed")
        return found.variance + found.bias

    best = minimize_scalar(both, bounds=(1e-3, 0.4), method="bounded", options={"xatol": 1e-9})
    assert best.x == pytest.approx(math.sqrt(2 * gamma * 3 * beta / (q - 1)), rel=1e-4)


@pytest.mark.parametrize(("form", "expected", "digits"), [("printed", 0.1970, 1e-4), ("sharp", 0.0155, 1e-4)])
def test_best_constant_parameters_at_ten_thousand_steps(form, expected, digits):
    """Over gamma, h and beta, with c all that is left: searched on the statements, then asked of the library."""
    T = 10**4

    def statement(point):
        gamma, h, beta = np.exp(point)
        p = 1 - h
        c = 2 * p - beta - 2 * gamma if form == "printed" else p - beta / 2 - gamma * p * (p - beta) / 2
        if c <= 0 or h < 1 / T or beta > p:
            return np.inf
        if form == "printed":
            return (2 / (gamma * T) + 2 * gamma / h + h / beta) / c
        return (1 / (gamma * T) + gamma / 2 + p * h / (2 * beta)) / c

    starts = [(-6, -2, -1), (-5, -4, -2), (-4, -8, -3)]
    options = {"xatol": 1e-10, "fatol": 1e-12, "maxiter": 4000}
    best = min((minimize(statement, x, method="Nelder-Mead", options=options) for x in starts), key=lambda r: r.fun)
    assert best.fun == pytest.approx(expected, abs=digits)
    gamma, h, beta = np.exp(best.x)
    found = bound(ONE, gamma, 1 - h, steps=T, form=form)
    assert found.total == pytest.approx(best.fun, rel=1e-6)
    assert found.beta == pytest.approx(beta, rel=1e-2)


def test_as_p_goes_to_one_the_print_explodes_and_the_sharp_bound_does_not():
    for form, grows in (("printed", True), ("corrected", True), ("sharp", False)):
        near, nearer = (bound(ONE, 0.1, 1 - h, steps=1000, form=form).total for h in (1e-4, 1e-8))
        assert (nearer > 100 * near) == grows


@given(assumptions, quantiles, shares, lengths, forms)
def test_terms_add_up_and_the_dominant_one_is_the_largest(a, p, share, steps, form):
    found = bound(a, share * max_step(a, p, form=form), p, steps=steps, form=form)
    terms = {"optimisation": found.optimisation, "variance": found.variance, "bias": found.bias}
    assert all(term >= 0 for term in terms.values())
    assert found.total == pytest.approx(math.fsum(terms.values()))
    assert terms[found.dominant] == max(terms.values())
    assert 0 < found.beta < 1
    assert 0 < found.c <= 2 * p


def test_one_run_is_markovs_inequality():
    found = Bound(optimisation=0.1, variance=0.2, bias=0.3)
    assert found.one_run() == pytest.approx(0.6 / 0.05)
    assert found.one_run(0.5) == pytest.approx(1.2)
    for confidence in (0, 1, math.nan):
        with pytest.raises(ValueError, match=rf"confidence = {confidence} must be .*; 0.95 is usual"):
            found.one_run(confidence)


@given(assumptions, quantiles, shares, lengths, forms, st.floats(0.001, 1), st.floats(0.01, 1))
def test_chosen_constants_never_beat_the_best_ones(a, p, share, steps, form, beta_share, c_share):
    gamma = share * max_step(a, p, form=form)
    best = bound(a, gamma, p, steps=steps, form=form)
    beta = min(beta_share * p, 0.999)
    assume(gamma < 0.999 * max_step(a, p, beta, form=form))
    free_c = bound(a, gamma, p, beta, steps=steps, form=form)
    assert best.total <= free_c.total * (1 + 1e-9)
    c = c_share * free_c.c * (1 - 1e-9)
    both = bound(a, gamma, p, beta, c, steps=steps, form=form)
    assert free_c.total <= both.total * (1 + 1e-9)
    free_beta = bound(a, gamma, p, c=c, steps=steps, form=form)
    assert best.total * (1 - 1e-9) <= free_beta.total <= both.total * (1 + 1e-9)


@given(assumptions, quantiles, shares, lengths, forms)
def test_the_best_constants_given_back_change_nothing(a, p, share, steps, form):
    gamma = share * max_step(a, p, form=form)
    best = bound(a, gamma, p, steps=steps, form=form)
    again = bound(a, gamma, p, best.beta, best.c, steps=steps, form=form)
    assert again.total == pytest.approx(best.total, rel=1e-12)


@given(
    a=assumptions,
    form=forms,
    ps=st.lists(quantiles, min_size=2, max_size=6),
    data=st.lists(shares, min_size=6, max_size=6),
    last=st.sampled_from([0.5, 0.9, 0.999]),
)
def test_the_best_beta_of_a_varying_run_is_the_best_of_a_dense_grid(a, form, ps, data, last):
    gammas = [share * max_step(a, p, form=form) for p, share in zip(ps, [*data[: len(ps) - 1], last], strict=True)]
    found = bound(a, gammas, ps, form=form)
    assert found.c > 0
    assert found.total > 0

    def total(log_beta):
        try:
            return bound(a, gammas, ps, float(np.exp(log_beta)), form=form).total
        except ValueError:
            return np.inf

    grid = np.linspace(-16, math.log(min(ps) if form == "sharp" else 0.999), 60)
    assert found.total <= min(total(x) for x in grid) * (1 + 1e-6)
    assert found.total == pytest.approx(total(math.log(found.beta)), rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_one_large_step_among_small_ones_keeps_the_bound_positive(form):
    """The large step leaves room for a tiny beta only; the small ones alone would choose a large one."""
    a = Assumptions(L=1, sigma=1, q=1.5, gap=1)
    large = 0.99 * max_step(a, 0.5, form=form)
    found = bound(a, [large] + [large / 100] * 5, 0.5, form=form)
    assert found.c > 0
    assert found.total > bound(a, [large / 100] * 6, 0.5, form=form).total / 100


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("p", [0.6, 0.9])
def test_c_at_its_limit_leaves_no_beta_and_no_bound_below_zero(form, p):
    """With all of the contraction asked for as c, only beta = 0 remains: refused or infinite, never negative."""
    c = 0.45 * p
    gamma = max_step(ONE, p, c=c, form=form)
    try:
        bias = bound(ONE, gamma, p, c=c, steps=100, form=form).bias
    except ValueError:
        bias = math.inf
    assert bias > 0


@pytest.mark.parametrize(("name", "other"), [("beta", {}), ("beta", {"c": 0.1}), ("c", {}), ("c", {"beta": 0.1})])
def test_zero_constants_are_refused(name, other):
    """The theorem has beta and c in (0, 1): at 0 it divides by 0."""
    with pytest.raises(ValueError, match=rf"{name} = 0(\.0)? must be"):
        bound(ONE, 0.01, 0.9, **{name: 0}, **other, steps=10)


@given(assumptions, quantiles, shares, lengths, forms, st.floats(1, 10))
def test_more_gap_more_noise_or_fewer_steps_never_help(a, p, share, steps, form, factor):
    gamma = share * max_step(a, p, form=form)
    base = bound(a, gamma, p, steps=steps, form=form).total * (1 - 1e-9)
    worse_gap = Assumptions(a.L, a.sigma, a.q, a.gap * factor)
    worse_sigma = Assumptions(a.L, a.sigma * factor, a.q, a.gap)
    assert bound(worse_gap, gamma, p, steps=steps, form=form).total >= base
    assert bound(worse_sigma, gamma, p, steps=steps, form=form).total >= base
    assert bound(a, gamma, p, steps=math.ceil(factor * steps), form=form).total * (1 - 1e-9) <= base / (1 - 1e-9)


@given(assumptions, quantiles, shares, lengths, publics, st.integers(1, 10))
def test_more_noise_or_dimensions_or_a_smaller_batch_never_help(a, p, share, steps, public, factor):
    harder = [
        public | {"noise_multiplier": factor * public["noise_multiplier"]},
        public | {"dim": factor * public["dim"]},
        public | {"batch_size": public["batch_size"] / factor},
    ]
    # A step size that all of them allow.
    gamma = share * min(max_step_private(a, p, **each) for each in (public, *harder))
    base = bound_private(a, gamma, p, steps=steps, **public).total
    for each in harder:
        assert bound_private(a, gamma, p, steps=steps, **each).total >= base * (1 - 1e-9)


@given(assumptions, quantiles, shares, lengths)
def test_sharp_is_never_above_corrected(a, p, share, steps):
    gamma = share * max_step(a, p, form="corrected")
    assert bound(a, gamma, p, steps=steps).total <= bound(a, gamma, p, steps=steps, form="corrected").total


@given(assumptions, quantiles, shares, lengths)
def test_sharp_is_never_above_printed(a, p, share, steps):
    gamma = share * max_step(a, p, form="printed")
    assert bound(a, gamma, p, steps=steps).total <= bound(a, gamma, p, steps=steps, form="printed").total


@given(assumptions, quantiles, shares, lengths, publics)
def test_private_sharp_is_never_above_private_corrected(a, p, share, steps, public):
    gamma = share * max_step_private(a, p, **public | {"form": "corrected"})
    below, above = (
        bound_private(a, gamma, p, steps=steps, **public | {"form": form}).total for form in ("sharp", "corrected")
    )
    assert below <= above * (1 + 1e-12)


@given(assumptions, st.lists(quantiles, min_size=4, max_size=4), shares, lengths, publics)
def test_a_wider_interval_for_the_quantile_never_lowers_the_bound(a, levels, share, steps, public):
    outer_lo, inner_lo, inner_hi, outer_hi = sorted(levels)
    gamma = share * max_step_private(a, outer_lo, **public)

    def total(low, high):
        return bound_private(a, gamma, low, steps=steps, p_hi=high, **public).total

    inner = total(inner_lo, inner_hi)
    assert total(inner_lo, outer_hi) >= inner * (1 - 1e-9)
    assert total(outer_lo, inner_hi) >= inner * (1 - 1e-9)


@given(assumptions, quantiles, shares, lengths, forms)
def test_an_exact_quantile_is_an_interval_of_no_width(a, p, share, steps, form):
    gamma = share * max_step(a, p, form=form)
    assert bound(a, gamma, p, p_hi=p, steps=steps, form=form) == bound(a, gamma, p, steps=steps, form=form)


@given(assumptions, quantiles, shares, st.integers(2, 30), forms)
def test_a_constant_sequence_is_a_number_with_steps(a, p, share, steps, form):
    gamma = share * max_step(a, p, form=form)
    scalar = bound(a, gamma, p, steps=steps, form=form)
    for gammas, ps in (([gamma] * steps, [p] * steps), (np.full(steps, gamma), p), (gamma, [p] * steps)):
        found = bound(a, gammas, ps, form=form)
        assert found.total == pytest.approx(scalar.total, rel=1e-12)
        assert found.bias == pytest.approx(scalar.bias, rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_a_schedule_is_the_sequence_of_its_values(form):
    def gamma(t):
        return 0.1 / (t + 1) ** 0.5

    def p(t):
        return 1 - 0.3 / (t + 1) ** 0.5

    gammas, ps = [gamma(t) for t in range(40)], [p(t) for t in range(40)]
    called = bound(ONE, gamma, p, steps=40, p_hi=lambda t: (1 + p(t)) / 2, form=form)
    assert called == bound(ONE, gammas, ps, p_hi=[(1 + p) / 2 for p in ps], form=form)
    assert bound(ONE, gammas, p, steps=40, form=form) == bound(ONE, gammas, ps, form=form)


@pytest.mark.parametrize("form", ["corrected", "sharp"])
@given(a=assumptions, p=quantiles, share=shares, steps=lengths)
def test_one_example_without_noise_is_theorem_1(form, a, p, share, steps):
    gamma = share * max_step(a, p, form=form)
    private = {"batch_size": 1, "noise_multiplier": 0, "dim": 7, "form": form, "sampling": "iid"}
    assert max_step_private(a, p, **private) == max_step(a, p, form=form)
    assert bound_private(a, gamma, p, steps=steps, **private) == bound(a, gamma, p, steps=steps, form=form)


def test_the_scale_of_the_problem_does_not_matter():
    """Measuring x in other units: L, sigma and gap scale, and the bound scales as a squared gradient."""
    unit, scaled = Assumptions(L=1, sigma=1, q=1.6, gap=1), Assumptions(L=4, sigma=6, q=1.6, gap=9)
    for form in FORMS:
        one = bound(unit, 0.1, 0.8, steps=100, form=form)
        other = bound(scaled, 0.1 / 4, 0.8, steps=100, form=form)
        assert other.total == pytest.approx(36 * one.total)
        assert other.beta == pytest.approx(one.beta)


@given(assumptions, quantiles, forms, st.floats(0.01, 0.9), st.floats(0.01, 0.9))
def test_largest_step_is_the_boundary(a, p, form, beta_share, c_share):
    beta = min(beta_share * p, 0.99)
    c = c_share * (p - beta / 2)
    for constants in ({}, {"beta": beta}, {"beta": beta, "c": c}, {"c": c}):
        limit = max_step(a, p, **constants, form=form)
        assert bound(a, limit * (1 - 1e-6), p, **constants, steps=3, form=form).total > 0
        with pytest.raises(ValueError, match=r"^gamma = .* must be (below|at most) .* at p = .*; lower the step size"):
            bound(a, limit * (1 + 1e-6), p, **constants, steps=3, form=form)


@given(assumptions, quantiles, publics, st.floats(0.01, 0.9), st.floats(0.01, 0.9))
def test_largest_private_step_is_the_boundary(a, p, public, beta_share, c_share):
    beta = min(beta_share * p, 0.99)
    for constants in ({}, {"beta": beta}, {"beta": beta, "c": c_share * (p - beta / 2)}):
        limit = max_step_private(a, p, **constants, **public)
        assert bound_private(a, limit * (1 - 1e-6), p, **constants, steps=3, **public).total > 0
        with pytest.raises(ValueError, match=r"must be (below|at most)"):
            bound_private(a, limit * (1 + 1e-6), p, **constants, steps=3, **public)


@pytest.mark.parametrize("form", FORMS)
def test_given_beta_and_c_may_hold_with_equality(form):
    limit = max_step(ONE, 0.7, 0.3, 0.2, form)
    assert bound(ONE, limit, 0.7, 0.3, 0.2, steps=3, form=form).total > 0


def test_the_condition_is_asked_of_every_step():
    with pytest.raises(ValueError, match=r"gamma\[2\] = 0\.9 must be below 0\.2 at p = 0\.2; lower the step size"):
        bound(ONE, [0.1, 0.1, 0.9], [0.9, 0.9, 0.2], form="printed")
    assert bound(ONE, [0.1, 0.1, 0.9], [0.9, 0.9, 0.95], form="printed").total > 0


def test_a_heavy_tailed_run_stays_below_every_form():
    problem, steps = HeavyTailedQuadratic(spectrum=[1.0, 0.3], noise=Pareto(2.5)), 300
    a = problem.assumptions([2.0, 2.0], q=2.0)
    run = simulate(problem, step_size=0.05, p=0.8, steps=steps, x0=[2.0, 2.0], seeds=128, loop="numpy")
    totals = [bound(a, 0.05, 0.8, steps=steps, form=form).total for form in ("sharp", "corrected", "printed")]
    assert run.mean() + 4 * run.standard_error() < totals[0]
    # Not vacuous: the sharp bound is within a factor of 10 of what was measured.
    assert totals[0] < 10 * run.mean()


NOT_QUANTILES = [0, 1, 1.5, -0.2, math.nan]


@pytest.mark.parametrize("p", NOT_QUANTILES)
def test_quantiles_outside_the_unit_interval_are_refused(p):
    message = rf"p = {float(p)} must be in \(0, 1\); .*fraction of examples left unclipped, such as 0.5"
    with pytest.raises(ValueError, match=message):
        bound(ONE, 0.01, p, steps=10)
    with pytest.raises(ValueError, match=rf"p\[1\] = {float(p)} must be in \(0, 1\)"):
        bound_private(ONE, 0.01, [0.5, p], **PUBLIC)
    with pytest.raises(ValueError, match=rf"p_hi = {float(p)} must be in \(0, 1\)"):
        bound(ONE, 0.01, 0.5, p_hi=p, steps=10)
    with pytest.raises(ValueError, match=rf"p = {p} must be (in \(0, 1\)|finite)"):
        max_step(ONE, p)


@pytest.mark.parametrize("gamma", [0, -0.1, math.nan, math.inf])
def test_step_sizes_must_be_positive(gamma):
    with pytest.raises(ValueError, match=rf"gamma = {float(gamma)} must be finite and > 0; a step size is positive"):
        bound(ONE, gamma, 0.5, steps=10)


@pytest.mark.parametrize(
    ("form", "constants", "message"),
    [
        ("printed", (0.9, 0.2), r"beta \+ c = 1\.1 must be at most 2p = 1; lower beta or c, or raise p"),
        ("corrected", (0.6, 0.3), r"beta/2 \+ c = 0\.6 must be at most p = 0\.5; lower beta or c, or raise p"),
        ("sharp", (0.4, 0.4), r"beta/2 \+ c = 0\.6.* must be at most p = 0\.5; lower beta or c, or raise p"),
        ("sharp", (0.6, 0.1), r"beta = 0\.6 must be at most p = 0\.5; lower beta, raise p, or leave beta out"),
        ("sharp", (1.0, None), r"beta = 1\.0 must be in [\[(]0, 1\); beta trades the bias term"),
        ("printed", (-0.1, None), r"beta = -0\.1 must be (in \[0, 1\)|> 0); "),
        ("corrected", (math.nan, None), r"beta = nan must be finite"),
        ("sharp", (None, -0.1), r"c = -0\.1 must be >=? 0; .*leave it out for the best one"),
        ("sharp", (None, math.nan), r"c = nan must be finite"),
    ],
)
def test_impossible_constants_are_refused(form, constants, message):
    with pytest.raises(ValueError, match=message):
        max_step(ONE, 0.5, *constants, form)
    with pytest.raises(ValueError, match=message):
        bound(ONE, 0.001, 0.5, *constants, steps=10, form=form)


def test_the_smallest_quantile_of_a_run_limits_the_constants():
    with pytest.raises(ValueError, match=r"beta = 0\.6 must be at most p = 0\.5"):
        bound(ONE, 0.001, [0.9, 0.5, 0.9], beta=0.6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "steps = None must be a whole number; give the number of steps with these constants"),
        ({"steps": 0}, "steps = 0 must be >= 1"),
        ({"steps": 2.5}, "steps = 2.5 must be a whole number"),
        ({"gammas": lambda t: 0.01}, "steps = None must be a whole number; a schedule gamma needs the number of steps"),
        ({"ps": lambda t: 0.5}, "steps = None must be a whole number; a schedule p needs the number of steps"),
        ({"gammas": [0.01] * 3, "steps": 4}, "steps = 4 must be 3, the number of values given; leave steps out"),
        ({"gammas": [0.01] * 3, "ps": [0.5] * 2}, r"lengths of gammas and ps = \[2, 3\] must be equal; give one value"),
        ({"gammas": []}, r"gamma has shape \(0,\) instead of that of a number or a non-empty 1-D sequence"),
        ({"gammas": [[0.01]]}, r"gamma has shape \(1, 1\) instead of"),
        ({"p_hi": 0.4, "steps": 9}, "p_hi = .* must be at least p = .*; swap the two, or widen"),
        ({"form": "best", "steps": 9}, "form = 'best' must be one of 'sharp', 'corrected', 'printed'; check the spell"),
    ],
)
def test_runs_that_do_not_add_up_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        bound(ONE, **{"gammas": 0.01, "ps": 0.5} | arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", 0, "batch_size = 0 must be > 0; it is the expected number of examples a step"),
        ("batch_size", math.inf, "batch_size = inf must be finite"),
        ("noise_multiplier", -1, "noise_multiplier = -1 must be >= 0; 0 means no noise"),
        ("noise_multiplier", math.nan, "noise_multiplier = nan must be finite"),
        ("dim", 0, "dim = 0 must be >= 1; it is the number of trainable parameters"),
        ("dim", 1.5, "dim = 1.5 must be a whole number"),
        ("sampling", "uniform", "sampling = 'uniform' must be one of 'poisson', 'iid'; check the spelling"),
        ("form", "exact", "form = 'exact' must be one of 'sharp', 'corrected', 'printed'"),
    ],
)
def test_public_constants_are_checked(name, value, message):
    with pytest.raises(ValueError, match=message):
        bound_private(ONE, 0.01, 0.5, steps=10, **PUBLIC | {name: value})
    with pytest.raises(ValueError, match=message):
        max_step_private(ONE, 0.5, **PUBLIC | {name: value})


def test_too_large_a_step_names_the_limit():
    limit = max_step(ONE, 0.5, 0.2, 0.1, "printed")
    with pytest.raises(ValueError, match=rf"gamma = 0\.6 must be at most {limit:.6g} at p = 0\.5; .* or c"):
        bound(ONE, 0.6, 0.5, 0.2, 0.1, steps=10, form="printed")
