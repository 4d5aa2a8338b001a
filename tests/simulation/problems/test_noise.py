"""Noise laws against independent calculations: scipy.stats laws, quadrature of densities, atoms, Monte Carlo.

Monte Carlo checks use fixed seeds and allow 5 standard errors: with fresh seeds, one check in about 1.7 million would
fail by chance.
"""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from qclip.simulation.problems import Bernoulli, Gaussian, Pareto, StudentT

LAWS = {
    "gaussian": Gaussian(0.7),
    "student": StudentT(5.0, 0.6),
    "pareto": Pareto(4.5, 0.4),
    "one-sided pareto": Pareto(4.5, 0.4, one_sided=True),
    "bernoulli": Bernoulli(2.0, 0.3),
}
laws = pytest.mark.parametrize("noise", LAWS.values(), ids=LAWS.keys())
sizes = st.just(0.0) | st.floats(1e-6, 10)  # of gradients


def gradient(dim: int, size: float) -> np.ndarray:
    """A gradient of this norm that is not along an axis (in more than one dimension)."""
    direction = np.linspace(1, 2, dim) * (-1.0) ** np.arange(dim)
    return size * direction / np.linalg.norm(direction)


def sample(noise, g: np.ndarray, count: int, seed: int) -> np.ndarray:
    """``g + xi``, [count, d]."""
    xi = noise.draw(np.random.default_rng(seed), (count,), g.size)
    out = np.tile(g, (count, 1))
    out[:, : xi.shape[1]] += xi
    return out


def close_to(samples: np.ndarray, expected, errors: float = 5.0) -> None:
    """The mean of the samples is within so many standard errors of the expected value (plus rounding)."""
    error = samples.std(0, ddof=1) / np.sqrt(len(samples))
    assert np.all(np.abs(samples.mean(0) - expected) <= errors * error + 1e-12)


# Moments


@pytest.mark.parametrize("dim", [1, 2, 5, 30])
@pytest.mark.parametrize("q", [1.0, 1.3, 2.0, 3.0])
def test_gaussian_sigma_is_a_moment_of_the_chi_law(q, dim):
    moment = stats.chi(dim).expect(lambda r: r**q)
    assert Gaussian(0.7).sigma(q, dim) == pytest.approx(0.7 * moment ** (1 / q), rel=1e-8)


@pytest.mark.parametrize("dim", [1, 2, 5, 30])
@pytest.mark.parametrize(("q", "df"), [(1.0, 1.5), (1.3, 1.5), (1.3, 3.0), (2.0, 2.5), (2.0, 8.0), (3.0, 4.0)])
def test_student_sigma_is_a_moment_of_the_f_law(q, df, dim):
    def integrand(y: float) -> float:  # ||xi||^2 / (scale^2 dim) = e^y has this law
        return np.exp(y * q / 2 + stats.f.logpdf(np.exp(y), dim, df) + y)

    moment = sum(integrate.quad(integrand, *ends, limit=500)[0] for ends in ((-80, 0), (0, 20), (20, 300)))
    assert StudentT(df, 0.6).sigma(q, dim) == pytest.approx(0.6 * np.sqrt(dim) * moment ** (1 / q), rel=1e-7)


@pytest.mark.parametrize(("q", "tail"), [(1.0, 1.2), (1.05, 1.1), (1.5, 1.6), (1.5, 3.0), (2.0, 2.2), (2.0, 9.0)])
@pytest.mark.parametrize("one_sided", [False, True])
def test_pareto_sigma_by_quadrature_of_its_density(one_sided, q, tail):
    scale = 0.4
    shift = scale * tail / (tail - 1) if one_sided else 0.0

    def integrand(y: float) -> float:  # x = scale e^y has density tail e^(-tail y) in y
        return tail * np.exp((q - tail) * y) * abs(scale - shift * np.exp(-y)) ** q

    kink = np.log(shift / scale) if one_sided else 1.0
    far = 40 / (tail - q)
    edges = [0, kink, *(kink + np.geomspace(1, far, 12))]
    moment = sum(integrate.quad(integrand, *ends)[0] for ends in pairwise(edges))
    assert Pareto(tail, scale, one_sided).sigma(q, 3) == pytest.approx(moment ** (1 / q), rel=1e-7)


@pytest.mark.parametrize(
    ("q", "jump", "probability", "expected"),
    [
        (1.0, 2.0, 0.25, 0.75),  # 1/4 * 3/2 + 3/4 * 1/2
        (2.0, 2.0, 0.5, 1.0),
        (2.0, 10.0, 0.1, 3.0),  # 10 sqrt(.1 * .9)
        (1.5, 1.0, 0.5, 0.5),
    ],
)
def test_bernoulli_sigma_by_hand(q, jump, probability, expected):
    assert Bernoulli(jump, probability).sigma(q, 4) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("noise", [StudentT(1.5), Pareto(1.5), Pareto(1.5, one_sided=True)])
