"""A table in memory: columns by name, from a file or a data frame."""

import datetime
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qclip import _validate as check
from qclip.tables.columns import TEXT, Column

_CHUNK = 20_000
"""Rows that are kept as Python texts at a time."""
_EXACT = 2**53
"""Whole numbers up to this one are exact as float64; larger ones stay texts, so that no two of them become one."""


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length, by name.

    Args:
        columns: The columns.
        source: Where they come from, for errors.
        notes: How the file was understood, a sentence each.
    """

    columns: Mapping[str, Column]
    source: str = "the table"
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, in their order."""
        return tuple(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def take(self, rows: Any) -> "Table":
        """Return the table of some rows: a slice, indices or a mask."""
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return Table(columns, self.source, self.notes)

    def column(self, argument: str, name: str) -> Column:
        """Return a column that an argument names; refuse one that the table does not have."""
        if name not in self.columns:
            listed = ", ".join(map(repr, self.columns))
            raise check.refuse(argument, name, f"a column of the file: {listed}", did_you_mean(name, self.columns))
        return self.columns[name]

    @staticmethod
    def of_records(names: Sequence[str], records: Iterable[tuple[int, Sequence[str]]], source: str) -> "Table":
        """Return the table of rows of texts, each with its line; rows of another length are refused.

        Args:
            names: The names of the columns.
            records: The line on which each row ends, and its values.
            source: The file, for errors.
        """
        lines: list[int] = []
        rows: list[Sequence[str]] = []
        ragged: list[tuple[int, int]] = []
        chunks: list[list[NDArray[Any]]] = [[] for _ in names]

        def put_away() -> None:
            for chunk, values in zip(chunks, zip(*rows, strict=True), strict=False):
                chunk.append(np.array([value.strip() for value in values], dtype=TEXT))
            rows.clear()

        for line, fields in records:
            if len(fields) != len(names):
                ragged.append((line, len(fields)))
                continue
            lines.append(line)
            rows.append(fields)
            if len(rows) == _CHUNK:
                put_away()
        put_away()
        if ragged:
            raise _ragged(ragged, len(names), source)
        if not lines:
            raise check.Refusal(f"{source} has no rows of values; check that it is the right file")
        places = np.array(lines, dtype=np.intp)
        columns = {}
        for name, chunk in zip(names, chunks, strict=True):
            columns[name] = Column(name, np.concatenate(chunk), places)
            chunk.clear()
        return Table(columns, source)

    @staticmethod
    def of_frame(frame: Any, *, source: str = "the frame") -> "Table":
        """Return the table of a pandas DataFrame, or of any mapping from names to one-dimensional arrays.

        Numbers stay numbers, dates stay dates, the rest is text; None, NaN, NaT and pandas.NA are missing. Whole
        numbers beyond 2**53 stay texts, so that no two of them become one.

        >>> table = Table.of_frame({"age": [30, 41], "sex": ["f", None]})
        >>> table["age"].values, table["sex"].missing()
        (array([30., 41.]), array([False,  True]))

        Args:
            frame: The data frame or mapping.
            source: What it is, for errors.

        Raises:
            qclip.Refusal: For columns of several dimensions or of different lengths, and for names that are not
                distinct.
        """
        names = list(frame)
        texts = [str(name) for name in names]
        if len(set(texts)) < len(texts) or "" in texts:
            raise check.refuse("columns", texts, "distinct names", "give each column a name of its own")
        columns = {text: _column(text, frame[name]) for text, name in zip(texts, names, strict=True)}
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            raise check.refuse("lengths of the columns", sizes, "equal", "give each row a value in every column")
        if not sizes or not next(iter(sizes.values())):
            raise check.Refusal(f"{source} has no rows of values; check that it is the right one")
        return Table(columns, source)


def _ragged(rows: Sequence[tuple[int, int]], columns: int, source: str) -> check.Refusal:
    """Return the refusal of rows of another length than the header, each given by its line and its length."""
    remedy = "complete the row, or quote values that hold the separator"
    if len(rows) == 1:
        return check.Refusal(f"line {rows[0][0]} of {source} has {rows[0][1]} values for {columns} columns; {remedy}")
    listed = ", ".join(f"line {line} has {count}" for line, count in rows[:3]) + (", ..." if len(rows) > 3 else "")
    return check.Refusal(
        f"{len(rows)} lines of {source} have more or fewer values than its {columns} columns: {listed}; {remedy}"
    )


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the remedy for a misspelt name: the nearest of the names, if one is near.

    >>> did_you_mean("Age", ["age", "sex"]), did_you_mean("x", ["age"])
    ("did you mean 'age'?", 'check the spelling')
    """
    by_lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[close[0]]!r}?" if close else "check the spelling"


def _column(name: str, values: Any) -> Column:
    array = np.asarray(values)
    if array.ndim != 1:
        raise check.refuse_shape(f"column {name!r}", array.shape, "[rows]", "give one value for each row")
    whole = False
    if array.dtype.kind in "iu":
        whole = True
        large = array.size and max(abs(int(array.max())), abs(int(array.min()))) > _EXACT
        array = _texts(array.tolist()) if large else array.astype(np.float64)
    elif array.dtype.kind == "f":
        array = array.astype(np.float64)
    elif array.dtype.kind == "M":
        array = array.astype("datetime64[s]")
    else:
        array, whole = _of_objects(array.tolist())
    return Column(name, array, np.arange(len(array)), counted="row", whole=whole)


def _of_objects(values: list[Any]) -> tuple[NDArray[Any], bool]:
    """Return the values of a column of objects as one array, and whether they are whole numbers."""
    known = [value for value in values if not is_missing(value)]
    if known and all(isinstance(value, int | float | np.number) and not isinstance(value, bool) for value in known):
        whole = all(isinstance(value, int | np.integer) for value in known)
        if not whole or max(abs(int(value)) for value in known) <= _EXACT:
            return np.array([np.nan if is_missing(value) else value for value in values], dtype=np.float64), whole
    if known and all(isinstance(value, datetime.date) for value in known):
        plain = [None if is_missing(value) else _without_zone(value) for value in values]
        return np.array(plain, dtype="datetime64[s]"), False
    return _texts(values), False


def is_missing(value: Any) -> bool:
    """Return whether a Python value is None, NaN, NaT or pandas.NA."""
    nan = isinstance(value, float | np.floating) and np.isnan(value)
    return value is None or nan or type(value).__name__ in ("NAType", "NaTType")


def _without_zone(value: datetime.date) -> datetime.date:
    return value.replace(tzinfo=None, microsecond=0) if isinstance(value, datetime.datetime) else value


def _texts(values: Iterable[Any]) -> NDArray[Any]:
    return np.array(["" if is_missing(value) else str(value).strip() for value in values], dtype=TEXT)
