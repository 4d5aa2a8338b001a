"""A column of a table: its values as they were read, and what they mean as numbers, dates or words."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qclip import _validate as check
from qclip._validate import Floats

TEXT = np.dtypes.StringDType()
MISSING = frozenset({"", "?", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null"})
"""Spellings of a missing value, in lower case."""

Decimal = Literal[".", ",", "?"]
"""The decimal mark of a column of texts; "?" where its values can be read with either."""
DateOrder = Literal["ymd", "dmy", "mdy"]
"""The order of day, month and year in a date."""


@dataclass(frozen=True, eq=False)
class Column:
    """A column with the place of each value for errors.

    Args:
        name: Its name.
        values: Texts, float64 numbers (NaN is missing) or dates in seconds (NaT is missing), [rows].
        places: The line of the file, or the number of the row, of each value, [rows].
        decimal: The decimal mark of numbers among texts.
        counted: What ``places`` counts.
        whole: Whether the values are whole numbers by their type.
    """

    name: str
    values: NDArray[Any]
    places: NDArray[np.intp]
    decimal: Decimal = "."
    counted: str = "line"
    whole: bool = False

    @staticmethod
    def of_texts(name: str, values: Iterable[str], places: ArrayLike) -> "Column":
        """Return a column of texts with their lines."""
        return Column(name, np.array(list(values), dtype=TEXT), np.asarray(places, dtype=np.intp))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_text(self) -> bool:
        """Whether the values are texts, as in a file."""
        return self.values.dtype.kind == "T"

    @property
    def is_dates(self) -> bool:
        """Whether the values are dates by their type."""
        return self.values.dtype.kind == "M"

    def take(self, rows: Any) -> "Column":
        """Return the column of some rows: a slice, indices or a mask."""
        return Column(self.name, self.values[rows], self.places[rows], self.decimal, self.counted, self.whole)

    def distinct(self) -> tuple[list[str], NDArray[np.intp]]:
        """Return the distinct values as texts, in the order in which they occur, and the index of each value."""
        found: dict[str, int] = {}
        codes = (found.setdefault(value, len(found)) for value in self._texts())
        index = np.fromiter(codes, dtype=np.intp, count=len(self))
        return list(found), index

    def num_distinct(self) -> int:
        """Return the number of distinct values."""
        return len(self.distinct()[0]) if self.is_text else len(np.unique(self.values))

    def is_constant(self) -> bool:
        """Return whether all values are the same."""
        return bool((self.values == self.values[0]).all())

    def texts(self) -> list[str]:
        """Return every value as a text; whole numbers have no decimals."""
        return list(self._texts())

    def _texts(self) -> Iterable[str]:
        if self.is_text:
            return iter(self.values)
        if self.is_dates:
            return iter(np.datetime_as_string(self.values).tolist())
        return (f"{value:.0f}" if value.is_integer() else repr(value) for value in self.values.tolist())

    def each(self, read: Callable[[str], Any], dtype: Any) -> NDArray[Any]:
        """Return what ``read`` makes of each value as a text; it is called once for each distinct value."""
        distinct, codes = self.distinct()
        return np.array([read(value) for value in distinct], dtype=dtype)[codes]

    def missing(self, spellings: Iterable[str] = MISSING) -> NDArray[np.bool_]:
        """Return where values are missing, [rows].

        Args:
            spellings: Texts of a missing value, in lower case.
        """
        if self.is_text:
            known = frozenset(spellings)
            return np.fromiter((value.lower() in known for value in self.values), dtype=bool, count=len(self))
        return np.isnat(self.values) if self.is_dates else np.isnan(self.values)

    def numbers(self) -> Floats:
        """Return the values as numbers, [rows]; others, and infinite ones, are refused by their places."""
        if self.is_text and self.decimal == "?":
            raise check.Refusal(f"column {self.name!r} {AMBIGUOUS_DECIMAL}")
        array = self.numbers_or_nan()
        remedy = "correct it, or declare the column as text"
        self.refuse_where(np.isnan(array) & ~self._said_nan(), "a number", remedy)
        self.refuse_where(~np.isfinite(array), "finite", "correct it, or delete the line")
        return array

    def numbers_or_nan(self) -> Floats:
        """Return the values as numbers, [rows]; NaN where they are none."""
        if self.is_dates:
            return np.full(len(self), np.nan)
        if not self.is_text:
            return self.values
        read = (number(value, self.decimal) for value in self.values)  # not by `distinct`: most numbers differ
        return np.fromiter((math.nan if each is None else each for each in read), dtype=np.float64, count=len(self))

    def _said_nan(self) -> NDArray[np.bool_]:
        if not self.is_text:
            return np.isnan(self.values) if not self.is_dates else np.zeros(len(self), dtype=bool)
        return np.fromiter((value.lower().lstrip("+-") == "nan" for value in self.values), dtype=bool, count=len(self))

    def dates(self, order: DateOrder) -> NDArray[np.datetime64]:
        """Return the values as dates, [rows] in seconds; others are refused by their places."""
        array = self.dates_or_nat(order)
        remedy = f"write it as {DATE_EXAMPLES[order]}, or declare the column as text"
        self.refuse_where(np.isnat(array), f"a date in the order {order}", remedy)
        return array

    def dates_or_nat(self, order: DateOrder) -> NDArray[np.datetime64]:
        """Return the values as dates, [rows] in seconds; NaT where they are none in this order."""
        if self.is_dates:
            return self.values
        return self.each(lambda value: date(value, order), "datetime64[s]")

    def refuse_where(self, bad: ArrayLike, bound: str, remedy: str) -> None:
        """Refuse the values where ``bad`` [rows] is true, by their places and the first three that differ."""
        where = np.flatnonzero(bad)
        if len(where):
            distinct = self.take(where).distinct()[0]
            shown = ", ".join(map(repr, distinct[:3])) + (", ..." if len(distinct) > 3 else "")
            raise check.Refusal(
                f"column {self.name!r} ({self.place(where.tolist())}) = {shown} must be {bound}; {remedy}"
            )

    def place(self, rows: Sequence[int]) -> str:
        """Return the place of some rows in words: the lines of the file, the first three of them."""
        shown = ", ".join(str(self.places[k]) for k in rows[:3]) + (", ..." if len(rows) > 3 else "")
        return f"{self.counted} {shown}" if len(rows) == 1 else f"{len(rows)} {self.counted}s: {shown}"


AMBIGUOUS_DECIMAL = (
    "has numbers that can be read with a decimal comma or with commas between thousands, or that mix both; say which: "
    'decimal="," or decimal="." (--decimal), or declare it as text'
)
_PLAIN = re.compile(r"[+-]?\d+")
_GROUPED = {mark: re.compile(rf"[+-]?[1-9]\d{{0,2}}({re.escape(mark)}\d{{3}})+") for mark in ".,"}
_WITH_MARK = {
    mark: re.compile(rf"[+-]?(\d*|[1-9]\d{{0,2}}({re.escape(other)}\d{{3}})+){re.escape(mark)}\d*([eE][+-]?\d+)?")
    for mark, other in (".,", ",.")
}


def number(value: str, decimal: Decimal = ".") -> float | None:
    """Return the number in a text; None where it is not a number.

    Thousands may be grouped by the mark that is not the decimal one: a comma in front of a point is never a decimal.

    >>> number("1e3"), number("1_000"), number("one"), number("36,6")
    (1000.0, None, None, None)
    >>> number("36,6", ","), number("1.234,5", ","), number("1,234.5", "."), number("1.234", ",")
    (36.6, 1234.5, 1234.5, 1234.0)

    Args:
        value: The text.
        decimal: The decimal mark.
    """
    if decimal == "?":
        return None
    other = "," if decimal == "." else "."
    if other in value:
        grouped = value[: value.find(decimal)] if decimal in value else value
        if not _GROUPED[other].fullmatch(grouped.strip()):
            return None
        value = value.replace(other, "")
    if decimal == ",":
        value = value.replace(",", ".")
    try:
        return None if "_" in value else float(value)
    except ValueError:
        return None


def decimal_mark(values: Iterable[str], *, commas_elsewhere: bool = False) -> Decimal:
    """Return the decimal mark of the numbers among some texts; "?" where thousands and decimals look the same.

    >>> decimal_mark(["36,6", "37"]), decimal_mark(["36.6", "1,234.5"]), decimal_mark(["1,234", "2,500"])
    (',', '.', '?')
    >>> decimal_mark(["1.234"]), decimal_mark(["1.234"], commas_elsewhere=True), decimal_mark(["1,5", "1.5"])
    ('.', '?', '?')

    Args:
        values: The texts; those that are not numbers have no say.
        commas_elsewhere: Whether other columns of the file have decimal commas.
    """
    comma = point = maybe_comma = maybe_point = False
    for value in values:
        if "," not in value and "." not in value:
            continue
        if groups := _GROUPED[","].fullmatch(value):
            point |= value.count(",") > 1
            maybe_comma |= groups is not None
        elif _GROUPED["."].fullmatch(value):
            comma |= value.count(".") > 1
            maybe_point = True
        elif _WITH_MARK[","].fullmatch(value) and "," in value:
            comma = True
        elif _WITH_MARK["."].fullmatch(value):
            point = True
    if comma and point:
        return "?"
    if comma or point:
        return "," if comma else "."
    return "?" if maybe_comma or (maybe_point and commas_elsewhere) else "."


DATE_EXAMPLES: dict[DateOrder, str] = {"ymd": "2024-12-31", "dmy": "31.12.2024", "mdy": "12/31/2024"}
_TIME = (
    r"(?:[T ]+(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:[.,]\d+)?)?\s*(?:Z|UTC|[+-]\d{2}:?\d{2})?)?"
)
_YEAR_FIRST = re.compile(rf"(?P<year>\d{{4}})(?P<mark>[-/.])(?P<month>\d{{1,2}})(?P=mark)(?P<day>\d{{1,2}}){_TIME}")
_YEAR_LAST = re.compile(rf"(?P<one>\d{{1,2}})(?P<mark>[-/.])(?P<two>\d{{1,2}})(?P=mark)(?P<year>\d{{4}}){_TIME}")
_SHORT_YEAR = re.compile(rf"\d{{1,2}}([-/.])\d{{1,2}}\1\d{{2}}{_TIME}")


def date(value: str, order: DateOrder) -> np.datetime64:
    """Return the date in a text, with its time of day as it is written, in whichever zone; NaT where it is none.

    >>> date("31.12.2024", "dmy"), date("2024-12-31T08:30", "ymd"), date("12/31/2024", "mdy")
    (np.datetime64('2024-12-31T00:00:00'), np.datetime64('2024-12-31T08:30:00'), np.datetime64('2024-12-31T00:00:00'))
    """
    found = (_YEAR_FIRST if order == "ymd" else _YEAR_LAST).fullmatch(value)
    if found is None or (order == "mdy" and found["mark"] == "."):
        return np.datetime64("NaT")
    part = found.groupdict()
    month, day = (
        (part["month"], part["day"])
        if order == "ymd"
        else (part["two"], part["one"])
        if order == "dmy"
        else (part["one"], part["two"])
    )
    clock = f"{int(part['hour'] or 0):02d}:{part['minute'] or '00'}:{part['second'] or '00'}"
    try:
        return np.datetime64(f"{part['year']}-{int(month):02d}-{int(day):02d}T{clock}", "s")
    except ValueError:
        return np.datetime64("NaT")


def has_short_year(value: str) -> bool:
    """Return whether a text looks like a date whose year has two digits.

    >>> has_short_year("31.12.24"), has_short_year("31.12.2024")
    (True, False)
    """
    return _SHORT_YEAR.fullmatch(value) is not None
