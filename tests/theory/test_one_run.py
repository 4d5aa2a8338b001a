"""The certificate of one run: each exponential inequality against brute force, and what the bound depends on."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import gammaln

from qclip.simulation.problems import Gaussian, HeavyTailedQuadratic
from qclip.theory import Assumptions, one_run_certificate, weighted_certificate
from qclip.theory.one_run import REACH, SPREAD, _excess

ONE = Assumptions(L=1, sigma=0.5, q=2, gap=1)
PUBLIC = {"batch_size": 16, "noise_multiplier": 1, "dim": 10}
RECORD = 0.02, np.full(2000, 0.6), np.full(2000, 0.2)


def bounded_laws(rng, count):
    """Laws of two or three atoms in the unit disc, some at its edge."""
    for _ in range(count):
        n = rng.integers(2, 4)
        atoms = rng.normal(size=(n, 2))
        atoms /= np.maximum(np.linalg.norm(atoms, axis=1, keepdims=True), 1e-9) / rng.choice([1.0, 0.3], size=(n, 1))
        yield atoms, rng.dirichlet(np.ones(n) * rng.choice([0.3, 1.0]))


def sums(atoms, weights, size):
    """The sum of ``size`` independent draws, with its probabilities."""
    for picks in itertools.product(range(len(atoms)), repeat=size):
        yield atoms[list(picks)].sum(0) if size else np.zeros(2), float(np.prod(weights[list(picks)]))


def poisson(B, most):
    return [(n, math.exp(-B + n * math.log(B) - gammaln(n + 1))) for n in range(most + 1)]


def test_the_linear_exponent():
    """``E exp(<w, xi>)`` against ``exp(SPREAD ||w||^2 / (2B))``: iid without the factor, Poisson while ||w|| <= B/2."""
    rng, tightest = np.random.default_rng(0), {"iid": 0.0, "poisson": 0.0}
    for atoms, weights in bounded_laws(rng, 60):
        mean, B = weights @ atoms, 3
        for _ in range(3):
            w = rng.normal(size=2)
            w *= REACH * B / np.linalg.norm(w) * rng.choice([1.0, 0.3])
            iid = math.log(sum(p * math.exp(w @ (s / B - mean)) for s, p in sums(atoms, weights, B)))
            drawn = B * (weights @ np.exp(atoms @ w / B) - 1) - w @ mean  # the logarithm for a Poisson number of draws
            square = w @ w / (2 * B)
            tightest["iid"] = max(tightest["iid"], iid / square)
            tightest["poisson"] = max(tightest["poisson"], drawn / (SPREAD * square))
    assert 0.9 < tightest["iid"] <= 1
    assert 0.8 < tightest["poisson"] <= 1


def test_the_squared_deviation():
    """``E exp(y ||xi||^2)``: the two bounds for iid batches, and the truncated one for Poisson batches."""
    rng, tightest = np.random.default_rng(1), {"bounded": 0.0, "differences": 0.0, "poisson": 0.0}
    for atoms, weights in bounded_laws(rng, 40):
        mean, B = weights @ atoms, 4
        for y in (0.1, 0.5, 1.0):
            exact = math.log(sum(p * math.exp(y * np.sum((s / B - mean) ** 2)) for s, p in sums(atoms, weights, B)))
            bounded, x = math.expm1(4 * y) / (4 * B), y / B
            tightest["bounded"] = max(tightest["bounded"], exact / bounded)
            tightest["differences"] = max(tightest["differences"], exact / (x / (1 - 2 * x) - math.log(1 - 2 * x) / 2))
            most = 7
            total = 1 - sum(p for _, p in poisson(2, most))  # larger batches count with exponent 0
            for n, chance in poisson(2, most):
                total += chance * sum(p * math.exp(y * np.sum((s / 2 - mean) ** 2)) for s, p in sums(atoms, weights, n))
            largest = y * (1 + most / 2) ** 2
            tightest["poisson"] = max(tightest["poisson"], math.log(total) / (math.expm1(largest) / largest * y / 2))
    assert all(0.05 < value <= 1 for value in tightest.values()), tightest


def test_the_noise_exponent():
    """The Gaussian integral of section 17, against quadrature in one dimension."""
    x, w = np.polynomial.hermite_e.hermegauss(120)
    for v, xi, s, theta_gamma, gamma_L in itertools.product((0.3, -2.0), (0.0, 0.7), (0.5,), (0.2, 1.0), (0.1, 1.0)):
        zeta = s * x
        # gamma = 1: the exponent theta (-<v, zeta> + (L/2)(zeta^2 + 2 xi zeta))
        exponent = theta_gamma * (-v * zeta + gamma_L / 2 * (zeta**2 + 2 * xi * zeta))
        exact = math.log(w @ np.exp(exponent) / w.sum())
        omega = theta_gamma * gamma_L * s**2
        formula = -0.5 * math.log(1 - omega) + (s * theta_gamma * (v - gamma_L * xi)) ** 2 / (2 * (1 - omega))
        assert exact == pytest.approx(formula, rel=1e-8)


def test_the_largest_poisson_batch():
    for B, log in ((4, 5.0), (64, 12.0)):
        most = (1 + _excess(B, log)) * B
        tail = 1 - sum(p for n, p in poisson(B, int(most)))
        assert tail <= math.exp(-log)
        assert most < B + 3 * math.sqrt(2 * B * log)


def test_what_it_depends_on():
    """More confidence, noisier counts and Poisson batches cost more; a known p_lo costs less; and it is no miracle."""

    def total(**change):
        return one_run_certificate(ONE, *RECORD, **PUBLIC | change).total

    assert weighted_certificate(ONE, *RECORD, **PUBLIC).total < total() < total(confidence=0.999) < 1.3 * total()
    assert total(sampling="iid") <= total()
    assert total(p_lo=0.8) < total()
    assert total() < total(fraction_reach=1.0) < total(fraction_reach=1.0, fraction_noise=0.1)


def test_the_example_of_the_documentation():
    """docs/theory.md, section 17: fifty dimensions, Gaussian noise."""
    problem = HeavyTailedQuadratic(50, Gaussian(0.1))
    a, tau = problem.assumptions(np.full(50, 0.3)), float(problem.quantile(problem.minimiser, 0.9))
    record = 0.0253, np.full(2000, tau), np.full(2000, 0.1)
    public = {"batch_size": 16, "noise_multiplier": 4, "dim": 50}
    over_runs = weighted_certificate(a, *record, **public).total
    found = [one_run_certificate(a, *record, **public, p_lo=p_lo).total for p_lo in (0.0, 0.9)]
    assert [over_runs, *found] == pytest.approx([0.178, 0.224, 0.196], abs=5e-4)


def test_units():
    """Scaling the loss, or the parameters, scales the bound."""
    plain = one_run_certificate(ONE, *RECORD, **PUBLIC, fraction_reach=1.0).total
    gamma, tau, clipped = RECORD
    scaled = Assumptions(L=4, sigma=1.0, q=2, gap=1)  # x -> x / 2
    found = one_run_certificate(scaled, gamma / 4, 2 * tau, clipped, **PUBLIC, fraction_reach=1.0).total
    assert found == pytest.approx(4 * plain, rel=1e-9)
    louder = Assumptions(L=9, sigma=4.5, q=2, gap=9)  # f -> 9 f
    found = one_run_certificate(louder, gamma / 9, 9 * tau, clipped, **PUBLIC, fraction_reach=1.0).total
    assert found == pytest.approx(81 * plain, rel=1e-9)


def test_noise_from_a_start_at_the_minimum_is_charged():
    """No gap and no gradient noise: what is left is the noise of privacy."""
    a, public = Assumptions(L=1, sigma=0, q=2, gap=0), {"batch_size": 1, "dim": 1}
    record = 0.01, np.ones(5000), np.zeros(5000)
    found = one_run_certificate(a, *record, noise_multiplier=1.0, **public)
    assert found.optimisation == found.bias == 0
    assert found.variance > 0.01 / 2  # gamma L z^2 tau^2 / 2, the stationary mean


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"taus": np.ones((2, 2)), "clipped_fractions": np.ones((2, 2))}, r"taus has shape .*certify one run"),
        ({"clipped_fractions": np.ones(2000)}, "certifies nothing about this run alone"),
        ({"gammas": 1.5}, r"largest gamma L 1.5"),
        ({"fraction_noise": -1.0}, "fraction_noise has shape"),
        ({"confidence": 1.0}, "confidence = 1.0 must be in"),
        ({"p_lo": 1.5}, "p_lo = 1.5 must be in"),
    ],
)
def test_refuses(change, message):
    good = {"gammas": RECORD[0], "taus": RECORD[1], "clipped_fractions": RECORD[2], **PUBLIC}
    with pytest.raises(ValueError, match=message):
        one_run_certificate(ONE, **good | change)
