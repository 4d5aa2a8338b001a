"""The ledger: what several runs on the same data have spent together, those of tuning included."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qclip import accounting
from qclip._validate import Refusal
from qclip.apps.run_folder import RunFolder
from qclip.apps.run_summary import Summary


@dataclass(frozen=True)
class Run:
    """A run of the ledger."""

    name: str
    steps: int
    sample_rate: float
    noise_multiplier: float
    epsilon: float
    """Spent by the run alone, at its own delta; infinite without noise."""
    delta: float


@dataclass(frozen=True)
class Ledger:
    """Runs on the same data, and what they have spent together."""

    runs: tuple[Run, ...]
    epsilon: float
    delta: float
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the ledger as JSON values; infinity becomes None."""
        rows = [asdict(run) | {"epsilon": _finite(run.epsilon)} for run in self.runs]
        return {"runs": rows, "epsilon": _finite(self.epsilon), "delta": self.delta, "notes": list(self.notes)}


def read(folders: Sequence[Path]) -> Ledger:
    """Read the summaries of runs and add up what they spent, at the largest delta among them.

    Unfinished runs count with the steps they have done. Runs that were never written to a folder are not seen.

    Args:
        folders: Folders of runs, or folders that hold some.

    Raises:
        qclip.Refusal: A folder has no run, or the runs protect other units or trained on data of another size.
    """
    found = {path: summary for folder in folders for path, summary in _summaries(folder)}
    if not found:
        raise Refusal(f"--ledger: no run in {', '.join(map(str, folders))}; name folders that hold a summary.json")
    for what in ("examples", "unit"):
        values = {str(path): getattr(summary, what) for path, summary in found.items()}
        if len(set(values.values())) > 1:
            raise Refusal(
                f"--ledger: the runs do not have the same data: {what} = {values}; one ledger is for one data set and "
                "one unit of privacy"
            )
    descriptions = {summary.description for summary in found.values()}
    notes = []
    if len(descriptions) > 1:
        notes.append(f"the data are described differently: {'; '.join(sorted(descriptions))}")
    if unfinished := [str(path) for path, summary in found.items() if not summary.finished]:
        notes.append(f"not finished, counted so far: {', '.join(unfinished)}")
    runs = tuple(
        Run(
            str(path),
            summary.steps,
            summary.sample_rate,
            summary.noise_multiplier,
            math.inf if summary.epsilon is None else summary.epsilon,
            summary.delta,
        )
        for path, summary in found.items()
    )
    delta = max(run.delta for run in runs)
    if any(math.isinf(run.epsilon) for run in runs):
        return Ledger(runs, math.inf, delta, (*notes, "a run without a guarantee is among them"))
    spendings = [accounting.Spending(run.noise_multiplier, run.sample_rate, run.steps) for run in runs]
    return Ledger(runs, accounting.together(spendings, delta), delta, tuple(notes))


def _summaries(folder: Path) -> list[tuple[Path, Summary]]:
    if not folder.is_dir():
        raise Refusal(f"--ledger: {folder} is not a folder; name folders of runs")
    files = sorted(folder.rglob("summary.json"))
    return [(file.parent, RunFolder(file.parent).summary()) for file in files]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
