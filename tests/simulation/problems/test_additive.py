"""Additive-noise problems: their oracles against differences, samples, brute force and the paper's lemmas.

Monte Carlo checks use fixed seeds and allow 5 standard errors (see test_noise).
"""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qclip.simulation.problems import (
    Bernoulli,
    Gaussian,
    HeavyTailedQuadratic,
    NonConvex,
    Pareto,
    ShiftedQuadratic,
    StudentT,
    TwoPoint,
)
from qclip.theory import Assumptions, lemma1_bias, lemma1_threshold, lemma2_descent

SPECTRUM = [3.0, 1.0, 0.2]
CENTRE = [0.5, -1.0, 2.0]
PROBLEMS = {
    "quadratic, gaussian": HeavyTailedQuadratic(spectrum=SPECTRUM, centre=CENTRE, noise=Gaussian(0.7)),
    "quadratic, student": HeavyTailedQuadratic(spectrum=SPECTRUM, centre=CENTRE, noise=StudentT(4.5, 0.6)),
    "quadratic, pareto": HeavyTailedQuadratic(spectrum=SPECTRUM, noise=Pareto(4.5, 0.4)),
    "quadratic, one-sided": HeavyTailedQuadratic(spectrum=SPECTRUM, noise=Pareto(4.5, 0.4, one_sided=True)),
    "wells, gaussian": NonConvex(spectrum=SPECTRUM, centre=CENTRE, noise=Gaussian(0.7)),
    "wells, one-sided": NonConvex(spectrum=SPECTRUM, noise=Pareto(4.5, 0.4, one_sided=True)),
    "wells, bernoulli": NonConvex(2, Bernoulli(2.0, 0.3)),
    "shifted": ShiftedQuadratic(jump=3.0, probability=0.25),
    "two-point": TwoPoint(r=2.0, omega=0.7),
}
problems = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
coordinates = st.lists(st.floats(-3, 3), min_size=3, max_size=3)


def place(problem, values) -> np.ndarray:
    return np.array(values[: problem.dim])


@problems
@given(values=coordinates)
def test_grad_is_the_derivative_of_loss(problem, values):
    x, step = place(problem, values), 1e-5
    shifts = step * np.eye(problem.dim)
    difference = (problem.loss(x + shifts) - problem.loss(x - shifts)) / (2 * step)
    np.testing.assert_allclose(problem.grad(x), difference, rtol=1e-6, atol=1e-8)


@problems
def test_L_bounds_the_gradients_lipschitz_constant_and_is_attained(problem):
    rng = np.random.default_rng(0)
    x = problem.minimiser + rng.normal(size=(2000, problem.dim)) * rng.choice([0.01, 1, 10], size=(2000, 1))
    y = x + rng.normal(size=x.shape) * rng.choice([1e-3, 1, 10], size=(2000, 1))
    ratio = np.linalg.norm(problem.grad(x) - problem.grad(y), axis=-1) / np.linalg.norm(x - y, axis=-1)
    assert ratio.max() <= problem.L * (1 + 1e-9)
    # At the minimiser, along the steepest coordinate, every one of these reaches L.
    step = np.zeros(problem.dim)
    step[np.argmax(problem.spectrum)] = 1e-4
    reached = np.linalg.norm(problem.grad(problem.minimiser + step)) / 1e-4
    assert reached == pytest.approx(problem.L, rel=1e-6)


@problems
@given(values=coordinates)
def test_the_minimiser_is_stationary_and_lowest(problem, values):
    best = problem.minimiser
    assert best.shape == (problem.dim,)
    np.testing.assert_allclose(problem.grad(best), 0, atol=1e-15)
    assert problem.loss(best) == pytest.approx(problem.f_inf, abs=1e-15)
    assert problem.loss(place(problem, values)) >= problem.f_inf


@problems
def test_example_gradients_average_to_grad_and_spread_by_sigma(problem):
    rng = np.random.default_rng(1)
    for _ in range(3):
        x = rng.normal(size=problem.dim)
        g = problem.sample_gradients(x, 100_000, rng)
        assert g.shape == (100_000, problem.dim)
        deviation = g - problem.grad(x)
        error = deviation.std(0) / np.sqrt(len(g))
        assert np.all(np.abs(deviation.mean(0)) <= 5 * error + 1e-12)
        for q in (1.2, 2.0):
            powers = np.linalg.norm(deviation, axis=1) ** q
            assert abs(powers.mean() - problem.sigma(q) ** q) <= 5 * powers.std() / np.sqrt(len(g)) + 1e-12


