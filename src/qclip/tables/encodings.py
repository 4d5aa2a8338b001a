"""Encodings of columns as inputs of a model, which are fixed before the data are read."""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.tables.columns import Column, DateOrder


class Encoding(ABC):
    """The encoding of a column as inputs of a model.

    Guarantees:
        - It uses constants only: no row affects the encoding of another one.
        - A value becomes a vector of norm at most 1, so that no column outweighs the others. The size of gradients
          depends on the number of columns rather than on their content.
    """

    kind: ClassVar[str]
    """Its name in files."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of inputs."""

    @property
    @abstractmethod
    def words(self) -> str:
        """What the column is taken for, in words."""

    @abstractmethod
    def encode(self, column: Column) -> Floats:
        """Return the inputs of each value, [rows, width]; values that it cannot encode are refused."""

    def check(self, column: Column) -> None:
        """Refuse values that cannot be encoded; as cheap as can be."""
        return


@dataclass(frozen=True)
class Dropped(Encoding):
    """A column that is not used."""

    kind: ClassVar[str] = "drop"

    @property
    def width(self) -> int:
        """No inputs."""
        return 0

    @property
    def words(self) -> str:
        """In words."""
        return "not used"

    def encode(self, column: Column) -> Floats:
        """Return no inputs, [rows, 0]."""
        return np.zeros((len(column), 0))


_POWERS = 10.0 ** (np.arange(-4, 13) / 2)
KNOTS = np.concatenate([-_POWERS[::-1], [0.0], _POWERS])
"""0 and the half powers of ten from 0.01 to a million, with both signs."""


@dataclass(frozen=True)
class Magnitude(Encoding):
    """A number of unknown size, interpolated between `KNOTS`; values outside are moved to the outermost knot.

    Values that vary little around a large number, such as years, are hardly resolved: use a `Number` for them.
    """

    kind: ClassVar[str] = "magnitude"

    @property
    def width(self) -> int:
        """One input for each knot."""
        return len(KNOTS)

    @property
    def words(self) -> str:
        """In words."""
        return "a magnitude"

    def encode(self, column: Column) -> Floats:
        """Return an input for each knot, [rows, knots]."""
        return shares(column.numbers(), KNOTS)

    def check(self, column: Column) -> None:
        """Refuse what is not a number."""
        column.numbers()


LEVELS = (0.5, 0.3, 0.2)
"""The shares of a number's squared norm: its magnitude, its first digit, its second digit."""
_SMALLEST = 0.01


@dataclass(frozen=True)
class Number(Encoding):
    """A number of unknown size: its magnitude between `KNOTS`, and its first two digits as points on a circle.

    The circles resolve values that vary little around a large number, such as temperatures or years, where the knots
    are too far apart: to a tenth, and to a hundredth of the number's size. They have no jumps: at a power of ten, where
    the next digit begins, both circles are at their beginning. Values outside are moved to the outermost knot.
    """

    kind: ClassVar[str] = "number"

    @property
    def width(self) -> int:
        """One input for each knot, and two for each circle."""
        return len(KNOTS) + 4

    @property
    def words(self) -> str:
        """In words."""
        return "a number of unknown size"

    def encode(self, column: Column) -> Floats:
        """Return the inputs of each number, [rows, width]."""
        numbers = np.clip(column.numbers(), KNOTS[0], KNOTS[-1])
        size = np.maximum(np.abs(numbers), _SMALLEST)
        decade = 10.0 ** np.floor(np.log10(size))
        parts = [shares(numbers, KNOTS), circle(numbers / decade), circle(10 * numbers / decade)]
        return np.hstack([part * share**0.5 for part, share in zip(parts, LEVELS, strict=True)])

    def check(self, column: Column) -> None:
        """Refuse what is not a number."""
        column.numbers()


