"""The tracking error of each threshold on a moving quantile, at equal total privacy.

Norms are drawn from known distributions whose location drifts by 1 % a step, up and down, or jumps by a factor of 100.
Every estimator gets the same total noise multiplier; the cost of its counts, as noise on the gradient, is a column.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from qclip import accounting
from qclip._validate import Floats
from qclip.apps.report.style import CYCLE, GREY, label, new_figure, save
from qclip.thresholds import (
    Answer,
    Conditions,
    Count,
    ExactQuantile,
    GeometricQuantile,
    HistogramQuantile,
    PrivateQuantile,
    Question,
    RollingQuantile,
    SlackQuantile,
    Threshold,
)
from qclip.thresholds.threshold import refusal

DISTRIBUTIONS: dict[str, Any] = {
    "log-normal": stats.lognorm(1.0),
    "narrow log-normal": stats.lognorm(0.25),
    "Pareto": stats.pareto(1.5),
    "wide log-normal": stats.lognorm(2.0),
    "half-normal": stats.halfnorm(),
    "chi, 20 degrees": stats.chi(20),
    "half-Cauchy": stats.halfcauchy(),
}
DRIFT, JUMP = 0.01, math.log(100)
NEAR = 0.22
"""A quantile counts as reached when log tau is this near: 25 %."""


@dataclass(frozen=True)
class Setting:
    """The public constants of a run, and the target quantile."""

    batch_size: int
    noise_multiplier: float
    p: float

    def conditions(self, steps: int) -> Conditions:
        """Return the public facts of a run with this many steps."""
        return Conditions(self.batch_size, steps, self.noise_multiplier, (1,))

    def __str__(self) -> str:
        return f"{self.batch_size}, {self.noise_multiplier:g}, {self.p:g}"


SETTINGS = (
    Setting(64, 1, 0.5), Setting(256, 4, 0.5), Setting(256, 4, 0.9), Setting(1024, 1, 0.5), Setting(1024, 1, 0.9)
)  # fmt: skip


def estimators(setting: Setting) -> dict[str, Any]:
    """Return the estimators to compare at this setting."""
    p = setting.p
    return {
        "PrivateQuantile": PrivateQuantile(p),
        "SlackQuantile": SlackQuantile(p),
        "HistogramQuantile": HistogramQuantile(p),
        "GeometricQuantile": GeometricQuantile(p),
        "GeometricQuantile, literature": GeometricQuantile(p, noise_share=literature_share(setting)),
        "RollingQuantile": RollingQuantile(p, window=10 * setting.batch_size),
        "ExactQuantile": ExactQuantile(p),
    }


def literature_share(setting: Setting) -> float:
    """Return the noise share of the usual count noise, a twentieth of the batch size; the sensitivity is one half.

    >>> round(literature_share(Setting(64, 1, 0.5)), 4)
    0.0124
    """
    ratio = setting.noise_multiplier * 0.5 / (setting.batch_size / 20)
    return 1 / math.sqrt(1 - ratio**2) - 1


@dataclass(frozen=True)
class Trace:
    """The path of tau, [steps, runs]."""

    unclipped: Floats
    """The true probability that an example is not clipped."""
    distance: Floats
    """log tau less the log of the true quantile."""

    def steps_to_reach(self) -> Floats:
        """Return the first step of each run that is near the quantile or past it; the length where none is."""
        side = np.sign(self.distance[0])
        there = side * self.distance <= NEAR
        return np.where(there.any(0), there.argmax(0), len(there))


def follow(
    threshold: Threshold[Any], distribution: Any, path: Floats, setting: Setting, *, runs: int, rng: np.random.Generator
) -> Trace:
    """Run an estimator on norms ``exp(path[step])`` times draws of the distribution, many runs at once.

    The runs are the groups of one state, since no estimator mixes its groups; each has the noise of a run with one
    group.

    Args:
        threshold: The estimator.
        distribution: A frozen distribution of scipy.
        path: Location of the log norms at each step.
        setting: The public constants, and the target quantile.
        runs: Number of runs.
        rng: Generator of norms and noise.
    """
    B = setting.batch_size
    split = accounting.split(setting.noise_multiplier, threshold.share(setting.conditions(len(path))))
    state, taus = threshold.start(runs), np.empty((len(path), runs))
    for step, place in enumerate(path):
        # Raw norms come as one array: then all runs have batches of one size.
        sizes = rng.poisson(B, runs) if threshold.private else np.full(runs, rng.poisson(B))
        norms = distribution.rvs((sizes.max(), runs), random_state=rng) * math.exp(place)
        raw_norms = None if threshold.private else norms
        tau = np.array(threshold.clip_norms(state, step, raw_norms))
        taus[step] = tau
        norms[np.arange(len(norms))[:, None] >= sizes] = math.inf  # beyond the run's own batch
        answer = _answer(threshold.ask(state, step), tau, norms, sizes, split, B, rng)
        state = threshold.update(state, step, replace(answer, raw_norms=raw_norms))
    relative = taus * np.exp(-path)[:, None]
    return Trace(distribution.cdf(relative), np.log(relative / distribution.ppf(setting.p)))


def _answer(
    question: Question,
    tau: Floats,
    norms: Floats,
    sizes: Floats,
    split: accounting.Split,
    B: int,
    rng: np.random.Generator,
) -> Answer:
    """Return the answer that the mechanism would release; ``norms`` is [examples, runs]."""

    def within(radii: Any) -> Floats:
        return (norms[:, :, None] <= np.array(radii)).sum(0)

    bins, free, bins_std, free_std = (), (), 0.0, ()
    if question.count is not None:
        centre, radii = question.count.centre, question.count.radii
        bins_std = split.counts * Count(radii[:1], centre).l2_bound / B
        centred = np.diff(within(radii), axis=1, prepend=0) - centre * sizes[:, None]
        bins = _grid(centred / B + centre + bins_std * rng.standard_normal(centred.shape))
    if question.slack is not None:
        std = split.gradient * tau[:, None] / np.array(question.slack.coefficients(tau.tolist())) / B
        free = _grid(within(question.slack.radii) / B + std * rng.standard_normal(std.shape))
        free_std = _grid(std)
    return Answer(bins, free, bins_std=bins_std, within_std=free_std, batch_size=B)


def _grid(values: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, values.tolist()))


@dataclass(frozen=True)
class TrackingRow:
    """One estimator at one setting."""

    setting: Setting
    estimator: str
    private: bool
    cost: float
    """Growth of the gradient's noise."""
    bias: float
    """Mean error of the unclipped fraction on stationary norms, for the distribution where it is largest."""
    error: float
    """Root mean square error of the unclipped fraction on norms that drift by 1 % a step, up and down."""
    steps_up: float
    """Steps to reach a quantile a hundred times as large as the first tau; the median run."""
    steps_down: float
    """Steps to reach one a hundred times smaller."""
    refused: bool
    """Whether the estimator would refuse this run."""


