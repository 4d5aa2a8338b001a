"""A CSV file of the released values of a private run."""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from qclip import _validate as check
from qclip._files import replace_text
from qclip.integrations.release_log import ReleaseLog
from qclip.training.run import PrivateTraining


class CsvLog(ReleaseLog):
    """A `ReleaseLog` in a CSV file: a line for each logical step, a column for each value.

        log = CsvLog(training, "run.csv")
        for batch in training.loader:
            training.step(batch)
            log.write()

    A resumed run goes on in its file, without the steps after the checkpoint. `qclip.RunLog` writes JSON lines that
    ``qclip report`` reads.

    Args:
        training: The private run.
        path: The file.
        raw_loss: Whether `write` accepts the raw training loss.

    Raises:
        Refusal: The file exists already, and the run is new.
    """

    def __init__(self, training: PrivateTraining, path: str | os.PathLike[str], *, raw_loss: bool = False) -> None:
        super().__init__(training, self._append, raw_loss=raw_loss)
        self._path, self._columns = Path(path), ["step"]
        if training.rank != 0 or not self._path.exists():
            return
        if not training.history:
            raise check.Refusal(f"{self._path} exists already; choose another file, or load the checkpoint of its run")
        self._replace(row for row in self._rows() if int(row["step"]) < len(training.history))

    def _append(self, values: dict[str, float], step: int) -> None:
        row = {"step": str(step)} | {name: repr(value) for name, value in values.items()}
        if not self._path.exists() or row.keys() - set(self._columns):
            self._replace([*self._rows(), row])
        else:
            with self._path.open("a", encoding="utf-8", newline="") as stream:
                self._writer(stream).writerow(row)

    def _rows(self) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with self._path.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))

    def _replace(self, rows: Iterable[Mapping[str, str]]) -> None:
        """Write the whole file, because a column or a line has gone or come."""
        rows = list(rows)
        self._columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        text = io.StringIO()
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(rows)
        replace_text(self._path, text.getvalue())

    def _writer(self, stream: TextIO) -> "csv.DictWriter[str]":
        return csv.DictWriter(stream, self._columns, lineterminator="\n")
