"""The audits of ``qclip audit``, each a few rows of figures."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import qclip
from qclip import audit
from qclip.apps import data
from qclip.apps.audits import foreign
from qclip.apps.data import Task
from qclip.audit import bounds
from qclip.audit.replay import Replay
from qclip.thresholds import Threshold

Verdict = Literal["holds", "fails", "caught", "missed"]
Say = Callable[[str], object]
DELTA: Final = 1e-5
EPSILONS: Final = (1.0, 2.0, 4.0, 8.0)
AUDITS: Final = ("replay", "canary", "one-run", "foreign")

THRESHOLDS: Final[dict[str, Callable[[], Threshold[Any]]]] = {
    "balanced": qclip.BalancedThreshold,
    "private-quantile": lambda: qclip.PrivateQuantile(0.5),
    "histogram": lambda: qclip.HistogramQuantile(0.5),
    "geometric": lambda: qclip.GeometricQuantile(0.5),
    "constant": lambda: qclip.Constant(1.0),
}


@dataclass(frozen=True)
class Row:
    """What an audit found on one subject."""

    audit: str
    subject: str
    verdict: Verdict
    epsilon: float | None
    """The epsilon that is claimed; None where the claim is not a number."""
    lower_bound: float | None
    """The largest lower bound on epsilon that was found at 95 % confidence; None for audits that give none."""
    found: str
    """The result in words."""
    values: dict[str, Any] = field(default_factory=dict)
    """Further figures."""
    curves: dict[str, Any] = field(default_factory=dict, repr=False)
    """What the figures draw: not part of the JSON."""

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {key: value for key, value in asdict(self).items() if key != "curves"}


@dataclass(frozen=True)
class Scope:
    """How much to run, and on what."""

    quick: bool = False
    data: str = "digits"
    """A data set of `qclip train`, or a table."""
    data_dir: Path | None = None
    target: str | None = None
    seed: int = 0

    def task(self) -> Task:
        """Load the task of the replays."""
        return data.load(self.data, data_dir=self.data_dir, target=self.target)


def rows(name: str, scope: Scope, say: Say) -> Iterator[Row]:
    """Run an audit and yield its rows."""
    runners = {"replay": replays, "canary": canaries, "one-run": one_runs, "foreign": foreign_faults}
    logger = logging.getLogger("qclip")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield from runners[name](scope, say)
    finally:
        logger.setLevel(level)


def replays(scope: Scope, say: Say) -> Iterator[Row]:
    """Replay a few steps of the task under each threshold, flat and in groups."""
    task = scope.task()
    settings = [(name, "flat") for name in THRESHOLDS] + [("balanced", "per-layer")]
    for name, groups in settings[:1] if scope.quick else settings:
        subject = f"{task.name}, {name}, {groups}"
        say(f"replay: {subject}")
        found = replay_task(task, THRESHOLDS[name](), groups, examples=1 if scope.quick else 3, seed=scope.seed)
        yield Row(
            "replay",
            subject,
            "holds" if found.holds else "fails",
            round(found.epsilon, 4),
            None,
            str(found).split("\n")[0] if found.holds else str(found),
            {"neighbours": len(found.neighbours), "steps": found.steps, "most_moved": found.most_moved},
        )


def replay_task(task: Task, threshold: Threshold[Any], groups: str, *, examples: int, seed: int) -> Replay:
    """Replay a few steps of a task."""

    def train(dataset: Dataset[Any]) -> None:
        torch.manual_seed(seed)
        model: nn.Module = task.build_model()
        training = qclip.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            dataset,
            loss=task.loss,
            batch_size=min(128, len(dataset) // 2),  # type: ignore[arg-type]
            steps=4,
            noise_multiplier=1.0,
            delta=DELTA,
            threshold=threshold,
            groups=groups,
        )
        for batch in training.loader:
            training.step(*batch)

    return audit.replay(train, task.train, examples=examples, seed=seed)


def canaries(scope: Scope, say: Say) -> Iterator[Row]:
    """Let an attacker guess from the joint releases of many short runs."""
    runs = 1000 if scope.quick else 10_000
    cases: list[tuple[str, float, dict[str, Any]]] = [("balanced", epsilon, {}) for epsilon in EPSILONS]
    if not scope.quick:
        cases += [("private-quantile", 4.0, {}), ("constant", 4.0, {})]
        cases += [("constant", 4.0, {"sample_rate": 0.2, "steps": 10})]
    for name, epsilon, settings in cases:
        rate = settings.get("sample_rate", 1.0)
        subject = f"{name}, epsilon {epsilon:g}" + (f", sampled at {rate:g}" if rate < 1 else "")
        say(f"canary: {subject}, {runs} runs")
        seen = audit.white_box(THRESHOLDS[name](), epsilon=epsilon, delta=DELTA, runs=runs, seed=scope.seed, **settings)
        bound = seen.lower_bound if rate == 1 else seen.clopper_pearson
        holds = bound <= epsilon and seen.clopper_pearson <= epsilon
        yield Row(
            "canary",
            subject,
            "holds" if holds else "fails",
            epsilon,
            round(bound, 4),
            f"at least {bound:.2f} of {epsilon:g} ({bound / epsilon:.0%}); without an assumption "
            f"{seen.clopper_pearson:.2f}, where so many runs can show {seen.most:.2f}",
            {
                "share": bound / epsilon,
                "clopper_pearson": seen.clopper_pearson,
                "most": seen.most,
                "runs": seen.runs,
                "steps": seen.steps,
                "sample_rate": rate,
            },
            {"without": seen.scores_without, "with": seen.scores_with},
        )


def one_runs(scope: Scope, say: Say) -> Iterator[Row]:
    """Guess which of many canaries took part in a single training."""
    for epsilon in EPSILONS:
        say(f"one run: epsilon {epsilon:g}")
        canary_count = 2000 if scope.quick else 5000
        seen = audit.one_run(epsilon=epsilon, delta=DELTA, canaries=canary_count, seed=scope.seed)
        yield Row(
            "one-run",
            f"balanced, epsilon {epsilon:g}",
            "holds" if seen.holds else "fails",
            epsilon,
            round(seen.lower_bound, 4),
            f"at least {seen.lower_bound:.2f} of {epsilon:g} ({seen.lower_bound / epsilon:.0%}) by {seen.correct} "
            f"right guesses of {seen.guesses}; without an assumption {seen.any_mechanism:.2f}",
            {
                "share": seen.lower_bound / epsilon,
                "any_mechanism": seen.any_mechanism,
                "canaries": seen.canaries,
                "guesses": seen.guesses,
                "correct": seen.correct,
            },
        )


def foreign_faults(scope: Scope, say: Say) -> Iterator[Row]:
    """Point the attacker at faults of other libraries, and at a release without one."""
    runs = 4000 if scope.quick else 40_000
    control = foreign.lower_bound(foreign.honest, gaussian=True, runs=runs, seed=scope.seed)
    yield Row(
        "foreign",
        "one Gaussian release, as it should be (the control)",
        "holds" if control <= foreign.CLAIM else "fails",
        foreign.CLAIM,
        round(control, 4),
        f"at least {control:.2f} of the {foreign.CLAIM:g} claimed",
    )
    for fault in foreign.FAULTS:
        rule, how = fault.rule()
        library = f"{fault.library.split()[0]} {version(fault.package)}" if how == "run" else fault.library
        say(f"foreign: {library}, {fault.name}")
        subject = f"{library}, {how}: {fault.name}"
        if rule.scores is not None:
            most = min(runs, rule.most_runs or runs)
            bound = foreign.lower_bound(rule.scores, gaussian=rule.gaussian, runs=most, seed=scope.seed)
            caught, found = bound > foreign.CLAIM, f"at least {bound:.2f} where {foreign.CLAIM:g} is claimed"
            claim: float | None = foreign.CLAIM
            shown: float | None = round(bound, 4)
        else:
            assert rule.check is not None
            caught, found = rule.check(np.random.default_rng(scope.seed))
            claim = shown = None
        values = {"library": library, "source": fault.source, "rule": how}
        yield Row("foreign", subject, "caught" if caught else "missed", claim, shown, found, values)


def trade_off(row: Row) -> dict[str, Any]:
    """Return the rates of a canary row's attacker, and the best that the claim allows at rate 1."""
    without, there = np.sort(row.curves["without"]), np.sort(row.curves["with"])
    cuts = np.concatenate([without, there])
    cuts.sort()
    false_positives = 1 - np.searchsorted(without, cuts) / len(without)
    true_positives = 1 - np.searchsorted(there, cuts) / len(there)
    assert row.epsilon is not None
    from scipy.special import ndtr, ndtri

    allowed = np.geomspace(1e-4, 1, 200)
    mu = bounds.gaussian_mu(row.epsilon, DELTA)
    return {
        "false_positives": false_positives,
        "true_positives": true_positives,
        "at": allowed,
        "allowed": ndtr(ndtri(allowed) + mu),
    }
