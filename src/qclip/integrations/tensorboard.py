"""A TensorBoard log of the released values of a private run."""

from typing import Protocol

from qclip.integrations.release_log import ReleaseLog
from qclip.training.run import PrivateTraining


class Writer(Protocol):
    """The method of ``torch.utils.tensorboard.SummaryWriter`` that is used (``pip install 'qclip[tensorboard]'``)."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write one number."""
        ...


class TensorBoardLog(ReleaseLog):
    """A `ReleaseLog` in TensorBoard, under ``qclip/``.

        log = TensorBoardLog(training, SummaryWriter("runs/first"))
        for batch in training.loader:
            training.step(batch)
            log.write()

    Args:
        training: The private run.
        writer: A SummaryWriter.
        raw_loss: Whether `write` accepts the raw training loss.
    """

    def __init__(self, training: PrivateTraining, writer: Writer, *, raw_loss: bool = False) -> None:
        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(f"qclip/{name}", value, step)

        super().__init__(training, write, raw_loss=raw_loss)
