"""Exponents by linear programming, and the decay they give to the bounds themselves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from qclip.theory import Assumptions, bound, rates

moments = st.floats(1.01, 2)


def exponents_of_terms(q, form):
    """The exponent of T in each term of the bound, as rows (of theta, of nu, constant)."""
    variance = (1, -2 / q, -1) if form == "printed" else (1, 1 - 2 / q, -1)
    return [(-1, 0, 0), variance, (0, 2 - 2 / q, 0)]


@pytest.mark.parametrize("form", ["printed", "sharp"])
@given(q=moments)
def test_exponents_are_the_best_ones(form, q):
    found, terms = rates(q, form), exponents_of_terms(q, form)
    slowest = max(theta * found.theta + nu * found.nu + constant for theta, nu, constant in terms)
    assert slowest == pytest.approx(-found.rate)
    # The least slowest exponent: minimise s over (theta, nu, s) with every term's exponent at most s.
    rows, sides = [(theta, nu, -1) for theta, nu, _ in terms], [-constant for *_, constant in terms]
    best = linprog((0, 0, 1), A_ub=rows, b_ub=sides, bounds=[(0, 1), (-1, 0), (None, None)])
    assert found.rate == pytest.approx(-best.fun)


@given(q=moments)
def test_complexity_inverts_the_rate_of_the_square(q):
    for form in ("printed", "corrected", "sharp"):
        assert rates(q, form).complexity_exponent == pytest.approx(2 / rates(q, form).rate)
    assert rates(q, "printed").complexity_exponent == pytest.approx(2 * (2 * q - 1) / (q - 1))
    assert rates(q, "sharp").complexity_exponent == pytest.approx((3 * q - 2) / (q - 1))


@given(q=moments)
def test_sharp_is_faster_and_corrected_is_as_printed(q):
    assert rates(q).rate > rates(q, "printed").rate
    assert rates(q, "corrected") == rates(q, "printed")


@pytest.mark.parametrize(
    ("form", "theta", "nu", "complexity"), [("printed", 1 / 3, -1 / 3, 6), ("sharp", 1 / 2, -1 / 2, 4)]
)
def test_bounded_variance(form, theta, nu, complexity):
    found = rates(2, form)
    assert (found.theta, found.nu, found.rate) == pytest.approx((theta, nu, theta))
    assert found.complexity_exponent == pytest.approx(complexity)


@pytest.mark.parametrize("form", ["printed", "corrected", "sharp"])
@pytest.mark.parametrize("q", [1.3, 1.7, 2.0])
def test_bounds_decay_at_the_rate(form, q):
    """Constant parameters tuned to T have no logarithm: gamma = g T^(theta-1), h = h0 T^nu (erratum J)."""
    a = Assumptions(L=1, sigma=1, q=q, gap=1)
    found = rates(q, form)

    def total(T):
        return bound(a, 0.1 * T ** (found.theta - 1), 1 - 0.2 * T**found.nu, steps=T, form=form).total

    early, late = 10**18, 10**20
    assert math.log(total(early) / total(late), late / early) == pytest.approx(found.rate, abs=0.002)


@pytest.mark.parametrize("q", [1, 0.5, 2.01, math.nan])
def test_moments_outside_the_paper_are_refused(q):
    with pytest.raises(ValueError, match=rf"q = {q} must be (in \(1, 2\]|finite); use 2 when the variance is bounded"):
        rates(q)


def test_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form = 'sharpest' must be one of 'sharp', 'corrected', 'printed'"):
        rates(2, "sharpest")
