"""Several runs side by side, as rows of a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qclip.apps.report import words
from qclip.apps.report.record import Record, read, short_names

TableRow = dict[str, str]
COMPARED = ("auc", "loss")
UNCOMPARED = ("out", "command", "resume")
"""Settings that differ between any two runs without explaining a difference."""


@dataclass(frozen=True)
class RunComparison:
    """The readable runs, by short name, and the errors of the others."""

    runs: Mapping[str, Record]
    broken: Mapping[str, str]

    @property
    def metrics(self) -> list[str]:
        """The held-out metrics to compare by: the first of each run, and those of `COMPARED`."""
        runs = self.runs.values()
        first = [name for record in runs for name in record.metrics[:1]]
        return list(dict.fromkeys([*first, *(name for name in COMPARED if any(name in run.metrics for run in runs))]))

    def rows(self) -> list[TableRow]:
        """Return a row of text per run, without columns that no run fills."""
        rows = [{"run": name} | self._row(record) for name, record in self.runs.items()]
        filled = {column for row in rows for column, text in row.items() if text}
        return [{column: text for column, text in row.items() if column in filled} for row in rows]

    def differences(self) -> dict[str, str]:
        """Return the settings in which the runs that have them differ: each value, and its runs."""
        settings = {name: record.summary.settings for name, record in self.runs.items()}
        names = dict.fromkeys(key for given in settings.values() for key in given if key not in UNCOMPARED)
        holders = {key: [run for run, given in settings.items() if key in given] for key in names}
        texts = {
            key: {run: words.setting(key, given.get(key, "")) or "none" for run, given in settings.items()}
            for key in names
        }
        # What only the command line has a name for, such as --data, does not set runs of Python apart.
        return {key: _grouped(text) for key, text in texts.items() if len({text[run] for run in holders[key]}) > 1}

    def as_json(self) -> dict[str, Any]:
        """Return the content of the table as JSON values."""
        return {
            "runs": [_as_json(name, record) for name, record in self.runs.items()],
            "broken": [{"run": name, "error": error} for name, error in self.broken.items()],
        }

    def _row(self, record: Record) -> TableRow:
        summary = record.summary
        return {
            "task": words.plain(summary.task),
            "threshold": words.threshold(record) + (" (lost)" if summary.lost_threshold else ""),
            "p": words.quantile(record),
            "groups": words.plain(len(record.groups)) if len(record.steps) else "",
            "batch": words.plain(summary.batch_size),
            "steps": words.steps(record),
            "epochs": words.number(words.epochs(record)),
            "noise": words.number(summary.noise_multiplier),
            "epsilon": words.epsilon(record.epsilon),
            "delta": words.number(summary.delta),
            **{name.replace("_", " "): words.number(record.last(name)) for name in self.metrics},
            "last threshold": words.taus(record),
            "seconds": words.number(summary.seconds),
        }


def compare(folders: Sequence[Path]) -> RunComparison:
    """Read the folders of runs; the error of an unreadable one is kept."""
    runs: dict[str, Record] = {}
    broken: dict[str, str] = {}
    for name, folder in zip(short_names(folders), folders, strict=True):
        try:
            runs[name] = read(folder)
        except (ValueError, OSError) as error:
            broken[name] = str(error)
    return RunComparison(runs, broken)


def constant_columns(rows: Sequence[TableRow]) -> TableRow:
    """Return the columns that are equal in all rows, where there are several."""
    if len(rows) < 2:
        return {}
    return {column: text for column, text in rows[0].items() if all(row[column] == text for row in rows)}


def _grouped(texts: Mapping[str, str]) -> str:
    """Format each value with its runs, in order of first appearance."""
    holders: dict[str, list[str]] = {}
    for run, text in texts.items():
        holders.setdefault(text, []).append(run)
    most = max(holders.values(), key=len)
    named = {
        text: "the others" if runs is most and len(runs) > 3 else ", ".join(runs) for text, runs in holders.items()
    }
    return "; ".join(f"{text} ({runs})" for text, runs in named.items())


def _as_json(name: str, record: Record) -> dict[str, Any]:
    keys = ("task", "batch_size", "noise_multiplier", "delta", "accuracy", "held_out", "seconds", "num_steps")
    targets = record.targets
    return {
        "run": name,
        "folder": str(record.folder),
        "finished": record.finished,
        "steps": record.done,
        "private": record.private,
        "epsilon": record.epsilon if record.private else None,
        "threshold": dict(record.threshold),
        "p": None if targets is None else float(targets[-1]),
        "groups": len(record.groups),
        "epochs": words.epochs(record),
        "lost_threshold": record.summary.lost_threshold,
        "last_tau": record.taus[-1].tolist() if len(record.steps) else [],
        **{key: getattr(record.summary, key) for key in keys},
    }
