"""Encodings are fixed beforehand, act on each row alone, and are at most 1 long."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qclip.tables.columns import MISSING, Column
from qclip.tables.encodings import (
    KNOTS,
    YEARS,
    Date,
    Dropped,
    Hashed,
    Interval,
    Magnitude,
    Number,
    OneOf,
    OrMissing,
    Words,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(repr)
COLOURS = ("red", "green", "blue")
TIMES = st.datetimes().map(lambda at: f"{at:%d.%m.}{at.year:04d} {at:%H:%M}")
CASES = [
    pytest.param(Magnitude(), NUMBERS, id="magnitude"),
    pytest.param(Number(), NUMBERS, id="number"),
    pytest.param(Interval(-3, 10), NUMBERS, id="interval"),
    pytest.param(Hashed(), st.text(), id="hashed"),
    pytest.param(OneOf(COLOURS), st.sampled_from(COLOURS), id="one-of"),
    pytest.param(Dropped(), st.text(), id="dropped"),
    pytest.param(Words(), st.text(), id="words"),
    pytest.param(Date("ymd"), st.dates().map(str), id="date"),
    pytest.param(
        Date("dmy", clock=True), st.datetimes().map(lambda at: f"{at:%d.%m.}{at.year:04d} {at:%H:%M}"), id="clock"
    ),
    pytest.param(OrMissing(Magnitude(), MISSING), NUMBERS | st.sampled_from(sorted(MISSING)), id="or-missing"),
]


def column(values, name="x"):
    return Column.of_texts(name, values, range(2, 2 + len(values)))


@pytest.mark.parametrize(("encoding", "values"), CASES)
@given(data=st.data())
def test_no_row_has_a_say_in_how_another_is_encoded(encoding, values, data):
    rows = data.draw(st.lists(values, min_size=1, max_size=6))
    together = encoding.encode(column(rows))
    alone = np.vstack([encoding.encode(column([row])) for row in rows])
    assert np.array_equal(together, alone)
    assert together.shape == (len(rows), encoding.width)
    assert (np.linalg.norm(together, axis=1) <= 1 + 1e-12).all()


@given(st.floats(KNOTS[0], KNOTS[-1]))
def test_a_magnitude_is_the_mean_of_its_knots(number):
    (shares,) = Magnitude().encode(column([repr(number)]))
    assert np.isclose(shares @ KNOTS, number, rtol=1e-9, atol=1e-12)
    assert np.isclose(shares.sum(), 1)
    assert (shares >= 0).all()
    assert np.flatnonzero(shares).size <= 2


@given(st.floats(-1e6, 1e6), st.sampled_from([-2, -1, 0, 1, 3, 6]))
def test_numbers_have_no_jumps(number, power):
    for near in (number, 10.0**power, -(10.0**power)):
        below, at = Number().encode(column([repr(near * (1 - 1e-9)), repr(near)]))
        assert np.abs(below - at).max() < 1e-5


@pytest.mark.parametrize(("first", "second"), [(36.6, 37.6), (1990, 2005), (1010, 1020), (7.35, 7.45), (138, 142)])
def test_numbers_that_vary_little_are_told_apart(first, second):
    encoded = Number().encode(column([str(first), str(second)]))
    coarse = Magnitude().encode(column([str(first), str(second)]))
    assert np.linalg.norm(np.subtract(*encoded)) > 0.2
    assert np.linalg.norm(np.subtract(*coarse)) < 0.1


def test_what_lies_outside_is_moved_to_the_ends():
    for encoding in (Magnitude(), Interval(0, 1)):
        encoded = encoding.encode(column(["-1e300", "1e300"]))
        assert encoded[0, 0] == encoded[1, -1] == 1


def test_a_hash_is_the_same_on_every_machine():
    # As `b2sum -l 16` has them. Another hash would silently break models that were trained with this one.
    assert [Hashed.places(value) for value in ("red", "green", "")] == [(13, 50), (17, 41), (17, 62)]


def test_many_texts_are_told_apart():
    # 45 pairs of ten texts, each alike with probability 1/1024: fixed texts, so this does not vary.
    assert len({Hashed.places(f"value {k}") for k in range(10)}) == 10


def test_the_parts_of_a_date():
    encoded = Date("ymd", clock=True).encode(column(["2024-01-01T06:00", "2024-07-02"])) * 2
    years, season, weekday, clock = np.split(encoded, np.cumsum([len(YEARS), 2, 7]), axis=1)
    assert years @ YEARS == pytest.approx([2024, 2024.5])
    assert season == pytest.approx(np.array([[1, 0], [-1, 0]]), abs=1e-12)
    assert weekday.tolist() == [[1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]]  # a Monday and a Tuesday
    assert clock == pytest.approx(np.array([[0, 1], [1, 0]]), abs=1e-12)


def test_words_count_once_and_have_no_order():
    first, second, third = Words().encode(column(["Fever, cough & fever", "COUGH fever", "cough"]))
    assert np.array_equal(first, second)
    assert np.linalg.norm(first) == pytest.approx(1)
    assert sorted(np.flatnonzero(first)) == sorted(Words.place(word) for word in ("fever", "cough"))
    assert first @ third == pytest.approx(0.5**0.5)
    assert not Words().encode(column(["?!"])).any()


@pytest.mark.parametrize(
    ("encoding", "values", "message"),
    [
        (Magnitude(), ["1", "x", "2"], r"column 'x' \(line 3\) = 'x' must be a number; correct it"),
        (Magnitude(), ["1", "inf"], r"column 'x' \(line 3\) = 'inf' must be finite"),
        (
            Interval(0, 1),
            ["a", "b", "c", "d", "1"],
            r"\(4 lines: 2, 3, 4, \.\.\.\) = 'a', 'b', 'c', \.\.\. must be a number",
        ),
        (OneOf(COLOURS), ["red", "pink"], r"\(line 3\) = 'pink' must be one of 'red', 'green', 'blue'; correct it, or"),
    ],
    ids=["text", "infinite", "many", "unknown-option"],
)
def test_values_are_refused_by_their_lines(encoding, values, message):
    with pytest.raises(ValueError, match=message):
        encoding.encode(column(values))
