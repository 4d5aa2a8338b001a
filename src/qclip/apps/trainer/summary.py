"""The summary of a run in memory."""

from qclip.apps.live_run import summary_of
from qclip.apps.run_summary import Certificate, Summary
from qclip.apps.trainer.run import TrainerRun

CONFIDENCE = 0.95


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
    """Return the certificate where it was requested, or the reason why the theorem does not cover the run."""
    assumptions = run.settings.assumptions()
    if assumptions is None:
        return None, None
    try:
        bound = run.training.certificate(assumptions, CONFIDENCE)
    except ValueError as error:  # the run is finished and paid for, with or without a certificate
        return None, str(error)
    return Certificate(bound.total, bound.optimisation, bound.variance, bound.bias, CONFIDENCE), None
