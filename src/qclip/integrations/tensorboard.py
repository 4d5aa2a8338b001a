"""A TensorBoard log of the released values of a private run."""

from typing import Protocol

from qclip import _validate as check
from qclip.training.history import StepRecord
from qclip.training.run import PrivateTraining


class Writer(Protocol):
    """The method of ``torch.utils.tensorboard.SummaryWriter`` that is used (``pip install 'qclip[tensorboard]'``)."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number."""
        ...


class Loss(Protocol):
    """The return value of `PrivateTraining.step` and `PrivateTraining.loss`."""

    def item(self) -> float:
        """Return the mean loss of the batch."""
        ...


class TensorBoardLog:
    """A log of each logical step: thresholds, noisy unclipped fractions, step size, and epsilon so far.

        log = TensorBoardLog(training, SummaryWriter("runs/first"))
        for batch in training.loader:
            training.step(batch)
            log.write()

    - All of these values are released: epsilon covers a reader of the log. (It is rounded up between the points of
      `PrivateTraining.epsilon_curve`, and exact at the last step.)
    - The training loss is not released. It is written only with ``raw_loss=True``, and epsilon does not cover such a
      log.

    Args:
        training: The private run.
        writer: A SummaryWriter.
        raw_loss: Whether `write` accepts the raw training loss.
    """

    def __init__(self, training: PrivateTraining, writer: Writer, *, raw_loss: bool = False) -> None:
        self._training, self._writer, self._shows_loss = training, writer, raw_loss
        self._written = len(training.history)
        self._raw_losses: list[float] = []

    def write(self, *, raw_loss: Loss | None = None) -> None:
        """Write the logical steps done since the last call, or since the log was made.

        Args:
            raw_loss: The return value of ``training.step(batch)`` or ``training.loss(batch)``, at every physical batch;
                their mean over the logical step is written.

        Raises:
            Refusal: ``raw_loss`` was given to a log made without ``raw_loss=True``.
        """
        if raw_loss is not None:
            self._note(raw_loss)
        new = self._training.history[self._written :]
        for record in new:
            self._write_record(record)
        if new and self._raw_losses:
            mean = sum(self._raw_losses) / len(self._raw_losses)
            self._writer.add_scalar("qclip/raw_loss", mean, new[-1].step)
            self._raw_losses.clear()
        self._written += len(new)

    def _note(self, raw_loss: Loss) -> None:
        if not self._shows_loss:
            raise check.Refusal(
                "raw_loss is not a released value, and log files last; leave it out, or make the log with "
                "raw_loss=True if nobody else reads it"
            )
        self._raw_losses.append(raw_loss.item())

    def _write_record(self, record: StepRecord) -> None:
        self._write_groups("tau", record.tau, record.step)
        self._write_groups("noisy_unclipped", record.noisy_unclipped, record.step)
        self._writer.add_scalar("qclip/step_size", record.step_size, record.step)
        self._writer.add_scalar("qclip/epsilon", self._training.epsilon_curve(record.step + 1), record.step)

    def _write_groups(self, name: str, values: tuple[float, ...], step: int) -> None:
        for k, value in enumerate(values):
            tag = f"qclip/{name}" if len(values) == 1 else f"qclip/{name}/{k}"
            self._writer.add_scalar(tag, value, step)