@dataclass(frozen=True)
class Interval(Encoding):
    """A number in a publicly known range, interpolated between 9 knots; values outside are moved to its ends."""

    low: float
    high: float

    kind: ClassVar[str] = "range"

    @property
    def width(self) -> int:
        """One input for each knot."""
        return 9

    @property
    def words(self) -> str:
        """In words."""
        return f"a number in {self.low:g} .. {self.high:g}"

    def encode(self, column: Column) -> Floats:
        """Return an input for each knot, [rows, 9]."""
        return shares(column.numbers(), np.linspace(self.low, self.high, 9))

    def check(self, column: Column) -> None:
        """Refuse what is not a number."""
        column.numbers()

    def scaled(self, column: Column) -> Floats:
        """Return the numbers scaled from [low, high] to [-1, 1], [rows], as a target.

        >>> Interval(0, 100).scaled(Column.of_texts("percent", ("25", "130"), (2, 3)))
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


def circle(turns: Floats) -> Floats:
    """Return the point on the unit circle after some turns, [rows, 2]: the same point after every whole turn.

    >>> circle(np.array([0.0, 1.25])).round(6)
    array([[1., 0.],
           [0., 1.]])
    """
    angle = 2 * np.pi * turns
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


@dataclass(frozen=True)
class Hashed(Encoding):
    """Text, hashed twice into one of 32 inputs: two values collide with probability 1/1024."""

    kind: ClassVar[str] = "text"

    @property
    def width(self) -> int:
        """Twice 32 inputs."""
        return 64

    @property
    def words(self) -> str:
        """In words."""
        return "a category, hashed"

    def encode(self, column: Column) -> Floats:
        """Return 64 inputs, two of them on, [rows, 64]."""
        distinct, codes = column.distinct()
        table = np.zeros((len(distinct), 64))
        for row, value in enumerate(distinct):
            table[row, list(self.places(value))] = 0.5**0.5
        return table[codes]

    @staticmethod
    def places(value: str) -> tuple[int, int]:
        """Return the two inputs of a value, the same on every machine and in every run.

        >>> Hashed.places("blue")
        (30, 59)
        """
        first, second = hashlib.blake2b(value.encode(), digest_size=2).digest()
        return first % 32, 32 + second % 32


WORD_PLACES = 256
"""The inputs of free text: constants, like those of every encoding."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Words(Encoding):
    """Free text as the set of its words, each hashed to one of 256 inputs, at norm 1 whatever the length."""

    kind: ClassVar[str] = "words"

    @property
    def width(self) -> int:
        """One input for each place of the hash."""
        return WORD_PLACES

    @property
    def words(self) -> str:
        """In words."""
        return "free text, as hashed words"

    def encode(self, column: Column) -> Floats:
        """Return the hashed words of each text, [rows, 256]; a text without words is 0."""
        distinct, codes = column.distinct()
        known: dict[str, int] = {}
        table = np.zeros((len(distinct), WORD_PLACES), dtype=np.float32)
        for row, text in enumerate(distinct):
            for word in set(_WORD.findall(text.lower())):
                if word not in known:
                    known[word] = self.place(word)
                table[row, known[word]] += 1
        table /= np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1)
        return table[codes]

    @staticmethod
    def place(word: str) -> int:
        """Return the input of a word, the same on every machine and in every run.

        >>> Words.place("cough")
        30
        """
        return hashlib.blake2b(word.encode(), digest_size=1).digest()[0]


@dataclass(frozen=True)
class OneOf(Encoding):
    """One of the options of a published list."""

    options: tuple[str, ...]

    kind: ClassVar[str] = "choice"

    @property
    def width(self) -> int:
        """One input for each option."""
        return len(self.options)

    @property
    def words(self) -> str:
        """In words."""
        return f"one of {len(self.options)} options"

    def encode(self, column: Column) -> Floats:
        """Return an input for each option, [rows, options]."""
        return np.eye(len(self.options))[self.indices(column)]

    def check(self, column: Column) -> None:
        """Refuse what is not an option."""
        self.indices(column)

    def indices(self, column: Column) -> Floats:
        """Return the index of each value in the list, [rows]."""
        places = {option: k for k, option in enumerate(self.options)}
        indices = column.each(lambda value: places.get(value, -1), np.int64)
        bound = f"one of {', '.join(map(repr, self.options))}"
        column.refuse_where(indices < 0, bound, "correct it, or complete the list")
        return indices


YEARS = np.arange(1900.0, 2051.0, 5.0)
"""The knots of a date: every fifth year; dates outside are moved to the ends."""
WEEKDAYS = 7


