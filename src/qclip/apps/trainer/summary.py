"""The summary of a run in memory."""

from qclip.apps.live_run import summary_of
from qclip.apps.run_summary import Certificate, Summary
from qclip.apps.trainer.run import TrainerRun
from qclip.theory import Assumptions

CONFIDENCE = 0.95
UNKNOWN = "the smoothness, the gradient noise and the gap of the loss were not given (--L, --sigma, --gap)"
HARMLESS = Assumptions(L=1e-9, sigma=1e-3, q=2, gap=1)
"""Constants with which a run is refused for what it lacks itself, and not for its step sizes."""


def summarise(run: TrainerRun, *, exact: bool) -> Summary:
    """Summarise a run at this moment; epsilon is rounded up a little unless ``exact``, which takes longer."""
    certificate, refused = _certificate(run) if run.training.finished else (None, None)
    return summary_of(
        run.training,
        exact=exact,
        held_out=run.held_out,
        evaluation=run.evaluation,
        seconds=round(run.seconds, 3),
        task=run.task.name,
        description=run.task.description,
        unit=run.task.unit,
        public=list(run.task.public),
        details=list(run.task.details),
        settings=run.settings.public(),
        seeded=run.seeded,
        command=run.settings.command(),
        certificate=certificate,
        certificate_refused=refused,
    )


def _certificate(run: TrainerRun) -> tuple[Certificate | None, str | None]:
    """Return the certificate, or the reason why there is none: the constants of the loss, or what the run lacks."""
    assumptions = run.settings.assumptions()
    try:
        found = run.training.certificate(assumptions or HARMLESS, CONFIDENCE)
    except ValueError as error:  # the run is finished and paid for, with or without a certificate
        return None, str(error) if assumptions else f"{UNKNOWN}; and {error}"
    if assumptions is None:
        return None, UNKNOWN
    certificate = Certificate(
        total=found.total,
        optimisation=found.optimisation,
        variance=found.variance,
        bias=found.bias,
        this_run=None if found.this_run is None else found.this_run.total,
        confidence=CONFIDENCE,
        theorem=found.theorem,
        mean=found.mean,
    )
    return certificate, None
