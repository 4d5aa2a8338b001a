"""``qclip predict``."""

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from qclip._files import replace_text

if TYPE_CHECKING:
    from qclip.tables import Table
    from qclip.tables.predictor import Predictor


@dataclass(frozen=True)
class PredictCommand:
    """Predict the rows of a file by a trained model of a table, as comma-separated values.

    A line for each row, after a header: the predicted class and the probability of every class, or the predicted
    number. If the file has the target, the scores are printed, too.
    """

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The folder of the run (`qclip train --out`), or its model.safetensors."""
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """The table, with the columns that the model knows; others are ignored."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the screen)")] = None
    """File to write to."""
    keep: Annotated[tuple[str, ...], tyro.conf.arg(metavar="COLUMN...", help_behavior_hint="(default: none)")] = ()
    """Columns of the table to copy in front of the predictions, such as the one that names the rows."""
    separator: Annotated[str | None, tyro.conf.arg(metavar="CHAR", help_behavior_hint="(default: recognised)")] = None
    """The character between the values of the table, or its name: tab, comma, semicolon, bar."""
    encoding: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: recognised)")] = None
    """The encoding of the table, such as utf-8, cp1252 or utf-16."""
    decimal: Annotated[
        Literal[".", ","] | None, tyro.conf.arg(metavar="{.,','}", help_behavior_hint="(default: recognised)")
    ] = None
    """The decimal mark of the table."""

    def run(self, console: Console) -> int:
        """Write the predictions."""
        from qclip import _validate as check
        from qclip.tables import read
        from qclip.tables.predictor import load

        if self.out is not None and self.out.exists() and self.file.exists() and self.out.samefile(self.file):
            raise check.refuse("--out", str(self.out), "another file than the table", "predictions would replace it")
        predictor = load(self.model)
        table = read(self.file, separator=self.separator, encoding=self.encoding, decimal=self.decimal)
        kept = [table.column("keep", name).texts() for name in self.keep]
        header, rows = _predictions(predictor, table)
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.keep, *header])
        writer.writerows([*(column[k] for column in kept), *row] for k, row in enumerate(rows))
        if self.out is None:
            sys.stdout.write(text.getvalue())
        else:
            replace_text(self.out, text.getvalue())
        text.close()  # a file of a million rows is large
        said = Console(stderr=True) if self.out is None else console  # beside the predictions, not among them
        for line in _scores(predictor, table):
            said.print(line, highlight=False, markup=False, soft_wrap=True)
        if self.out is not None:
            said.print(f"{len(table)} predictions: {self.out}", highlight=False, markup=False, soft_wrap=True)
        return 0


def _predictions(predictor: "Predictor", table: "Table") -> tuple[list[str], Iterator[Sequence[object]]]:
    """Return a header, and a row of values for each row of the table."""
    if predictor.classes is None:
        return [f"predicted {predictor.schema.target}"], ([f"{value:.6g}"] for value in predictor.predict(table))
    probabilities = predictor.predict_proba(table)
    header = [f"predicted {predictor.schema.target}", *(f"probability of {name}" for name in predictor.classes)]
    names = (predictor.classes[k] for k in probabilities.argmax(1))
    rows = zip(names, probabilities, strict=True)
    return header, ([name, *(f"{p:.6g}" for p in row)] for name, row in rows)


def _scores(predictor: "Predictor", table: "Table") -> Iterator[str]:
    """Yield the scores on the rows whose target is known."""
    known = predictor.schema.has_target(table)
    if not known.any():
        return
    from qclip.apps.data.csv_file import scores

    with_target = table if known.all() else table.take(known)
    for name, value in scores(predictor.model, predictor.schema, with_target).items():
        yield f"{name.replace('_', ' ')}: {value:.4f}"
    if not known.all():
        yield f"the scores leave out {(~known).sum()} rows whose {predictor.schema.target} is not known"