def test_sigma_is_infinite_where_the_moment_does_not_exist(noise):
    assert np.isfinite(noise.sigma(1.49, 3))
    assert noise.sigma(1.5, 3) == np.inf
    assert noise.sigma(2.0, 3) == np.inf


@laws
@pytest.mark.parametrize("dim", [1, 4])
def test_draws_have_their_shape_a_zero_mean_and_their_moments(noise, dim):
    draws = noise.draw(np.random.default_rng(0), (400, 500), dim)
    assert draws.shape[:2] == (400, 500)
    assert draws.shape[2] in (1, dim)
    draws = draws.reshape(-1, draws.shape[2])
    close_to(draws, 0.0)
    for q in (1.0, 2.0):
        close_to(np.linalg.norm(draws, axis=1) ** q, noise.sigma(q, dim) ** q)


@pytest.mark.parametrize(
    ("noise", "law"),
    [
        (Gaussian(0.7), stats.norm(scale=0.7)),
        (StudentT(3.0, 0.7), stats.t(3.0, scale=0.7)),
        (Pareto(1.5, 0.4, one_sided=True), stats.pareto(1.5, loc=-1.2, scale=0.4)),
    ],
)
def test_draws_follow_their_law(noise, law):
    draws = noise.draw(np.random.default_rng(1), (20000,), 3)[:, 0]
    assert stats.kstest(draws, law.cdf).pvalue > 1e-4


def test_a_symmetric_pareto_draw_is_a_signed_pareto_size():
    draws = Pareto(1.5, 0.4).draw(np.random.default_rng(2), (20000,), 3)[:, 0]
    assert stats.kstest(np.abs(draws), stats.pareto(1.5, scale=0.4).cdf).pvalue > 1e-4
    close_to(np.sign(draws), 0.0)


# Quantiles


@pytest.mark.parametrize("dim", [1, 2, 3, 10, 50])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_gaussian_quantile_is_that_of_the_noncentral_chi_squared_law(dim, p):
    scale, sizes = 0.7, np.array([0.01, 0.3, 1.0, 3.0, 30.0])
    g = np.stack([gradient(dim, size) for size in sizes])
    expected = scale * np.sqrt(stats.ncx2.ppf(p, dim, (sizes / scale) ** 2))
    np.testing.assert_allclose(Gaussian(scale).quantile(g, p), expected, rtol=1e-7)


@pytest.mark.parametrize("dim", [200, 1000])
@pytest.mark.parametrize("size", [0.0, 1.0, 100.0])
def test_gaussian_quantile_in_many_dimensions(dim, size):
    p = np.array([0.1, 0.5, 0.9])
    tau = Gaussian(1.0).quantile(np.tile(gradient(dim, size), (3, 1)), p)
    reached = stats.ncx2.cdf(tau**2, dim, size**2) if size else stats.chi.cdf(tau, dim)
    np.testing.assert_allclose(reached, p, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 3, 10])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("df", [1.5, 4.0])
def test_student_quantile_by_integration_over_the_mixing_variable(df, p, dim):
    scale = 0.6

    def reached(size: float, t: float) -> float:
        def integrand(y: float) -> float:
            w = np.exp(y)  # xi = scale N(0, I) / sqrt(w/df): a Gaussian given w, which is chi-squared
            ratio = w / df / scale**2
            return stats.ncx2.cdf(t**2 * ratio, dim, size**2 * ratio) * stats.chi2.pdf(w, df) * w

        low, high = np.log(stats.chi2.ppf([1e-14, 1 - 1e-14], df))
        return integrate.quad(integrand, low, high, limit=400, epsabs=1e-12)[0]

    for size in (0.05, 1.0, 12.0):
        tau = float(StudentT(df, scale).quantile(gradient(dim, size), p))
        assert reached(size, tau) == pytest.approx(p, abs=1e-7)


@pytest.mark.parametrize("dim", [1, 2, 3, 10])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_quantiles_at_a_zero_gradient_are_those_of_the_noise(dim, p):
    g = np.zeros(dim)
    assert Gaussian(0.7).quantile(g, p) == pytest.approx(stats.chi(dim, scale=0.7).ppf(p), rel=1e-9)
    radius = 0.6 * np.sqrt(dim * stats.f(dim, 3.0).ppf(p))
    assert StudentT(3.0, 0.6).quantile(g, p) == pytest.approx(radius, rel=1e-9)
    assert Pareto(1.5, 0.4).quantile(g, p) == pytest.approx(stats.pareto(1.5, scale=0.4).ppf(p), rel=1e-12)


