"""The overview of a run: a few lines for whoever prints it. Public and released values only."""

import math
from collections.abc import Callable, Sequence

from torch import nn

from qclip.thresholds import Threshold
from qclip.training.history import StepRecord
from qclip.training.plan import TrainingPlan


def title(model: nn.Module) -> str:
    """Return what is trained, in words."""
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"PrivateTraining of {type(model).__name__}, {parameters:,} trainable parameters"


def rows(
    plan: TrainingPlan,
    threshold: Threshold,
    history: Sequence[StepRecord],
    *,
    epsilon: Callable[[int], float],
    num_groups: int,
    lost: str,
) -> list[tuple[str, str]]:
    """Return the plan, and what is done and spent of it, as pairs of a name and a text.

    Args:
        plan: The public constants of the run.
        threshold: The threshold.
        history: The records of the steps done.
        epsilon: Epsilon as a function of steps done.
        num_groups: The number of groups of parameters.
        lost: Why the threshold is lost; empty if it is not.
    """
    done, finished = len(history), len(history) == plan.num_steps
    lines = [
        ("plan", f"{plan.num_steps:,} steps of {plan.batch_size:,} expected examples of {plan.dataset_size:,}"),
        ("noise", f"{plan.noise_multiplier:.4g} times the sensitivity, of gradient and counts together"),
        ("threshold", repr(threshold) + (f" in each of {num_groups} groups" if num_groups > 1 else "")),
        ("done", f"{done:,} steps" + (", the whole plan" if finished else "")),
        ("epsilon", _epsilon(plan, threshold, epsilon(done))),
    ]
    if history:
        low, high = min(history[-1].tau), max(history[-1].tau)
        lines.append(("tau", f"{low:.4g}" if num_groups == 1 else f"{low:.4g} to {high:.4g}"))
    return [*lines, ("lost", lost)] if lost else lines


def _epsilon(plan: TrainingPlan, threshold: Threshold, spent: float) -> str:
    """Return epsilon in words, rounded up."""
    if plan.noise_multiplier == 0:
        return "infinite: without noise there is no privacy"
    if not threshold.private:
        return f"infinite: {type(threshold).__name__} reads raw gradient norms"
    budget = "" if plan.epsilon is None else f" of {plan.epsilon:g}"
    return f"{math.ceil(1000 * spent) / 1000:g}{budget} spent, at delta = {plan.delta:.3g}"
