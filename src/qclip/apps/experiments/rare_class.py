"""The effect of a rare class on thresholds: loss and AUC on fresh rows of synthetic tables, against a constant guess.

Where most rows are easy, most gradients vanish, and a quantile below their share drives tau to zero. The rare rows then
have no more influence than the others, and the model never predicts the rare class.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from qclip import _validate as check
from qclip._validate import Floats
from qclip.apps.data import Task, load
from qclip.apps.data.task import classification, scorer
from qclip.apps.experiments.scores import auc, held_out_scores
from qclip.apps.experiments.task_training import train_privately
from qclip.thresholds import BalancedThreshold, Constant, PrivateQuantile, Threshold

RANGES = {"age": "18:95", "weight": "30:150", "pressure": "60:220", "sugar": "2:16", "visits": "0:10", "days": "0:60"}
"""What is publicly known of the numbers in the synthetic tables."""
GUESS, FITTED = "a constant guess", "logistic regression, no privacy"
RATE = 2.0
"""The learning rate of methods that do not find it, in units of the threshold."""
AUTOMATIC = "automatic: BalancedThreshold() and step_size='auto'"
AUC_MARGIN = 0.01
"""The AUC that the automatic run may lose against logistic regression without privacy."""


@dataclass(frozen=True)
class RareClassRow:
    """One method on one table: means over the seeds."""

    table: str
    method: str
    loss: float
    spread: float
    """Standard deviation of the loss over the seeds."""
    auc: float
    auc_spread: float
    accuracy: float
    tau: float | None


def risk_task(folder: Path, share: float, *, rows: int = 30_000, fresh_rows: int = 100_000) -> Task:
    """Return the task of ``qclip train`` on a table of synthetic people, with every row used for training.

    The scores are those of fresh rows from the same distribution.

    Args:
        folder: Folder to write the tables to.
        share: Expected share of the rare class.
        rows: Number of training rows.
        fresh_rows: Number of rows to score on.
    """
    table, fresh = (
        load(str(write_table(folder / f"{name}.csv", share, rows=count, seed=seed)), target="event", columns=RANGES)
        for name, count, seed in (("risk", rows, 0), ("fresh", fresh_rows, 1))
    )
    held_out = _all_rows(fresh)
    return replace(
        table,
        train=_all_rows(table),
        held_out=held_out,
        score=scorer(held_out, classification),
        description=f"{rows} rows, {fresh_rows} fresh ones held out, {share:.1%} positives expected",
    )


def _all_rows(task: Task) -> TensorDataset:
    return TensorDataset(*(torch.cat(parts) for parts in zip(*_tensors(task), strict=True)))


def write_table(path: Path, share: float, *, rows: int = 30_000, seed: int = 0) -> Path:
    """Write a .csv of synthetic people with 9 columns and an event that happens to about this share of them.

    Tables of the same share are draws from the same distribution, whatever their size and seed.
    """
    check.between("share", share, 0, 1, "pass the expected share of the rare class, such as 0.02")
    rng = np.random.default_rng(seed)
    columns = _people(rng, rows)
    columns["event"] = np.where(rng.random(rows) < _chance(_score(columns) + _intercept(share)), "yes", "no")
    lines = (",".join(map(str, row)) for row in zip(*(values.tolist() for values in columns.values()), strict=True))
    path.write_text("\n".join([",".join(columns), *lines]) + "\n", encoding="utf-8")
    return path


def _people(rng: np.random.Generator, rows: int) -> dict[str, Floats]:
    return {
        "age": rng.uniform(18, 95, rows).round(1),
        "weight": rng.normal(75, 14, rows).round(1),
        "pressure": rng.normal(130, 18, rows).round(),
        "sugar": rng.lognormal(1.7, 0.25, rows).round(2),
        "visits": rng.poisson(1.5, rows),
        "days": rng.exponential(4, rows).round(1),
        "sex": rng.choice(["f", "m"], rows),
        "smoker": rng.choice(["never", "once", "now"], rows, p=[0.5, 0.3, 0.2]),
        "ward": rng.choice(list("ABCDEF"), rows),
    }


def _score(columns: dict[str, Floats]) -> Floats:
    """Return the log odds of the event up to a constant, [rows]."""
    weights = {"age": 0.05, "weight": 0.03, "pressure": 0.03, "sugar": 0.4, "visits": 0.5, "days": 0.12}
    numbers = sum(weight * columns[name] for name, weight in weights.items())
    return numbers + 0.4 * (columns["sex"] == "m") + 0.8 * (columns["smoker"] == "now")


@cache
def _intercept(share: float) -> float:
    """Return the constant at which the event happens to this share of 200,000 other people."""
    score = _score(_people(np.random.default_rng(2), 200_000))
    low, high = -60.0, 60.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(score + middle).mean() < share else (low, middle)
    return low


def constant_loss(task: Task) -> float:
    """Return the held-out loss of a constant prediction, the share of each class among the training rows."""
    (_, train), (_, held_out) = _tensors(task)
    shares = torch.bincount(train) / len(train)
    return -shares.log()[held_out].mean().item()


def compare(
    out: Path,
    *,
    shares: Sequence[float],
    data_dir: Path | None = None,
    seeds: int = 5,
    say: Callable[[str], None] = print,
) -> list[RareClassRow]:
    """Run every method on every table at epsilon = 3, with the settings of ``qclip train``, and write table.md.

    Args:
        out: Folder to write to.
        shares: Shares of the rare class in the synthetic tables.
        data_dir: Folder of the Adult files; without it, synthetic tables only.
        seeds: Runs of each method.
        say: Called with the progress.
    """
    out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Callable[[], Task]] = {f"{share:.1%}": partial(risk_task, out, share) for share in shares}
    if data_dir is not None:
        tables["Adult"] = partial(load, "adult", data_dir=data_dir)
    rows: list[RareClassRow] = []
    for name, build in tables.items():
        task = build()
        rows += [_constant_guess(name, task), _without_privacy(name, task)]
        for method, (threshold, step_size) in _methods().items():
            row = _privately(name, task, method, threshold, step_size, seeds=seeds)
            rows.append(row)
            say(f"{name}  {method}: loss {row.loss:.4f} ± {row.spread:.4f}, AUC {row.auc:.4f} ± {row.auc_spread:.4f}")
    (out / "table.md").write_text(table(rows))
    return rows


def _methods() -> dict[str, tuple[Threshold[Any], float | Literal["auto"]]]:
    """Return the thresholds to compare, each with its learning rate."""
    quantiles = {f"PrivateQuantile({p})": PrivateQuantile(p) for p in (0.7, 0.95, 0.99)}
    constants = {"Constant(1)": Constant(1.0), "Constant(3)": Constant(3.0)}
    thresholds: dict[str, Threshold[Any]] = {**quantiles, **constants, "BalancedThreshold()": BalancedThreshold()}
    return {**{name: (each, RATE) for name, each in thresholds.items()}, AUTOMATIC: (BalancedThreshold(), "auto")}


def table(rows: list[RareClassRow]) -> str:
    """Return loss / AUC of each method on each table, and the verdicts, as Markdown."""
    tables, methods = (
        list(dict.fromkeys(names)) for names in zip(*((row.table, row.method) for row in rows), strict=True)
    )
    cells = {(row.table, row.method): f"{row.loss:.4f} / {row.auc:.3f}" for row in rows}
    lines = [f"| loss / AUC | {' | '.join(tables)} |", "|---" * (len(tables) + 1) + "|"]
    lines += [f"| {method} | {' | '.join(cells[name, method] for name in tables)} |" for method in methods]
    judged = verdicts(rows)
    return "\n".join([*lines, *([""] if judged else []), *judged]) + "\n"


def verdicts(rows: list[RareClassRow]) -> list[str]:
    """Return for each table whether the automatic run is better than a guess and close to logistic regression."""
    found = {(row.table, row.method): row for row in rows}
    lines = []
    for row in rows:
        if row.method == AUTOMATIC:
            guess, fitted = found[row.table, GUESS], found[row.table, FITTED]
            below = "below" if row.loss < guess.loss else "not below"
            within = "within" if fitted.auc - row.auc <= AUC_MARGIN else "not within"
            lines.append(
                f"- {row.table}: automatic loss {row.loss:.4f} ± {row.spread:.4f}, {below} {guess.loss:.4f} of a "
                f"guess; automatic AUC {row.auc:.4f} ± {row.auc_spread:.4f}, {within} {AUC_MARGIN} of {fitted.auc:.4f}"
            )
    return lines


def _privately(
    name: str, task: Task, method: str, threshold: Threshold[Any], step_size: float | Literal["auto"], *, seeds: int
) -> RareClassRow:
    scores, taus = [], []
    for seed in range(seeds):
        model = task.build_model()
        training = train_privately(
            task,
            model,
            threshold=threshold,
            step_size=step_size,
            batch_size=task.defaults.batch_size,
            epochs=task.defaults.epochs,
            seed=seed,
            epsilon=3.0,
            delta=1e-5,
        )
        scores.append(held_out_scores(task, model))
        taus.append(training.history[-1].tau[0])
    losses, aucs, accuracies = ([score[name] for score in scores] for name in ("loss", "auc", "accuracy"))
    spread = statistics.stdev if seeds > 1 else lambda _: 0.0
    mean = statistics.mean
    return RareClassRow(
        name, method, mean(losses), spread(losses), mean(aucs), spread(aucs), mean(accuracies), mean(taus)
    )


def _constant_guess(name: str, task: Task) -> RareClassRow:
    held_out = _tensors(task)[1][1]
    accuracy = max(torch.bincount(held_out).tolist()) / len(held_out)
    return RareClassRow(name, GUESS, constant_loss(task), 0.0, 0.5, 0.0, accuracy, None)


def _without_privacy(name: str, task: Task) -> RareClassRow:
    """Return the scores of scikit-learn's logistic regression, fitted on the same inputs."""
    from sklearn.linear_model import LogisticRegression

    (inputs, targets), (held_inputs, held_targets) = _tensors(task)
    fitted = LogisticRegression(max_iter=2000).fit(inputs.numpy(), targets.numpy())
    scores = torch.from_numpy(fitted.predict_log_proba(held_inputs.numpy()))
    loss = nn.functional.nll_loss(scores, held_targets).item()
    accuracy = (scores.argmax(1) == held_targets).double().mean().item()
    area = auc(scores[:, 1], held_targets)
    return RareClassRow(name, FITTED, loss, 0.0, area, 0.0, accuracy, None)


def _tensors(task: Task) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return inputs and targets, of training and held-out rows."""
    assert isinstance(task.train, TensorDataset)
    assert isinstance(task.held_out, TensorDataset)
    (x, y), (held_x, held_y) = task.train.tensors, task.held_out.tensors
    return (x, y), (held_x, held_y)


def _chance(log_odds: Floats) -> Floats:
    return 1 / (1 + np.exp(-log_odds))
