"""The record of a run as arrays: read from its folder, checked, and ready to be drawn or compared."""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qclip import _validate as check
from qclip._validate import Floats
from qclip.apps.run_folder import Line, RunFolder
from qclip.apps.run_summary import Summary
from qclip.schedules import Polynomial, Schedule, Unclipped, values

INTACT = "restore the file as the run wrote it"


@dataclass(frozen=True)
class Score:
    """The held-out metrics at some step."""

    step: int
    """Steps done by then."""
    epoch: float | None
    epsilon: float
    """Epsilon spent by then."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Record:
    """A run: n steps of K groups, and its held-out scores."""

    folder: Path
    summary: Summary
    steps: Floats
    """The steps, counted from 0, [n]."""
    taus: Floats
    """The threshold of each group, [n, K]."""
    noisy_unclipped: Floats
    """The noisy unclipped fraction of each group, [n, K]; NaN where it was not measured."""
    noise_power: Floats
    """The squared length of the noise on the mean gradient, over the squared threshold, [n, K]; NaN if not recorded."""
    clipped_length: Floats
    """The mean length that clipping takes from a gradient, over the threshold, [n, K]; NaN where not estimated."""
    step_sizes: Floats
    """The learning rate of each step, on gradients in their own units, [n]; NaN where it was not recorded."""
    lost: NDArray[np.bool_]
    """Whether the threshold of any group was lost after each step, [n]."""
    epsilons: Floats
    """The epsilon spent after each step, [n]; infinite without privacy."""
    scores: tuple[Score, ...]

    @property
    def private(self) -> bool:
        """Whether the run has a privacy guarantee."""
        return self.summary.private and self.summary.epsilon is not None

    @property
    def done(self) -> int:
        """The number of steps done; a killed run may have recorded more than its last summary has."""
        last = int(self.steps[-1]) + 1 if len(self.steps) else 0
        return max(last, self.summary.steps)

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.summary.finished

    @property
    def epsilon(self) -> float:
        """The epsilon spent by the steps done."""
        if not self.summary.private or self.summary.epsilon is None:
            return math.inf
        return self.summary.epsilon if self.done == self.summary.steps else float(self.epsilons[-1])

    @property
    def groups(self) -> list[str]:
        """The name of each group."""
        return self.summary.groups

    @property
    def threshold(self) -> Mapping[str, Any]:
        """The name and settings of the threshold."""
        return self.summary.threshold

    @property
    def asked(self) -> bool:
        """Whether the threshold measured the unclipped fraction."""
        return bool(np.isfinite(self.noisy_unclipped).any())

    @property
    def targets(self) -> Floats | None:
        """The target p of the threshold at each step, [n]; None where it has none."""
        p = _schedule(self.threshold.get("p"))
        if p is None or not len(self.steps):
            return None
        return values(p, int(self.steps[-1]) + 1)[self.steps]

    @property
    def reached_floor(self) -> bool:
        """Whether the threshold of any group was ever at its lower bound."""
        lowest = self.threshold.get("tau_min")
        return isinstance(lowest, int | float) and bool((self.taus <= lowest).any())

    @property
    def clip_norms(self) -> Floats:
        """The threshold of all groups together, [n]."""
        return np.sqrt((self.taus**2).sum(axis=1))

    @property
    def noise(self) -> Floats:
        """The length of the noise on each step's mean gradient, [n]; NaN where it was not recorded."""
        return np.sqrt((self.noise_power * self.taus**2).sum(axis=1))

    @property
    def bias(self) -> Floats:
        """The estimated bound on the bias of each step's mean gradient, [n]; NaN where it was not estimated."""
        return np.sqrt(((self.clipped_length * self.taus) ** 2).sum(axis=1))

    @property
    def learning_rates(self) -> Floats | None:
        """The learning rates that the run found, in units of the threshold, [n]; None where it was told one."""
        found = self.summary.settings.get("lr", "not a setting") is None and np.isfinite(self.step_sizes).all()
        return self.step_sizes * self.clip_norms if found and len(self.steps) else None

    @property
    def metrics(self) -> list[str]:
        """The names of the held-out metrics, accuracy first."""
        names = dict.fromkeys(name for score in self.scores for name in score.values)
        return sorted(names, key=lambda name: name != "accuracy")

    def last(self, metric: str) -> float | None:
        """Return the last held-out value of a metric; None without one."""
        history = [score.values[metric] for score in self.scores if metric in score.values]
        return history[-1] if history else None


