"""Any comma-separated file with a header, and a column of it to foretell."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qclip import _validate as check
from qclip.apps.data import models, tables
from qclip.apps.data.columns import MISSING, Column, Dropped, Encoding, Hashed, Interval, Magnitude, OneOf, number
from qclip.apps.data.task import Defaults, Loss, Measure, Task, classification, classification_losses, hold_out, scorer

MAX_CLASSES = 30
"""A target with more distinct values is taken for classes only when these are given."""
KINDS: dict[str, Encoding] = {"number": Magnitude(), "text": Hashed(), "drop": Dropped()}


def csv_file(
    path: Path, *, target: str | None, classes: Sequence[str] | None = None, columns: Mapping[str, str] | None = None
) -> Task:
    """The rows of a file; every sixth, in its order, is held out.

    target: the column to foretell: a class, or a number whose range ``columns`` gives.
    classes: the classes. When left out, they are read from the file.
    columns: what a column holds: "number", "text", "drop" (it is not used), or the range of a number, "LOW:HIGH",
        from your own knowledge: it serves better than "number". Columns left out are numbers where every value is one,
        and text otherwise.

    The encodings were fixed beforehand (`columns`). What is *read from the file* counts as public, and is
    not covered by the guarantee: the columns' names, their kinds and the classes where not given, how many rows there
    are, and what is refused. Held-out rows are scored without noise, and not protected either.
    """
    table = _read(path)
    answer = _column("target", target, table)
    declared = {name: _declared(_column("columns", name, table), kind) for name, kind in (columns or {}).items()}
    _refuse_missing(column for name, column in table.items() if not isinstance(declared.get(name), Dropped))
    goal = _goal(answer, declared.get(answer.name), classes)
    features = [column for column in table.values() if column is not answer]
    encodings = {column.name: declared.get(column.name) or _guessed(column) for column in features}
    inputs = tables.encode(table, encodings)
    if inputs.shape[1] == 0:
        raise check.refuse("columns", columns, "not all 'drop'", "keep a column to foretell the target from")
    train, held_out = hold_out(inputs, goal.targets)
    return Task(
        path.name.removesuffix(".gz").removesuffix(".csv"),
        train,
        held_out,
        partial(models.linear, inputs.shape[1], goal.outputs),
        goal.loss,
        scorer(held_out, goal.measure),
        _defaults(len(train), goal, tables.longest_row(encodings.values())),
        f"{len(train)} rows, {len(held_out)} held out (every 6th); {_columns_in_words(encodings)}; {goal.description}",
    )


def _read(path: Path) -> dict[str, Column]:
    """The columns of a file by their names in its first line."""
    if not path.is_file():
        raise check.refuse("name", str(path), "a file that exists", "check the path")
    rows = tables.read_rows(path)
    if len(rows) < 3:
        remedy = "it may be empty, or have no header" if rows else "it is empty"
        raise check.refuse("file", f"{path} with {len(rows)} lines", "a header and at least 2 rows", remedy)
    names = rows[0].fields
    if "" in names or len(set(names)) < len(names):
        remedy = "the first line is the header: give each column a name of its own"
        raise check.refuse("header", list(names), "distinct names", remedy)
    if len(names) < 2:
        raise check.refuse("header", list(names), "at least 2 columns", "separate values by commas")
    return tables.columns(names, rows[1:], path)


def _column(argument: str, name: str | None, table: Mapping[str, Column]) -> Column:
    if name is None or name not in table:
        remedy = "its names are those of the first line"
        raise check.refuse(argument, name, f"a column of the file: {', '.join(map(repr, table))}", remedy)
    return table[name]


def _declared(column: Column, kind: str) -> Encoding:
    """The encoding of a column whose kind was given."""
    if kind in KINDS:
        return KINDS[kind]
    low, _, high = (number(part) for part in kind.partition(":"))
    if low is None or high is None or not -math.inf < low < high < math.inf:
        remedy = 'such as "0:120" for an age'
        raise check.refuse(f"columns[{column.name!r}]", kind, "'number', 'text', 'drop' or a range LOW:HIGH", remedy)
    return Interval(low, high)


def _refuse_missing(columns: Iterable[Column]) -> None:
    for column in columns:
        missing = [value.lower() in MISSING for value in column.values]
        remedy = (
            "delete these lines, fill them in (with a word of its own in a column of text), or do without the column: "
            f"{column.name}=drop in columns"
        )
        column.refuse_where(missing, "known", remedy)


def _guessed(column: Column) -> Encoding:
    """The encoding of a column whose kind was not given; what tells every row from every other is refused."""
    numbers = all(number(value) is not None for value in column.values)
    whole = all(value.lstrip("+-").isdigit() for value in column.values)
    if (whole or not numbers) and len(set(column.values)) == len(column.values):
        remedy = (
            f"if they only name the rows, do without them: {column.name}=drop in columns; otherwise say what they are "
            "there: number, text or a range"
        )
        found = f"{'whole numbers' if whole else 'texts'} that differ in every row"
        raise check.refuse(f"column {column.name!r}", found, "values that rows share", remedy)
    return KINDS["number" if numbers else "text"]


@dataclass(frozen=True)
class Goal:
    """What is to be foretold, and how well that was done."""

    targets: Tensor
    outputs: int
    loss: Loss
    measure: Measure
    description: str


def _goal(column: Column, encoding: Encoding | None, classes: Sequence[str] | None) -> Goal:
    if encoding is None:
        return _class(column, classes)
    if not isinstance(encoding, Interval) or classes is not None:
        remedy = "a target is a class unless its range is given"
        raise check.refuse(f"columns[{column.name!r}]", "given", "left out, or a range without classes=", remedy)
    return _number(column, encoding)


def _class(column: Column, classes: Sequence[str] | None) -> Goal:
    options = OneOf(tuple(map(str, classes))) if classes is not None else OneOf(_distinct(column))
    if len(set(options.options)) < max(2, len(options.options)):
        remedy = "there is nothing to tell apart"
        raise check.refuse(f"classes of {column.name!r}", list(options.options), "at least 2, and distinct", remedy)
    targets = torch.from_numpy(options.indices(column))
    listed = ", ".join(options.options)
    origin = "given" if classes is not None else "read from the file as public"
    description = f"{len(options.options)} classes ({origin}): {listed}"
    return Goal(targets, len(options.options), classification_losses, classification, description)


def _distinct(column: Column) -> tuple[str, ...]:
    distinct = sorted(set(column.values))
    if len(distinct) > MAX_CLASSES:
        remedy = (
            f"if it is a number, give its range, {column.name}=LOW:HIGH in columns; if it is a class, give all classes"
        )
        bound = f"at most {MAX_CLASSES} when they are read from the file"
        raise check.refuse(f"distinct values of target {column.name!r}", len(distinct), bound, remedy)
    numbers = {value: number(value) for value in distinct}
    return tuple(distinct if None in numbers.values() else sorted(distinct, key=float))


def _number(column: Column, interval: Interval) -> Goal:
    """A number, scaled to [-1, 1]; values outside its range are moved to its ends, in held-out rows too."""
    half = (interval.high - interval.low) / 2

    def measure(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        errors = half * (outputs - targets).abs().squeeze(1)
        return {"mean_absolute_error": errors, "loss": _squared_errors(outputs, targets)}

    targets = torch.from_numpy(interval.scaled(column)).float().unsqueeze(1)
    description = f"a number in {interval.low:g} .. {interval.high:g}"
    return Goal(targets, 1, _squared_errors, measure, description)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().squeeze(1)


def _defaults(rows: int, goal: Goal, tau: float) -> Defaults:
    """What worked on files of 100 to 30,000 rows. A number is foretold by smaller steps than a class."""
    rate = 2.0 if goal.loss is classification_losses else 0.3
    return Defaults(batch_size=min(1024, math.ceil(rows / 3)), epochs=20, learning_rate=rate, tau=tau)


def _columns_in_words(encodings: Mapping[str, Encoding]) -> str:
    kinds = {"of numbers": Magnitude | Interval, "of text": Hashed, "not used": Dropped}
    counts = {words: sum(isinstance(each, kind) for each in encodings.values()) for words, kind in kinds.items()}
    return "columns: " + ", ".join(f"{count} {words}" for words, count in counts.items() if count)
