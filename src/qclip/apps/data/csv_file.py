"""Any comma-separated file with a header, and a column of it to predict."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qclip import _validate as check
from qclip.apps.data import metrics, models, tables
from qclip.apps.data.columns import MISSING, Column, Dropped, Encoding, Hashed, Interval, Magnitude, OneOf, number
from qclip.apps.data.task import (
    Defaults,
    Loss,
    Measure,
    Task,
    classification,
    classification_losses,
    evaluator,
    hold_out,
    scorer,
)
from qclip.apps.run_summary import Evaluation

MAX_CLASSES = 30
"""A target with more distinct values counts as a class only when its classes are given."""
PUBLIC = ("the number of rows", "the names of the columns, and the kinds of those not declared")
KINDS: dict[str, Encoding] = {"number": Magnitude(), "text": Hashed(), "drop": Dropped()}


def csv_file(
    path: Path, *, target: str | None, classes: Sequence[str] | None = None, columns: Mapping[str, str] | None = None
) -> Task:
    """Load the rows of a file; every sixth row, in the order of the file, is held out.

    - The encodings are fixed beforehand (`columns`).
    - Facts that are *read from the file* count as public and are not covered by the guarantee: the names of the
      columns, their kinds and the classes where not given, the number of rows, and refusals.
    - Held-out rows are scored without noise, and are not protected either.

    Args:
        path: The file.
        target: The column to predict: a class, or a number whose range ``columns`` gives.
        classes: The classes of the target; read from the file when left out.
        columns: The kind of each column: "number", "text", "drop" (not used), or the public range of a number,
            "LOW:HIGH", which serves better than "number". Columns left out are numbers where every value is one, and
            text otherwise.

    Raises:
        Refusal: The file cannot be read, or an argument does not fit its columns.
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
        raise check.Refusal(f"columns = {columns!r} drops every column; keep one to predict the target from")
    train, held_out = hold_out(inputs, goal.targets)
    return Task(
        path.name.removesuffix(".gz").removesuffix(".csv"),
        train,
        held_out,
        partial(models.linear, inputs.shape[1], goal.outputs),
        goal.loss,
        scorer(held_out, goal.measure, whole=goal.whole),
        Defaults(batch_size=min(1024, math.ceil(len(train) / 3)), epochs=40),
        f"{len(train)} rows, {len(held_out)} held out (every 6th); {_columns_in_words(encodings)}; {goal.description}",
        evaluator(held_out, goal.evaluation),
        public=PUBLIC if classes is not None or goal.outputs == 1 else (*PUBLIC, f"the classes of {answer.name}"),
    )


def _read(path: Path) -> dict[str, Column]:
    """Return the columns of a file by their names in its first line."""
    if not path.is_file():
        raise check.refuse("name", str(path), "a file that exists", "check the path")
    rows = tables.read_rows(path)
    if len(rows) < 3:
        raise check.Refusal(
            f"{path} has {len(rows)} lines of values; give a .csv file with a header and at least 2 rows"
        )
    names = rows[0].fields
    if "" in names or len(set(names)) < len(names):
        remedy = "the first line is the header: give each column a name of its own"
        raise check.refuse("header", list(names), "a list of distinct names", remedy)
    if len(names) < 2:
        raise check.Refusal(f"header = {list(names)!r} has fewer than 2 columns; separate values by commas")
    return tables.columns(names, rows[1:], path)


def _column(argument: str, name: str | None, table: Mapping[str, Column]) -> Column:
    if name is None or name not in table:
        raise check.refuse(argument, name, f"a column of the file: {', '.join(map(repr, table))}", "check the spelling")
    return table[name]


def _declared(column: Column, kind: str) -> Encoding:
    """Return the encoding of a column whose kind was given."""
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
            "delete these lines, fill them in (with a word of their own in a column of text), or drop the column: "
            f"{column.name}=drop in columns"
        )
        column.refuse_where(missing, "known", remedy)


def _guessed(column: Column) -> Encoding:
    """Return the encoding of a column whose kind was not given; refuse one whose values identify the rows."""
    numbers = all(number(value) is not None for value in column.values)
    whole = all(value.lstrip("+-").isdigit() for value in column.values)
    if (whole or not numbers) and len(set(column.values)) == len(column.values):
        kind = "whole numbers" if whole else "texts"
        raise check.Refusal(
            f"column {column.name!r} holds {kind} that differ in every row; drop it if they only name the rows "
            f"({column.name}=drop in columns), otherwise declare it there as number, text or a range"
        )
    return KINDS["number" if numbers else "text"]


@dataclass(frozen=True)
class Goal:
    """The prediction target and its metrics."""

    targets: Tensor
    outputs: int
    loss: Loss
    measure: Measure
    whole: Callable[[Tensor, Tensor], dict[str, float]] | None
    """Returns the metrics that are no means over examples."""
    evaluation: Callable[[Tensor, Tensor], Evaluation]
    description: str


def _goal(column: Column, encoding: Encoding | None, classes: Sequence[str] | None) -> Goal:
    if encoding is None:
        return _class(column, classes)
    if not isinstance(encoding, Interval) or classes is not None:
        raise check.Refusal(
            f"columns[{column.name!r}] and classes contradict each other; a target is a class, or a number whose range "
            "is given without classes"
        )
    return _number(column, encoding)


def _class(column: Column, classes: Sequence[str] | None) -> Goal:
    options = OneOf(tuple(map(str, classes))) if classes is not None else OneOf(_distinct(column))
    if len(set(options.options)) < max(2, len(options.options)):
        remedy = "check the column, or give the classes"
        raise check.refuse(f"classes of {column.name!r}", list(options.options), "at least 2, and distinct", remedy)
    targets = torch.from_numpy(options.indices(column))
    listed = ", ".join(options.options)
    origin = "given" if classes is not None else "read from the file as public"
    description = f"{len(options.options)} classes ({origin}): {listed}"
    whole = metrics.ranking if len(options.options) == 2 else None
    evaluation = partial(metrics.evaluation, classes=options.options)
    return Goal(targets, len(options.options), classification_losses, classification, whole, evaluation, description)


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
    """Return the goal to predict a number, scaled to [-1, 1]; values outside its range are moved to its ends."""
    half = (interval.high - interval.low) / 2

    def measure(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        errors = half * (outputs - targets).abs().squeeze(1)
        return {"mean_absolute_error": errors, "loss": _squared_errors(outputs, targets)}

    def whole(outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return metrics.fit(half * outputs, half * targets)

    def evaluation(_: Tensor, targets: Tensor) -> Evaluation:
        mean = targets.mean(0, keepdim=True).expand_as(targets)
        guess = {name: float(values.mean()) for name, values in measure(mean, targets).items()} | whole(mean, targets)
        return Evaluation(guess, [], [], "", [])

    targets = torch.from_numpy(interval.scaled(column)).float().unsqueeze(1)
    description = f"a number in {interval.low:g} .. {interval.high:g}"
    return Goal(targets, 1, _squared_errors, measure, whole, evaluation, description)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().squeeze(1)


def _columns_in_words(encodings: Mapping[str, Encoding]) -> str:
    kinds = {"of numbers": Magnitude | Interval, "of text": Hashed, "not used": Dropped}
    counts = {words: sum(isinstance(each, kind) for each in encodings.values()) for words, kind in kinds.items()}
    return "columns: " + ", ".join(f"{count} {words}" for words, count in counts.items() if count)
