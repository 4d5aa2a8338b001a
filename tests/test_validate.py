"""Each check returns the value it was given, or raises an error with a name, a value, a bound and a remedy."""

import math
from fractions import Fraction

import numpy as np
import pytest

from qclip import _validate as check


def test_refuse_names_all_four_parts():
    error = check.refuse("p", 1.2, "in (0, 1)", "pass a fraction")
    assert isinstance(error, ValueError)
    assert str(error) == "p = 1.2 must be in (0, 1); pass a fraction"


@pytest.mark.parametrize("value", [3, 0.25, -7.5, np.float32(0.5), np.int64(4), Fraction(1, 4), np.array(2.0)])
def test_real_takes_anything_that_is_a_number(value):
    number = check.real("x", value)
    assert type(number) is float
    assert number == float(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_real_refuses_what_is_not_finite(value):
    with pytest.raises(ValueError, match=r"^x = -?(nan|inf) must be finite; measure it$"):
        check.real("x", value, "measure it")


@pytest.mark.parametrize("value", [None, "one", "0.5", [1.0, 2.0], 1j, {}, 10**400])
def test_real_refuses_what_is_not_a_number(value):
    with pytest.raises(ValueError, match=r"^x = .* must be a number; pass a finite number$"):
        check.real("x", value)


@pytest.mark.parametrize("value", [0, -0.0, -1e-300, -3])
def test_positive_refuses_zero_and_below(value):
    with pytest.raises(ValueError, match=r"^x = -?[0-9.e-]+ must be > 0; pass a number above 0$"):
        check.positive("x", value)
    assert check.positive("x", 1e-300) == 1e-300


def test_nonnegative_takes_zero_and_refuses_below():
    assert check.nonnegative("x", 0) == 0
    with pytest.raises(ValueError, match=r"^x = -1e-09 must be >= 0; pass 0 or more$"):
        check.nonnegative("x", -1e-9)


@pytest.mark.parametrize("name", ["positive", "nonnegative"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_signs_are_not_a_way_around_finiteness(name, value):
    with pytest.raises(ValueError, match="must be finite"):
        getattr(check, name)("x", value)


@pytest.mark.parametrize(
    ("closed", "low_taken", "high_taken", "interval"),
    [
        ("", False, False, r"\(1, 2\)"),
        ("low", True, False, r"\[1, 2\)"),
        ("high", False, True, r"\(1, 2\]"),
        ("both", True, True, r"\[1, 2\]"),
    ],
)
def test_between_admits_exactly_the_closed_ends(closed, low_taken, high_taken, interval):
    assert check.between("x", 1.5, 1, 2, "a remedy", closed=closed) == 1.5
    outside = [0.999, 2.001, math.nan]
    for end, taken in ((1.0, low_taken), (2.0, high_taken)):
        if taken:
            assert check.between("x", end, 1, 2, "a remedy", closed=closed) == end
        else:
            outside.append(end)
    for value in outside:
        with pytest.raises(ValueError, match=rf"^x = {value} must be (in {interval}|finite); a remedy$"):
            check.between("x", value, 1, 2, "a remedy", closed=closed)


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.1])
def test_quantile_is_strictly_inside(value):
    with pytest.raises(ValueError, match=rf"^p = {value} must be in \(0, 1\); .*fraction of examples left unclipped"):
        check.quantile("p", value)
    assert check.quantile("p", 0.3) == 0.3


@pytest.mark.parametrize("value", [3, 3.0, np.int32(3), np.float64(3.0)])
def test_count_takes_whole_numbers(value):
    number = check.count("steps", value)
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize("value", [2.5, math.nan, math.inf, "3", None, [3]])
def test_count_refuses_what_is_not_whole(value):
    with pytest.raises(ValueError, match=r"^steps = .* must be a whole number; pass a whole number of at least 1$"):
        check.count("steps", value)


@pytest.mark.parametrize(("least", "refused"), [(0, -1), (1, 0), (2, 1)])
def test_count_has_a_least_value(least, refused):
    assert check.count("steps", least, least=least) == least
    with pytest.raises(ValueError, match=rf"^steps = {refused} must be >= {least}; say when to stop$"):
        check.count("steps", refused, "say when to stop", least=least)


def test_choice_lists_the_options():
    assert check.choice("form", "sharp", ("sharp", "blunt")) == "sharp"
    with pytest.raises(ValueError, match=r"^form = 'shrap' must be one of 'sharp', 'blunt'; did you mean 'sharp'\?$"):
        check.choice("form", "shrap", iter(("sharp", "blunt")))
    with pytest.raises(ValueError, match=r"^form = 'round' must be one of 'sharp', 'blunt'; check the spelling$"):
        check.choice("form", "round", ("sharp", "blunt"))


@pytest.mark.parametrize(
    ("values", "expected"), [(0.5, [0.5]), ([0.1, 0.2], [0.1, 0.2]), (np.ones(1, np.float32), [1.0])]
)
def test_sequence_is_one_dimensional_and_of_double_precision(values, expected):
    array = check.sequence("p", values, low=0, high=2, remedy="a remedy")
    assert array.dtype == np.float64
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("values", [[], np.zeros((2, 2)), np.zeros((1, 0))])
def test_sequence_refuses_other_shapes_by_naming_them(values):
    with pytest.raises(
        ValueError, match=r"^p has shape \(.*\) instead of that of a number or a non-empty 1-D sequence"
    ):
        check.sequence("p", values, low=0, high=1, remedy="a remedy")


@pytest.mark.parametrize("bad", [0.0, 1.0, -1.0, math.nan, math.inf])
def test_sequence_names_the_first_bad_entry(bad):
    with pytest.raises(ValueError, match=rf"^p\[2\] = {bad} must be in \(0, 1\); a remedy$"):
        check.sequence("p", [0.1, 0.2, bad, bad], low=0, high=1, remedy="a remedy")
    with pytest.raises(ValueError, match=rf"^p = {bad} must be in \(0, 1\); a remedy$"):
        check.sequence("p", bad, low=0, high=1, remedy="a remedy")


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_sequence_without_an_upper_end_still_wants_finite_values(bad):
    with pytest.raises(ValueError, match=rf"^gamma\[1\] = {bad} must be finite and > 0; a remedy$"):
        check.sequence("gamma", [1e300, bad], low=0, high=np.inf, remedy="a remedy")


@pytest.mark.parametrize("values", ["fast", [[1.0], [2.0, 3.0]], [{}]])
def test_sequence_refuses_what_are_not_numbers(values):
    with pytest.raises(ValueError, match=r"^x = .* must be a number or a sequence of numbers; give numbers$"):
        check.sequence("x", values, low=0, high=1, remedy="give numbers")


def test_sequence_can_admit_its_low_end_and_ask_for_whole_numbers():
    assert check.sequence("x", [0, 2], low=0, high=5, remedy="", closed=True, whole=True).tolist() == [0, 2]
    with pytest.raises(ValueError, match=r"^x\[0\] = 0.0 must be finite and > 0; r$"):
        check.sequence("x", [0, 2], low=0, high=math.inf, remedy="r")
    with pytest.raises(ValueError, match=r"^x\[1\] = 2.5 must be whole, finite and >= 0; r$"):
        check.sequence("x", [0, 2.5], low=0, high=math.inf, remedy="r", closed=True, whole=True)