@problems
def test_points_may_be_stacked(problem):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 4, problem.dim))
    tau = problem.quantile(x, 0.8)
    assert problem.loss(x).shape == tau.shape == (2, 4)
    assert problem.grad(x).shape == problem.clip_moments(x, tau).mean.shape == x.shape
    assert problem.sample_gradients(x, 5, rng).shape == (2, 4, 5, problem.dim)
    assert problem.loss(x)[1, 2] == problem.loss(x[1, 2])
    assert tau[1, 2] == pytest.approx(problem.quantile(x[1, 2], 0.8), rel=1e-12)


@problems
def test_quantile_and_moments_describe_the_sampled_gradients(problem):
    rng = np.random.default_rng(3)
    x = problem.minimiser + rng.normal(size=problem.dim)
    g = problem.sample_gradients(x, 200_000, rng)
    norms = np.linalg.norm(g, axis=1)
    for p in (0.55, 0.9):
        tau = problem.quantile(x, p)
        error = 5 * np.sqrt(p * (1 - p) / norms.size)
        assert (norms <= tau * (1 + 1e-12)).mean() >= p - error
        assert (norms < tau * (1 - 1e-12)).mean() <= p + error
        clipped = g * np.minimum(1, tau / norms)[:, None]
        mean = problem.clip_moments(x, tau).mean
        assert np.all(np.abs(clipped.mean(0) - mean) <= 5 * clipped.std(0) / np.sqrt(len(g)) + 1e-12)


# The lemmas


LEMMA_PROBLEMS = {
    "gaussian": HeavyTailedQuadratic(10, Gaussian(0.5)),
    "gaussian on the line": HeavyTailedQuadratic(1, Gaussian(0.5)),
    "gaussian in the plane": HeavyTailedQuadratic(2, Gaussian(0.5)),
    "student": HeavyTailedQuadratic(3, StudentT(2.5, 0.5)),
    "heavy student": HeavyTailedQuadratic(3, StudentT(1.7, 0.5)),
    "pareto": HeavyTailedQuadratic(3, Pareto(1.7, 0.5)),
    "one-sided pareto": HeavyTailedQuadratic(3, Pareto(1.7, 0.5, one_sided=True)),
    "bernoulli": HeavyTailedQuadratic(3, Bernoulli(2.0, 0.1)),
    "shifted": ShiftedQuadratic(jump=3.0, probability=0.25),
    "two-point": TwoPoint(r=2.0, omega=0.7),
}
lemma_problems = pytest.mark.parametrize("problem", LEMMA_PROBLEMS.values(), ids=LEMMA_PROBLEMS.keys())


def at_random(problem, size: float, turn: int, q: float) -> tuple[np.ndarray, Assumptions]:
    """A point at this distance from the minimiser, and the constants there."""
    assume(np.isfinite(problem.sigma(q)))
    direction = np.random.default_rng(turn).normal(size=problem.dim)
    x = problem.minimiser + size * direction / np.linalg.norm(direction)
    return x, problem.assumptions(x, q)


settings_of_lemmas = given(
    size=st.just(0.0) | st.floats(1e-3, 10),
    turn=st.integers(0, 20),
    p=st.floats(0.03, 0.98),
    q=st.floats(1.05, 2),
    gamma=st.floats(0.001, 2),
    beta=st.floats(0.01, 1),
)


@lemma_problems
@settings_of_lemmas
def test_lemmas_hold_at_random_points(problem, size, turn, p, q, gamma, beta):
    """Lemma 1 twice and Lemma 2, whose left side is exact for a unit spectrum: f(x - gv) is quadratic in v."""
    x, a = at_random(problem, size, turn, q)
    gradient = problem.grad(x)
    G = float(np.linalg.norm(gradient))
    tau = float(problem.quantile(x, p))
    moments = problem.clip_moments(x, tau)
    slack = 1e-4 * (tau + a.sigma)  # the quadrature of clip_moments
    assert tau <= lemma1_threshold(a, p, G) * (1 + 1e-9)
    assert np.linalg.norm(moments.mean - moments.mean_factor * gradient) <= lemma1_bias(a, p) + slack
    assert p <= moments.mean_factor + 1e-4
    descent = -gamma * gradient @ moments.mean + gamma**2 / 2 * moments.second_moment
    factor = min(float(moments.mean_factor), 1.0)
    tolerance = gamma * (G + gamma * tau) * slack + 1e-12
    assert descent <= lemma2_descent(a, gamma, p, G, beta=beta, mean_factor=factor) + tolerance
    assert descent <= lemma2_descent(a, gamma, p, G, beta=beta) + tolerance


