"""The certificate of a run; refused if its theorem (docs/theory.md, section 13) does not cover the run."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from qclip import _validate as check
from qclip import accounting, theory
from qclip._validate import Refusal
from qclip.schedules import Schedule, fixed
from qclip.thresholds import Threshold
from qclip.thresholds.threshold import Count
from qclip.training.history import History
from qclip.training.plan import TrainingPlan

StepSize = Schedule | float | None
"""The step size of a run; None if the optimizer sets its own learning rate."""


class Departures:
    """The first step of a run that was not plain SGD at the recorded step size.

    The optimizers are inspected at every step, because the record does not show their settings, which can be changed
    and changed back.
    """

    def __init__(self) -> None:
        self._first: str | None = None
        self._step, self._rate = 0, 0.0
        self._waiting = False

    def begin(self, first: str | None) -> None:
        """Continue with the first departure so far, if any; no step is expected until `expect`."""
        self._first, self._waiting = first, False

    def expect(self, step: int, rate: float) -> None:
        """Expect an optimizer step with this number and learning rate."""
        self._step, self._rate, self._waiting = step, rate, True

    def see(self, optimizer: Optimizer) -> None:
        """Inspect an optimizer that is about to take the step."""
        self._waiting = False
        departure = self._unlike_plain_sgd(optimizer)
        if self._first is None and departure is not None:
            self._first = f"{departure} at step {self._step}"

    def so_far(self, *, applied: bool) -> str | None:
        """Return the first departure so far, or None.

        Args:
            applied: Whether every released gradient was applied (`qclip.training.guard.Guard.applied`).
        """
        if self._first is None and (self._waiting or not applied):
            return f"not applied to all parameters at step {self._step}"
        return self._first

    def _unlike_plain_sgd(self, optimizer: Optimizer) -> str | None:
        if type(optimizer) is not SGD:
            return type(optimizer).__name__
        for group in optimizer.param_groups:
            extra = next((name for name in ("momentum", "weight_decay", "maximize") if group[name]), None)
            if extra is not None:
                return f"SGD with {extra} {group[extra]}"
            if float(group["lr"]) != self._rate:
                return f"SGD with lr {float(group['lr']):g}"
        return None


def certify(
    assumptions: theory.Assumptions,
    history: History,
    threshold: Threshold[Any],
    plan: TrainingPlan,
    *,
    count: Count | None,
    noise: accounting.Split,
    dims: Sequence[int],
    p_lo: float | None,
    confidence: float,
) -> theory.Bound:
    """Return the certificate of a run that passed `require_covered`.

    Args:
        assumptions: The constants of the problem.
        history: The records of the run.
        threshold: The threshold of the run.
        plan: The public constants of the run.
        count: The count that the threshold pays for, if any.
        noise: The noise multipliers of gradient and counts.
        dims: The number of coordinates of each group.
        p_lo: A lower bound on the unclipped fraction of every step, if one is known.
        confidence: The probability with which the bounds on the noisy clipped fractions hold.

    Raises:
        qclip.Refusal: For several groups, no steps, or a record without the unclipped fraction of every step.
    """
    if len(dims) > 1:
        raise check.refuse("groups", len(dims), "1 (flat)", "certify a run with one threshold")
    if not history:
        raise check.refuse("steps", 0, ">= 1", "train first: the certificate reads the record")
    fraction_std = _fraction_std(threshold, count, noise, plan.batch_size)
    fractions = [record.noisy_unclipped for record in history]
    if not all(fractions):
        raise Refusal(
            "the unclipped fraction is not known at every step, which a certificate needs: take a larger batch, so "
            "that no draw is empty"
        )
    return theory.certificate(
        assumptions,
        [record.step_size for record in history],
        [record.tau[0] for record in history],
        [1 - fraction for (fraction,) in fractions],
        batch_size=plan.batch_size,
        noise_multiplier=noise.gradient,
        dim=dims,
        p_lo=p_lo,
        fraction_std=fraction_std,
        confidence=confidence,
    )


def require_covered(
    history: History,
    threshold: Threshold[Any],
    parameters: Iterable[Tensor],
    *,
    step_size: StepSize,
    rescale_to_unit_norm: bool,
    departure: str | None,
    plan: TrainingPlan,
    num_examples: int,
) -> None:
    """Refuse a run that the theorem does not cover.

    The theorem covers plain SGD with step sizes that are fixed before the run, and with thresholds that are fixed
    before the examples of each step are drawn.

    Args:
        history: The records of the run.
        threshold: The threshold of the run.
        parameters: The trained parameters.
        step_size: The ``step_size`` of the run.
        rescale_to_unit_norm: Whether released gradients were divided by the clip norm.
        departure: The first step that was not plain SGD, if any (`Departures.so_far`).
        plan: The public constants of the run.
        num_examples: The true number of examples.

    Raises:
        qclip.Refusal: By the first condition that the run does not meet.
    """
    if departure is not None:
        raise Refusal(
            f"the optimizer was {departure}, but a certificate needs plain SGD at every step, at the recorded step "
            "size: the theorem covers one step size, no momentum, no weight decay, and every gradient applied"
        )
    if num_examples != plan.dataset_size:
        bound = f"{num_examples}, the number of examples, for a certificate"
        remedy = "leave it out: the theorem is about the mean over the examples, and the steps follow a multiple of it"
        raise check.refuse("dataset_size", plan.dataset_size, bound, remedy)
    if rescale_to_unit_norm:
        bound = "False, for a certificate"
        remedy = (
            "the theorem covers step sizes that are fixed before the run, and step sizes over the clip norm follow "
            "from the releases of the run"
        )
        raise check.refuse("rescale_to_unit_norm", rescale_to_unit_norm, bound, remedy)
    if threshold.raw_access in ("physical_batch", "batch"):
        bound = "one that is fixed before the examples of the step are drawn, for a certificate"
        remedy = 'take ExactQuantile(p, over="dataset"), PrivateQuantile or GeometricQuantile'
        raise check.refuse("threshold", type(threshold).__name__, bound, remedy)
    for name, schedule in {"step_size": step_size, **vars(threshold)}.items():
        if callable(schedule) and not fixed(schedule):
            remedy = "the theorem covers schedules that are fixed before the run, and a function may react to it"
            raise check.refuse(name, schedule, "a number or a schedule of qclip.schedules, for a certificate", remedy)
    rates = sorted({record.step_size for record in history})
    if step_size is None and len(rates) > 1:
        remedy = (
            "pass step_size=, a schedule of qclip.schedules: the theorem covers step sizes that are fixed before the "
            "run, and a scheduler may react to it"
        )
        raise check.refuse("learning rate", f"{rates[0]:g} to {rates[-1]:g}", "the same at every step", remedy)
    short_dtypes = {str(p.dtype) for p in parameters if p.dtype not in (torch.float32, torch.float64)}
    if short_dtypes:
        remedy = "16-bit parameters round small steps away, which the theorem does not allow for"
        raise check.refuse("parameters", min(short_dtypes), "float32 or float64, for a certificate", remedy)


def _fraction_std(threshold: Threshold[Any], count: Count | None, noise: accounting.Split, batch_size: int) -> float:
    """Return a bound on the standard deviation of a recorded fraction, from sampling and noise."""
    B = batch_size
    if not threshold.private:
        return 0.5 / B**0.5
    if count is None or any(len(radii) > 1 for radii in count.radii):  # extrapolated, or a sum of several bins
        remedy = "take PrivateQuantile or GeometricQuantile, which count at the threshold itself"
        name = type(threshold).__name__
        raise check.refuse("threshold", name, "one that counts unclipped examples and no others", remedy)
    return float(np.hypot(max(count.centre, 1 - count.centre) / B**0.5, noise.counts * count.l2_bound / B))
