"""The certificate of a finished run: by hand, above what a simulation measures, and with honest margins."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from qclip.simulation.problems import HeavyTailedQuadratic, Pareto
from qclip.simulation.simulate import simulate
from qclip.theory import Assumptions, bound_private, certificate

ONE = Assumptions(L=1, sigma=1, q=2, gap=1)
PUBLIC = {"batch_size": 8, "noise_multiplier": 2.0, "dim": 5}


def mean_clipped(a, found):
    """hbar, read off the bias term s^2 hbar^(2-2/q) / (2 beta c)."""
    return (found.bias * 2 * found.beta * found.c / a.sigma**2) ** (1 / (2 - 2 / a.q))


@pytest.mark.parametrize("q", [1.4, 2.0])
def test_by_hand(q):
    a, B, z, d = Assumptions(L=2, sigma=1.5, q=q, gap=3), 8, 2.0, 5
    gammas, taus, clipped = np.array([0.1, 0.2, 0.05]), np.array([1.0, 2.0, 0.5]), np.array([0.1, 0.3, 0.2])
    Gamma, p, S = gammas.sum(), 0.7, 1 / B + d * z**2 / B**2
    hbar = (gammas @ clipped) / Gamma

    def terms(beta):
        c = min(p - beta / 2 - gamma * 2 * p * (p - beta) / 2 for gamma in gammas)
        noise = 2 * S / (2 * Gamma) * sum(gamma**2 * tau**2 for gamma, tau in zip(gammas, taus, strict=True))
        return np.array([3 / Gamma, noise, 1.5**2 * hbar ** (2 - 2 / q) / (2 * beta)]) / c

    best = minimize_scalar(lambda beta: terms(beta).sum(), bounds=(1e-6, p), method="bounded", options={"xatol": 1e-10})
    found = certificate(a, gammas, taus, clipped, batch_size=B, noise_multiplier=z, dim=d)
    assert found.total == pytest.approx(best.fun)
    assert (found.optimisation, found.variance, found.bias) == pytest.approx(terms(found.beta))


@pytest.mark.slow
def test_above_the_measured_mean_and_below_the_theorem():
    """The setting of the example in the theory: d = 50, B = 16, z = 4, p = .9, with exact quantiles as thresholds."""
    problem, steps, gamma, p = HeavyTailedQuadratic(50, Pareto(2.5, 0.5)), 300, 0.02, 0.9
    x0, public = np.full(50, 0.3), {"batch_size": 16, "noise_multiplier": 4.0}
    a = problem.assumptions(x0)
    run = simulate(
        problem, step_size=gamma, p=p, steps=steps, x0=x0, seeds=16, record=range(steps), sampling="poisson", **public
    )
    # The certificate bounds an expectation, in which tau_t^2 enters by its mean over runs.
    taus = np.sqrt((run.tau[:-1] ** 2).mean(axis=1))
    found = certificate(a, gamma, taus, np.full(steps, 1 - p), **public, dim=50)
    assert run.mean() + 4 * run.standard_error() < found.total < 5 * run.mean()
    assert found.total < bound_private(a, gamma, p, steps=steps, **public, dim=50, form="corrected").total


@given(
    st.lists(st.tuples(st.floats(0.01, 0.9), st.floats(0, 0.8)), min_size=1, max_size=10), st.floats(1.05, 2)
)  # fmt: skip
def test_only_the_weighted_mean_of_the_clipped_fraction_matters(rows, q):
    a = Assumptions(L=1, sigma=2, q=q, gap=1)
    gammas, clipped = np.array(rows).T
    taus = np.ones_like(gammas)
    mean = gammas @ clipped / gammas.sum()
    varying = certificate(a, gammas, taus, clipped, p_lo=0.1, **PUBLIC)
    constant = certificate(a, gammas, taus, np.full_like(gammas, mean), p_lo=0.1, **PUBLIC)
    assert varying.total == pytest.approx(constant.total)
    # Jensen: the mean of h^(2-2/q), which the theorem sums, is at most the power of the mean.
    assert gammas @ clipped ** (2 - 2 / q) / gammas.sum() <= mean ** (2 - 2 / q) * (1 + 1e-9)


@given(st.floats(1.1, 5), st.sampled_from(["gap", "sigma", "taus", "clipped", "z"]))
def test_everything_bad_makes_it_larger(factor, what):
    def evaluate(**scale):
        a = Assumptions(L=1, sigma=scale.get("sigma", 1), q=1.5, gap=scale.get("gap", 1))
        taus, clipped = np.full(20, scale.get("taus", 1.0)), np.full(20, 0.1 * scale.get("clipped", 1.0))
        return certificate(a, 0.1, taus, clipped, batch_size=8, noise_multiplier=scale.get("z", 1.0), dim=5).total

    assert evaluate(**{what: factor}) > evaluate()


def test_longer_runs_and_larger_batches_certify_more():
    def evaluate(steps, batch_size):
        taus, clipped = np.ones(steps), np.full(steps, 0.1)
        return certificate(ONE, 0.1, taus, clipped, batch_size=batch_size, noise_multiplier=1, dim=5).total

    assert evaluate(200, 8) < evaluate(100, 8)
    assert evaluate(100, 16) < evaluate(100, 8)


def test_a_known_lower_bound_replaces_the_lowest_fraction():
    fractions = [0.1, 0.4, 0.1]
    measured = certificate(ONE, 0.1, np.ones(3), fractions, **PUBLIC)
    assert certificate(ONE, 0.1, np.ones(3), fractions, p_lo=0.6, **PUBLIC) == measured
    assert certificate(ONE, 0.1, np.ones(3), fractions, p_lo=0.5, **PUBLIC).total > measured.total


@given(st.floats(0.01, 0.8))
def test_a_beta_fixed_beforehand_never_beats_the_best_one(beta):
    record = 0.1, np.ones(3), [0.1, 0.2, 0.1]
    best, fixed = certificate(ONE, *record, **PUBLIC), certificate(ONE, *record, **PUBLIC, beta=beta)
    assert fixed.beta == beta
    assert fixed.total >= best.total * (1 - 1e-12)


def test_nothing_clipped_leaves_no_bias():
    found = certificate(ONE, 0.1, np.ones(3), np.zeros(3), **PUBLIC)
    assert found.bias == 0
    assert found.c == pytest.approx(1 - 0.1 / 2)


def test_one_group_is_flat_and_groups_pay_for_their_thresholds():
    taus, clipped = np.array([1.0, 2.0]), np.array([0.1, 0.2])
    flat = certificate(ONE, 0.1, taus, clipped, **PUBLIC)
    assert certificate(ONE, 0.1, taus[:, None], clipped[:, None], **PUBLIC | {"dim": [5]}) == flat
    # Two groups of dimensions 4 and 9, thresholds 1 and 2: tau^2 (1/B + d z^2/B^2) becomes 5/B + (z/B)^2 (2 + 6)^2.
    rows = np.array([[1.0, 2.0], [1.0, 2.0]]), np.array([[0.1, 0.2], [0.2, 0.05]])
    grouped = certificate(ONE, 0.1, *rows, **PUBLIC | {"dim": [4, 9]})
    assert grouped.variance * grouped.c == pytest.approx(0.1 / 2 * (5 / 8 + 64 * 4 / 64))
    assert mean_clipped(ONE, grouped) == pytest.approx(0.2)  # of the most clipped group, at each step


def test_margins_of_the_mean_and_of_each_step():
    """Two statements share the 5 %: the mean is widened by 1.96 of its standard error, p_lo by the union over steps."""
    steps, std = 400, 0.03
    exact = certificate(ONE, 1e-6, np.ones(steps), np.full(steps, 0.2), **PUBLIC)
    noisy = certificate(ONE, 1e-6, np.ones(steps), np.full(steps, 0.2), **PUBLIC, fraction_std=std)
    assert mean_clipped(ONE, exact) == pytest.approx(0.2)
    assert mean_clipped(ONE, noisy) == pytest.approx(0.2 + 1.95996 * std / 20, abs=1e-5)
    # With gamma L near 0, c = p_lo - beta/2.
    assert noisy.c + noisy.beta / 2 == pytest.approx(0.8 - 3.8357 * std, abs=1e-4)


def test_margins_cover():
    """Over many noisy recordings the widened mean and every step's p_lo hold together as often as promised."""
    rng, steps, std, confidence = np.random.default_rng(0), 50, 0.05, 0.8
    truth, gammas = rng.uniform(0.1, 0.4, steps), 1e-6 * rng.uniform(0.5, 1, steps)
    mean, held = gammas @ truth / gammas.sum(), 0
    for _ in range(1000):
        recorded = truth + std * rng.standard_normal(steps)
        found = certificate(
            ONE, gammas, np.ones(steps), recorded, **PUBLIC, fraction_std=std, confidence=confidence
        )  # fmt: skip
        held += mean_clipped(ONE, found) >= mean and found.c + found.beta / 2 <= 1 - truth.max() + 1e-5
    assert held / 1000 >= confidence


