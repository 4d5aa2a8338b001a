"""The certificate of a run, refused by name wherever its theorem (docs/theory.md, section 13) does not cover it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from qclip import _validate as check
from qclip import accounting, theory
from qclip.schedules import Schedule, fixed
from qclip.thresholds import Threshold
from qclip.thresholds.threshold import Count
from qclip.training.history import History
from qclip.training.plan import TrainingPlan

StepSize = Schedule | float | None
"""None where the optimizer's own learning rate counts."""


class Departures:
    """Watches the optimizers of a run, and keeps the first step that was not plain SGD at the recorded step size.

    The record does not show it: settings of optimizers can be changed, and changed back.
    """

    def __init__(self) -> None:
        self._first: str | None = None
        self._step, self._rate = 0, 0.0
        self._waiting = False

    def begin(self, first: str | None) -> None:
        """Go on with a run whose first such step was this one, if any: nothing is expected."""
        self._first, self._waiting = first, False

    def expect(self, step: int, rate: float) -> None:
        """The step that comes next, and its learning rate."""
        self._step, self._rate, self._waiting = step, rate, True

    def see(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that is about to take the step."""
        self._waiting = False
        found = self._unlike_plain_sgd(optimizer)
        if self._first is None and found is not None:
            self._first = f"{found} at step {self._step}"

    def so_far(self, *, applied: bool) -> str | None:
        """The first such step up to now; ``applied``: whether the gradients that were written were."""
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
    """The certificate of a record, of a run that is `covered`; ``count`` is what the threshold pays for."""
    if len(dims) > 1:
        raise check.refuse("groups", len(dims), "1 (flat)", "certify a run with one threshold")
    if not history:
        raise check.refuse("steps", 0, ">= 1", "train first: the certificate reads the record")
    fraction_std = _fraction_std(threshold, count, noise, plan.batch_size)
    fractions = [record.noisy_unclipped for record in history]
    if not all(fractions):
        remedy = "take a larger batch, so that no draw is empty"
        raise check.refuse("unclipped fraction", "not known at every step", "recorded at every step", remedy)
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
    examples: int,
) -> None:
    """Refuse what the theorem is not about: it is about plain SGD.

    Its step sizes are fixed before the run, its thresholds before each step's examples are drawn.
    """
    if departure is not None:
        remedy = "the theorem is about one step size, no momentum and no weight decay, and every gradient applied"
        raise check.refuse("optimizer", departure, "plain SGD at every step, at the step size recorded", remedy)
    if examples != plan.dataset_size:
        bound = f"{examples}, the number of examples, for a certificate"
        remedy = "leave it out: the theorem is about their mean, and the steps follow a multiple of it"
        raise check.refuse("dataset_size", plan.dataset_size, bound, remedy)
    if rescale_to_unit_norm:
        bound = "False, for a certificate: the theorem is about step sizes that are fixed before the run"
        remedy = "those over the threshold follow from what the run releases"
        raise check.refuse("rescale_to_unit_norm", rescale_to_unit_norm, bound, remedy)
    if threshold.raw_access in ("physical_batch", "batch"):
        bound = "one that is settled before the examples of the step are drawn, for a certificate"
        remedy = 'take ExactQuantile(p, over="dataset"), PrivateQuantile or GeometricQuantile'
        raise check.refuse("threshold", type(threshold).__name__, bound, remedy)
    for name, schedule in {"step_size": step_size, **vars(threshold)}.items():
        if callable(schedule) and not fixed(schedule):
            remedy = "the theorem is about schedules that are fixed before the run, and a function may react to it"
            raise check.refuse(name, schedule, "a number or a schedule of qclip.schedules, for a certificate", remedy)
    rates = sorted({record.step_size for record in history})
    if step_size is None and len(rates) > 1:
        remedy = (
            "pass step_size=, a schedule of qclip.schedules: the theorem is about step sizes that are fixed before the "
            "run, and a scheduler may react to it"
        )
        raise check.refuse("learning rate", f"{rates[0]:g} to {rates[-1]:g}", "the same at every step", remedy)
    short = {str(p.dtype) for p in parameters if p.dtype not in (torch.float32, torch.float64)}
    if short:
        remedy = "in 16 bits small steps are rounded away, which the theorem does not allow for"
        raise check.refuse("parameters", min(short), "float32 or float64, for a certificate", remedy)


def _fraction_std(threshold: Threshold[Any], count: Count | None, noise: accounting.Split, batch_size: int) -> float:
    """A bound on the standard deviation of a recorded fraction: who was sampled, and the noise."""
    B = batch_size
    if not threshold.private:
        return 0.5 / B**0.5
    if count is None or any(len(radii) > 1 for radii in count.radii):  # extrapolated, or a sum of several
        remedy = "take PrivateQuantile or GeometricQuantile, which count at the threshold itself"
        name = type(threshold).__name__
        raise check.refuse("threshold", name, "one that counts unclipped examples and no others", remedy)
    return float(np.hypot(max(count.centre, 1 - count.centre) / B**0.5, noise.counts * count.l2_bound / B))
