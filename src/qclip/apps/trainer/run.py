"""Runs of the trainer: started from settings, or resumed."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from qclip import _validate as check
from qclip import thresholds
from qclip.apps import data
from qclip.apps.data import Task
from qclip.apps.run_folder import RunFolder
from qclip.apps.run_summary import Evaluation
from qclip.apps.trainer.settings import Settings, agreed, from_public
from qclip.tables.examples import NO_CLASS, batch_of
from qclip.tables.reader import stem
from qclip.training.dataset import dataset_size
from qclip.training.make import make_private
from qclip.training.ranks import Ranks, seed_sequence
from qclip.training.run import PrivateTraining

QUANTILES: dict[str, Callable[[float], thresholds.Threshold[Any]]] = {
    "private-quantile": thresholds.PrivateQuantile,
    "slack": thresholds.SlackQuantile,
    "histogram": thresholds.HistogramQuantile,
    "geometric": thresholds.GeometricQuantile,
    "exact": thresholds.ExactQuantile,
    "rolling": thresholds.RollingQuantile,
}


@dataclass
class TrainerRun:
    """A run in memory; the training owns the state, the other fields are for the record."""

    settings: Settings
    """The settings, with every default filled in."""
    task: Task
    model: nn.Module
    training: PrivateTraining
    folder: RunFolder
    held_out: dict[str, float] = field(default_factory=dict)
    """The last held-out score."""
    evaluation: Evaluation | None = None
    """Its details."""
    seconds_before: float = 0.0
    """The time spent before the run was resumed."""
    began: float = field(default_factory=monotonic)
    seeded: bool = False
    """Whether the run began with a given seed."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes of the run."""

    @property
    def seconds(self) -> float:
        """The time spent so far."""
        return self.seconds_before + monotonic() - self.began


def start(given: Settings, folder: RunFolder, *, overwrite: bool = False, ranks: Ranks | None = None) -> TrainerRun:
    """Start a new run. The folder does not change before the whole run is set up.

    Args:
        given: The settings of the command line.
        folder: The folder to write to.
        overwrite: Whether to replace a run in the folder.
        ranks: The processes of the run.

    Raises:
        Refusal: A setting is out of bounds, or the folder holds a run or cannot be written to.
    """
    given.check()
    if folder.holds_run and not overwrite:
        state = "a finished" if folder.summary_file.exists() and folder.summary().finished else "an unfinished"
        raise check.Refusal(
            f"--out = {str(folder.path)!r} holds {state} run; resume it (--resume), replace it (--overwrite), or "
            "choose another folder"
        )
    folder.refuse_unwritable()
    task = _load(given)
    settings = given.filled(asdict(task.defaults), dataset_size(task.train), _device(given.device))
    run = _build(settings, task, folder, ranks or Ranks())
    folder.prepare()
    if overwrite:
        folder.clear()
    return run


def resume(given: Settings, folder: RunFolder, ranks: Ranks | None = None) -> TrainerRun:
    """Resume the run of this folder at its checkpoint.

    Args:
        given: The settings of the command line; those left out stay as they were.
        folder: The folder of the run.
        ranks: The processes of the run; any number, whatever it was before.

    Raises:
        Refusal: The run is finished, or settings or data contradict it.
    """
    summary = folder.summary()
    if summary.finished:
        raise check.Refusal(
            f"--out = {str(folder.path)!r} holds a finished run, which cannot be resumed; start another run in another "
            "--out, or replace it (--overwrite)"
        )
    settings = agreed(given, from_public(summary.settings))
    folder.refuse_unwritable()
    task = _load(settings)
    if task.description != summary.description:
        raise check.Refusal(
            f"the data have changed from {summary.description!r} to {task.description!r}; put back the data that the "
            "run began with"
        )
    run = _build(settings, task, folder, ranks or Ranks())
    run.training.load(folder.checkpoint_file)
    folder.truncate(len(run.training.history))
    scores = folder.scores()
    run.held_out = scores[-1]["held_out"] if scores else {}
    run.evaluation = summary.evaluation
    run.seconds_before = summary.seconds
    run.seeded = summary.seeded
    return run


def free_folder(given: Settings) -> RunFolder:
    """Return the default folder: out/NAME, or the first of out/NAME-2, ... that holds no run."""
    name = stem(Path(given.data or "digits"))
    folder, number = RunFolder(Path("out") / name), 1
    while folder.holds_run:
        number += 1
        folder = RunFolder(Path("out") / f"{name}-{number}")
    return folder