@settings_of_lemmas
def test_lemma2_on_the_wells_by_enumeration_of_the_atoms(size, turn, p, q, gamma, beta):
    problem = NonConvex(2, Bernoulli(2.0, 0.3))
    x, a = at_random(problem, size, turn, q)
    gradient = problem.grad(x)
    atoms = np.array([[1.4, 0.0], [-0.6, 0.0]]) + gradient
    tau = problem.quantile(x, p)
    norms = np.linalg.norm(atoms, axis=1)
    after = problem.loss(x - gamma * atoms * np.minimum(1, tau / np.maximum(norms, 1e-300))[:, None])
    descent = 0.3 * after[0] + 0.7 * after[1] - problem.loss(x)
    assert descent <= lemma2_descent(a, gamma, p, float(np.linalg.norm(gradient)), beta=beta) + 1e-12


def test_lemma1_is_attained():
    """A rare jump at a zero gradient, clipped to the common atom: the bias nears its bound as the jump gets rarer."""
    h = 0.2
    problem = HeavyTailedQuadratic(1, Bernoulli(1.0, h))
    a = problem.assumptions(np.zeros(1))
    p = 1 - h
    tau = problem.quantile(np.zeros(1), p)
    bias = abs(problem.clip_moments(np.zeros(1), tau).mean[0])
    # s = sqrt(h(1-h)), so the bound on the bias is h sqrt(1-h); the bias is h(1-h) - h^2 = h(1-2h).
    assert bias == pytest.approx(h * (1 - 2 * h), rel=1e-12)
    assert lemma1_bias(a, p) == pytest.approx(h * np.sqrt(1 - h), rel=1e-12)
    # As h falls the ratio tends to 1: the constant of the lemma cannot be lowered.
    ratios = []
    for rare in (1e-2, 1e-4, 1e-6):
        problem = HeavyTailedQuadratic(1, Bernoulli(1.0, rare))
        tau = problem.quantile(np.zeros(1), 1 - rare)
        bias = abs(problem.clip_moments(np.zeros(1), tau).mean[0])
        ratios.append(bias / lemma1_bias(problem.assumptions(np.zeros(1)), 1 - rare))
    assert 0.98 < ratios[0] < ratios[1] < ratios[2] <= 1


# The paper's Example 1


def qc_step(problem, x, p: float) -> np.ndarray:
    """The expected QC-SGD step at each x, [n]."""
    x = np.asarray(x, dtype=float)[:, None]
    return problem.clip_moments(x, problem.quantile(x, p)).mean[:, 0]


@pytest.mark.parametrize(
    ("p", "roots"), [(0.3, (-2.0, 0.0)), (0.5, (-2.0,)), (0.7, (-2.0,)), (0.71, (-1.4,)), (0.9, (-1.4,))]
)
def test_two_point_fixed_points_are_all_the_roots_of_the_step(p, roots):
    problem = TwoPoint(r=2, omega=0.7)
    assert sorted(problem.fixed_points(p)) == pytest.approx(sorted(roots))
    np.testing.assert_allclose(qc_step(problem, problem.fixed_points(p), p), 0, atol=1e-12)
    grid = np.arange(-4000, 2001) / 1000
    found = grid[np.abs(qc_step(problem, grid, p)) < 1e-9]
    np.testing.assert_allclose(found, roots)


@pytest.mark.parametrize("omega", [0.55, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95])
def test_two_point_fixed_points_at_the_mass_of_the_rarer_function(omega):
    """0 is a root at p = 1 - omega, where x^2/2 alone reaches the quantile (1 - 0.9 < 0.1 as floats)."""
    problem = TwoPoint(r=1, omega=omega)
    p = round(1 - omega, 10)
    assert abs(qc_step(problem, [0.0], p)[0]) < 1e-12
    assert problem.fixed_points(p) == (-1.0, 0.0)


@pytest.mark.parametrize("p", [0.3, 0.5, 0.7, 0.71, 0.9])
def test_the_printed_fixed_point_is_no_fixed_point(p):
    problem = TwoPoint(r=2, omega=0.7)
    printed = problem.printed_fixed_point()
    assert printed == pytest.approx(-7 / 3)
    assert abs(qc_step(problem, [printed], p)[0]) > 0.1


@given(p=st.floats(0.51, 0.99), r=st.floats(0.1, 10))
def test_two_point_bias_at_omega_equal_to_p(p, r):
    """Erratum A: G^2 = s^2 h / p there."""
    problem = TwoPoint(r=r, omega=p)
    (x,) = problem.fixed_points(p)
    square = float(problem.grad(np.array([x]))[0] ** 2)
    assert square == pytest.approx(problem.sigma(2) ** 2 * (1 - p) / p, rel=1e-9)
    assert square == pytest.approx((r * (1 - p)) ** 2, rel=1e-9)


