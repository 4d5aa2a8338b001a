"""Figure 1 of the paper: the norms of client updates over the rounds of federated training, and thresholds at them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qclip._validate import Floats
from qclip.apps.experiments.claim import Effort, Outcome, claim
from qclip.apps.experiments.federated_averaging import FederatedRun, federated_averaging
from qclip.apps.experiments.federated_tasks import FederatedTask, federated_tasks
from qclip.apps.report.figures import log_axis, running_mean
from qclip.apps.report.style import GREY, RED, empty_figure, label, style_axes
from qclip.federated.aggregator import MEDIAN
from qclip.thresholds import Answer, ExactQuantile, GeometricQuantile, Threshold

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
PRIVATE_QUANTILES = (0.1, 0.5, 0.9)
NOISE_MULTIPLIER = 1.0
SETTLED = 20
"""The first round at which a threshold is judged: it begins far off."""
RISE = 1.2
"""The median norm has risen when its running mean is this many times an earlier one."""
MISS = 0.1
"""A threshold follows when it leaves a fraction p of the clients unclipped up to this error, on average over rounds."""
NEAR = math.log(1.25)
"""And when, in the median round, its logarithm is this near to that of the exact quantile."""


class FlowerRule(GeometricQuantile):
    """The rule by which Flower 1.41 moves its clip norm, restated: it counts the *clipped* clients.

    ``tau <- tau exp(-learning_rate (noisy clipped fraction - target))``. Above its quantile, where few are clipped, tau
    goes up, and below it down.
    """

    def update(self, state: tuple[float, ...], step: int, answer: Answer) -> tuple[float, ...]:
        """Move each group's tau away from its quantile."""
        clipped = tuple((1 - unclipped,) for (unclipped,) in answer.noisy_bins)
        return super().update(state, step, replace(answer, noisy_bins=clipped))


