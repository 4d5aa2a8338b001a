"""Schedules by their scaling laws, their clamps, and the step-size condition they promise to keep."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qclip.schedules import Capped, Polynomial, constant, coupled, polynomial, values
from qclip.theory import FORMS, Assumptions, bound, max_step

ONE = Assumptions(L=1, sigma=1, q=2, gap=1)
steps = st.integers(0, 10**6)
powers = st.floats(-2, 2)


@pytest.mark.parametrize("value", [0.1, 0.0, -3.0])
@pytest.mark.parametrize("step", [0, 1, 10**9])
def test_constant_is_constant(value, step):
    assert constant(value)(step) == value


@given(st.floats(1e-3, 1e3), powers, steps)
def test_polynomial_starts_at_its_first_value_and_scales_as_a_power(initial, power, t):
    schedule = polynomial(initial, power)
    assert schedule(0) == initial
    # t counts from 0 and the formula uses t + 1: going from t to 2t + 1 doubles the clock.
    assert schedule(2 * t + 1) == pytest.approx(schedule(t) * 2**power)


@given(powers, st.integers(0, 1000), steps)
def test_warm_start_is_the_same_curve_entered_later(power, warm_start, t):
    warm = polynomial(1.0, power, warm_start=warm_start)
    cold = polynomial(1.0, power)
    assert warm(0) == 1
    assert warm(t) == pytest.approx(cold(t + warm_start) / cold(warm_start))


@given(powers, steps)
def test_clamps_hold_and_only_where_they_bind(power, t):
    free, clamped = polynomial(1.0, power)(t), polynomial(1.0, power, low=0.5, high=3.0)(t)
    assert clamped == sorted((0.5, free, 3.0))[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": 0, "power": -1}, "initial = 0 must be > 0; it is the value at step 0"),
        ({"initial": -1, "power": -1}, "initial = -1 must be > 0"),
        ({"initial": math.nan, "power": -1}, "initial = nan must be finite"),
        ({"initial": 1, "power": math.inf}, "power = inf must be finite"),
        ({"initial": 1, "power": 1, "warm_start": -1}, "warm_start = -1 must be >= 0; it is a number of steps"),
        ({"initial": 1, "power": 1, "low": 2}, r"initial = 1.0 must be in \[2, inf\]; move the clamps"),
        ({"initial": 1, "power": 1, "high": 0.5}, r"initial = 1.0 must be in \[0, 0.5\]; move the clamps"),
    ],
)
def test_polynomial_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        polynomial(**arguments)


def test_constant_refuses_what_is_not_finite():
    with pytest.raises(ValueError, match="value = nan must be finite; pass a finite number"):
        constant(math.nan)


SCHEDULES = [
    constant(0.3),
    polynomial(0.5, -0.5, warm_start=3, low=0.1),
    polynomial(0.5, 0.5, high=0.9),
    coupled(1.5, 0.5, 0.3).p,
    coupled(1.5, 2.0, 0.3, assumptions=ONE).gamma,
    lambda t: 1 / (t + 2),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_are_the_calls_one_by_one(schedule):
    array = values(schedule, 50)
    assert array.dtype == np.float64
    np.testing.assert_allclose(array, [schedule(t) for t in range(50)], rtol=1e-15)


def test_values_of_a_number_repeat_it():
    np.testing.assert_array_equal(values(0.25, 4), np.full(4, 0.25))


@pytest.mark.parametrize("schedule", [polynomial(0.5, -0.5, warm_start=3, low=0.1), coupled(1.5, 0.5, 0.3).p])
def test_many_steps_at_once_are_the_calls_one_by_one(schedule):
    times = np.array([0, 7, 7, 2, 1000])
    np.testing.assert_allclose(schedule.at(times), [schedule(int(t)) for t in times], rtol=1e-15)


@pytest.mark.parametrize(
    ("q", "form", "step_exponent", "clipped_exponent"),
    [
        (2, "sharp", -1 / 2, -1 / 2),
        (2, "printed", -2 / 3, -1 / 3),
        (2, "corrected", -2 / 3, -1 / 3),
        (1.5, "sharp", -0.6, -0.6),
        (1.5, "printed", -0.75, -0.375),
    ],
)
def test_coupled_exponents_are_those_of_the_paper_or_the_sharp_ones(q, form, step_exponent, clipped_exponent):
    gamma, p = coupled(q, 0.5, 0.4, form)
    assert gamma(0) == 0.5
    assert p(0) == pytest.approx(0.6)
    assert math.log(gamma(10**4 - 1) / 0.5, 10**4) == pytest.approx(step_exponent)
    assert math.log((1 - p(10**4 - 1)) / 0.4, 10**4) == pytest.approx(clipped_exponent)


def test_coupled_warm_start_delays_both():
    gamma, p = coupled(2, 0.5, 0.4, warm_start=99)
    assert (gamma(0), p(0)) == (0.5, 0.6)
    assert gamma(300) == pytest.approx(0.25)
    assert p(300) == pytest.approx(0.8)


@given(
    q=st.floats(1.05, 2),
    L=st.floats(0.1, 10),
    step_size=st.floats(0.01, 100),
    clipped=st.floats(0.05, 0.95),
    form=st.sampled_from(FORMS),
)
def test_coupled_with_assumptions_keeps_the_step_size_condition(q, L, step_size, clipped, form):
    a = Assumptions(L=L, sigma=1, q=q, gap=1)
    gamma, p = coupled(q, step_size, clipped, form, assumptions=a)
    beta, c = p(0) / 2, p(0) / 4
    # The theorem accepts the whole run with these constants (it refuses a single step that is too large) ...
    assert bound(a, gamma, p, beta, c, steps=30, form=form).total > 0
    # ... and no step is smaller than the condition and the schedule ask for.
    free = coupled(q, step_size, clipped, form).gamma
    for t in (0, 1, 29):
        assert gamma(t) == min(free(t), max_step(a, p(t), beta, c, form))


def test_coupled_cap_binds_and_releases():
    gamma, _ = coupled(2, 2.0, 0.4, assumptions=ONE)
    free = coupled(2, 2.0, 0.4).gamma
    assert isinstance(gamma, Capped)
    assert gamma(0) < free(0)
    assert gamma(1000) == free(1000)


def test_coupled_without_assumptions_is_not_capped():
    gamma, _ = coupled(2, 100.0, 0.4)
    assert isinstance(gamma, Polynomial)
    assert gamma(0) == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": 1}, r"q = 1 must be in \(1, 2\]; use 2 when the variance is bounded"),
        ({"q": 2.5}, r"q = 2.5 must be in \(1, 2\]"),
        ({"step_size": 0}, "initial = 0 must be > 0"),
        ({"clipped_fraction": 0}, r"clipped_fraction = 0 must be in \(0, 1\)"),
        ({"clipped_fraction": 1.0}, r"clipped_fraction = 1.0 must be in \(0, 1\)"),
        ({"form": "best"}, "form = 'best' must be one of 'sharp', 'corrected', 'printed'; check the spelling"),
        ({"beta": 0.1}, r"beta = 0.1 and c = None only serve the step-size condition; pass assumptions too"),
        ({"c": 0.1}, r"beta = None and c = 0.1 only serve the step-size condition"),
        ({"assumptions": ONE, "beta": 0.7}, "beta = 0.7 must be at most p = 0.6; lower beta, raise p"),
        ({"assumptions": ONE, "c": 0.5}, r"beta/2 \+ c = 0.65 must be at most p = 0.6; lower beta or c, or raise p"),
    ],
)
def test_coupled_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        coupled(**{"q": 2, "step_size": 0.5, "clipped_fraction": 0.4} | arguments)


@pytest.mark.parametrize("steps", [-1, 2.5, "3"])
def test_values_refuses_a_number_of_steps_that_is_none(steps):
    with pytest.raises(ValueError, match=r"steps = .* must be .*; it is the number of values"):
        values(0.5, steps)