def _load(settings: Settings) -> Task:
    weights = settings.class_weights
    return data.load(
        settings.data or "digits",
        data_dir=settings.data_dir,
        target=settings.target,
        classes=settings.classes or None,
        columns=_pairs("--columns", settings.columns, "NAME=KIND", "such as age=0:120, or id=drop") or None,
        separator=settings.separator,
        encoding=settings.encoding,
        decimal=settings.decimal,
        missing=settings.missing or None,
        unit=settings.unit,
        rows_per_unit=settings.rows_per_unit,
        model=settings.model,
        class_weights="balanced" if weights == ("balanced",) else _numbers("--class-weights", weights),
        class_shares=_numbers("--class-shares", settings.class_shares),
    )


def _pairs(option: str, given: Sequence[str], form: str, remedy: str) -> dict[str, str]:
    """Return what was given as NAME=VALUE, by name."""
    pairs = {}
    for each in given:
        name, separator, value = each.rpartition("=")
        if not separator:
            raise check.refuse(option, each, form, remedy)
        pairs[name] = value
    return pairs


def _numbers(option: str, given: Sequence[str]) -> dict[str, float] | None:
    form, remedy = "CLASS=NUMBER", "such as yes=10 no=1"
    numbers = {}
    for name, value in _pairs(option, given, form, remedy).items():
        try:
            numbers[name] = float(value)
        except ValueError:
            raise check.refuse(option, f"{name}={value}", form, remedy) from None
    return numbers or None


def _build(settings: Settings, task: Task, folder: RunFolder, ranks: Ranks) -> TrainerRun:
    examples = dataset_size(task.train)
    assert settings.batch_size is not None
    if settings.batch_size > examples:
        remedy = "take a smaller batch, or more data"
        raise check.refuse("--batch-size", settings.batch_size, f"<= {examples}, the number of examples", remedy)
    model = _fresh_model(task, seed_sequence(settings.seed, ranks)).to(_device(settings.device))
    _check_labels(task, model)
    training = make_private(
        model,
        _optimizer(model, settings),
        task.train,
        loss=task.loss,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        epsilon=settings.epsilon,
        delta=settings.delta,
        noise_multiplier=settings.noise_multiplier,
        threshold=threshold(settings),
        step_size="auto" if settings.lr is None else None,
        rescale_to_unit_norm=not settings.plain_steps,
        groups=settings.groups or "flat",
        physical_batch_size=settings.physical_batch_size,
        compile=settings.compile,
        seed=settings.seed,
    )
    return TrainerRun(settings, task, model, training, folder, seeded=settings.seed is not None, ranks=ranks)


def threshold(settings: Settings) -> thresholds.Threshold[Any]:
    """Return the threshold of settings whose defaults are filled in."""
    if settings.threshold == "constant":
        assert settings.tau is not None
        return thresholds.Constant(settings.tau)
    if settings.threshold == "balanced":
        return thresholds.BalancedThreshold()
    assert settings.threshold is not None
    assert settings.p is not None
    return QUANTILES[settings.threshold](settings.p)


def _optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    rate = 1.0 if settings.lr is None else settings.lr  # step_size="auto" sets it
    return (Adam if settings.optimizer == "adam" else SGD)(model.parameters(), lr=rate)


def _fresh_model(task: Task, seed: np.random.SeedSequence) -> nn.Module:
    """Build a model whose initial weights follow from the seed, without touching the global generator."""
    initial = seed.generate_state(1, np.uint64)[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(initial))
        return task.build_model()


def _check_labels(task: Task, model: nn.Module) -> None:
    """Refuse classes that the model has no output for: on an accelerator they would crash the process."""
    for part in (task.train, task.held_out):
        if not isinstance(part, TensorDataset) or part.tensors[-1].is_floating_point():
            continue
        inputs, targets = batch_of(part, slice(0, 1))[0], part.tensors[-1]
        targets = targets[targets != NO_CLASS]
        device = next(model.parameters()).device
        with torch.no_grad():
            classes = model(inputs.to(device)).shape[-1]
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            remedy = "correct the labels, or give the model an output for each"
            raise check.refuse("label", low if low < 0 else high, f"in 0 .. {classes - 1}", remedy)


def _device(given: str | None) -> str:
    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=given)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise check.Refusal(f"--device = {given!r} does not work here ({reason}); leave it out, or take cpu") from None
    return given
