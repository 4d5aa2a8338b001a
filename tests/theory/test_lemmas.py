"""The lemmas at hand-computed values and where they are attained (that they hold: test_first_principles.py)."""

import math

import numpy as np
import pytest

from qclip.theory import Assumptions, bias_floor, lemma1_bias, lemma1_threshold, lemma2_descent, squared_bias

ONE = Assumptions(L=1, sigma=1, q=2, gap=1)


def moment(values, weights, q):
    return float(weights @ np.abs(values) ** q) ** (1 / q)


@pytest.mark.parametrize(
    ("q", "p", "threshold", "bias"),
    [(2, 0.75, 3 + 2 * 2, 2 * 0.5), (2, 0.99, 3 + 2 * 10, 2 * 0.1), (1.5, 0.875, 3 + 2 * 4, 2 * 0.5)],
)
def test_lemma_1_by_hand(q, p, threshold, bias):
    a = Assumptions(L=1, sigma=2, q=q, gap=1)
    assert lemma1_threshold(a, p, grad_norm=3) == pytest.approx(threshold)
    assert lemma1_bias(a, p) == pytest.approx(bias)


@pytest.mark.parametrize("q", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_lemma_1_threshold_is_attained(p, q):
    # 0, or +-1 with a total weight of a little more than 1 - p: the p-quantile of the norm is 1.
    clipped = (1 - p) * (1 + 1e-9)
    values, weights = np.array([0.0, 1.0, -1.0]), np.array([1 - clipped, clipped / 2, clipped / 2])
    a = Assumptions(L=1, sigma=moment(values, weights, q), q=q, gap=0)
    assert lemma1_threshold(a, p, grad_norm=0) == pytest.approx(1, rel=1e-8)


@pytest.mark.parametrize("q", [1.5, 2.0])
def test_lemma_1_bias_is_attained(q):
    # 1 with probability h and -h/(1-h) otherwise: the first is clipped almost to 0, the mean of the rest stays.
    h = 1e-9
    values, weights = np.array([1.0, -h / (1 - h)]), np.array([h, 1 - h])
    clipped_mean = float(weights @ np.array([h / (1 - h), -h / (1 - h)]))
    a = Assumptions(L=1, sigma=moment(values, weights, q), q=q, gap=0)
    assert abs(clipped_mean) == pytest.approx(lemma1_bias(a, 1 - h), rel=1e-4)


@pytest.mark.parametrize("q", [1.1, 1.5, 2.0])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.7, 0.99])
def test_the_exact_bias_is_attained(p, q):
    """A jump against which the other gradient vanishes: tau = 0, so all of the jump is clipped away."""
    h = 1 - p
    values, weights = np.array([1.0, -h / p]), np.array([h, p])
    sigma = moment(values, weights, q)
    gradients = values + h / p  # 1/p with probability h, else 0
    mean_factor = p  # of the clip at tau = 0
    bias = 0 - mean_factor * float(weights @ gradients)
    assert bias**2 == pytest.approx(sigma**2 * squared_bias(q, p))
    a = Assumptions(L=1, sigma=sigma, q=q, gap=0)
    # Where it stands still, the gradient is that of the example: the floor is attained, too.
    assert float(weights @ gradients) ** 2 == pytest.approx(bias_floor(a, p))


@pytest.mark.parametrize("q", [1.01, 1.2, 1.5, 2.0])
def test_the_exact_bias_is_below_lemma_1_and_falls_relative_to_the_factor(q):
    p = np.linspace(0.001, 0.999, 999)
    assert (squared_bias(q, p) < (1 - p) ** (2 - 2 / q)).all()
    assert (np.diff(squared_bias(q, p) / p) < 0).all()


def test_lemma_2_by_hand():
    # -gamma (p - beta/2 - gamma L) G^2 + gamma h^(2-2/q) s^2 / (2 beta) + gamma^2 L s^2 h^(-2/q)
    a = Assumptions(L=2, sigma=3, q=2, gap=1)
    value = lemma2_descent(a, gamma=0.1, p=0.75, grad_norm=2, beta=0.5)
    assert value == pytest.approx(-0.1 * (0.75 - 0.25 - 0.2) * 4 + 0.1 * 0.25 * 9 / 1 + 0.01 * 2 * 9 * 4)


def test_lemma_2_splits_the_bias_tightly():
    """A rare far atom against the gradient, a tiny step and the best beta: f falls by what the lemma says."""
    h, far = 1e-5, 1.0
    G = 3 * h * far
    values, weights = np.array([G + far, G - far * h / (1 - h)]), np.array([h, 1 - h])
    factors = np.array([abs(values[1]) / values[0], 1.0])
    mean, alpha = float(weights @ (factors * values)), float(weights @ factors)
    a = Assumptions(L=1, sigma=moment(values - G, weights, 2), q=2, gap=0)
    gamma, beta = 1e-12, abs(mean - alpha * G) / G
    exact = -gamma * G * mean
    assert exact < 0
    assert lemma2_descent(a, gamma, 1 - h, G, beta=beta, mean_factor=alpha) == pytest.approx(exact, rel=1e-2)


def test_lemma_2_is_better_with_the_mean_factor_known():
    arguments = {"gamma": 0.1, "p": 0.5, "grad_norm": 2.0, "beta": 0.5}
    assert lemma2_descent(ONE, **arguments, mean_factor=0.5) == lemma2_descent(ONE, **arguments)
    difference = lemma2_descent(ONE, **arguments) - lemma2_descent(ONE, **arguments, mean_factor=0.8)
    assert difference == pytest.approx(0.1 * 0.3 * 4)


def test_without_noise_only_the_descent_is_left():
    quiet = Assumptions(L=1, sigma=0, q=1.5, gap=1)
    assert lemma1_bias(quiet, 0.5) == 0
    assert lemma1_threshold(quiet, 0.5, 7) == 7
    assert lemma2_descent(quiet, 0.1, 0.5, 1.0, beta=0.2) == pytest.approx(-0.1 * (0.5 - 0.1 - 0.1))


@pytest.mark.parametrize("p", [0, 1, -0.5, math.nan])
def test_quantile_outside_the_unit_interval_is_refused(p):
    for call in (
        lambda: lemma1_threshold(ONE, p, 1),
        lambda: lemma1_bias(ONE, p),
        lambda: lemma2_descent(ONE, 0.1, p, 1, beta=0.5),
    ):
        with pytest.raises(ValueError, match=rf"p = {p} must be (in \(0, 1\)|finite); .*unclipped, such as 0.5"):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 0}, "gamma = 0 must be > 0; a step size is positive"),
        ({"beta": 0}, "beta = 0 must be > 0; it splits the clipping bias"),
        ({"grad_norm": -1}, "grad_norm = -1 must be >= 0"),
        ({"mean_factor": 1.5}, r"mean_factor = 1.5 must be in \[0, 1\]; it is E min"),
    ],
)
def test_lemma_2_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        lemma2_descent(ONE, **{"gamma": 0.1, "p": 0.5, "grad_norm": 1, "beta": 0.5} | change)


def test_lemma_1_refuses_a_negative_norm():
    with pytest.raises(ValueError, match="grad_norm = -1 must be >= 0"):
        lemma1_threshold(ONE, 0.5, -1)