@given(x=st.floats(-5, 5), r=st.floats(0.1, 5), omega=st.floats(0.51, 0.99))
def test_two_point_is_the_mixture_of_its_two_functions(x, r, omega):
    problem = TwoPoint(r=r, omega=omega)
    point = np.array([x])
    assert problem.loss(point) == pytest.approx(omega * (x + r) ** 2 / 2 + (1 - omega) * x**2 / 2, abs=1e-12)
    atoms = np.array([[r * (1 - omega)], [-r * omega]])
    jumped, stayed = problem.example_gradients(point, atoms)[:, 0]
    assert (jumped, stayed) == pytest.approx((x + r, x), abs=1e-12)
    assert problem.grad(point)[0] == pytest.approx(omega * jumped + (1 - omega) * stayed, abs=1e-12)


# Koloskova et al.'s example


@given(jump=st.floats(0.1, 20), probability=st.floats(0.05, 0.95), tau=st.floats(0.05, 30))
def test_shifted_fixed_point_is_the_root_of_the_clipped_mean(jump, probability, tau):
    problem = ShiftedQuadratic(jump, probability)
    x = np.array([problem.fixed_point(tau)])
    assert abs(problem.clip_moments(x, tau).mean[0]) <= 1e-9 * (1 + tau)
    if abs(probability - 0.5) > 1e-3:  # the mean rises through it; at 1/2 it may be flat
        assert problem.clip_moments(x - 0.01, tau).mean[0] < 0 < problem.clip_moments(x + 0.01, tau).mean[0]


@pytest.mark.parametrize(
    ("jump", "probability", "tau", "expected"),
    [
        (10.0, 0.25, 1.0, -1 / 3),  # -p c / (1 - p)
        (10.0, 0.2, 2.0, -0.5),
        (10.0, 0.75, 1.0, -10 + 1 / 3),  # its mirror
        (1.0, 0.25, 5.0, -0.25),  # nothing is clipped: the minimiser
    ],
)
def test_shifted_fixed_point_in_closed_form(jump, probability, tau, expected):
    assert ShiftedQuadratic(jump, probability).fixed_point(tau) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("tau", [0.0, -1.0, np.nan])
def test_shifted_fixed_point_refuses_a_threshold_that_is_none(tau):
    for probability in (0.25, 0.8):
        with pytest.raises(ValueError, match=r"^tau = "):
            ShiftedQuadratic(1.0, probability).fixed_point(tau)


# Arguments


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (HeavyTailedQuadratic, "dim"),
        (lambda: HeavyTailedQuadratic(2, spectrum=[1.0, 2.0, 3.0]), "lengths of dim, spectrum, centre"),
        (lambda: HeavyTailedQuadratic(spectrum=[1.0, 2.0], centre=[0.0]), "lengths of dim, spectrum, centre"),
        (lambda: HeavyTailedQuadratic(spectrum=[1.0, -1.0]), "spectrum"),
        (lambda: HeavyTailedQuadratic(spectrum=[0.0, 0.0]), "spectrum"),
        (lambda: NonConvex(spectrum=[1.0, np.nan]), "spectrum"),
        (lambda: NonConvex(2, centre=[0.0, np.nan]), "centre"),
        (lambda: ShiftedQuadratic(-1.0, 0.5), "jump"),
        (lambda: ShiftedQuadratic(1.0, 1.5), "probability"),
        (lambda: TwoPoint(0.0, 0.7), "r"),
        (lambda: TwoPoint(1.0, 0.5), "omega"),
        (lambda: TwoPoint(1.0, 0.7).fixed_points(1.0), "p"),
        (lambda: HeavyTailedQuadratic(3).point(np.zeros(2)), "x"),
        (lambda: HeavyTailedQuadratic(3).point(1.0), "x"),
        (lambda: HeavyTailedQuadratic(3, Pareto(1.5)).assumptions(np.zeros(3)), "q"),
    ],
)
def test_bad_arguments_are_named(make, name):
    with pytest.raises(ValueError, match=f"^{name} (= |has )"):
        make()


def test_dim_spectrum_and_centre_fill_in_for_each_other():
    assert HeavyTailedQuadratic(spectrum=[1.0, 0.5]).dim == 2
    assert HeavyTailedQuadratic(centre=[1.0, 0.5, 0.0]).dim == 3
    np.testing.assert_array_equal(HeavyTailedQuadratic(3, centre=[1.0, 0.5, 0.0]).spectrum, [1, 1, 1])
    assert TwoPoint(2.0, 0.7).point(1.5).shape == (1,)


def test_assumptions_collect_the_constants():
    problem = HeavyTailedQuadratic(spectrum=SPECTRUM, noise=Gaussian(0.7))
    x0 = np.array([1.0, 1.0, 1.0])
    a = problem.assumptions(x0)
    assert (a.L, a.q, a.gap) == (3.0, 2.0, pytest.approx(2.1))
    assert a.sigma == pytest.approx(0.7 * np.sqrt(3))
    stacked = problem.assumptions(np.stack([x0, 2 * x0]))
    assert stacked.gap == pytest.approx(8.4)  # the worst start