@dataclass(frozen=True)
class Date(Encoding):
    """A date in parts: years between knots, the season as a circle, the weekday, and the time of day where it has one.

    Args:
        order: The order of day, month and year.
        clock: Whether the values have times of day.
    """

    order: DateOrder
    clock: bool = False

    kind: ClassVar[str] = "date"

    @property
    def width(self) -> int:
        """The inputs of all parts."""
        return len(YEARS) + 2 + WEEKDAYS + (2 if self.clock else 0)

    @property
    def words(self) -> str:
        """In words."""
        order = {"ymd": "year, month, day", "dmy": "day, month, year", "mdy": "month, day, year"}[self.order]
        parts = "year, season and weekday" + (" and time of day" if self.clock else "")
        return f"a date ({order}), as {parts}"

    def encode(self, column: Column) -> Floats:
        """Return the parts of each date, [rows, width], with a joint norm of at most 1."""
        seconds = column.dates(self.order)
        days = seconds.astype("datetime64[D]")
        years = seconds.astype("datetime64[Y]")
        year_starts, next_starts = years.astype("datetime64[D]"), (years + 1).astype("datetime64[D]")
        part_of_year = (days - year_starts).astype(float) / (next_starts - year_starts).astype(float)
        number_of_year = years.astype(float) + 1970
        weekday = (days.astype(int) + 3) % 7  # 1970 began on a Thursday
        parts = [shares(number_of_year + part_of_year, YEARS), circle(part_of_year), np.eye(WEEKDAYS)[weekday]]
        if self.clock:
            parts.append(circle((seconds - days).astype(float) / 86400))
        return np.hstack(parts) / len(parts) ** 0.5

    def check(self, column: Column) -> None:
        """Refuse what is not a date."""
        column.dates(self.order)


@dataclass(frozen=True)
class OrMissing(Encoding):
    """An encoding with one more input, which is 1 where the value is missing; the others are 0 there, as a constant.

    Nothing is imputed from the data. A model learns a weight of its own for "not known".

    Args:
        inner: The encoding of the values that are known.
        spellings: Texts of a missing value, in lower case.
    """

    inner: Encoding
    spellings: frozenset[str]

    @property
    def width(self) -> int:
        """One more than the encoding of known values."""
        return self.inner.width + 1

    @property
    def words(self) -> str:
        """In words."""
        return self.inner.words

    def encode(self, column: Column) -> Floats:
        """Return the inputs of each value, the mark of missing ones last, [rows, width]."""
        missing = column.missing(self.spellings)
        encoded = np.zeros((len(column), self.width))
        encoded[missing, -1] = 1
        encoded[~missing, :-1] = self.inner.encode(column.take(~missing))
        return encoded

    def check(self, column: Column) -> None:
        """Refuse known values that cannot be encoded."""
        self.inner.check(column.take(~column.missing(self.spellings)))


_ALL: tuple[type[Encoding], ...] = (Dropped, Number, Magnitude, Interval, Hashed, Words, OneOf, Date)
_CLASSES = {each.kind: each for each in _ALL}


def to_dict(encoding: Encoding) -> dict[str, Any]:
    """Return an encoding as JSON data.

    >>> to_dict(Interval(0, 120))
    {'kind': 'range', 'low': 0, 'high': 120}
    """
    values = asdict(encoding)  # type: ignore[call-overload]
    return {"kind": encoding.kind} | {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


_TYPES: dict[str, tuple[type, ...]] = {"low": (int, float), "high": (int, float), "order": (str,), "clock": (bool,)}


def from_dict(name: str, content: Mapping[str, Any]) -> Encoding:
    """Return an encoding from JSON data; whatever `to_dict` does not write is refused.

    Args:
        name: The column, for errors.
        content: The data.
    """
    remedy = "restore the file as qclip wrote it, or use the version that wrote it"
    kind = content.get("kind") if isinstance(content, Mapping) else None
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise check.refuse(f"kind of column {name!r}", kind, f"one of {', '.join(map(repr, _CLASSES))}", remedy)
    cls = _CLASSES[kind]
    values = {key: value for key, value in content.items() if key != "kind"}
    well = set(values) == {field.name for field in fields(cls)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key == "options":
            well = well and isinstance(value, list | tuple) and all(isinstance(option, str) for option in value)
            values[key] = tuple(value) if well else value
        else:
            number_as_bool = isinstance(value, bool) and bool not in _TYPES.get(key, ())
            well = well and isinstance(value, _TYPES.get(key, ())) and not number_as_bool
    if well and kind == "date":
        well = values["order"] in ("ymd", "dmy", "mdy")
    if well and kind == "range":
        well = -np.inf < values["low"] < values["high"] < np.inf
    if not well:
        raise check.Refusal(
            f"the encoding of column {name!r}, {dict(content)!r}, is not one that qclip writes; {remedy}"
        )
    return cls(**values)