@dataclass(frozen=True)
class TaskRuns:
    """All runs of a task, which share the initial model and the cohorts."""

    task: FederatedTask
    exact: Mapping[float, FederatedRun]
    """Runs without noise by p, each clipped at its own exact p-quantile."""
    private: Mapping[float, FederatedRun]
    """Runs with noise by p, each clipped at a private estimate of its p-quantile."""
    flower: FederatedRun
    """A run with the same noise, clipped by Flower's rule for the median."""

    @property
    def median_norms(self) -> Floats:
        """The exact median of the norms without noise, its logarithm averaged over a tenth of the rounds, [rounds]."""
        path = np.log(self.exact[0.5].clip_norms)
        return np.exp(running_mean(path[:, None], (len(path) // 10) | 1)[:, 0])

    @property
    def rise(self) -> float:
        """The largest factor by which the median norm is above an earlier one."""
        path = self.median_norms
        return float((path / np.minimum.accumulate(path)).max())

    @property
    def fall(self) -> float:
        """The largest factor by which the median norm is below an earlier one."""
        path = self.median_norms
        return float((np.maximum.accumulate(path) / path).max())

    @property
    def private_miss(self) -> float:
        """The `miss` of the private thresholds, for the p where it is largest."""
        return max(miss(run, p, run.clip_norms) for p, run in self.private.items())

    @property
    def private_distance(self) -> float:
        """The `distance` of the private thresholds from the exact quantiles, for the p where it is largest."""
        return max(distance(run, p) for p, run in self.private.items())

    @property
    def first_miss(self) -> float:
        """The `miss` of the exact median of the first round, had it been kept, in the private run at the median."""
        run = self.private[0.5]
        return miss(run, 0.5, np.full(len(run.clip_norms), run.quantiles(0.5)[0]))

    @property
    def constant_miss(self) -> float:
        """The `miss` of the constant that is best in hindsight, in the same run."""
        run = self.private[0.5]
        candidates = np.nanquantile(run.quantiles(0.5)[SETTLED:], np.linspace(0, 1, 101))
        return min(miss(run, 0.5, np.full(len(run.clip_norms), tau)) for tau in candidates)

    @property
    def flower_miss(self) -> float:
        """The `miss` of Flower's rule."""
        return miss(self.flower, 0.5, self.flower.clip_norms)

    @property
    def values(self) -> dict[str, float]:
        """The numbers of the verdict, with losses and epsilon."""
        return {
            "rise": self.rise,
            "fall": self.fall,
            "private miss": self.private_miss,
            "private distance": self.private_distance,
            "first median's miss": self.first_miss,
            "best constant's miss": self.constant_miss,
            "Flower miss": self.flower_miss,
            "first loss": self.exact[0.5].first_loss,
            "last loss": self.exact[0.5].last_loss,
            "private last loss": self.private[0.5].last_loss,
            "Flower last loss": self.flower.last_loss,
            "epsilon": self.private[0.5].epsilon,
        }


def miss(run: FederatedRun, p: float, clip_norms: Floats) -> float:
    """Return the mean error of the fraction of unclipped clients over the rounds after the first ones."""
    return float(np.nanmean(np.abs(run.unclipped(clip_norms) - p)[SETTLED:]))


def distance(run: FederatedRun, p: float) -> float:
    """Return the median over the same rounds of the distance of the clip norm from the exact quantile, |log ratio|."""
    return float(np.nanmedian(np.abs(np.log(run.clip_norms / run.quantiles(p)))[SETTLED:]))


@claim(
    "figure1",
    "The norms of client updates may rise during federated training, and a private quantile follows them as they move",
    "Figure 1, with the comparison to fixed clipping",
)
def figure1(effort: Effort) -> Outcome:
    """Train every task at exact quantiles, and with noise at private ones."""
    rounds = effort.pick(60, 200)
    seed = int(effort.rng().integers(2**31))
    quantiles = PRIVATE_QUANTILES if effort.quick else QUANTILES
    private_quantiles = (0.5,) if effort.quick else PRIVATE_QUANTILES
    tasks = federated_tasks(effort.data_dir)
    outcome = judge([run_task(each, rounds, seed, quantiles, private_quantiles) for each in tasks])
    if effort.data_dir is not None:
        return outcome
    note = "digits stand in for the six tasks, which need --data-dir"
    return replace(outcome, measured=f"{outcome.measured}; {note}")


def judge(runs: Sequence[TaskRuns]) -> Outcome:
    """Return what the runs say of the claim, and whether the private thresholds and only these pass."""
    rising, falling = max(runs, key=lambda each: each.rise), max(runs, key=lambda each: each.fall)
    private, away = max(each.private_miss for each in runs), max(each.private_distance for each in runs)
    first = [each.first_miss for each in runs]
    constant = [each.constant_miss for each in runs]
    flower = [each.flower_miss for each in runs]
    follows = private <= MISS and away <= NEAR
    return Outcome(
        expected=f"in some task the median norm rises by {_percent(math.log(RISE))}; in all of them private thresholds "
        f"leave a fraction of the clients unclipped that is off p by at most {MISS:g} on average, and are within "
        f"{_percent(NEAR)} of the exact quantile in the median round; in some task no constant does, and in all the "
        "rule of Flower does not",
        measured=f"{len(runs)} tasks, {len(runs[0].median_norms)} rounds: the median norm rises by a factor of up to "
        f"{rising.rise:.2f} ({rising.task.name}) and falls by up to {falling.fall:.2f} ({falling.task.name}); private "
        f"thresholds are off by at most {private:.3f} and {_percent(away)}, the best constants in hindsight by "
        f"{min(constant):.3f} to {max(constant):.3f}, the medians of the first round by {min(first):.2f} to "
        f"{max(first):.2f}, the rule of Flower by {min(flower):.2f} to {max(flower):.2f}",
        printed=rising.rise >= RISE and follows and max(constant) > MISS and min(flower) > MISS,
        values={f"{each.task.name}: {name}": value for each in runs for name, value in each.values.items()},
        draw=lambda: draw(runs),
    )


def _percent(log_ratio: float) -> str:
    return f"{100 * math.expm1(log_ratio):.0f} %"


def run_task(
    task: FederatedTask, rounds: int, seed: int, quantiles: Sequence[float], private_quantiles: Sequence[float]
) -> TaskRuns:
    """Train a task without noise at exact quantiles, and with noise at private ones and by the rule of Flower."""

    def run(threshold: Threshold[Any], noise_multiplier: float = NOISE_MULTIPLIER) -> FederatedRun:
        return federated_averaging(task, threshold, rounds=rounds, noise_multiplier=noise_multiplier, seed=seed)

    return TaskRuns(
        task,
        {p: run(ExactQuantile(p), noise_multiplier=0.0) for p in quantiles},
        {p: run(replace(MEDIAN, p=p)) for p in private_quantiles},
        run(FlowerRule(0.5, noise_share=MEDIAN.noise_share)),
    )


DASHES = dict(zip(QUANTILES, (":", "-.", "-", "--", (0, (9, 2, 2, 2))), strict=True))
SHADES = dict(zip(QUANTILES, colormaps["viridis"](np.linspace(0, 0.75, len(QUANTILES))), strict=True))
MARKERS = dict(zip(PRIVATE_QUANTILES, "v^o", strict=True))


def draw(runs: Sequence[TaskRuns]) -> Figure:
    """Draw a panel per task without noise, as the paper does, and one with noise."""
    columns = 3 if len(runs) > 4 else len(runs)
    rows = math.ceil(len(runs) / columns)
    figure = empty_figure(width=3.7 * columns, height=4.6 * rows + 1.4)
    grid = figure.add_gridspec(2, 1)
    with_noise = (
        f"with noise (multiplier {NOISE_MULTIPLIER:g}): private thresholds, and exact quantiles of the same runs"
    )
    parts = {
        "without noise: runs clipped at the exact p-quantile of their norms": _draw_exact,
        with_noise: _draw_private,
    }
    for place, (title, panel) in enumerate(parts.items()):
        part = figure.add_subfigure(grid[place])
        part.suptitle(title, fontsize=10.5)
        axes = list(part.subplots(rows, columns, squeeze=False).flat)
        style_axes(axes)
        for number, (ax, each) in enumerate(zip(axes, runs, strict=True)):
            panel(ax, each)
            first, last = number % columns == 0, number >= len(runs) - columns
            label(ax, "round" if last else "", "norm of an update" if first else "", each.task.name, legend=False)
        handles, names = axes[0].get_legend_handles_labels()
        style = {"ncols": len(names), "fontsize": 8.5, "frameon": False, "handlelength": 3.2}
        part.legend(handles, names, loc="outside lower center", **style)
    return figure


def _draw_exact(ax: Axes, runs: TaskRuns) -> None:
    for p, run in runs.exact.items():
        ax.plot(run.clip_norms, linestyle=DASHES[p], color=SHADES[p], linewidth=1.3, label=f"p = {p:g}")
        if p in PRIVATE_QUANTILES:  # all five would collide
            end = len(run.clip_norms), float(np.median(run.clip_norms[-10:]))
            ax.annotate(f"{p:g}", end, xytext=(4, 0), textcoords="offset points", fontsize=7.5, va="center")
    log_axis(ax, np.concatenate([run.clip_norms for run in runs.exact.values()]))


def _draw_private(ax: Axes, runs: TaskRuns) -> None:
    for number, (p, run) in enumerate(runs.private.items()):
        ax.plot(run.quantiles(p), color=GREY, linewidth=0.8, alpha=0.8, label="" if number else "exact quantile")
    for number, (p, run) in enumerate(runs.private.items()):
        rounds = len(run.clip_norms)
        every = (number * rounds // 20, rounds // 7)
        style = {"color": SHADES[p], "marker": MARKERS[p], "markersize": 4.5, "markevery": every, "linewidth": 1.3}
        ax.plot(run.clip_norms, label=f"private, p = {p:g}", **style)
    log_axis(
        ax, np.concatenate([path for p, run in runs.private.items() for path in (run.quantiles(p), run.clip_norms)])
    )
    low, high = ax.get_ylim()
    ax.plot(runs.flower.clip_norms, color=RED, linestyle="--", linewidth=1.3, label="Flower's rule, p = 0.5")
    ax.set_ylim(low / 2, high)
