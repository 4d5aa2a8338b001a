"""What the folder of a run says of a run in memory: its lines and its summary. Released and held-out values only."""

import math
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from qclip._version import __version__
from qclip.apps.run_folder import Line
from qclip.apps.run_summary import Summary
from qclip.thresholds import describe
from qclip.training.history import StepRecord
from qclip.training.run import PrivateTraining


def step_line(training: PrivateTraining, record: StepRecord) -> Line:
    """Return the line of a logical step."""
    return {
        "step": record.step,
        "tau": record.tau,
        "noisy_unclipped": record.noisy_unclipped,
        "step_size": record.step_size,
        "noise_power": record.noise_power,
        "clipped_length": record.clipped_length,
        "lost": record.lost,
        "epsilon": training.epsilon_curve(record.step + 1),
    }


def score_line(training: PrivateTraining, done: int, held_out: Mapping[str, float]) -> Line:
    """Return the line of a held-out score after ``done`` steps."""
    whole, part = divmod(done, training.steps_per_epoch)
    epoch = done / training.steps_per_epoch if part else whole
    return {"step": done, "epoch": epoch, "held_out": dict(held_out), "epsilon": training.epsilon_curve(done)}


def summary_of(training: PrivateTraining, *, exact: bool, held_out: Mapping[str, float], **about: Any) -> Summary:
    """Return the summary of a run at this moment.

    Args:
        training: The run.
        exact: Whether epsilon is exact, which takes longer, or rounded up a little.
        held_out: The last held-out score.
        about: The fields of a summary that do not follow from the run.
    """
    plan, done = training.plan, len(training.history)
    epsilon = training.epsilon() if exact else training.epsilon_curve(done)
    return Summary(
        epsilon=epsilon if math.isfinite(epsilon) else None,
        delta=plan.delta,
        private=plan.noise_multiplier > 0 and training.threshold.private,
        accuracy=held_out.get("accuracy"),
        held_out=dict(held_out),
        finished=training.finished,
        steps=done,
        num_steps=training.num_steps,
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
        parameters=sum(p.numel() for p in training.model.parameters() if p.requires_grad),
        versions={
            "qclip": __version__,
            "torch": torch.__version__,
            "dp-accounting": version("dp-accounting"),
            "python": platform.python_version(),
        },
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
    )