def test_more_confidence_costs_more():
    totals = [
        certificate(ONE, 0.1, np.ones(50), np.full(50, 0.2), **PUBLIC, fraction_std=0.05, confidence=level).total
        for level in (0.5, 0.9, 0.99)
    ]
    assert totals == sorted(totals)
    assert totals[0] < totals[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gammas": 1.5}, r"gamma = 1.5 must be below 1 at p = 0.8; lower the step size"),
        ({"gammas": 0}, "gammas = 0.0 must be finite and > 0; a step size is positive"),
        (
            {"gammas": [0.1] * 3},
            r"shapes of gammas \(3,\), .* do not fit together; give one row per step and one column per group",
        ),
        ({"taus": [1.0]}, r"shapes of .*taus \(1, 1\), clipped_fractions \(2, 1\)"),
        ({"dim": [1, 2]}, r"shapes of .*dim \(2,\)"),
        ({"taus": [1.0, 0.0]}, "taus = 0.0 must be finite and > 0 at every step; check the record"),
        ({"taus": [1.0, math.nan]}, "taus = nan must be finite and > 0"),
        ({"taus": [1.0, math.inf]}, "taus = inf must be finite and > 0"),
        ({"taus": 1.0}, r"taus has shape \(\) instead of \[steps\] or \[steps, groups\]; record each step"),
        ({"clipped_fractions": [0.1, math.nan]}, "clipped_fractions has NaN or infinite entries"),
        ({"clipped_fractions": [0.1, 1.0]}, r"lowest unclipped fraction .* must be in \(0, 1\]; pass p_lo"),
        ({"fraction_std": 0.5}, r"lowest unclipped fraction .* must be in \(0, 1\]; .*record less noisy fractions"),
        ({"fraction_std": -0.1}, "fraction_std = -0.1 must be >= 0; it is a standard deviation"),
        ({"confidence": 1}, r"confidence = 1 must be in \(0, 1\); 0.95 is usual"),
        ({"p_lo": 0}, r"p_lo = 0 must be in \(0, 1\]; it bounds every unclipped fraction from below"),
        ({"beta": 0}, r"beta = 0 must be"),
        ({"beta": 0.9}, r"beta = 0.9 must be at most p = 0.8; lower beta, raise p, or leave beta out"),
        ({"batch_size": 0}, "batch_size = 0 must be > 0"),
        ({"noise_multiplier": -1}, "noise_multiplier = -1 must be >= 0"),
        ({"dim": 0}, "dim = 0.* must be .*; count the parameters"),
    ],
)
def test_refuses(change, message):
    good = {"gammas": 0.1, "taus": [1.0, 2.0], "clipped_fractions": [0.1, 0.2], **PUBLIC}
    with pytest.raises(ValueError, match=message):
        certificate(ONE, **good | change)


def test_a_record_that_cannot_be_is_refused():
    good = {"batch_size": 4, "noise_multiplier": 0, "dim": 1}
    with pytest.raises(ValueError, match=r"clipped_fractions = -0.5 must be in \[0, 1\]; give fraction_std"):
        certificate(Assumptions(L=1, sigma=1, q=2, gap=1), 0.1, [1.0, 1.0], [-0.5, 0.2], **good)
    with pytest.raises(ValueError, match=r"p_lo = 0.9 must be at most 0.5, the lowest recorded fraction; lower it"):
        certificate(Assumptions(L=1, sigma=1, q=2, gap=1), 0.1, [1.0, 1.0], [0.5, 0.2], p_lo=0.9, **good)
