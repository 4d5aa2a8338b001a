"""Any table with a header, and a column of it to predict."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from qclip import _validate as check
from qclip.apps.data import metrics
from qclip.apps.data.task import HELD_OUT_EVERY, Defaults, Loss, Measure, Task, classification, evaluator, scorer
from qclip.apps.run_summary import Evaluation
from qclip.tables import Schema, read
from qclip.tables.encodings import Date, Dropped, Hashed, Interval, Number, Words
from qclip.tables.examples import ROWS_PER_UNIT, examples, is_held_out, mean_over_rows, rows_of_units
from qclip.tables.models import HIDDEN, Kind, build
from qclip.tables.reader import stem
from qclip.tables.table import Table

BALANCED = "balanced"
SHARES_OFF = 0.02
"""How far from 1 the shares of the classes may add up, since published ones are rounded."""
COLUMNS = "the names of the columns, and the kinds of those not declared"


class TableOptions(TypedDict, total=False):
    """What may be said of a table; what is left out is recognised, or read from the file as public."""

    target: str | None
    """The column to predict: a class, or a number whose range ``columns`` gives."""
    classes: Sequence[str] | None
    """The classes of the target."""
    columns: Mapping[str, str] | None
    """The kind of each column, as for `qclip.tables.Schema.of`."""
    separator: str | None
    encoding: str | None
    decimal: Literal[".", ","] | None
    """How the file is written, as for `qclip.tables.read`."""
    missing: Sequence[str] | None
    """Spellings of a missing value besides the usual ones."""
    unit: str | None
    """The column whose values name the units of privacy; a row is one where it is left out."""
    rows_per_unit: int | None
    """The most rows of a unit that count; 4 if left out."""
    model: Kind | None
    """A linear model, or a perceptron with one hidden layer; linear if left out."""
    class_weights: Mapping[str, float] | Literal["balanced"] | None
    """The weight of each class in the loss; "balanced" needs ``class_shares``."""
    class_shares: Mapping[str, float] | None
    """The share of each class, known beforehand."""


def csv_file(path: Path, **options: Unpack[TableOptions]) -> Task:
    """Load a table. Without a unit, every sixth row is held out; with one, about every sixth unit, by its name.

    - The encodings are fixed beforehand (`qclip.tables`).
    - Facts that are *read from the file* count as public and are not covered by the guarantee: the names of the
      columns, their kinds and the classes where not given, the number of examples (rows, or units), and refusals.
    - Held-out examples are scored without noise, row by row, and are not protected either.

    Args:
        path: The file.
        **options: What is known of it.

    Raises:
        Refusal: The file cannot be read, or an option does not fit its columns.
    """
    table = read(
        path,
        separator=options.get("separator"),
        encoding=options.get("encoding"),
        decimal=options.get("decimal"),
    )
    classes, unit = options.get("classes"), options.get("unit")
    schema = Schema.of(
        table,
        target=options.get("target"),
        classes=classes,
        columns=options.get("columns"),
        unit=unit,
        missing=options.get("missing") or (),
    )
    goal = _goal(schema, _weights(schema, options), given=classes is not None)
    split = _by_row(table, options.get("rows_per_unit")) if unit is None else _by_unit(schema, table, options)
    train, held_out = (examples(schema, table, rows) for rows in (split.train, split.held_out))
    kind: Kind = options.get("model") or "linear"
    check.choice("model", kind, MODELS)
    return Task(
        stem(path),
        train,
        held_out,
        partial(build, kind, schema.width, schema.outputs),
        goal.loss if unit is None else mean_over_rows(goal.loss),
        scorer(held_out, goal.measure, whole=goal.whole),
        Defaults(batch_size=min(1024, math.ceil(len(train) / 3)), epochs=40),
        f"{split.description}; {_columns_in_words(schema)}; {goal.description}",
        evaluator(held_out, goal.evaluation),
        schema=schema,
        architecture=kind,
        unit=split.unit,
        public=_public(schema, given=classes is not None),
        details=(
            *(f"the file: {note}" for note in table.notes),
            *schema.describe(),
            *schema.remarks,
            f"the model: {MODELS[kind]}, {schema.width} inputs, {schema.outputs} outputs",
            *([goal.weights] if goal.weights else []),
        ),
    )


def scores(model: nn.Module, schema: Schema, table: Table) -> dict[str, float]:
    """Return the metrics of a model on a table that has the target, row by row."""
    goal = _goal(schema, None, given=True)
    rows = examples(schema, table, np.arange(len(table)))
    return scorer(rows, goal.measure, whole=goal.whole)(model)


MODELS: dict[Kind, str] = {"linear": "linear", "mlp": f"a perceptron with {HIDDEN} hidden units"}


def _public(schema: Schema, *, given: bool) -> tuple[str, ...]:
    """Return what was read from the file and counts as public."""
    number = "the number of rows" if schema.unit is None else f"the number of different values of {schema.unit}"
    return (number, COLUMNS, *([] if given or schema.classes is None else [f"the classes of {schema.target}"]))


@dataclass(frozen=True)
class Split:
    """The rows to train on, [examples] or [units, K], and those held out, [rows]."""

    train: np.ndarray
    held_out: np.ndarray
    description: str
    unit: str


def _by_row(table: Table, rows_per_unit: int | None) -> Split:
    if rows_per_unit is not None:
        raise check.refuse("rows_per_unit", rows_per_unit, "left out without a unit", "name the unit: --unit COLUMN")
    rows = np.arange(len(table))
    held = rows % HELD_OUT_EVERY == 0
    train = rows[~held]
    description = f"{len(train)} rows, {held.sum()} held out (every {HELD_OUT_EVERY}th)"
    return Split(train, rows[held], description, "a row of the file")


def _by_unit(schema: Schema, table: Table, options: TableOptions) -> Split:
    most = options.get("rows_per_unit")
    most = ROWS_PER_UNIT if most is None else check.count("rows_per_unit", most)
    name, units = schema.unit, schema.units(table)
    assert name is not None
    held = is_held_out(table[name].distinct()[0])
    if held.all() or not held.any():
        raise check.refuse(
            f"number of different values of {name!r}", len(held), "large enough to hold some out and train on others",
            "about one in six is held out: check that the column names the units, or give more data",
        )  # fmt: skip
    description = (
        f"{(~held).sum()} units ({name}) of at most {most} rows, {held.sum()} held out (about every "
        f"{HELD_OUT_EVERY}th, by a hash of the name)"
    )
    words = f"all rows of one {name} (at most {most} of them count)"
    train = rows_of_units(units, most)[~held]
    return Split(train, np.flatnonzero(held[units]), description, words)


@dataclass(frozen=True)
class Goal:
    """The loss of a row and the metrics of a target, and its description."""

    loss: Loss
    measure: Measure
    whole: Callable[[Tensor, Tensor], dict[str, float]] | None
    """Returns the metrics that are no means over examples."""
    evaluation: Callable[[Tensor, Tensor], Evaluation]
    description: str
    weights: str = ""
    """The weights of the classes, in words; empty where all are 1."""


def _goal(schema: Schema, weights: Tensor | None, *, given: bool) -> Goal:
    if schema.interval is not None:
        return _number(schema.interval)
    assert schema.classes is not None
    origin = "given" if given else "read from the file as public"
    description = f"{len(schema.classes)} classes ({origin}): {', '.join(schema.classes)}"
    shown = ""
    if weights is not None:
        listed = ", ".join(
            f"{name} {weight:.3g}" for name, weight in zip(schema.classes, weights.tolist(), strict=True)
        )
        shown = f"weights of the classes in the loss: {listed}; they shift the probabilities"

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return each if weights is None else each * weights.to(outputs.device)[targets]

    whole = metrics.ranking if len(schema.classes) == 2 else None
    evaluation = partial(metrics.evaluation, classes=schema.classes)
    return Goal(losses, classification, whole, evaluation, description, shown)


def _number(interval: Interval) -> Goal:
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

    return Goal(_squared_errors, measure, whole, evaluation, interval.words)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().squeeze(1)


def _weights(schema: Schema, options: TableOptions) -> Tensor | None:
    """Return the weights of the classes, [classes]; None where all are 1.

    They are given, or follow from shares that are given. Shares counted in the data would be a release that epsilon
    does not cover.
    """
    weights, shares = options.get("class_weights"), options.get("class_shares")
    if weights is None:
        if shares is not None:
            raise check.refuse("class_shares", dict(shares), f'left out without class_weights="{BALANCED}"', "add it")
        return None
    if schema.classes is None:
        raise check.refuse("class_weights", weights, "left out for a target that is a number", "it has no classes")
    if weights == BALANCED:
        if shares is None:
            raise check.Refusal(
                f'class_weights = "{BALANCED}" needs the shares of the classes from public sources, class_shares '
                "(--class-shares CLASS=SHARE ...): counting them in the data would be a release that epsilon does not "
                "cover"
            )
        numbers = _of_each_class("class_shares", shares, schema.classes)
        if not math.isclose(sum(numbers), 1, abs_tol=SHARES_OFF):
            raise check.refuse("sum of class_shares", sum(numbers), "1", "give the share of each class, such as 0.04")
        return torch.tensor([1 / (len(numbers) * share) for share in numbers])
    if shares is not None or isinstance(weights, str):
        remedy = f'give weights, or "{BALANCED}" with class_shares'
        raise check.refuse("class_weights", weights, "a number for each class", remedy)
    return torch.tensor(_of_each_class("class_weights", weights, schema.classes))


def _of_each_class(argument: str, values: Mapping[str, float], classes: Sequence[str]) -> list[float]:
    if set(values) != set(classes):
        bound = f"a number for each of {', '.join(map(repr, classes))}"
        raise check.refuse(argument, dict(values), bound, "name every class once")
    return [check.positive(f"{argument}[{name!r}]", values[name]) for name in classes]


def _columns_in_words(schema: Schema) -> str:
    kinds = {
        "of numbers": Number | Interval,
        "of dates": Date,
        "of text": Hashed,
        "of free text": Words,
        "not used": Dropped,
    }
    counts = {words: sum(isinstance(each, kind) for each in schema.encodings.values()) for words, kind in kinds.items()}
    return "columns: " + ", ".join(f"{count} {words}" for words, count in counts.items() if count)