def read(folder: Path) -> Record:
    """Read the folder of a run, finished or not.

    A last line of metrics.jsonl that an interruption cut off is left out.

    Raises:
        Refusal: A file is missing or broken; the message names it.
    """
    files = RunFolder(Path(folder))
    summary = files.summary()
    if not files.metrics_file.exists():
        raise check.Refusal(f"{files.metrics_file} is missing beside summary.json; {INTACT}")
    lines = {_step(line, files): line for line in files.steps()}  # the later line of a step that was written twice
    taus = _matrix(lines, "tau", files)
    if lines and taus.shape[1] != len(summary.groups):
        fault = f"it has {taus.shape[1]} thresholds for the {len(summary.groups)} groups of summary.json"
        raise _broken(files, next(iter(lines)), fault)
    if not (taus > 0).all():  # false for NaN
        bad = list(lines)[int(np.argmin((taus > 0).all(axis=1)))]
        raise _broken(files, bad, "its thresholds are not all positive")
    return _within_all(
        Record(
            folder=files.path,
            summary=summary,
            steps=np.array(list(lines), dtype=np.int64),
            taus=taus,
            noisy_unclipped=_matrix(lines, "noisy_unclipped", files, width=taus.shape[1]),
            noise_power=_matrix(lines, "noise_power", files, width=taus.shape[1]),
            clipped_length=_matrix(lines, "clipped_length", files, width=taus.shape[1]),
            step_sizes=_column(lines, "step_size", math.nan, files),
            lost=np.array([bool(line.get("lost")) for line in lines.values()], dtype=np.bool_),
            epsilons=_column(lines, "epsilon", math.inf, files),
            scores=tuple(_score(line, files) for line in files.scores()),
        )
    )


def _within_all(record: Record) -> Record:
    """Return the record with no epsilon above that of all steps: single steps have that of a later one."""
    most = record.epsilon
    scores = tuple(replace(score, epsilon=min(score.epsilon, most)) for score in record.scores)
    return replace(record, epsilons=np.minimum(record.epsilons, most), scores=scores)


def _matrix(lines: Mapping[int, Line], key: str, files: RunFolder, width: int | None = None) -> Floats:
    """Return the lists under ``key``, a row per step and as long as the first; with ``width``, an empty list is NaN."""
    rows: list[list[float]] = []
    for step, line in lines.items():
        given = line.get(key, [])
        if not isinstance(given, list):
            raise _broken(files, step, f"{key} is not a list")
        row = [_number(value, math.nan, step, files) for value in given]
        if not row and width is not None:
            row = [math.nan] * width
        if not row or len(row) != (width or len(rows[0] if rows else row)):
            raise _broken(files, step, f"{key} does not have one value per group")
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(rows[0]) if rows else 0)


def _column(lines: Mapping[int, Line], key: str, absent: float, files: RunFolder) -> Floats:
    """Return the numbers under ``key``, one per step."""
    return np.array([_number(line.get(key), absent, step, files) for step, line in lines.items()], dtype=np.float64)


def _score(line: Line, files: RunFolder) -> Score:
    step, held_out = _step(line, files), line["held_out"]
    if not isinstance(held_out, dict):
        raise _broken(files, step, "held_out is not an object")
    epoch = line.get("epoch")
    return Score(
        step,
        None if epoch is None else _number(epoch, math.nan, step, files),
        _number(line.get("epsilon"), math.inf, step, files),
        {name: _number(value, math.nan, step, files) for name, value in held_out.items()},
    )


def _step(line: Line, files: RunFolder) -> int:
    step = line.get("step") if isinstance(line, dict) else None
    if not isinstance(step, int) or step < 0:
        raise _broken(files, step, "steps count from 0")
    return step


def _number(value: object, absent: float, step: int, files: RunFolder) -> float:
    """Return a number; JSON has null for infinities and NaN."""
    if value is None:
        return absent
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _broken(files, step, f"{value!r} is not a number")
    return float(value)


def _broken(files: RunFolder, step: object, fault: str) -> check.Refusal:
    return check.Refusal(f"{files.metrics_file}, step {step!r}: {fault}; {INTACT}")


def _schedule(described: object) -> Schedule | float | None:
    """Return the schedule of p that `qclip.thresholds.describe` wrote, a number or a repr; None for any other.

    >>> _schedule("Unclipped(clipped_fraction=Polynomial(initial=0.4, power=-1.0, high=inf))")(1)
    0.8
    """
    if isinstance(described, bool):
        return None
    if isinstance(described, int | float):
        return float(described)
    try:
        return _built(ast.parse(str(described), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        return None  # a function of the user's own


def _built(node: ast.expr) -> Any:
    """Build the numbers and schedules of an expression, and nothing else."""
    match node:
        case ast.Call(func=ast.Name(id="Polynomial" | "Unclipped" as name), args=[], keywords=keywords):
            made: Any = Polynomial if name == "Polynomial" else Unclipped
            return made(**{str(keyword.arg): _built(keyword.value) for keyword in keywords})
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_built(operand)
        case ast.Name(id="inf"):
            return math.inf
        case ast.Constant(value=int() | float() as number):
            return number
        case _:
            raise ValueError(ast.dump(node))


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths that distinguish the folders.

    >>> short_names([Path("a/seed1/run"), Path("a/seed2/run")])
    ['seed1/run', 'seed2/run']
    """
    parts = [Path(folder).resolve().parts for folder in folders]
    deepest = max((len(each) for each in parts), default=1)
    for length in range(1, deepest + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(folder) for folder in folders]
