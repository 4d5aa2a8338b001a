"""The summary of a run: what it is, how far it came, and what it achieved. Released and held-out values only."""

import math
import platform
from typing import Any

import torch

import qclip
from qclip.thresholds import describe
from qclip.trainer.run import Run

CONFIDENCE = 0.95


def summarise(run: Run, *, exact: bool) -> dict[str, Any]:
    """The summary of a run at this moment; its epsilon is rounded up a little unless ``exact``, which takes longer."""
    training, plan = run.training, run.training.plan
    done = len(training.history)
    epsilon = training.epsilon() if exact else training.epsilon_curve(done)
    complete = done == training.num_steps
    return {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": plan.delta,
        "private": plan.noise_multiplier > 0 and training.threshold.private,
        "accuracy": run.held_out.get("accuracy"),
        "held_out": run.held_out,
        "finished": complete,
        "steps": done,
        "num_steps": training.num_steps,
        "seconds": round(run.seconds, 3),
        "task": run.task.name,
        "description": run.task.description,
        "examples": plan.dataset_size,
        "batch_size": plan.batch_size,
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise_multiplier,
        "gradient_noise_multiplier": training.noise_multipliers.gradient,
        "threshold": describe(training.threshold),
        "groups": list(training.groups),
        "parameters": sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        "settings": run.settings.public(),
        "seeded": run.seeded,
        "command": run.settings.command(),
        "versions": {"qclip": qclip.__version__, "torch": torch.__version__, "python": platform.python_version()},
        **(_certificate(run) if complete else {"certificate": None}),
    }


def _certificate(run: Run) -> dict[str, Any]:
    """The certificate, where one is asked for; where the run does not meet its conditions, why not."""
    assumptions = run.settings.assumptions()
    if assumptions is None:
        return {"certificate": None}
    try:
        bound = run.training.certificate(assumptions, CONFIDENCE)
    except ValueError as error:  # the run is done and paid for: it is no less so without a certificate
        return {"certificate": None, "certificate_refused": str(error)}
    terms = {name: getattr(bound, name) for name in ("total", "optimisation", "variance", "bias")}
    return {"certificate": terms | {"confidence": CONFIDENCE}}
