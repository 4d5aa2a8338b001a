"""Any table with a header, and a column of it to predict."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from qclip.apps.data import metrics
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
from qclip.tables import Schema, Table, read
from qclip.tables.encodings import Date, Dropped, Hashed, Interval, Magnitude, Words
from qclip.tables.models import build
from qclip.tables.reader import stem

PUBLIC = ("the number of rows", "the names of the columns, and the kinds of those not declared")


def csv_file(
    path: Path, *, target: str | None, classes: Sequence[str] | None = None, columns: Mapping[str, str] | None = None
) -> Task:
    """Load the rows of a file; every sixth row, in the order of the file, is held out.

    - The encodings are fixed beforehand (`qclip.tables`).
    - Facts that are *read from the file* count as public and are not covered by the guarantee: the names of the
      columns, their kinds and the classes where not given, the number of rows, and refusals.
    - Held-out rows are scored without noise, and are not protected either.

    Args:
        path: The file.
        target: The column to predict: a class, or a number whose range ``columns`` gives.
        classes: The classes of the target; read from the file when left out.
        columns: The kind of each column, as for `qclip.tables.Schema.of`.

    Raises:
        Refusal: The file cannot be read, or an argument does not fit its columns.
    """
    table = read(path)
    schema = Schema.of(table, target=target, classes=classes, columns=columns)
    goal = _goal(schema, given=classes is not None)
    train, held_out = hold_out(schema.inputs(table), schema.targets(table))
    return Task(
        stem(path),
        train,
        held_out,
        partial(build, "linear", schema.width, schema.outputs),
        goal.loss,
        scorer(held_out, goal.measure, whole=goal.whole),
        Defaults(batch_size=min(1024, math.ceil(len(train) / 3)), epochs=40),
        f"{len(train)} rows, {len(held_out)} held out (every 6th); {_columns_in_words(schema)}; {goal.description}",
        evaluator(held_out, goal.evaluation),
        schema=schema,
        public=PUBLIC if classes is not None or schema.classes is None else (*PUBLIC, f"the classes of {target}"),
    )


def scores(model: nn.Module, schema: Schema, table: Table) -> dict[str, float]:
    """Return the metrics of a model on a table that has the target."""
    goal = _goal(schema, given=True)
    rows = TensorDataset(schema.inputs(table), schema.targets(table))
    return scorer(rows, goal.measure, whole=goal.whole)(model)


@dataclass(frozen=True)
class Goal:
    """The loss and the metrics of a target, and its description."""

    loss: Loss
    measure: Measure
    whole: Callable[[Tensor, Tensor], dict[str, float]] | None
    """Returns the metrics that are no means over examples."""
    evaluation: Callable[[Tensor, Tensor], Evaluation]
    description: str


def _goal(schema: Schema, *, given: bool) -> Goal:
    if schema.classes is not None:
        origin = "given" if given else "read from the file as public"
        description = f"{len(schema.classes)} classes ({origin}): {', '.join(schema.classes)}"
        whole = metrics.ranking if len(schema.classes) == 2 else None
        evaluation = partial(metrics.evaluation, classes=schema.classes)
        return Goal(classification_losses, classification, whole, evaluation, description)
    assert schema.interval is not None
    half = (schema.interval.high - schema.interval.low) / 2

    def measure(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        errors = half * (outputs - targets).abs().squeeze(1)
        return {"mean_absolute_error": errors, "loss": _squared_errors(outputs, targets)}

    def whole(outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return metrics.fit(half * outputs, half * targets)

    def evaluation(_: Tensor, targets: Tensor) -> Evaluation:
        mean = targets.mean(0, keepdim=True).expand_as(targets)
        guess = {name: float(values.mean()) for name, values in measure(mean, targets).items()} | whole(mean, targets)
        return Evaluation(guess, [], [], "", [])

    return Goal(_squared_errors, measure, whole, evaluation, schema.interval.words)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().squeeze(1)


def _columns_in_words(schema: Schema) -> str:
    kinds = {
        "of numbers": Magnitude | Interval,
        "of dates": Date,
        "of text": Hashed,
        "of free text": Words,
        "not used": Dropped,
    }
    counts = {words: sum(isinstance(each, kind) for each in schema.encodings.values()) for words, kind in kinds.items()}
    return "columns: " + ", ".join(f"{count} {words}" for words, count in counts.items() if count)
