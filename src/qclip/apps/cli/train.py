"""``qclip train``."""

import math
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qclip import _validate as check
from qclip.apps.run_folder import RunFolder
from qclip.apps.trainer.settings import Settings

if TYPE_CHECKING:
    from qclip.apps.data import Task
    from qclip.apps.trainer.run import TrainerRun
    from qclip.training.ranks import Ranks
    from qclip.training.run import PrivateTraining


@dataclass(frozen=True)
class TrainCommand:
    """Train a model privately; without arguments, on scikit-learn's digits at epsilon = 3.

    Writes metrics.jsonl, summary.json, checkpoint.pt and report.html. Ctrl-C stops after the current step; --resume
    continues from there as if the run had not been interrupted. Under torchrun it trains on all processes:
    torchrun --nproc-per-node 2 -m qclip train ...
    """

    settings: Settings = field(default_factory=Settings)
    """Settings of the run. With --resume, those left out stay as they were, and contradicting ones are refused."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: out/NAME)")] = None
    """Folder to write to."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Resume the run in --out; its settings are in the folder."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace the run in --out."""

    def run(self, console: Console) -> int:
        """Train; the status is 130 after an interruption."""
        if self.resume and self.overwrite:
            raise check.Refusal("--resume and --overwrite exclude each other; resume the run, or replace it")
        if self.resume and self.out is None:
            raise check.Refusal("--resume was given without --out; name the folder of the run to resume")
        from qclip.apps.trainer.processes import launched

        with launched(self.settings.device) as ranks:
            if ranks.rank == 0:
                return self._train(console, ranks)
            with TemporaryDirectory() as nobodys:  # rank 0 has the screen and the folder
                return self._train(Console(quiet=True), ranks, RunFolder(Path(nobodys)))

    def _train(self, console: Console, ranks: "Ranks", other_folder: RunFolder | None = None) -> int:
        """Train, and write to the folder of the run or to another one; the status is 130 after an interruption."""
        from qclip.apps.trainer.interrupt import Interrupt
        from qclip.apps.trainer.loop import train
        from qclip.apps.trainer.run import free_folder, resume, start
        from qclip.apps.trainer.screen import Screen

        with console.status("loading the data, calibrating the noise"), _warnings_on(console):
            folder = RunFolder(self.out) if self.out is not None else free_folder(self.settings)
            if self.resume:
                run = resume(self.settings, folder, ranks)
                run.folder = other_folder or folder
            else:
                run = start(self.settings, other_folder or folder, overwrite=self.overwrite, ranks=ranks)
        folder = run.folder
        _say_what(console, run)
        training, interrupt = run.training, Interrupt(quiet=ranks.rank > 0)
        epochs = training.num_steps // training.steps_per_epoch
        try:
            screen = Screen(console, training.num_steps, len(training.history), epochs)
            with _warnings_on(console), interrupt, screen:
                done = train(run, screen, interrupt)
        except KeyboardInterrupt:  # the second one: the last checkpoint counts
            done = False
        if not done:
            _say_how_to_resume(console, folder)
            if ranks.rank == 0 and training.history:
                _write_report(console, folder)
            return 130
        if ranks.rank == 0:
            _say_result(console, run)
            _write_report(console, folder)
        return 0


@contextmanager
def _warnings_on(console: Console) -> Iterator[None]:
    """Show warnings as sentences, without the line of code that raised them."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: console.print(
            f"warning: {message}", highlight=False, markup=False, soft_wrap=True
        )
        yield


def _say_what(console: Console, run: "TrainerRun") -> None:
    training, plan = run.training, run.training.plan
    lines = [f"{run.task.name}: {run.task.description}", *(f"  {line}" for line in run.task.details)]
    lines.append(_unit(run.task))
    lines.append(f"{plan.num_steps} steps of {plan.batch_size} examples (expected); {_privacy(training)}")
    if run.settings.seed is not None:
        lines.append("seeded, for tests only: anyone who knows the seed can subtract the noise")
    if training.history:
        lines.append(f"resuming after step {len(training.history)}")
    if find_spec("matplotlib") is None:
        lines.append("there will be no report, because matplotlib is not installed; pip install 'qclip[train]'")
    if training.lost_threshold:
        lines.append(f"warning: {training.lost_threshold}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _unit(task: "Task") -> str:
    hint = "" if task.schema is None or task.schema.unit is not None else "; if a person has several, name --unit"
    return f"the guarantee is for {task.unit}{hint}"


def _privacy(training: "PrivateTraining") -> str:
    plan, epsilon = training.plan, training.epsilon_curve(training.num_steps)
    if math.isinf(epsilon):
        return "NOT private: epsilon is infinite"
    return f"noise multiplier {plan.noise_multiplier:.4g}, so that epsilon = {epsilon:.5g} at delta = {plan.delta:.3g}"


def _say_how_to_resume(console: Console, folder: RunFolder) -> None:
    if not folder.summary_file.exists():
        console.print("stopped before the first step", highlight=False)
        return
    console.print(f"stopped after step {folder.summary().steps}; to resume:", highlight=False)
    command = shlex.join(["qclip", "train", "--resume", "--out", str(folder.path)])
    console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)


def _say_result(console: Console, run: "TrainerRun") -> None:
    from qclip.apps.trainer.screen import span

    summary = run.folder.summary()
    table = Table(show_header=False)
    guess = {} if run.evaluation is None else run.evaluation.guess
    for name, value in run.held_out.items():
        beside = f" ({guess[name]:.4f} by a constant guess)" if name in guess else ""
        table.add_row(f"held-out {name.replace('_', ' ')}", f"{value:.4f}{beside}")
    spent = math.inf if summary.epsilon is None else summary.epsilon
    table.add_row("epsilon", f"{spent:.5g} at delta {summary.delta:.3g}" if summary.private else "infinite")
    table.add_row("tau at the end", span(run.training.history[-1].tau))
    if summary.lost_threshold:
        table.add_row("warning", escape(summary.lost_threshold))
    if summary.certificate is not None:
        bound, single = summary.certificate, summary.certificate.this_run
        this_run = "" if single is None else f"; in this run <= {single:.4g} with {bound.confidence:.0%}"
        table.add_row("certificate", f"mean of ||grad f||^2 <= {bound.total:.4g} over runs{this_run}")
        table.add_row("its theorem", bound.theorem)
    if summary.certificate_refused is not None and run.settings.assumptions() is not None:
        table.add_row("no certificate", escape(summary.certificate_refused))
    table.add_row("seconds", f"{summary.seconds:.0f}")
    console.print(table)


def _write_report(console: Console, folder: RunFolder) -> None:
    try:
        from qclip.apps.report.run import write_report

        where = f"report: {write_report(folder.path)}"
    except ModuleNotFoundError as missing:
        where = f"no report: {missing.name} is not installed; pip install 'qclip[train]'; run: {folder.path}"
    console.print(where, highlight=False, markup=False, soft_wrap=True)
