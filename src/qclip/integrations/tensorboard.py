"""TensorBoard: the released values of a private run, as it goes."""

from typing import Protocol

from qclip import _validate as check
from qclip.training.history import StepRecord
from qclip.training.run import PrivateTraining


class Writer(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that is used (``pip install 'qclip[tensorboard]'``)."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number."""
        ...


class Loss(Protocol):
    """What `PrivateTraining.step` and `PrivateTraining.loss` return."""

    def item(self) -> float:
        """The mean loss of the batch."""
        ...


class TensorBoardLog:
    """Writes each logical step: the thresholds, the noisy fractions left unclipped, the step size, epsilon so far.

    These are released values: whoever reads them learns nothing that epsilon does not cover. (It is rounded up between
    the points of `PrivateTraining.epsilon_curve`, and exact at the last step.) The training loss is not released; it is
    written only to a log made with ``raw_loss=True``, and epsilon does not cover such a log.

        log = TensorBoardLog(training, SummaryWriter("runs/first"))
        for batch in training.loader:
            training.step(batch)
            log.write()
    """

    def __init__(self, training: PrivateTraining, writer: Writer, *, raw_loss: bool = False) -> None:
        self._training, self._writer, self._shows_loss = training, writer, raw_loss
        self._written = len(training.history)
        self._raw_losses: list[float] = []

    def write(self, *, raw_loss: Loss | None = None) -> None:
        """Write the logical steps done since the last call, or since the log was made.

        raw_loss: what ``training.step(batch)`` or ``training.loss(batch)`` returned, at every physical batch; their
        mean over the logical step is written.
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
            remedy = "make the log with raw_loss=True if nobody else reads it, or leave it out"
            raise check.refuse("raw_loss", "given", "left out: it is not released, and files last", remedy)
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
