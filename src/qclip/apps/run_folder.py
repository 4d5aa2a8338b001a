"""The folder of a run: its metrics, its summary, its checkpoint, its model and its report.

``metrics.jsonl`` grows by a line at each logical step and at each held-out score. ``summary.json`` and
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
    """The folder of a run, to read or to write; only its methods touch the disk."""

    path: Path

    @property
    def metrics_file(self) -> Path:
        """The metrics: a JSON object for each step and each score."""
        return self.path / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        """The summary of the run and of its progress."""
        return self.path / "summary.json"

    @property
    def checkpoint_file(self) -> Path:
        """The checkpoint to resume from. Secret: its owner can subtract the noise that is still to come."""
        return self.path / "checkpoint.pt"

    @property
    def model_file(self) -> Path:
        """The exported model, as it was when the run ended or stopped: without secrets."""
        return self.path / "model.safetensors"

    @property
    def report_file(self) -> Path:
        """The report of the run, as it was when the run ended or stopped."""
        return self.path / "report.html"

    @property
    def holds_run(self) -> bool:
        """Whether the folder has files of a run."""
        return self.summary_file.exists() or self.checkpoint_file.exists() or self.metrics_file.exists()

    def summary(self) -> Summary:
        """Read the summary.

        Raises:
            Refusal: There is no summary, or it cannot be read.
        """
        remedy = "name the folder that `qclip train --out` wrote"
        try:
            content = json.loads(self.summary_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise check.Refusal(f"{self.path} is not the folder of a run, with a summary.json; {remedy}") from None
        except ValueError:
            raise check.Refusal(f"{self.summary_file} is not JSON; {remedy}") from None
        if not isinstance(content, dict):
            raise check.Refusal(f"{self.summary_file} is not a JSON object; {remedy}")
        return Summary.from_json(content)

    def steps(self) -> list[Line]:
        """Read the lines of the logical steps, in order."""
        return [line for line in self._lines() if "held_out" not in line]

    def scores(self) -> list[Line]:
        """Read the lines of the held-out scores, in order."""
        return [line for line in self._lines() if "held_out" in line]

    def refuse_unwritable(self, argument: str = "--out") -> None:
        """Refuse a folder that cannot be written to, before any work is done and without creating it."""
        nearest = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            reason = "is not writable" if nearest.is_dir() else "is a file"
            raise check.Refusal(
                f"{argument} = {str(self.path)!r} is not usable: {nearest} {reason}; choose another folder"
            )

    def prepare(self) -> None:
        """Create the folder if it does not exist."""
        self.path.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove the files of a run and no others; the summary goes first, without which no run can be resumed."""
        for file in (self.summary_file, self.checkpoint_file, self.metrics_file, self.model_file, self.report_file):
            file.unlink(missing_ok=True)

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line to the metrics."""
        with self.metrics_file.open("a", encoding="utf-8") as stream:
            stream.write(_dumps(line) + "\n")

    def sync(self) -> None:
        """Flush the metrics to the disk, so that no later checkpoint has more steps than they do."""
        with self.metrics_file.open("a", encoding="utf-8") as stream:
            os.fsync(stream.fileno())

    def truncate(self, done: int) -> None:
        """Drop the lines after the first ``done`` steps, which will run again.

        Raises:
            Refusal: The metrics have fewer steps than that.
        """
        kept = [line for line in self._lines() if line["step"] < done + ("held_out" in line)]
        steps = sum("held_out" not in line for line in kept)
        if steps != done:
            raise check.Refusal(
                f"{self.metrics_file} has {steps} of the checkpoint's {done} steps; restore the file that belongs to "
                "the checkpoint"
            )
        replace_text(self.metrics_file, "".join(_dumps(line) + "\n" for line in kept))

    def write_summary(self, summary: Summary) -> None:
        """Replace the summary."""
        replace_text(self.summary_file, _dumps(summary.as_json(), indent=1) + "\n")

    def _lines(self) -> list[Line]:
        """Read all lines, without a last line that an interruption cut off."""
        if not self.metrics_file.exists():
            return []
        *whole, _torn = self.metrics_file.read_text(encoding="utf-8").split("\n")
        return [self._line(text, number) for number, text in enumerate(whole, start=1)]

    def _line(self, text: str, number: int) -> Line:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            remedy = "restore the file as the run wrote it"
            raise check.refuse(f"{self.metrics_file}, line {number}", text[:40], "a JSON object with a step", remedy)
        return line


def _dumps(value: object, *, indent: int | None = None) -> str:
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    """Return the value with None for infinities and NaN, which JSON does not have."""
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
