"""A log of the released values of a private run, written by a function of any logger."""

from collections.abc import Callable, Mapping
from typing import Protocol

from qclip import _validate as check
from qclip.training.history import StepRecord
from qclip.training.run import PrivateTraining

Write = Callable[[dict[str, float], int], object]
"""``write(values, step)``: writes values of a step by name, as ``accelerator.log`` does."""


class Loss(Protocol):
    """The return value of `PrivateTraining.step` and `PrivateTraining.loss`."""

    def item(self) -> float:
        """Return the mean loss of the batch."""
        ...


class ReleaseLog:
    """A log of each logical step: thresholds, noisy unclipped fractions, step size, and epsilon so far.

        log = ReleaseLog(training, accelerator.log)  # or a Lightning logger's log_metrics, or a function of one's own
        for batch in training.loader:
            training.step(batch)
            log.write()

    - All of these values are released: epsilon covers a reader of the log. (It is rounded up between the points of
      `PrivateTraining.epsilon_curve`, and exact at the last step.)
    - The training loss is not released. It is written only with ``raw_loss=True``, and epsilon does not cover such a
      log.
    - Of several processes, rank 0 writes.

    Args:
        training: The private run.
        write: Writes the values of a step: ``write(values, step)``.
        raw_loss: Whether `write` accepts the raw training loss.
    """

    def __init__(self, training: PrivateTraining, write: Write, *, raw_loss: bool = False) -> None:
        self._training, self._write, self._shows_loss = training, write, raw_loss
        self._written = len(training.history)
        self._raw_losses: list[float] = []

    def write(self, *, raw_loss: Loss | None = None, held_out: Mapping[str, float] | None = None) -> None:
        """Write the logical steps done since the last call, or since the log was made.

        Args:
            raw_loss: The return value of ``training.step(batch)`` or ``training.loss(batch)``, at every physical batch;
                their mean over the logical step is written.
            held_out: Scores on held-out examples, which epsilon does not protect; written with the last step done.

        Raises:
            Refusal: ``raw_loss`` was given to a log made without ``raw_loss=True``.
        """
        if raw_loss is not None:
            self._note(raw_loss)
        history = self._training.history
        new = history[self._written :]
        self._written += len(new)
        rows = {record.step: released(self._training, record) for record in new}
        others: dict[str, float] = {}
        if new and self._raw_losses:
            others["raw_loss"] = sum(self._raw_losses) / len(self._raw_losses)
            self._raw_losses.clear()
        others |= {f"held_out/{name}": float(value) for name, value in (held_out or {}).items()}
        if others:
            rows.setdefault(max(len(history) - 1, 0), {}).update(others)
        if self._training.rank == 0:
            for step, values in rows.items():
                self._write(values, step)

    def _note(self, raw_loss: Loss) -> None:
        if not self._shows_loss:
            raise check.Refusal(
                "raw_loss is not a released value, and log files last; leave it out, or make the log with "
                "raw_loss=True if nobody else reads it"
            )
        self._raw_losses.append(raw_loss.item())


def released(training: PrivateTraining, record: StepRecord) -> dict[str, float]:
    """Return the released values of a step by name."""
    epsilon = training.epsilon_curve(record.step + 1)
    return released_norms(training, record) | {"step_size": record.step_size, "epsilon": epsilon}


def released_norms(training: PrivateTraining, record: StepRecord) -> dict[str, float]:
    """Return what a step released about norms, by name: with several groups, those of each as ``tau/GROUP``."""
    values: dict[str, float] = {}
    for name, row in ("tau", record.tau), ("noisy_unclipped", record.noisy_unclipped):
        groups = training.groups
        values |= {name if len(groups) == 1 else f"{name}/{g}": x for g, x in zip(groups, row, strict=False)}
    return values
