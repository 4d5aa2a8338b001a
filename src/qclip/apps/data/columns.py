"""The columns of a table, and their encodings, which are fixed before the data are read."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from qclip import _validate as check
from qclip._validate import Floats

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null"})
"""Spellings of a missing value, in lower case."""


@dataclass(frozen=True)
class Column:
    """A column of a file as text, with the line of each value for errors."""

    name: str
    values: tuple[str, ...]
    lines: tuple[int, ...]

    def numbers(self) -> Floats:
        """Return the values as numbers, [rows]; others, and infinite ones, are refused by their lines."""
        numbers = [number(value) for value in self.values]
        self.refuse_where([each is None for each in numbers], "a number", "correct it, or declare the column as text")
        array = np.asarray(numbers, dtype=np.float64)
        self.refuse_where(~np.isfinite(array), "finite", "correct it, or delete the line")
        return array

    def refuse_where(self, bad: ArrayLike, bound: str, remedy: str) -> None:
        """Refuse the values where ``bad`` [rows] is true, by their lines."""
        where = np.flatnonzero(bad).tolist()
        if where:
            lines = ", ".join(str(self.lines[k]) for k in where[:3]) + (", ..." if len(where) > 3 else "")
            place = f"line {lines}" if len(where) == 1 else f"{len(where)} lines: {lines}"
            raise check.refuse(f"column {self.name!r} ({place})", self.values[where[0]], bound, remedy)


def number(value: str) -> float | None:
    """Return the number in a text; None where it is not a number.

    >>> number("1e3"), number("1_000"), number("one")
    (1000.0, None, None)
    """
    try:
        return None if "_" in value else float(value)
    except ValueError:
        return None


class Encoding(ABC):
    """The encoding of a column as inputs of a model.

    Guarantees:
        - It uses constants only: no row affects the encoding of another one.
        - A value becomes a vector of norm at most 1, so that no column outweighs the others. The size of gradients
          depends on the number of columns rather than on their content.
    """

    @abstractmethod
    def encode(self, column: Column) -> Floats:
        """Return the inputs of each value, [rows, inputs]."""


@dataclass(frozen=True)
class Dropped(Encoding):
    """A column that is not used."""

    def encode(self, column: Column) -> Floats:
        """Return no inputs, [rows, 0]."""
        return np.zeros((len(column.values), 0))


_POWERS = 10.0 ** (np.arange(-4, 13) / 2)
KNOTS = np.concatenate([-_POWERS[::-1], [0.0], _POWERS])
"""0 and the half powers of ten from 0.01 to a million, with both signs."""


@dataclass(frozen=True)
class Magnitude(Encoding):
    """A number of unknown size, interpolated between `KNOTS`; values outside are moved to the outermost knot.

    Values that vary little around a large number, such as years, are hardly resolved: use an `Interval` for them.
    """

    def encode(self, column: Column) -> Floats:
        """Return an input for each knot, [rows, knots]."""
        return shares(column.numbers(), KNOTS)


@dataclass(frozen=True)
class Interval(Encoding):
    """A number in a publicly known range, interpolated between 9 knots; values outside are moved to its ends."""

    low: float
    high: float

    def encode(self, column: Column) -> Floats:
        """Return an input for each knot, [rows, 9]."""
        return shares(column.numbers(), np.linspace(self.low, self.high, 9))

    def scaled(self, column: Column) -> Floats:
        """Return the numbers scaled from [low, high] to [-1, 1], [rows], as a target.

        >>> Interval(0, 100).scaled(Column("percent", ("25", "130"), (2, 3)))
        array([-0.5,  1. ])
        """
        return np.interp(column.numbers(), [self.low, self.high], [-1, 1])


def shares(numbers: Floats, knots: Floats) -> Floats:
    """Return the linear interpolation weights of each number at its two nearest knots, [rows, knots].

    The weights of a row add up to 1. A linear model of them is piecewise linear in the number, with a corner at each
    knot.

    >>> shares(np.array([2.5, 20.0]), np.array([0.0, 10.0, 20.0]))
    array([[0.75, 0.25, 0.  ],
           [0.  , 0.  , 1.  ]])
    """
    numbers = np.clip(numbers, knots[0], knots[-1])
    right = np.clip(np.searchsorted(knots, numbers), 1, len(knots) - 1)
    share = (numbers - knots[right - 1]) / (knots[right] - knots[right - 1])
    weights, rows = np.zeros((len(numbers), len(knots))), np.arange(len(numbers))
    weights[rows, right - 1], weights[rows, right] = 1 - share, share
    return weights


@dataclass(frozen=True)
class Hashed(Encoding):
    """Text, hashed twice into one of 32 inputs: two values collide with probability 1/1024."""

    def encode(self, column: Column) -> Floats:
        """Return 64 inputs, two of them on, [rows, 64]."""
        encoded = np.zeros((len(column.values), 64))
        places = {value: self.places(value) for value in set(column.values)}
        rows = np.arange(len(column.values))
        for k in range(2):
            encoded[rows, [places[value][k] for value in column.values]] = 0.5**0.5
        return encoded

    @staticmethod
    def places(value: str) -> tuple[int, int]:
        """Return the two inputs of a value, the same on every machine and in every run.

        >>> Hashed.places("blue")
        (30, 59)
        """
        first, second = hashlib.blake2b(value.encode(), digest_size=2).digest()
        return first % 32, 32 + second % 32


@dataclass(frozen=True)
class OneOf(Encoding):
    """One of the options of a published list."""

    options: tuple[str, ...]

    def encode(self, column: Column) -> Floats:
        """Return an input for each option, [rows, options]."""
        return np.eye(len(self.options))[self.indices(column)]

    def indices(self, column: Column) -> Floats:
        """Return the index of each value in the list, [rows]."""
        places = {option: k for k, option in enumerate(self.options)}
        bound = f"one of {', '.join(map(repr, self.options))}"
        column.refuse_where([value not in places for value in column.values], bound, "correct it, or complete the list")
        return np.asarray([places[value] for value in column.values])