@pytest.mark.parametrize("dim", [1, 2, 5])
@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_quantiles_at_a_huge_gradient_are_those_of_the_noise_along_it(dim, p):
    size = 1e6
    expected = {Gaussian(0.7): stats.norm.ppf(p, scale=0.7), StudentT(3.0, 0.6): stats.t.ppf(p, 3.0, scale=0.6)}
    for noise, along in expected.items():
        # What is across the gradient adds ||across||^2 / (2 size), about 1e-6.
        assert noise.quantile(gradient(dim, size), p) - size == pytest.approx(along, abs=1e-4)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("tail", [1.2, 2.0, 5.0])
def test_pareto_quantiles_in_closed_form(tail, p):
    scale, far = 0.4, 1e6
    size = stats.pareto(tail, scale=scale)
    rest = np.array([0.3, -0.4])
    centred = Pareto(tail, scale).quantile(np.array([0.0, *rest]), p)
    assert centred == pytest.approx(np.hypot(size.ppf(p), 0.5), rel=1e-12)

    shift = scale * tail / (tail - 1)
    one_sided = Pareto(tail, scale, one_sided=True)
    # A large positive gradient never changes sign: its norm is g + xi. A large negative one mirrors the quantile.
    assert one_sided.quantile(np.array([far]), p) == pytest.approx(far + size.ppf(p) - shift, rel=1e-14)
    if tail > 1.9:  # else the tail beyond -2 far is not negligible
        mirrored = far + shift - size.isf(p)
        assert one_sided.quantile(np.array([-far]), p) == pytest.approx(mirrored, abs=1e-3 * far ** (1 - tail) + 1e-8)


@pytest.mark.parametrize("one_sided", [False, True])
@given(
    axis=st.floats(-5, 5),
    rest=st.floats(0, 3),
    p=st.floats(0.01, 0.99),
    tail=st.floats(1.1, 6),
)
def test_pareto_quantile_reaches_p_and_nothing_smaller_does(one_sided, axis, rest, p, tail):
    noise = Pareto(tail, 0.5, one_sided)
    size = stats.pareto(tail, scale=0.5)
    shift = size.mean() if one_sided else 0.0

    def reached(t: float) -> float:
        if t < rest:
            return 0.0
        half = np.sqrt(t**2 - rest**2)
        low, high = -half - axis + shift, half - axis + shift
        right = size.cdf(high) - size.cdf(low)
        return right if one_sided else 0.5 * (right + size.cdf(-low) - size.cdf(-high))

    tau = float(noise.quantile(np.array([axis, rest]), p))
    assert reached(tau * (1 + 1e-9) + 1e-12) >= p - 1e-12
    assert reached(tau * (1 - 1e-9) - 1e-12) <= p + 1e-12


@given(
    twentieths=st.integers(1, 19),
    level=st.integers(1, 39),
    axis=st.floats(-4, 4),
    jump=st.floats(0.1, 5),
)
def test_bernoulli_quantile_by_brute_force_over_its_atoms(twentieths, level, axis, jump):
    """Half of the levels p = k/40 are masses of atoms exactly, as fractions if not as floats."""
    w, p = Fraction(twentieths, 20), Fraction(level, 40)
    atoms = [(abs(axis + jump * (1 - float(w))), w), (abs(axis - jump * float(w)), 1 - w)]
    (small, mass), (large, _) = sorted(atoms)
    expected = small if mass >= p else large
    tau = float(Bernoulli(jump, float(w)).quantile(np.array([axis]), float(p)))
    assert tau == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_bernoulli_quantile_at_the_mass_of_an_atom_is_the_lower_one():
    noise = Bernoulli(2.0, 0.7)  # at g = 0: norms 0.6 with probability .7 and 1.4 with probability .3
    g = np.zeros((3, 1))
    np.testing.assert_allclose(noise.quantile(g, np.array([0.69, 0.7, 0.71])), [0.6, 0.6, 1.4])
    far = np.full((3, 1), 10.0)  # 10.6 with .7, 8.6 with .3: now the rare one is the smaller
    np.testing.assert_allclose(noise.quantile(far, np.array([0.29, 0.3, 0.31])), [8.6, 8.6, 10.6])


