"""A Weights & Biases log of the released values of a private run."""

from typing import Any, Protocol

from qclip.integrations.release_log import ReleaseLog
from qclip.training.run import PrivateTraining


class Run(Protocol):
    """The methods of the run that ``wandb.init`` returns that are used (``pip install 'qclip[wandb]'``)."""

    def define_metric(self, name: str, step_metric: str | None = None) -> Any:
        """Choose what a value is drawn against."""
        ...

    def log(self, data: dict[str, Any]) -> None:
        """Write values."""
        ...


class WandbLog(ReleaseLog):
    """A `ReleaseLog` in Weights & Biases, under ``qclip/``, drawn against the logical step ``qclip/step``.

        log = WandbLog(training, wandb.init(project="mine"))
        for batch in training.loader:
            training.step(batch)
            log.write()

    Other values can be logged to the same run; wandb's own step counts the calls of both. Of several processes, only
    rank 0 needs a run.

    Args:
        training: The private run.
        run: The run of wandb.
        raw_loss: Whether `write` accepts the raw training loss.
    """

    def __init__(self, training: PrivateTraining, run: Run, *, raw_loss: bool = False) -> None:
        if training.rank == 0:
            run.define_metric("qclip/step")
            run.define_metric("qclip/*", step_metric="qclip/step")

        def write(values: dict[str, float], step: int) -> None:
            run.log({"qclip/step": step} | {f"qclip/{name}": value for name, value in values.items()})

        super().__init__(training, write, raw_loss=raw_loss)
