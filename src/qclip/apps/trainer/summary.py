"""The summary of a run in memory."""

import math
import platform
from datetime import UTC, datetime
from importlib.metadata import version

import torch

import qclip
from qclip.apps.run_summary import Certificate, Summary
from qclip.apps.trainer.run import TrainerRun
from qclip.thresholds import describe

CONFIDENCE = 0.95


def summarise(run: TrainerRun, *, exact: bool) -> Summary:
    """Summarise a run at this moment; epsilon is rounded up a little unless ``exact``, which takes longer."""
    training, plan = run.training, run.training.plan
    done = len(training.history)
    epsilon = training.epsilon() if exact else training.epsilon_curve(done)
    certificate, refused = _certificate(run) if training.finished else (None, None)
    return Summary(
        epsilon=epsilon if math.isfinite(epsilon) else None,
        delta=plan.delta,
        private=plan.noise_multiplier > 0 and training.threshold.private,
        accuracy=run.held_out.get("accuracy"),
        held_out=run.held_out,
        evaluation=run.evaluation,
        finished=training.finished,
        steps=done,
        num_steps=training.num_steps,
        seconds=round(run.seconds, 3),
        task=run.task.name,
        description=run.task.description,
        unit=run.task.unit,
        public=list(run.task.public),
        details=list(run.task.details),
        examples=plan.dataset_size,
        batch_size=plan.batch_size,
        sampling=plan.sampling,
        sample_rate=plan.sample_rate,
        accountant=plan.accountant,
        noise_multiplier=plan.noise_multiplier,
        gradient_noise_multiplier=training.noise_multipliers.gradient,
        threshold=describe(training.threshold),
        lost_threshold=training.lost_threshold,
        groups=list(training.groups),
        parameters=sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        settings=run.settings.public(),
        seeded=run.seeded,
        command=run.settings.command(),
        versions={
            "qclip": qclip.__version__,
            "torch": torch.__version__,
            "dp-accounting": version("dp-accounting"),
            "python": platform.python_version(),
        },
        date=datetime.now(UTC).isoformat(timespec="seconds"),
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