@laws
@pytest.mark.parametrize("p", [0.05, 0.5, 0.8, 0.97])
def test_quantile_reaches_p_on_a_large_sample(noise, p):
    g = gradient(10, 1.3)
    norms = np.linalg.norm(sample(noise, g, 200_000, seed=3), axis=1)
    tau = float(noise.quantile(g, p))
    error = 5 * np.sqrt(p * (1 - p) / norms.size)
    assert (norms <= tau * (1 + 1e-12)).mean() >= p - error
    assert (norms < tau * (1 - 1e-12)).mean() <= p + error


@laws
@given(size=sizes, p=st.floats(0.02, 0.95), more=st.floats(0, 0.04), dim=st.sampled_from([3, 7, 10]))
def test_quantile_rises_with_p(noise, size, p, more, dim):
    g = gradient(dim, size)
    low, high = noise.quantile(g, p), noise.quantile(g, p + more)
    assert 0 <= low <= high * (1 + 1e-12)


@pytest.mark.parametrize("factor", [1e-4, 7.0, 1e5])
@pytest.mark.parametrize("dim", [1, 3, 10])
def test_quantile_and_moments_scale_with_the_units(factor, dim):
    g, tau = gradient(dim, 1.3), 0.9
    pairs = [
        (Gaussian(0.7), Gaussian(0.7 * factor)),
        (StudentT(3.0, 0.6), StudentT(3.0, 0.6 * factor)),
        (Pareto(1.5, 0.4), Pareto(1.5, 0.4 * factor)),
        (Pareto(1.5, 0.4, True), Pareto(1.5, 0.4 * factor, True)),
        (Bernoulli(2.0, 0.3), Bernoulli(2.0 * factor, 0.3)),
    ]
    for unit, scaled in pairs:
        assert scaled.quantile(factor * g, 0.6) == pytest.approx(factor * unit.quantile(g, 0.6), rel=1e-9)
        mine, theirs = scaled.clip_moments(factor * g, factor * tau), unit.clip_moments(g, tau)
        assert mine.mean_factor == pytest.approx(theirs.mean_factor, rel=1e-9)
        np.testing.assert_allclose(mine.mean, factor * theirs.mean, rtol=1e-9, atol=1e-9 * factor)
        assert mine.second_moment == pytest.approx(factor**2 * theirs.second_moment, rel=1e-9)


@laws
def test_many_gradients_at_once_equal_one_at_a_time(noise):
    rng = np.random.default_rng(4)
    g, p = rng.normal(size=(2, 3, 5)), rng.uniform(0.05, 0.9, size=(2, 3))
    tau = noise.quantile(g, p)
    moments = noise.clip_moments(g, tau)
    assert tau.shape == moments.mean_factor.shape == moments.second_moment.shape == (2, 3)
    assert moments.mean.shape == (2, 3, 5)
    for i in np.ndindex(2, 3):
        assert noise.quantile(g[i], p[i]) == pytest.approx(tau[i], rel=1e-12)
        one = noise.clip_moments(g[i], tau[i])
        assert one.mean_factor == pytest.approx(moments.mean_factor[i], rel=1e-12)
        np.testing.assert_allclose(one.mean, moments.mean[i], rtol=1e-12, atol=1e-15)


# Moments of the clipped gradient


@laws
@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("tau", [0.3, 1.5])
def test_clip_moments_match_a_sample(noise, dim, tau):
    g = gradient(dim, 1.1)
    drawn = sample(noise, g, 300_000, seed=5)
    norms = np.linalg.norm(drawn, axis=1)
    factor = np.minimum(1, tau / norms)
    moments = noise.clip_moments(g, tau)
    close_to(factor, moments.mean_factor)
    close_to(factor[:, None] * drawn, moments.mean)
    close_to((factor * norms) ** 2, moments.second_moment)


