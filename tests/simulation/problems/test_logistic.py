"""Logistic regression on a finite data set: every oracle against a loop over the examples."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from qclip.simulation.problems import Logistic
from qclip.theory import lemma1_bias, lemma1_threshold, lemma2_descent

DATA = {
    "light": Logistic.generate(40, 3, np.random.default_rng(0)),
    "heavy": Logistic.generate(25, 4, np.random.default_rng(1), tail=1.5, ridge=0.1),
    "wide": Logistic.generate(6, 8, np.random.default_rng(2), ridge=1e-3),
}
problems = pytest.mark.parametrize("problem", DATA.values(), ids=DATA.keys())
seeds = st.integers(0, 10**6)


def at(problem: Logistic, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=problem.dim) * rng.choice([0.1, 1, 5])


def by_hand(problem: Logistic, x: np.ndarray) -> np.ndarray:
    """All example gradients, one at a time, [n, d]."""
    rows = []
    for a, y in zip(problem.features, problem.labels, strict=True):
        margin = y * float(np.dot(a, x))
        rows.append(-y / (1 + math.exp(margin)) * a + problem.ridge * x)
    return np.array(rows)


def gradients(problem: Logistic, x: np.ndarray) -> np.ndarray:
    return problem.example_gradients(x, np.arange(len(problem.labels)))


@problems
@given(seed=seeds)
def test_grad_is_the_derivative_of_loss(problem, seed):
    x, step = at(problem, seed), 1e-5
    shifts = step * np.eye(problem.dim)
    difference = (problem.loss(x + shifts) - problem.loss(x - shifts)) / (2 * step)
    np.testing.assert_allclose(problem.grad(x), difference, rtol=1e-5, atol=1e-8)


@problems
@given(seed=seeds)
def test_loss_and_gradients_example_by_example(problem, seed):
    x = at(problem, seed)
    margins = problem.labels * (problem.features @ x)
    loss = sum(math.log1p(math.exp(-m)) for m in margins) / len(margins) + problem.ridge / 2 * float(x @ x)
    assert problem.loss(x) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(gradients(problem, x), by_hand(problem, x), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(by_hand(problem, x).mean(0), problem.grad(x), rtol=1e-10, atol=1e-13)


def test_large_margins_do_not_overflow():
    problem = Logistic(np.array([[1000.0], [-1000.0]]), np.array([1.0, 1.0]), ridge=0.1)
    x = np.array([5.0])
    assert problem.loss(x) == pytest.approx(2500 + 0.05 * 25)
    np.testing.assert_allclose(gradients(problem, x), [[0.5], [1000.5]])


@problems
@given(seed=seeds, p=st.floats(0.001, 0.999))
def test_quantile_is_found_by_sorting_the_norms(problem, seed, p):
    x = at(problem, seed)
    norms = sorted(np.linalg.norm(by_hand(problem, x), axis=1))
    rank = next(k for k in range(1, len(norms) + 1) if k / len(norms) >= p - 1e-12)
    assert problem.quantile(x, p) == pytest.approx(norms[rank - 1], rel=1e-9)


@pytest.mark.parametrize("k", range(1, 20))
def test_quantile_at_a_multiple_of_one_over_n_is_the_lower_one(k):
    problem = Logistic.generate(20, 3, np.random.default_rng(3))
    x = np.array([0.3, -1.0, 0.5])
    norms = np.sort(np.linalg.norm(gradients(problem, x), axis=1))
    assert problem.quantile(x, k / 20) == pytest.approx(norms[k - 1], rel=1e-12)


@problems
def test_the_quantile_is_reached_and_nothing_below_it_is(problem):
    """P(||g|| <= tau) >= p >= P(||g|| < tau), to rounding."""
    rng = np.random.default_rng(4)
    n = len(problem.labels)
    for x in rng.normal(size=(100, problem.dim)):
        norms = np.linalg.norm(gradients(problem, x), axis=1)
        for p in (1 / n, 0.5, 1 - 1 / n):
            tau = problem.quantile(x, p)
            assert (norms < tau * (1 - 1e-12)).mean() < p <= (norms <= tau * (1 + 1e-12)).mean() + 1e-12


@problems
@given(seed=seeds, share=st.floats(0.05, 1.5))
def test_clip_moments_are_means_over_the_examples(problem, seed, share):
    x = at(problem, seed)
    g = by_hand(problem, x)
    norms = np.linalg.norm(g, axis=1)
    tau = share * norms.max()
    clipped = np.array([row if size <= tau else row * (tau / size) for row, size in zip(g, norms, strict=True)])
    moments = problem.clip_moments(x, tau)
    assert moments.mean_factor == pytest.approx(np.mean([min(1, tau / size) for size in norms]), rel=1e-10)
    np.testing.assert_allclose(moments.mean, clipped.mean(0), rtol=1e-9, atol=1e-13)
    assert moments.second_moment == pytest.approx((clipped**2).sum() / len(g), rel=1e-10)


@problems
def test_L_bounds_the_gradients_lipschitz_constant(problem):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(3000, problem.dim)) * rng.choice([0.01, 1, 10], size=(3000, 1))
    y = x + rng.normal(size=x.shape) * rng.choice([1e-3, 1, 10], size=(3000, 1))
    ratio = np.linalg.norm(problem.grad(x) - problem.grad(y), axis=-1) / np.linalg.norm(x - y, axis=-1)
    assert ratio.max() <= problem.L * (1 + 1e-9)
    # At 0 the Hessian is a quarter of the second moment plus the ridge: L is attained along its top direction.
    _, vectors = np.linalg.eigh(problem.features.T @ problem.features)
    step = 1e-5 * vectors[:, -1]
    reached = np.linalg.norm(problem.grad(step) - problem.grad(-step)) / 2e-5
    assert reached == pytest.approx(problem.L, rel=1e-6)


@problems
def test_the_minimiser_against_a_general_optimiser(problem):
    found = optimize.minimize(problem.loss, np.ones(problem.dim), jac=problem.grad, method="BFGS", tol=1e-10)
    np.testing.assert_allclose(problem.minimiser, found.x, rtol=1e-4, atol=1e-4)
    assert np.linalg.norm(problem.grad(problem.minimiser)) < 1e-12 * (1 + np.linalg.norm(problem.minimiser))
    assert problem.f_inf == pytest.approx(found.fun, rel=1e-9)
    assert problem.f_inf <= found.fun + 1e-15


def test_the_minimiser_of_separable_data():
    problem = Logistic(np.array([[1.0], [2.0], [-1.5]]), np.array([1.0, 1.0, -1.0]), ridge=1e-6)
    assert abs(problem.grad(problem.minimiser)[0]) < 1e-12
    assert problem.minimiser[0] > 5


@problems
@given(seed=seeds, q=st.floats(1.01, 2))
def test_sigma_bounds_the_moment_at_every_point(problem, seed, q):
    x = at(problem, seed)
    deviation = by_hand(problem, x) - by_hand(problem, x).mean(0)
    moment = (np.linalg.norm(deviation, axis=1) ** q).mean() ** (1 / q)
    assert problem.sigma_at(x, q) == pytest.approx(moment, rel=1e-9)
    assert moment <= problem.sigma(q) * (1 + 1e-12)


@problems
def test_sampling_is_uniform_over_the_examples(problem):
    n = len(problem.labels)
    drawn = problem.draw(np.random.default_rng(6), (100, 1000))
    counts = np.bincount(drawn.ravel(), minlength=n)
    assert counts.size == n
    assert np.all(np.abs(counts - 1e5 / n) <= 5 * np.sqrt(1e5 / n * (1 - 1 / n)))  # 5 standard errors
    x = np.random.default_rng(7).normal(size=(2, problem.dim))
    assert problem.sample_gradients(x, 5, np.random.default_rng(8)).shape == (2, 5, problem.dim)


@problems
@given(
    seed=seeds,
    p=st.floats(0.02, 0.98),
    q=st.floats(1.05, 2),
    gamma=st.floats(0.001, 2),
    beta=st.floats(0.01, 1),
)
def test_lemmas_hold_by_enumeration(problem, seed, p, q, gamma, beta):
    x = at(problem, seed)
    a = problem.assumptions(x, q)
    full = problem.grad(x)
    G = float(np.linalg.norm(full))
    tau = float(problem.quantile(x, p))
    assert tau <= lemma1_threshold(a, p, G) * (1 + 1e-12)
    g = by_hand(problem, x)
    factor = np.minimum(1, tau / np.linalg.norm(g, axis=1))
    clipped = factor[:, None] * g
    assert factor.mean() >= p - 1e-12
    assert np.linalg.norm(clipped.mean(0) - factor.mean() * full) <= lemma1_bias(a, p) * (1 + 1e-12)
    descent = problem.loss(x - gamma * clipped).mean() - problem.loss(x)
    assert descent <= lemma2_descent(a, gamma, p, G, beta=beta) + 1e-12
    assert descent <= lemma2_descent(a, gamma, p, G, beta=beta, mean_factor=min(float(factor.mean()), 1.0)) + 1e-12


def test_generated_data_have_the_tail_asked_for():
    rng = np.random.default_rng(9)
    light, heavy = Logistic.generate(5000, 3, rng), Logistic.generate(5000, 3, rng, tail=1.5)
    assert light.dim == heavy.dim == 3
    sizes = [np.linalg.norm(problem.features, axis=1) for problem in (light, heavy)]
    assert sizes[0].max() < 5
    assert sizes[1].max() > 20
    assert set(light.labels) == {-1.0, 1.0}
    assert light.loss(light.minimiser) < light.loss(np.zeros(3)) - 0.01  # the labels follow a model


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((np.ones((3, 2)), np.ones(2)), "features"),
        ((np.ones(3), np.ones(3)), "features"),
        ((np.ones((0, 2)), np.ones(0)), "features"),
        ((np.array([[np.nan]]), np.ones(1)), "features"),
        ((np.ones((2, 1)), np.array([0.0, 1.0])), "labels"),
        ((np.ones((2, 1)), np.array([-1.0, 1.0]), 0.0), "ridge"),
    ],
)
def test_bad_arguments_are_named(arguments, name):
    with pytest.raises(ValueError, match=f"^{name} "):
        Logistic(*arguments)
