"""Test accuracy of private quantiles and of constant thresholds at one privacy budget.

The question is whether a private quantile matches the best constant without tuning. Every run takes the same number of
steps with the same noise multiplier and normalized step sizes, ``learning_rate / tau``: an example moves the parameters
by at most ``learning_rate / batch_size`` in all of them, and the noise is the same. Only the set of clipped examples
differs. (With one plain learning rate for all, a constant threshold would also act as a step size.)
"""

import json
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.utils.data import TensorDataset

from qclip import _validate as check
from qclip import accounting
from qclip.apps.data import load
from qclip.apps.experiments.quality_settings import QualitySettings
from qclip.apps.report.style import CYCLE, label, new_figure, save
from qclip.thresholds import Constant, PrivateQuantile, SlackQuantile, Threshold
from qclip.training.make import make_private


def thresholds(settings: QualitySettings) -> dict[str, Threshold[Any]]:
    """Return the thresholds to compare, by name."""
    compared: dict[str, Threshold[Any]] = {f"PrivateQuantile({p:g})": PrivateQuantile(p) for p in settings.quantiles}
    compared |= {f"SlackQuantile({p:g})": SlackQuantile(p) for p in settings.quantiles}
    return compared | {f"Constant({c:g})": Constant(c) for c in settings.constants}


@dataclass(frozen=True)
class QualityRow:
    """One run."""

    threshold: str
    seed: int
    accuracy: float
    """Test accuracy after the last step."""
    epsilon: float
    tau: float
    """Threshold at the last step."""
    noise_multiplier: float


def train(settings: QualitySettings, name: str, seed: int, noise_multiplier: float) -> QualityRow:
    """Train one private run."""
    torch.set_num_threads(1 if settings.workers > 1 else torch.get_num_threads())
    torch.manual_seed(seed)
    task = load(settings.data, data_dir=settings.data_dir)
    model = task.build_model().to(settings.device)
    assert isinstance(task.train, TensorDataset)
    training = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=settings.learning_rate),
        TensorDataset(*(tensor.to(settings.device) for tensor in task.train.tensors)),
        loss=task.loss,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        noise_multiplier=noise_multiplier,
        delta=settings.delta,
        threshold=thresholds(settings)[name],
        rescale_to_unit_norm=True,
        seed=seed,  # for reproducibility; leave it out for sensitive data
    )
    for _ in range(settings.epochs):
        for x, y in training.loader:
            training.step(x, y)
    tau = training.history[-1].tau[0]
    return QualityRow(name, seed, task.score(model)["accuracy"], training.epsilon(), tau, noise_multiplier)


def quality(settings: QualitySettings, say: Callable[[str], None] = print) -> list[QualityRow]:
    """Train every run and write table and figure; rows.json is rewritten after each run."""
    settings.out.mkdir(parents=True, exist_ok=True)
    task = load(settings.data, data_dir=settings.data_dir)
    assert isinstance(task.train, TensorDataset)
    z = accounting.noise_multiplier(
        epsilon=settings.epsilon, delta=settings.delta, examples=len(task.train), batch_size=settings.batch_size,
        epochs=settings.epochs,
    )  # fmt: skip
    jobs = [(name, seed) for seed in range(check.count("seeds", settings.seeds)) for name in thresholds(settings)]
    rows: list[QualityRow] = []
    for row in _results(settings, jobs, z):
        rows.append(row)
        (settings.out / "rows.json").write_text(json.dumps([asdict(each) for each in rows], indent=1))
        say(f"{len(rows)}/{len(jobs)}  {row.threshold}  seed {row.seed}: {row.accuracy:.4f}  (tau {row.tau:.3g})")
    (settings.out / "table.md").write_text(table(rows))
    save(draw(rows), settings.out / "quality.png")
    return rows


def _results(settings: QualitySettings, jobs: list[tuple[str, int]], z: float) -> Iterable[QualityRow]:
    if settings.workers == 1:
        yield from (train(settings, name, seed, z) for name, seed in jobs)
        return
    with ProcessPoolExecutor(settings.workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(train, *zip(*((settings, name, seed, z) for name, seed in jobs), strict=True))


def table(rows: list[QualityRow]) -> str:
    """Return the mean, lowest and highest accuracy of each threshold, as Markdown."""
    lines = ["| threshold | accuracy | lowest | highest | tau at the end |", "|---|---|---|---|---|"]
    for name, runs in _grouped(rows).items():
        values = [100 * row.accuracy for row in runs]
        tau = statistics.mean(row.tau for row in runs)
        lines.append(f"| {name} | {statistics.mean(values):.2f} | {min(values):.2f} | {max(values):.2f} | {tau:.3g} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[QualityRow]) -> Figure:
    """Draw the accuracy against the constant C, and against the quantile p, on one scale."""
    figure, axes = new_figure(2, width=8.0)
    families: dict[str, dict[float, list[float]]] = {}
    for name, runs in _grouped(rows).items():
        family, _, value = name.removesuffix(")").partition("(")
        families.setdefault(family, {})[float(value)] = [100 * row.accuracy for row in runs]
    for family, points in families.items():
        ax, color = axes[family != "Constant"], CYCLE[list(families).index(family)]
        ax.plot(list(points), [*map(statistics.mean, points.values())], color=color, marker="o", ms=4, label=family)
        for value, accuracies in points.items():
            ax.plot([value] * len(accuracies), accuracies, ".", color=color, alpha=0.4, markersize=4)
    axes[0].set_xscale("log")
    axes[1].sharey(axes[0])
    label(axes[0], "constant C", "test accuracy (%)", "a constant threshold")
    label(axes[1], "unclipped fraction p", "", "a private quantile")
    return figure


def _grouped(rows: list[QualityRow]) -> dict[str, list[QualityRow]]:
    return {name: [row for row in rows if row.threshold == name] for name in dict.fromkeys(r.threshold for r in rows)}
