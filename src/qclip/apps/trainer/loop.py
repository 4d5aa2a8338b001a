"""The loop of a run: steps, scores and checkpoints, until the run is finished or interrupted."""

import math

from torch import Tensor

from qclip import _validate as check
from qclip.apps.live_run import score_line, step_line
from qclip.apps.run_folder import Line
from qclip.apps.trainer.export import export
from qclip.apps.trainer.interrupt import Interrupt
from qclip.apps.trainer.run import TrainerRun
from qclip.apps.trainer.screen import Screen
from qclip.apps.trainer.summary import summarise

PATIENCE = 3
"""Number of steps in a row without a finite training loss after which the held-out loss is checked."""


def train(run: TrainerRun, screen: Screen, interrupt: Interrupt) -> bool:
    """Train to the end of the plan or to an interruption.

    - A checkpoint is written before the first step, after every epoch, and at an interruption.
    - The model is exported at the end, or at an interruption.
    - A run whose parameters or held-out loss are no longer finite is refused, and its last checkpoint stays. Both are
      functions of released values; only the moment of the check of the held-out loss depends on the training examples.

    Args:
        run: The run.
        screen: Display of steps and scores.
        interrupt: The interruption, which takes effect after the current step.

    Returns:
        Whether the plan is finished.

    Raises:
        Refusal: The run has diverged.
    """
    training, losses = run.training, RawLosses()
    done, stopped = len(training.history), False
    if done == 0:
        _save(run)
    while done < training.num_steps and not stopped:
        done, stopped = _rest_of_epoch(run, screen, interrupt, losses, done)
        if done % training.steps_per_epoch == 0:
            _score(run, screen, done)
        _save(run)
    export(run)
    run.folder.write_summary(summarise(run, exact=True))
    return done == training.num_steps


def _rest_of_epoch(
    run: TrainerRun, screen: Screen, interrupt: Interrupt, losses: "RawLosses", done: int
) -> tuple[int, bool]:
    """Train to the end of the epoch or to an interruption of any process.

    Returns:
        The number of steps done in all, and whether to stop.
    """
    training = run.training
    for batch in training.loader:
        losses.add(training.step(*batch), examples=len(batch[-1]))
        if not training.updated:
            continue
        done += 1
        raw_loss = losses.take()
        if losses.lost == PATIENCE:
            _held_out(run)
            screen.warn("the loss of some training examples is not finite; they do not contribute to the gradient")
        _refuse_lost_parameters(run)
        line = _step_line(run, raw_loss)
        run.folder.append(line)
        screen.step(line, raw_loss)
        if run.ranks.any(interrupt.asked):
            return done, True
    return done, False


class RawLosses:
    """The mean loss of a logical step, from those of its physical batches."""

    def __init__(self) -> None:
        self.lost = 0
        """The number of steps in a row, up to the last one, whose mean was not finite."""
        self._parts: list[tuple[Tensor, int]] = []

    def add(self, raw_loss: Tensor, *, examples: int) -> None:
        """Add the mean loss of a physical batch."""
        self._parts.append((raw_loss, examples))

    def take(self) -> float:
        """Return the mean over the physical batches, and begin the next step."""
        parts, self._parts = self._parts, []
        mean = sum(loss.item() * examples for loss, examples in parts) / sum(examples for _, examples in parts)
        self.lost = 0 if math.isfinite(mean) else self.lost + 1
        return mean


def _step_line(run: TrainerRun, raw_loss: float) -> Line:
    line = step_line(run.training, run.training.history[-1])
    return line | {"raw_loss": raw_loss} if run.settings.write_raw_loss else line


def _score(run: TrainerRun, screen: Screen, done: int) -> None:
    run.held_out = _held_out(run)
    run.evaluation = None if run.task.evaluate is None else run.task.evaluate(run.model)
    line = score_line(run.training, done, run.held_out)
    run.folder.append(line)
    screen.score(line)


def _held_out(run: TrainerRun) -> dict[str, float]:
    score = run.task.score(run.model)
    for name, value in score.items():
        if not math.isfinite(value):
            raise _diverged(run, f"held-out {name}", value)
    return score


def _refuse_lost_parameters(run: TrainerRun) -> None:
    for name, parameter in run.model.named_parameters():
        if not parameter.isfinite().all():
            raise _diverged(run, f"parameter {name}", "NaN or infinite")


def _diverged(run: TrainerRun, name: str, value: object) -> ValueError:
    rate = run.settings.lr
    lower = "take a low --lr, such as 0.1," if rate is None else f"take a lower --lr than {rate:g}"
    remedy = f"training has diverged: {lower} in a new run; the last good checkpoint is in {run.folder.path}"
    return check.refuse(name, value, "finite", remedy)


def _save(run: TrainerRun) -> None:
    """Write the checkpoint and the summary; the metrics first, so that they are never behind the checkpoint."""
    run.folder.sync()
    run.training.save(run.folder.checkpoint_file)
    run.folder.write_summary(summarise(run, exact=False))