@pytest.mark.parametrize("dim", [1, 2, 3, 10])
@pytest.mark.parametrize(("size", "tau"), [(0.5, 0.3), (0.5, 1.0), (4.0, 3.0), (4.0, 6.0)])
def test_gaussian_clip_moments_by_quadrature_over_the_norm(dim, size, tau):
    """``E min(R, tau)^2`` and ``E min(1, tau/R)`` for R^2 noncentral chi-squared, by parts."""
    law = stats.ncx2(dim, size**2)
    second = integrate.quad(law.sf, 0, tau**2, epsabs=1e-12)[0]
    # E min(1, tau/R) = int_0^1 P(R < tau/u) du: the factor exceeds u when R < tau/u.
    factor = integrate.quad(lambda u: law.cdf((tau / u) ** 2), 0, 1, epsabs=1e-12)[0]
    moments = Gaussian(1.0).clip_moments(gradient(dim, size), tau)
    assert moments.second_moment == pytest.approx(second, rel=1e-5)
    assert moments.mean_factor == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize(
    ("noise", "law"),
    [
        (Gaussian(0.7), stats.norm(scale=0.7)),
        (StudentT(4.0, 0.6), stats.t(4.0, scale=0.6)),
        (StudentT(1.5, 0.6), stats.t(1.5, scale=0.6)),
        (Pareto(1.5, 0.4, one_sided=True), stats.pareto(1.5, loc=-1.2, scale=0.4)),
    ],
)
@pytest.mark.parametrize("g", [-2.0, 0.0, 0.5])
@pytest.mark.parametrize("tau", [0.3, 2.0])
def test_clipped_mean_on_the_line_by_parts(noise, law, g, tau):
    """``E clip(g + xi) = -tau + int_(-tau)^tau P(g + xi > y) dy``."""
    mean = -tau + integrate.quad(lambda y: law.sf(y - g), -tau, tau, points=[0.0], epsabs=1e-12)[0]
    assert noise.clip_moments(np.array([g]), tau).mean[0] == pytest.approx(mean, abs=1e-4 * tau)


@pytest.mark.parametrize("dim", [1, 4])
@pytest.mark.parametrize("tau", [0.2, 1.0, 5.0])
def test_without_noise_the_moments_are_those_of_the_clipped_gradient(dim, tau):
    g = gradient(dim, 1.0)
    moments = Gaussian(0.0).clip_moments(g, tau)
    assert moments.mean_factor == pytest.approx(min(1, tau), rel=1e-12)
    np.testing.assert_allclose(moments.mean, min(1, tau) * g, rtol=1e-12)
    assert moments.second_moment == pytest.approx(min(1, tau) ** 2, rel=1e-12)
    assert Gaussian(0.0).quantile(g, 0.5) == pytest.approx(1.0, rel=1e-15)
    assert Gaussian(0.0).sigma(2.0, dim) == 0


@laws
def test_a_threshold_beyond_reach_leaves_the_gradient_alone(noise):
    g = gradient(4, 1.1)
    moments = noise.clip_moments(g, 1e6)
    assert moments.mean_factor == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(moments.mean, g, atol=1e-4)
    assert moments.second_moment == pytest.approx(1.1**2 + noise.sigma(2.0, 4) ** 2, rel=1e-4)


@pytest.mark.parametrize("noise", [Gaussian(0.7), StudentT(3.0), Pareto(1.5)])
def test_symmetric_noise_has_a_zero_clipped_mean_at_a_zero_gradient(noise):
    moments = noise.clip_moments(np.zeros(3), 0.8)
    np.testing.assert_allclose(moments.mean, 0, atol=1e-12)
    assert 0 < moments.mean_factor < 1


def test_one_sided_noise_has_a_biased_clipped_mean_at_a_zero_gradient():
    mean = Pareto(1.5, 0.4, one_sided=True).clip_moments(np.zeros(3), 0.8).mean
    assert mean[0] < -0.1  # the long tail is on the right, and cut
    np.testing.assert_array_equal(mean[1:], 0)


@laws
@given(size=sizes, tau=st.floats(0.01, 10), dim=st.sampled_from([1, 3]))
def test_moments_respect_the_threshold(noise, size, tau, dim):
    moments = noise.clip_moments(gradient(dim, size), tau)
    assert 0 < moments.mean_factor <= 1 + 1e-9
    assert np.linalg.norm(moments.mean) <= tau * (1 + 1e-6)
    assert np.linalg.norm(moments.mean) ** 2 <= moments.second_moment * (1 + 1e-4) + 1e-15
    assert moments.second_moment <= tau**2 * (1 + 1e-6)


@laws
@given(size=sizes, p=st.floats(0.02, 0.98))
def test_the_mean_factor_at_the_quantile_is_at_least_p(noise, size, p):
    g = gradient(10, size)
    assert noise.clip_moments(g, noise.quantile(g, p)).mean_factor >= p - 1e-5


# Arguments


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Gaussian(-1.0), "scale"),
        (lambda: Gaussian(np.nan), "scale"),
        (lambda: StudentT(0.0), "df"),
        (lambda: StudentT(3.0, 0.0), "scale"),
        (lambda: Pareto(1.0), "tail"),
        (lambda: Pareto(2.0, -1.0), "scale"),
        (lambda: Bernoulli(0.0, 0.5), "jump"),
        (lambda: Bernoulli(1.0, 0.0), "probability"),
        (lambda: Bernoulli(1.0, 1.0), "probability"),
    ],
)
def test_bad_arguments_are_named(make, name):
    with pytest.raises(ValueError, match=f"^{name} = "):
        make()
