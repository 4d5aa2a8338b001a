"""The kind of a column: declared, or guessed from its values, which then counts as public."""

import math
from collections.abc import Iterable

import numpy as np

from qclip import _validate as check
from qclip.tables.columns import AMBIGUOUS_DECIMAL, Column, DateOrder, date, has_short_year, number
from qclip.tables.encodings import Date, Dropped, Encoding, Hashed, Interval, Number, Words

NAMES = "'number', 'text', 'words', 'date', 'date:dmy', 'date:mdy', 'date:ymd', 'drop' or a range LOW:HIGH"
_SIMPLE: dict[str, Encoding] = {"number": Number(), "text": Hashed(), "words": Words(), "drop": Dropped()}
_ORDERS: tuple[DateOrder, ...] = ("ymd", "dmy", "mdy")
_NEARLY = 0.9
"""From this share of numbers (or dates) on, a column of other texts is a column of numbers with mistakes."""
_SEVERAL = 3
"""Words from which on a text is free text rather than the name of a category."""
_CATEGORIES = 256
"""Different texts that still are categories: more of them share the inputs of a hash."""
_FEW_ROWS = 10
"""Rows for each text below which more than `_CATEGORIES` texts name persons, and teach nothing of others."""


def declared(column: Column, kind: str, spellings: Iterable[str]) -> Encoding:
    """Return the encoding of a column whose kind was given.

    Args:
        column: The column.
        kind: Its kind.
        spellings: Texts of a missing value, in lower case.

    Raises:
        qclip.Refusal: There is no such kind, or the order of a date cannot be told from the values.
    """
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind.split(":", maxsplit=1)[0] == "date":
        known = column.take(~column.missing(spellings))
        orders = [order for order in _ORDERS if kind in ("date", f"date:{order}")]
        if len(orders) == 1:
            return Date(orders[0], _has_clock(known, orders[0]))
        if orders:
            fits = _orders(known)
            return Date(fits[0], _has_clock(known, fits[0])) if len(fits) == 1 else _ask_for_order(known, fits)
    low, _, high = (number(part) for part in kind.partition(":"))
    if low is None or high is None or not -math.inf < low < high < math.inf:
        raise check.refuse(f"columns[{column.name!r}]", kind, NAMES, 'such as "0:120" for an age')
    return Interval(low, high)


def guessed(column: Column, spellings: Iterable[str]) -> Encoding:
    """Return the encoding of a column whose kind was not given, from its known values.

    - A number where every value is one; a date where every value is one; free text where most values have three words
      or more and most differ, or more than 256 do; otherwise a category.
    - A column without any value is not used; neither is one of many texts, each in a few rows: it names persons.

    Args:
        column: The column.
        spellings: Texts of a missing value, in lower case.

    Raises:
        qclip.Refusal: The values identify the rows, can be understood in two ways, or are numbers or dates with a few
            exceptions.
    """
    known = column.take(~column.missing(spellings))
    if len(known) == 0:
        return Dropped()
    if known.is_dates:
        return Date("ymd", _has_clock(known, "ymd"))
    if not known.is_text:
        if known.whole and known.num_distinct() == len(known):
            raise _names_of_rows(known, "whole numbers")
        return Number()
    return _guessed_text(known)


def _guessed_text(known: Column) -> Encoding:
    if _are_numbers(known):
        if all(value.lstrip("+-").isdigit() for value in known.values) and known.num_distinct() == len(known):
            raise _names_of_rows(known, "whole numbers")
        return Number()
    distinct, codes = known.distinct()
    all_differ = len(distinct) == len(known)
    if fits := _orders(known):
        return Date(fits[0], _has_clock(known, fits[0])) if len(fits) == 1 else _ask_for_order(known, fits)
    if all(map(has_short_year, distinct)):
        remedy = f"write four digits, or declare it: {known.name}=text in columns"
        raise check.Refusal(f"column {known.name!r} holds dates whose years have two digits; {remedy}")
    several = np.array([len(value.split()) >= _SEVERAL for value in distinct])[codes]
    if several.mean() > 0.5 and len(distinct) > min(len(known) / 2, _CATEGORIES):
        return Words()
    if all_differ:
        raise _names_of_rows(known, "texts")
    return Dropped() if len(distinct) > max(_CATEGORIES, len(known) / _FEW_ROWS) else Hashed()


def remarks(column: Column, encoding: Encoding, spellings: Iterable[str]) -> list[str]:
    """Return what a user should know of a column: why it is not used though nobody said so, or teaches nothing.

    Args:
        column: The column.
        encoding: What it was taken for.
        spellings: Texts of a missing value, in lower case.
    """
    name = column.name
    if isinstance(encoding, Dropped):
        if column.missing(spellings).all():
            return [f"column {name!r} has no values; it is not used"]
        return [
            f"column {name!r} is not used: it has {column.num_distinct()} different texts, each in a few rows, as "
            f"names of persons have. To protect all rows of one, name it as the unit (--unit {name}); to use it, "
            f"declare it: {name}=text in columns"
        ]
    if column.is_constant():
        return [f"column {name!r} has the same value in every row: nothing can be learnt from it"]
    return []


def _names_of_rows(column: Column, values: str) -> check.Refusal:
    return check.Refusal(
        f"column {column.name!r} holds {values} that differ in every row; drop it if they only name the rows "
        f"({column.name}=drop in columns), otherwise declare it there as number, text, words or a range"
    )


def _are_numbers(known: Column) -> bool:
    """Return whether all texts are numbers; refuse what is nearly so, or can be read in two ways."""
    if known.decimal == "?" and all(
        number(v, ".") is not None or number(v, ",") is not None for v in known.distinct()[0]
    ):
        raise check.Refusal(f"column {known.name!r} {AMBIGUOUS_DECIMAL}")
    bad = np.isnan(known.numbers_or_nan())
    _refuse_exceptions(known, bad, "a number")
    return not bad.any()


def _refuse_exceptions(known: Column, bad: np.ndarray, what: str) -> None:
    if 0 < bad.mean() <= 1 - _NEARLY:
        remedy = (
            "correct it, add its spelling to the missing ones (--missing), or declare the column: "
            f"{known.name}=text in columns"
        )
        known.refuse_where(bad, f"{what}, as most values of the column are", remedy)


def _orders(known: Column) -> list[DateOrder]:
    """Return the orders in which every value is a date; refuse a column of dates with a few exceptions."""
    distinct, codes = known.distinct()
    if not any(value[:1].isdigit() for value in distinct):
        return []
    none = {
        order: np.isnat(np.array([date(v, order) for v in distinct], dtype="datetime64[s]"))[codes] for order in _ORDERS
    }
    fits = [order for order in _ORDERS if not none[order].any()]
    if not fits:
        _refuse_exceptions(known, min(none.values(), key=lambda bad: bad.sum()), "a date")
    return fits


def _ask_for_order(known: Column, fits: list[DateOrder]) -> Encoding:
    if not fits:
        raise check.refuse(f"columns[{known.name!r}]", "date", "a kind that fits its values", "no order of dates does")
    kinds = " or ".join(f"{known.name}=date:{order}" for order in fits)
    raise check.Refusal(
        f"column {known.name!r} holds dates whose day and month cannot be told apart; say which comes first in "
        f"columns: {kinds}"
    )


def _has_clock(known: Column, order: DateOrder) -> bool:
    """Return whether any date has a time of day."""
    seconds = known.dates_or_nat(order)
    return bool((seconds != seconds.astype("datetime64[D]")).any()) if len(seconds) else False