@dataclass(frozen=True)
class Size:
    """The size of the simulation."""

    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    steps: int = 600
    runs: int = 16


QUICK = Size(("log-normal", "Pareto", "chi, 20 degrees"), 200, 4)


def tracking(settings: Sequence[Setting] = SETTINGS, size: Size = Size(), *, seed: int = 0) -> list[TrackingRow]:  # noqa: B008
    """Measure every estimator at every setting."""
    return list(_rows(settings, size, seed))


def report(
    out: Path | str, settings: Sequence[Setting] = SETTINGS, *, quick: bool = False, seed: int = 0
) -> list[TrackingRow]:
    """Measure every estimator and write ``thresholds.md`` and ``thresholds.png``.

    Args:
        out: Folder to write to.
        settings: The settings to measure at.
        quick: Whether to take half a minute, with fewer distributions and steps.
        seed: Seed of the simulation.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    rows = tracking(settings, QUICK if quick else Size(), seed=seed)
    (out / "thresholds.md").write_text(table(rows) + "\n", encoding="utf-8")
    save(draw(rows, seed=seed), out / "thresholds.png")
    return rows


def _rows(settings: Sequence[Setting], size: Size, seed: int) -> Iterator[TrackingRow]:
    for setting in settings:
        for number, (name, threshold) in enumerate(estimators(setting).items()):
            yield measure(name, threshold, setting, size, np.random.default_rng([seed, number]))


def measure(name: str, threshold: Any, setting: Setting, size: Size, rng: np.random.Generator) -> TrackingRow:
    """Measure one estimator at one setting."""

    def run(kind: str, path: Floats, start: float = 1.0) -> Trace:
        distribution = DISTRIBUTIONS[kind]
        first = start * math.exp(path[0]) * distribution.ppf(setting.p)
        return follow(replace(threshold, initial=first), distribution, path, setting, runs=size.runs, rng=rng)

    settled, still = size.steps // 3, np.zeros(size.steps)
    biases = [float(run(kind, still).unclipped[settled:].mean()) - setting.p for kind in size.distributions]
    drift = up_and_down(size.steps)
    errors = [run(kind, drift).unclipped[settled:] - setting.p for kind in ("log-normal", "Pareto")]
    up, down = (np.median(run("log-normal", still, start).steps_to_reach()) for start in (0.01, 100.0))
    z = setting.noise_multiplier
    return TrackingRow(
        setting=setting,
        estimator=name,
        private=threshold.private,
        cost=accounting.split(z, threshold.noise_share).gradient / z - 1 if threshold.private else math.nan,
        bias=max(biases, key=abs),
        error=float(np.sqrt(np.mean(np.square(errors)))),
        steps_up=float(up),
        steps_down=float(down),
        refused=bool(refusal(threshold, setting.conditions(size.steps))),
    )


def up_and_down(steps: int) -> Floats:
    """Return a location that drifts up by 1 % a step and then down, 100 steps each."""
    turns = np.arange(steps) // 100 % 2
    return np.cumsum(np.where(turns == 0, DRIFT, -DRIFT))


def table(rows: Sequence[TrackingRow]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| B, z, p | estimator | cost | bias | error | up | down |",
        "|---|---|---|---|---|---|---|",
    ]
    for before, row in zip([None, *rows], rows, strict=False):
        setting = "" if before is not None and before.setting == row.setting else str(row.setting)
        name = row.estimator + (" *" if row.refused else "")
        cost = f"{row.cost:.1%}".replace("%", " %") if row.private else "not private"
        steps = f"{row.steps_up:.0f} | {row.steps_down:.0f}"
        lines.append(f"| {setting} | {name} | {cost} | {row.bias:+.3f} | {row.error:.3f} | {steps} |")
    return "\n".join(lines)


SHOWN = ("PrivateQuantile", "SlackQuantile", "HistogramQuantile", "GeometricQuantile")


def draw(rows: Sequence[TrackingRow], *, seed: int = 0) -> Figure:
    """Draw one run of each private estimator through drift and jumps, and the errors of all rows."""
    figure, (left, right) = new_figure(2, width=11, height=4.0)
    _draw_run(left, Setting(256, 4, 0.5), seed)
    _draw_errors(right, rows)
    return figure


def _draw_run(ax: Any, setting: Setting, seed: int) -> None:
    path = up_and_down(400)
    path[150:275] += JUMP
    for number, name in enumerate(SHOWN):
        distribution = DISTRIBUTIONS["log-normal"]
        threshold = replace(estimators(setting)[name], initial=distribution.ppf(setting.p))
        trace = follow(threshold, distribution, path, setting, runs=1, rng=np.random.default_rng([seed, number]))
        ax.semilogy(np.exp(trace.distance[:, 0] + path), linewidth=1, color=CYCLE[number], label=name)
    ax.semilogy(np.exp(path), "k--", linewidth=0.9, label="true quantile")
    title = f"norms drift by 1 % a step and jump by 100 (B = {setting.batch_size}, z = {setting.noise_multiplier:g})"
    label(ax, "step", "threshold τ", title)


def _draw_errors(ax: Any, rows: Sequence[TrackingRow]) -> None:
    settings = list(dict.fromkeys(row.setting for row in rows))
    names = list(dict.fromkeys(row.estimator for row in rows))
    colors = dict(zip(names, CYCLE, strict=False)) | {"ExactQuantile": "k", "RollingQuantile": GREY}
    errors = {(row.setting, row.estimator): row.error for row in rows}
    for name, marker in zip(names, "os^Dvx+", strict=False):
        places = [place for place, setting in enumerate(settings) if (setting, name) in errors]
        values = [errors[setting, name] for setting in settings if (setting, name) in errors]
        ax.semilogy(places, values, marker, markersize=5, color=colors[name], label=name)
    ax.set_xticks(range(len(settings)), [str(setting) for setting in settings])
    ax.set_yticks([0.01, 0.02, 0.05, 0.1], ["0.01", "0.02", "0.05", "0.1"])
    label(ax, "B, z, p", "rms error of the unclipped fraction", "drift of 1 % a step, up and down")
