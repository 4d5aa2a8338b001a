"""The schema of a table: what each column became, for training, for later files, and as plain data."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qclip import _validate as check
from qclip.tables import encodings, kinds
from qclip.tables.columns import MISSING, Column, Decimal, number
from qclip.tables.encodings import Dropped, Encoding, Interval, OneOf, OrMissing
from qclip.tables.table import Table, did_you_mean

VERSION = 1
"""Of the data that `Schema.to_dict` writes: it changes with any constant of the encodings."""
MAX_CLASSES = 30
"""A target with more distinct values counts as a class only when its classes are given."""
_CHUNK = 2**13
"""Rows that are encoded at a time."""


@dataclass(frozen=True)
class Schema:
    """What the columns of a table became: inputs of a model, and a target.

    Guarantees:
        - `inputs` is a function of each row alone: by constants, and by kinds that count as public.
        - `to_dict` holds names, kinds, classes and ranges: nothing else of the table.

    Args:
        encodings: The encoding of each column that is not the target or the unit.
        target: The column to predict.
        classes: The names of its classes; None where it is a number.
        interval: The public range of a target that is a number; None where it is a class.
        unit: The column whose values name the units of privacy; None where a unit is a row.
        missing: Texts of a missing value besides the usual ones, in lower case.
        decimals: The decimal marks of columns that had one, for later files where both are possible.
        remarks: What a user should know of the columns; not part of the schema.
    """

    encodings: Mapping[str, Encoding]
    target: str
    classes: tuple[str, ...] | None = None
    interval: Interval | None = None
    unit: str | None = None
    missing: tuple[str, ...] = ()
    decimals: Mapping[str, Decimal] = field(default_factory=dict)
    remarks: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(
        cls,
        table: Table,
        *,
        target: str | None,
        classes: Sequence[str] | None = None,
        columns: Mapping[str, str] | None = None,
        unit: str | None = None,
        missing: Iterable[str] = (),
    ) -> Self:
        """Return the schema of a table.

        Facts that are *read from the table* count as public: the names of the columns, their kinds and the classes
        where not given, and refusals.

        Args:
            table: The table.
            target: The column to predict: a class, or a number whose range ``columns`` gives.
            classes: The classes of the target; read from the table when left out.
            columns: The kind of each column: "number", "text" (a category), "words" (free text), "date" (with its
                order where it can be read in several: "date:dmy"), "drop" (not used), or the public range of a number,
                "LOW:HIGH", which serves better than "number". Columns left out are guessed.
            unit: The column whose values name the units of privacy, such as patients; it is no input.
            missing: Spellings of a missing value besides the usual ones ("", NA, N/A, NaN, NaT, NULL, ?).

        Raises:
            qclip.Refusal: An argument does not fit the table, or columns cannot be encoded: all of them at once.
        """
        if target is None:
            listed = ", ".join(map(repr, table))
            raise check.Refusal(f"no target was given; name the column to predict, --target NAME, one of: {listed}")
        if len(table.names) < 2:
            raise check.Refusal(
                f"header = {list(table.names)!r} has fewer than 2 columns; check the file, or give the separator "
                "between values (--separator)"
            )
        if len(table) < 2:
            raise check.Refusal(f"{table.source} has {len(table)} rows of values; give a header and at least 2 rows")
        own = tuple(sorted({spelling.strip().lower() for spelling in missing} - MISSING))
        spellings = MISSING | set(own)
        problems = _Problems(table.source)
        answer = problems.gather(lambda: table.column("target", target))
        if unit is not None:
            problems.gather(lambda: _check_unit(table.column("unit", unit), target, spellings))
        kinds_given = {}
        for name, kind in (columns or {}).items():
            problems.gather(lambda name=name: table.column("columns", name))
            if name == unit and kind != "drop":
                problems.add(f"columns[{name!r}] = {kind!r} is the unit of privacy, which is no input; leave it out")
            kinds_given[name] = kind
        found: dict[str, Encoding] = {}
        remarks: list[str] = []
        for name, column in table.columns.items():
            if name in (target, unit):
                continue
            encoding = problems.gather(lambda column=column: _encoding(column, kinds_given, spellings))
            if encoding is not None:
                found[name] = encoding
                if kinds_given.get(name) != "drop":
                    remarks += kinds.remarks(column, encoding, spellings)
        goal: tuple[tuple[str, ...] | None, Interval | None] | None = None
        if answer is not None:
            goal = problems.gather(lambda: _goal(answer, kinds_given.get(target), classes, spellings))
        problems.refuse()
        assert goal is not None
        if not any(encoding.width for encoding in found.values()):
            raise check.Refusal(f"columns = {columns!r} drops every column; keep one to predict the target from")
        decimals: dict[str, Decimal] = {name: "," for name, column in table.columns.items() if column.decimal == ","}
        return cls(found, target, *goal, unit, own, decimals, tuple(remarks))

    @property
    def width(self) -> int:
        """The number of inputs."""
        return sum(encoding.width for encoding in self._full().values())

    @property
    def outputs(self) -> int:
        """The number of outputs of a model: one for each class, or 1."""
        return 1 if self.classes is None else len(self.classes)

    @property
    def _spellings(self) -> frozenset[str]:
        return MISSING | set(self.missing)

    def _full(self) -> dict[str, Encoding]:
        """Return the encodings of the columns that are used, with their inputs for missing values."""
        spellings = self._spellings
        return {
            name: OrMissing(encoding, spellings)
            for name, encoding in self.encodings.items()
            if not isinstance(encoding, Dropped)
        }

    def inputs(self, table: Table, rows: NDArray[np.intp] | None = None) -> Tensor:
        """Return the inputs of each row, or of some rows, [rows, width] in float32.

        Columns that the schema does not know are ignored, and neither target nor unit has to be there.

        Raises:
            qclip.Refusal: A column is missing, or values cannot be encoded: all of them at once.
        """
        inputs = torch.empty(len(table) if rows is None else len(rows), self.width)
        start = 0
        for block in self.blocks(table, rows):
            inputs[start : start + len(block)] = block
            start += len(block)
        return inputs

    def blocks(self, table: Table, rows: NDArray[np.intp] | None = None) -> Iterator[Tensor]:
        """Yield the inputs of `inputs` in blocks, [some rows, width], so that they need not be in memory together.

        Raises:
            qclip.Refusal: As for `inputs`, before the first block.
        """
        full, known = self._full(), self._known(table)
        problems = _Problems(table.source)
        for name, encoding in full.items():
            if name in known:
                problems.gather(lambda name=name, encoding=encoding: encoding.check(known[name]))
            else:
                remedy = did_you_mean(name, set(table.names) - set(full))
                problems.add(f"column {name!r} is missing, which the model was made for; {remedy}")
        problems.refuse()
        for start in range(0, len(table) if rows is None else len(rows), _CHUNK):
            some = slice(start, start + _CHUNK) if rows is None else rows[start : start + _CHUNK]
            block = [encoding.encode(known[name].take(some)).astype(np.float32) for name, encoding in full.items()]
            yield torch.from_numpy(np.hstack(block))

    def targets(self, table: Table) -> Tensor:
        """Return the target of each row: classes, [rows], or numbers scaled to [-1, 1], [rows, 1].

        Raises:
            qclip.Refusal: The column is not there, or a value is missing or not one of the target.
        """
        column = self._known(table).get(self.target)
        if column is None:
            raise check.refuse("target", self.target, f"a column of {table.source}", did_you_mean(self.target, table))
        _refuse_missing(column, self._spellings)
        if self.classes is not None:
            return torch.from_numpy(OneOf(self.classes).indices(column))
        assert self.interval is not None
        return torch.from_numpy(self.interval.scaled(column)).float().unsqueeze(1)

    def has_target(self, table: Table) -> NDArray[np.bool_]:
        """Return the rows whose target is known and one that `targets` can read, [rows]; none without the column."""
        column = self._known(table).get(self.target)
        if column is None:
            return np.zeros(len(table), dtype=bool)
        if self.classes is not None:
            options = frozenset(self.classes)
            readable = column.each(options.__contains__, bool)
        else:
            readable = np.isfinite(column.numbers_or_nan())
        return readable & ~column.missing(self._spellings)

    def units(self, table: Table) -> np.ndarray:
        """Return the number of each row's unit, counted in the order in which units first occur, [rows]."""
        if self.unit is None:
            return np.arange(len(table))
        column = table.column("unit", self.unit)
        _check_unit(column, self.target, self._spellings)
        return column.distinct()[1]

    def _known(self, table: Table) -> dict[str, Column]:
        """Return the columns of a table, with the decimal mark of the schema where both are possible."""
        columns = dict(table.columns)
        for name, column in columns.items():
            if column.decimal == "?":
                columns[name] = replace(column, decimal=self.decimals.get(name, "?"))
        return columns

    def describe(self) -> list[str]:
        """Return what each column became, a line each."""
        goal = f"one of {len(self.classes)} classes: {', '.join(self.classes)}" if self.classes is not None else ""
        goal = goal or f"{self.interval.words if self.interval else ''}"
        lines = [f"{self.target}: the target, {goal}"]
        if self.unit is not None:
            lines.append(f"{self.unit}: names the units of privacy; no input")
        for name, encoding in self.encodings.items():
            inputs = f" ({encoding.width + 1} inputs)" if encoding.width else ""
            lines.append(f"{name}: {encoding.words}{inputs}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as plain JSON data, which `from_dict` reads back exactly."""
        goal = {"classes": list(self.classes)} if self.classes is not None else {}
        if self.interval is not None:
            goal = {"range": [self.interval.low, self.interval.high]}
        return {
            "version": VERSION,
            "columns": [{"name": name} | encodings.to_dict(each) for name, each in self.encodings.items()],
            "target": {"name": self.target} | goal,
            "unit": self.unit,
            "missing": list(self.missing),
            "decimals": dict(self.decimals),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return the schema from plain data; versions and kinds that are unknown, and other damage, are refused."""
        version = content.get("version") if isinstance(content, Mapping) else None
        if version != VERSION or isinstance(version, bool):
            remedy = "use the version of qclip that wrote it"
            raise check.refuse("version of the schema", version, f"{VERSION}, which this qclip reads", remedy)
        try:
            columns, target = content["columns"], content["target"]
            if set(content) != {"version", "columns", "target", "unit", "missing", "decimals"}:
                raise TypeError("other names than qclip writes")
            plain = {each["name"]: {k: v for k, v in each.items() if k != "name"} for each in columns}
            found = {_text(name): encodings.from_dict(name, each) for name, each in plain.items()}
            schema = cls(
                found,
                _text(target["name"]),
                _classes(target["classes"]) if "classes" in target else None,
                Interval(*_range(target["range"])) if "range" in target else None,
                None if content["unit"] is None else _text(content["unit"]),
                tuple(map(_text, content["missing"])),
                {_text(name): _decimal(mark) for name, mark in content["decimals"].items()},
            )
            if (schema.classes is None) == (schema.interval is None) or len(plain) < len(columns):
                raise TypeError("a target is a class or a number, and columns have names of their own")
        except (AttributeError, KeyError, TypeError) as error:
            remedy = "restore it as qclip wrote it, or use the version that wrote it"
            raise check.Refusal(f"the schema is damaged ({error}); {remedy}") from None
        return schema


class _Problems:
    """The problems of a table, gathered so that all of them are said at once."""

    def __init__(self, source: str) -> None:
        self._source, self._found = source, []

    def gather(self, work: Callable[[], Any]) -> Any:
        """Return the result of some work; None where it is refused, which is kept."""
        try:
            return work()
        except check.Refusal as refusal:
            self.add(str(refusal))
            return None

    def add(self, problem: str) -> None:
        """Keep a problem, once."""
        if problem not in self._found:
            self._found.append(problem)

    def refuse(self) -> None:
        """Refuse all problems together."""
        if len(self._found) == 1:
            raise check.Refusal(self._found[0])
        if self._found:
            listed = "".join(f"\n- {problem}" for problem in self._found)
            raise check.Refusal(f"{self._source} has {len(self._found)} problems:{listed}")


def _encoding(column: Column, given: Mapping[str, str], spellings: frozenset[str]) -> Encoding:
    """Return the encoding of a column; refuse values that it cannot encode."""
    kind = given.get(column.name)
    if kind is None:
        return kinds.guessed(column, spellings)
    encoding = kinds.declared(column, kind, spellings)
    OrMissing(encoding, spellings).check(column)
    return encoding


def _check_unit(column: Column, target: str, spellings: frozenset[str]) -> None:
    if column.name == target:
        raise check.refuse("unit", column.name, "another column than the target", "name the column of persons")
    remedy = "rows without a unit cannot be protected; delete these lines, or complete them"
    column.refuse_where(column.missing(spellings), "known, because it is the unit of privacy", remedy)


def _refuse_missing(column: Column, spellings: frozenset[str]) -> None:
    remedy = "it is the target: complete these lines, or delete them"
    column.refuse_where(column.missing(spellings), "known", remedy)


def _goal(
    column: Column, kind: str | None, classes: Sequence[str] | None, spellings: frozenset[str]
) -> tuple[tuple[str, ...] | None, Interval | None]:
    """Return the classes of the target, or its range."""
    _refuse_missing(column, spellings)
    if kind is None:
        options = _distinct(column) if classes is None else tuple(map(str, classes))
        if len(set(options)) < max(2, len(options)):
            remedy = "check the column, or give the classes"
            raise check.refuse(f"classes of {column.name!r}", list(options), "at least 2, and distinct", remedy)
        OneOf(options).check(column)
        return options, None
    if classes is not None:
        raise check.Refusal(
            f"columns[{column.name!r}] and classes contradict each other; a target is a class, or a number whose range "
            "is given without classes"
        )
    encoding = kinds.declared(column, kind, spellings) if ":" in kind and not kind.startswith("date") else None
    if not isinstance(encoding, Interval):
        remedy = f"give its public range, such as {column.name}=0:100, or leave it out where it is a class"
        raise check.refuse(f"columns[{column.name!r}]", kind, "a range LOW:HIGH, because it is the target", remedy)
    encoding.check(column)
    return None, encoding


def _distinct(column: Column) -> tuple[str, ...]:
    distinct = sorted(column.distinct()[0])
    if len(distinct) > MAX_CLASSES:
        remedy = (
            f"if it is a number, give its range, {column.name}=LOW:HIGH in columns; if it is a class, give all classes"
        )
        bound = f"at most {MAX_CLASSES} when they are read from the file"
        raise check.refuse(f"distinct values of target {column.name!r}", len(distinct), bound, remedy)
    numbers = [number(value) for value in distinct]
    return tuple(distinct if None in numbers else sorted(distinct, key=float))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _classes(values: object) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or len(values) < 2:
        raise TypeError(f"classes {values!r}")
    return tuple(map(_text, values))


def _range(values: object) -> tuple[float, float]:
    match values:
        case [int() | float() as low, int() | float() as high] if -math.inf < low < high < math.inf:
            return low, high
    raise TypeError(f"range {values!r}")


def _decimal(value: object) -> Decimal:
    if value not in (".", ","):
        raise TypeError(f"decimal mark {value!r}")
    return value  # type: ignore[return-value]
