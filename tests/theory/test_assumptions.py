"""The numbers of Assumptions 1 and 2: taken as floats, refused outside their domain."""

import dataclasses
import math

import pytest

from qclip.theory import Assumptions

GOOD = {"L": 2, "sigma": 0.5, "q": 1.5, "gap": 3}


def test_fields_become_floats():
    a = Assumptions(**GOOD)
    assert [type(value) for value in dataclasses.astuple(a)] == [float] * 4
    assert dataclasses.astuple(a) == (2.0, 0.5, 1.5, 3.0)


def test_no_noise_and_no_gap_are_allowed():
    a = Assumptions(L=1, sigma=0, q=2, gap=0)
    assert (a.sigma, a.gap) == (0, 0)


def test_frozen_hashable_and_compared_by_value():
    a = Assumptions(**GOOD)
    assert {a} == {Assumptions(**GOOD)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.L = 3  # pyrefly: ignore


def test_replace_checks_again():
    with pytest.raises(ValueError, match="L = -1 must be > 0"):
        dataclasses.replace(Assumptions(**GOOD), L=-1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("L", 0, "L = 0 must be > 0; it is the smoothness constant"),
        ("L", -1, "L = -1 must be > 0"),
        ("L", math.inf, "L = inf must be finite"),
        ("sigma", -0.1, "sigma = -0.1 must be >= 0; it bounds a moment of the gradient noise"),
        ("sigma", math.nan, "sigma = nan must be finite"),
        ("q", 1, r"q = 1 must be in \(1, 2\]; use 2 when the variance is bounded, less for heavier tails"),
        ("q", 2.0001, r"q = 2.0001 must be in \(1, 2\]"),
        ("q", math.nan, "q = nan must be finite"),
        ("gap", -1, r"gap = -1 must be >= 0; it is f\(x0\) - inf f"),
        ("gap", "large", "gap = 'large' must be a number"),
    ],
)
def test_refuses(name, value, message):
    with pytest.raises(ValueError, match=message):
        Assumptions(**GOOD | {name: value})
