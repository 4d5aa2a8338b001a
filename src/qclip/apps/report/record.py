"""What a run's folder says, as arrays: read once, checked, and ready to be drawn or compared."""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.apps.run_folder import Line, RunFolder
from qclip.apps.run_summary import Summary
from qclip.schedules import Polynomial, Schedule, Unclipped, values

INTACT = "put back the file as the run wrote it"


@dataclass(frozen=True)
class Score:
    """A look at the held-out data."""

    step: int
    """The steps done by then."""
    epoch: float | None
    epsilon: float
    """Spent by then."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Record:
    """A run: n steps of K groups, and its held-out scores."""

    folder: Path
    summary: Summary
    steps: Floats
    """[n], counted from 0."""
    taus: Floats
    """[n, K]."""
    noisy_unclipped: Floats
    """[n, K]; NaN where the threshold did not ask."""
    epsilons: Floats
    """[n], spent after each step; infinite without privacy."""
    scores: tuple[Score, ...]

    @property
    def private(self) -> bool:
        """Whether the run has a guarantee."""
        return self.summary.private and self.summary.epsilon is not None

    @property
    def done(self) -> int:
        """The steps done: a run that was killed may have recorded more of them than its last summary knows."""
        last = int(self.steps[-1]) + 1 if len(self.steps) else 0
        return max(last, self.summary.steps)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary.finished

    @property
    def epsilon(self) -> float:
        """Spent by the steps done."""
        if not self.summary.private or self.summary.epsilon is None:
            return math.inf
        return self.summary.epsilon if self.done == self.summary.steps else float(self.epsilons[-1])

    @property
    def groups(self) -> list[str]:
        """A name for each group."""
        return self.summary.groups

    @property
    def threshold(self) -> Mapping[str, Any]:
        """The threshold's name and its settings."""
        return self.summary.threshold

    @property
    def asked(self) -> bool:
        """Whether the run knows, noisily, how many examples it left unclipped."""
        return bool(np.isfinite(self.noisy_unclipped).any())

    @property
    def targets(self) -> Floats | None:
        """[n], the fraction p that the threshold was to leave unclipped at each step; None where it has none."""
        p = _schedule(self.threshold.get("p"))
        if p is None or not len(self.steps):
            return None
        return values(p, int(self.steps[-1]) + 1)[self.steps]

    @property
    def metrics(self) -> list[str]:
        """The names of the held-out metrics, accuracy first."""
        names = dict.fromkeys(name for score in self.scores for name in score.values)
        return sorted(names, key=lambda name: name != "accuracy")

    def last(self, metric: str) -> float | None:
        """The last held-out value of a metric."""
        found = [score.values[metric] for score in self.scores if metric in score.values]
        return found[-1] if found else None


def read(folder: Path) -> Record:
    """Read the folder of a run, finished or not; refused where a file is missing or cannot be understood.

    A last line of metrics.jsonl that an interruption tore is left out.
    """
    files = RunFolder(Path(folder))
    summary = files.summary()
    if not files.metrics_file.exists():
        raise check.refuse("metrics.jsonl", str(files.metrics_file), "there, beside summary.json", INTACT)
    lines = {_step(line, files): line for line in files.steps()}  # of a step that was written twice the later counts
    taus = _matrix(lines, "tau", files)
    if lines and taus.shape[1] != len(summary.groups):
        bound = f"with the thresholds of {len(summary.groups)} groups, those of summary.json"
        raise _broken(files, next(iter(lines)), bound)
    if not (taus > 0).all():  # a NaN is not
        bad = list(lines)[int(np.argmin((taus > 0).all(axis=1)))]
        raise _broken(files, bad, "with positive thresholds")
    return Record(
        folder=files.path,
        summary=summary,
        steps=np.array(list(lines), dtype=np.int64),
        taus=taus,
        noisy_unclipped=_matrix(lines, "noisy_unclipped", files, width=taus.shape[1]),
        epsilons=np.array([_number(line.get("epsilon"), math.inf, step, files) for step, line in lines.items()]),
        scores=tuple(_score(line, files) for line in files.scores()),
    )


def _matrix(lines: Mapping[int, Line], key: str, files: RunFolder, width: int | None = None) -> Floats:
    """The lists under ``key``, a row per step, as long as the first; with ``width`` so long, or empty and then NaN."""
    rows: list[list[float]] = []
    for step, line in lines.items():
        given = line.get(key, [])
        if not isinstance(given, list):
            raise _broken(files, step, f"with a list under {key}")
        row = [_number(value, math.nan, step, files) for value in given]
        if not row and width is not None:
            row = [math.nan] * width
        if not row or len(row) != (width or len(rows[0] if rows else row)):
            raise _broken(files, step, f"with a value per group under {key}")
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(rows[0]) if rows else 0)


def _score(line: Line, files: RunFolder) -> Score:
    step, held_out = _step(line, files), line["held_out"]
    if not isinstance(held_out, dict):
        raise _broken(files, step, "with an object under held_out")
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
        raise _broken(files, step, "counted from 0")
    return step


def _number(value: object, absent: float, step: int, files: RunFolder) -> float:
    """A number; JSON has null for those it cannot write."""
    if value is None:
        return absent
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _broken(files, step, f"with a number in place of {value!r}")
    return float(value)


def _broken(files: RunFolder, step: object, bound: str) -> ValueError:
    return check.refuse(f"{files.metrics_file}: step", step, bound, INTACT)


def _schedule(described: object) -> Schedule | float | None:
    """The schedule of p as `qclip.thresholds.describe` writes it, a number or a repr; None for what is not known.

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
    """The numbers and schedules that an expression names, and nothing else."""
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
    """The least of each path's end that tells the folders apart.

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
