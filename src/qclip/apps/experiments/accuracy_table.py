"""The tables of the accuracy experiment, and their verdicts."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qclip.apps.experiments.accuracy_runs import Run
from qclip.apps.experiments.accuracy_settings import AccuracySettings


@dataclass(frozen=True)
class Finalist:
    """A setting on fresh seeds."""

    tuned: str
    """What was chosen by grids."""
    runs: list[Run]
    tried: int = 0
    """The number of runs that it took to choose."""
    margin: float = math.nan
    """The points that a run with less tuned may lose against it."""


@dataclass
class Results:
    """All runs of the experiment, in their roles."""

    settings: AccuracySettings
    description: str
    finalists: dict[float, list[Finalist]] = field(default_factory=dict)
    """At each epsilon: the automatic one, the best learning rate, and the best thresholds at that rate."""
    grids: dict[str, list[Run]] = field(default_factory=dict)
    reference: list[Run] = field(default_factory=list)
    """Runs without privacy."""
    missing: int = 0
    """Runs that are not finished."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, in points of accuracy, and its standard error over seeds."""

    points: float
    error: float

    def worse(self, margin: float) -> bool:
        """Return whether more than ``margin`` points are lost, beyond two standard errors.

        >>> Difference(-0.9, 0.2).worse(0.3), Difference(-0.9, 0.4).worse(0.3)
        (True, False)
        """
        return -self.points > margin + 2 * self.error


def difference(ours: Sequence[Run], theirs: Sequence[Run]) -> Difference | None:
    """Return the difference over the seeds on which both finished; None for fewer than two."""
    others = {run.job.seed: run for run in theirs if not run.error}
    pairs = [(run, others[run.job.seed]) for run in ours if not run.error and run.job.seed in others]
    points = [100 * (run.accuracy - other.accuracy) for run, other in pairs]
    if len(points) < 2:
        return None
    return Difference(statistics.mean(points), statistics.stdev(points) / math.sqrt(len(points)))


def verdict(ours: Sequence[Run], theirs: Sequence[Run], margin: float) -> str:
    """Return whether our runs are worse than theirs by more than the margin, in words."""
    failed = sum(bool(run.error) for run in ours)
    if failed:
        return f"failed on {failed} of {len(ours)} seeds"
    measured = difference(ours, theirs)
    if measured is None:
        return "too few seeds to tell"
    judged = f"worse by more than {margin:g}" if measured.worse(margin) else "not worse"
    return f"{measured.points:+.2f} ± {measured.error:.2f}, {judged}"


def table(results: Results) -> str:
    """Return the finalists, the grids and what they cost, as Markdown."""
    blocks = [_heading(results)]
    for epsilon, finalists in results.finalists.items():
        blocks += [f"Epsilon = {epsilon:g}, {results.settings.seeds} fresh seeds:", _finalists(finalists)]
    if results.reference:
        blocks += ["Without privacy, by Adam, one seed:", _grid("learning rate", results.reference)]
    for name, runs in results.grids.items():
        blocks += [f"The grid of {name}, epsilon = {results.settings.epsilon:g}, one seed:", _grid(name, runs)]
    return "\n\n".join([*blocks, _costs(results)]) + "\n"


def _heading(results: Results) -> str:
    runs = _all(results)
    facts = f"{results.settings.data}: {results.description}"
    if runs:
        job = runs[0].job
        facts += f"; {job.epochs} epochs of batches of {job.batch_size}, delta = {job.delta:g}"
    if results.missing:
        facts += f". **Incomplete**: at least {results.missing} runs are missing"
    return facts + "."


def _finalists(finalists: Sequence[Finalist]) -> str:
    two_classes = any(run.auc is not None for finalist in finalists for run in finalist.runs)
    header = ["tuned", "runs to tune", "threshold", "learning rate", "accuracy", "lowest", "highest", "loss"]
    header += ["AUC"] * two_classes + ["automatic minus this", "balanced, same rate, minus this"]
    rows = []
    for finalist in finalists:
        done = [run for run in finalist.runs if not run.error]
        values = [100 * run.accuracy for run in done]
        failed = len(finalist.runs) - len(done)
        row = [finalist.tuned, str(finalist.tried), _threshold(finalist.runs), _rates(done)]
        row += [_mean(values, 2) + (f" ({failed} of {len(finalist.runs)} failed)" if failed else "")]
        row += [f"{end(values):.2f}" if values else "-" for end in (min, max)]
        row += [_mean([run.loss for run in done], 4)]
        row += [_mean([run.auc for run in done if run.auc is not None], 4)] * two_classes
        rows.append([*row, *_compared(finalists, finalist)])
    return markdown(header, rows)


def _compared(finalists: Sequence[Finalist], finalist: Finalist) -> list[str]:
    """Return the verdicts on the automatic runs and on the balanced threshold, where less was tuned for them."""
    place = finalists.index(finalist)
    verdicts = [verdict(less.runs, finalist.runs, finalist.margin) for less in finalists[: min(place, 2)]]
    return [*verdicts, "", ""][:2]


def _grid(name: str, runs: Sequence[Run]) -> str:
    rows = [
        ["accuracy", *("failed" if run.error else f"{100 * run.accuracy:.2f}" for run in runs)],
        ["loss", *("" if run.error else f"{run.loss:.4f}" for run in runs)],
    ]
    for fact, values, form in (
        ("tau at the end", [run.tau for run in runs], ".3g"),
        ("unclipped", [run.unclipped for run in runs], ".2f"),
    ):
        if any(value is not None for value in values):
            rows.append([fact, *(_number(value, form) for value in values)])
    return markdown([name, *(f"{point(name, run):g}" for run in runs)], rows)


def point(name: str, run: Run) -> float:
    """Return the place of a run on the grid of this name."""
    place = run.job.rate if name == "learning rate" else run.job.value
    assert place is not None
    return place


def _costs(results: Results) -> str:
    runs = _all(results)
    minutes = sum(run.seconds for run in runs) / 60
    where = "; ".join(dict.fromkeys(run.machine for run in runs)) or "no machine"
    errors = [f"- {run.job}: {run.error}" for run in runs if run.error]
    facts = f"{len(runs)} runs, {len(errors)} of them failed; {minutes:.0f} minutes of runs on {where}:"
    return "\n\n".join([*(["\n".join(errors)] if errors else []), facts, f"    {results.settings.command}"])


def _all(results: Results) -> list[Run]:
    finalists = (run for each in results.finalists.values() for finalist in each for run in finalist.runs)
    grids = (run for each in results.grids.values() for run in each)
    return list(dict.fromkeys([*finalists, *grids, *results.reference]))


def _threshold(runs: Sequence[Run]) -> str:
    if not runs:
        return "-"
    job = runs[0].job
    return {"balanced": "balanced", "quantile": f"p = {job.value}", "constant": f"C = {job.value}"}[job.family]


def _rates(runs: Sequence[Run]) -> str:
    rates = [run.rate_at_half for run in runs if run.rate_at_half is not None]
    if not rates:
        return "-"
    low, high = f"{min(rates):.2g}", f"{max(rates):.2g}"
    return low if low == high else f"{low} to {high}"


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{statistics.mean(values):.{digits}f}" if values else "-"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
