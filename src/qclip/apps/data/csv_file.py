"""Any table with a header, and a column of it to predict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from qclip.apps.data import models
from qclip.apps.data.task import Defaults, Loss, Measure, Task, classification, classification_losses, hold_out, scorer
from qclip.tables import Schema, read
from qclip.tables.encodings import Date, Dropped, Hashed, Interval, Magnitude, Words
from qclip.tables.reader import stem


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
        partial(models.linear, schema.width, schema.outputs),
        goal.loss,
        scorer(held_out, goal.measure),
        Defaults(batch_size=min(1024, math.ceil(len(train) / 3)), epochs=40),
        f"{len(train)} rows, {len(held_out)} held out (every 6th); {_columns_in_words(schema)}; {goal.description}",
    )


@dataclass(frozen=True)
class Goal:
    """The loss and the metrics of a target, and its description."""

    loss: Loss
    measure: Measure
    description: str


def _goal(schema: Schema, *, given: bool) -> Goal:
    if schema.classes is not None:
        origin = "given" if given else "read from the file as public"
        description = f"{len(schema.classes)} classes ({origin}): {', '.join(schema.classes)}"
        return Goal(classification_losses, classification, description)
    assert schema.interval is not None
    half = (schema.interval.high - schema.interval.low) / 2

    def measure(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        errors = half * (outputs - targets).abs().squeeze(1)
        return {"mean_absolute_error": errors, "loss": _squared_errors(outputs, targets)}

    return Goal(_squared_errors, measure, schema.interval.words)


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
