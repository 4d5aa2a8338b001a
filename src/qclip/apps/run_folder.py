"""The folder of a run: its metrics, its summary, its checkpoint and its report.

``metrics.jsonl`` grows by a line at each logical step and at each held-out score; ``summary.json`` and
``checkpoint.pt`` are replaced whole, so that an interruption at any point leaves the earlier ones. All but the
checkpoint hold released values and held-out metrics only (and the raw training loss, on request).
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qclip import _validate as check
from qclip._files import replace_text
from qclip.apps.run_summary import Summary

Line = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, to read or to write; nothing is touched before a method is called."""

    path: Path

    @property
    def metrics_file(self) -> Path:
        """A JSON object for each step and each score."""
        return self.path / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        """What the run is and how far it came."""
        return self.path / "summary.json"

    @property
    def checkpoint_file(self) -> Path:
        """All it takes to go on. Secret: whoever has it can subtract the noise that is still to come."""
        return self.path / "checkpoint.pt"

    @property
    def report_file(self) -> Path:
        """The report of a finished run."""
        return self.path / "report.html"

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return self.summary_file.exists() or self.checkpoint_file.exists() or self.metrics_file.exists()

    def summary(self) -> Summary:
        """The summary; refused where there is none, or none that can be read."""
        remedy = "name the folder that `qclip train --out` wrote"
        try:
            found = json.loads(self.summary_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise check.refuse("folder", str(self.path), "of a run, with a summary.json", remedy) from None
        except ValueError:
            raise check.refuse("summary.json", str(self.summary_file), "JSON, as it was written", remedy) from None
        if not isinstance(found, dict):
            raise check.refuse("summary.json", str(self.summary_file), "a JSON object", remedy)
        return Summary.from_json(found)

    def steps(self) -> list[Line]:
        """The lines of the logical steps, in order."""
        return [line for line in self._lines() if "held_out" not in line]

    def scores(self) -> list[Line]:
        """The lines of the held-out scores, in order."""
        return [line for line in self._lines() if "held_out" in line]

    def refuse_unwritable(self) -> None:
        """Refuse a folder that could not be written to, before any work is done; nothing is made yet."""
        nearest = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            state = f"{nearest} may not be written to" if nearest.is_dir() else f"{nearest} is a file"
            remedy = "choose another folder, or free this one"
            raise check.refuse("--out", str(self.path), f"a folder to write to, but {state}", remedy)

    def prepare(self) -> None:
        """Make the folder, where it is not there."""
        self.path.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove the files of a run; others stay. The summary goes first: without it there is no run to go on with."""
        for file in (self.summary_file, self.checkpoint_file, self.metrics_file, self.report_file):
            file.unlink(missing_ok=True)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        with self.metrics_file.open("a", encoding="utf-8") as stream:
            stream.write(_dumps(line) + "\n")

    def sync(self) -> None:
        """Have the metrics on the disk, so that no checkpoint that is written later knows more steps than they do."""
        with self.metrics_file.open("a", encoding="utf-8") as stream:
            os.fsync(stream.fileno())

    def truncate(self, done: int) -> None:
        """Drop the lines of what happened after the first ``done`` steps: they will happen again."""
        kept = [line for line in self._lines() if line["step"] < done + ("held_out" in line)]
        steps = sum("held_out" not in line for line in kept)
        if steps != done:
            remedy = "put back the file that belongs to the checkpoint"
            raise check.refuse("metrics.jsonl", f"with {steps} steps", f"of the checkpoint's {done}", remedy)
        replace_text(self.metrics_file, "".join(_dumps(line) + "\n" for line in kept))

    def write_summary(self, summary: Summary) -> None:
        """Replace the summary."""
        replace_text(self.summary_file, _dumps(summary.as_json(), indent=1) + "\n")

    def _lines(self) -> list[Line]:
        """All lines; the last one is left out when it was torn by an interruption."""
        if not self.metrics_file.exists():
            return []
        *whole, _torn = self.metrics_file.read_text(encoding="utf-8").split("\n")
        return [self._line(text, number) for number, text in enumerate(whole, start=1)]

    def _line(self, text: str, number: int) -> Line:
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("step"), int):
            remedy = "put back the file as it was written"
            raise check.refuse(f"{self.metrics_file}, line {number}", text[:40], "a JSON object with a step", remedy)
        return found


def _dumps(value: object, *, indent: int | None = None) -> str:
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    """The same value with null for what JSON cannot say: infinities and NaN."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case Path():
            return str(value)
        case _:
            return value
