"""An MLflow log of the released values of a private run."""

import re
from typing import Any, Protocol

from qclip.integrations.release_log import ReleaseLog
from qclip.training.run import PrivateTraining


class Tracker(Protocol):
    """The function of the module ``mlflow`` that is used (``pip install 'qclip[mlflow]'``)."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> Any:
        """Write values to the active run."""
        ...


class MlflowLog(ReleaseLog):
    """A `ReleaseLog` in MLflow's active run, under ``qclip/``.

        with mlflow.start_run():
            log = MlflowLog(training, mlflow)
            for batch in training.loader:
                training.step(batch)
                log.write()

    In the names of groups, what MLflow does not accept becomes an underscore.

    Args:
        training: The private run.
        tracker: The module ``mlflow``.
        raw_loss: Whether `write` accepts the raw training loss.
    """

    def __init__(self, training: PrivateTraining, tracker: Tracker, *, raw_loss: bool = False) -> None:
        def write(values: dict[str, float], step: int) -> None:
            tracker.log_metrics({f"qclip/{_accepted(name)}": value for name, value in values.items()}, step=step)

        super().__init__(training, write, raw_loss=raw_loss)


def _accepted(name: str) -> str:
    """Return a name that MLflow accepts."""
    return re.sub(r"[^-\w. /]", "_", name)
