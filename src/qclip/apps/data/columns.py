"""The columns of a table, and encodings of them that are fixed before the data are seen."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from qclip import _validate as check
from qclip._validate import Floats

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null"})
"""How files write that a value is not known, in small letters."""


@dataclass(frozen=True)
class Column:
    """A column of a file as it was written, with the line of each value, for errors."""

    name: str
    values: tuple[str, ...]
    lines: tuple[int, ...]

    def numbers(self) -> Floats:
        """The values as numbers; one that is none, or not finite, is refused by its line."""
        numbers = [number(value) for value in self.values]
        self.refuse_where(
            [each is None for each in numbers], "a number", "correct it; a column that holds other things is text"
        )
        array = np.asarray(numbers, dtype=np.float64)
        self.refuse_where(~np.isfinite(array), "finite", "correct it, or delete the line")
        return array

    def refuse_where(self, bad: ArrayLike, bound: str, remedy: str) -> None:
        """Refuse the values where ``bad`` holds, [rows], by their lines."""
        where = np.flatnonzero(bad).tolist()
        if where:
            lines = ", ".join(str(self.lines[k]) for k in where[:3]) + (", ..." if len(where) > 3 else "")
            place = f"line {lines}" if len(where) == 1 else f"{len(where)} lines: {lines}"
            raise check.refuse(f"column {self.name!r} ({place})", self.values[where[0]], bound, remedy)


def number(value: str) -> float | None:
    """The number that is written here, if it is one.

    >>> number("1e3"), number("1_000"), number("one")
    (1000.0, None, None)
    """
    try:
        return None if "_" in value else float(value)
    except ValueError:
        return None


class Encoding(ABC):
    """From a column to inputs, by constants: no row has a say in how another one is encoded.

    The inputs that a value becomes are a vector of length at most 1: no column outweighs the others, and the size of
    gradients depends on how many columns there are rather than on what they hold.
    """

    @abstractmethod
    def encode(self, column: Column) -> Floats:
        """[rows, inputs]."""


@dataclass(frozen=True)
class Dropped(Encoding):
    """Not used."""

    def encode(self, column: Column) -> Floats:
        """No input."""
        return np.zeros((len(column.values), 0))


_POWERS = 10.0 ** (np.arange(-4, 13) / 2)
KNOTS = np.concatenate([-_POWERS[::-1], [0.0], _POWERS])
"""0 and the half powers of ten from 0.01 to a million, with either sign."""


@dataclass(frozen=True)
class Magnitude(Encoding):
    """A number of unknown size, between `KNOTS`; what lies outside is moved to the outermost.

    What varies little around a large value, such as a year, is hardly resolved: take an `Interval`.
    """

    def encode(self, column: Column) -> Floats:
        """An input for each knot."""
        return shares(column.numbers(), KNOTS)


@dataclass(frozen=True)
class Interval(Encoding):
    """A number in a range that is publicly known, between 9 knots; what lies outside is moved to its ends."""

    low: float
    high: float

    def encode(self, column: Column) -> Floats:
        """An input for each knot."""
        return shares(column.numbers(), np.linspace(self.low, self.high, 9))

    def scaled(self, column: Column) -> Floats:
        """The numbers from [low, high] to [-1, 1], [rows]: for a target.

        >>> Interval(0, 100).scaled(Column("percent", ("25", "130"), (2, 3)))
        array([-0.5,  1. ])
        """
        return np.interp(column.numbers(), [self.low, self.high], [-1, 1])


def shares(numbers: Floats, knots: Floats) -> Floats:
    """How near each number is to the two knots it lies between, [rows, knots]; a row's shares add up to 1.

    A linear model of the shares is a broken line in the number, with a corner at each knot.

    >>> shares(np.array([2.5, 20.0]), np.array([0.0, 10.0, 20.0]))
    array([[0.75, 0.25, 0.  ],
           [0.  , 0.  , 1.  ]])
    """
    numbers = np.clip(numbers, knots[0], knots[-1])
    right = np.clip(np.searchsorted(knots, numbers), 1, len(knots) - 1)
    share = (numbers - knots[right - 1]) / (knots[right] - knots[right - 1])
    found, rows = np.zeros((len(numbers), len(knots))), np.arange(len(numbers))
    found[rows, right - 1], found[rows, right] = 1 - share, share
    return found


@dataclass(frozen=True)
class Hashed(Encoding):
    """Text, each value switching on one of 32 inputs in each of two tables: two values look alike once in 1024."""

    def encode(self, column: Column) -> Floats:
        """64 inputs."""
        encoded = np.zeros((len(column.values), 64))
        places = {value: self.places(value) for value in set(column.values)}
        rows = np.arange(len(column.values))
        for k in range(2):
            encoded[rows, [places[value][k] for value in column.values]] = 0.5**0.5
        return encoded

    @staticmethod
    def places(value: str) -> tuple[int, int]:
        """The two inputs of a value: the same on every machine and in every run.

        >>> Hashed.places("blue")
        (30, 59)
        """
        first, second = hashlib.blake2b(value.encode(), digest_size=2).digest()
        return first % 32, 32 + second % 32


@dataclass(frozen=True)
class OneOf(Encoding):
    """One of the values of a published list."""

    options: tuple[str, ...]

    def encode(self, column: Column) -> Floats:
        """An input for each option."""
        return np.eye(len(self.options))[self.indices(column)]

    def indices(self, column: Column) -> Floats:
        """The place of each value in the list, [rows]."""
        places = {option: k for k, option in enumerate(self.options)}
        bound = f"one of {', '.join(map(repr, self.options))}"
        column.refuse_where([value not in places for value in column.values], bound, "correct it, or complete the list")
        return np.asarray([places[value] for value in column.values])
