"""The certificate of a run: the theorem of docs/theory.md that covers it, or the reason why none does."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from qclip import _validate as check
from qclip import theory
from qclip._validate import Floats, Refusal
from qclip.schedules import Schedule, fixed
from qclip.theory.bounds import Sampling
from qclip.thresholds import Threshold
from qclip.training.auto_step_size import AutoStepSize
from qclip.training.history import History
from qclip.training.plan import TrainingPlan

StepSize = Schedule | float | AutoStepSize | None
"""The step size of a run; None if the optimizer sets its own learning rate."""


class Departures:
    """The first step of a run that was not SGD with one momentum at the recorded step size.

    The optimizers are inspected at every step, because the record does not show their settings, which can be changed
    and changed back.
    """

    def __init__(self) -> None:
        self.momentum: float | None = None
        """The momentum of the first step; None before it."""
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
        departure = self._unlike_sgd(optimizer)
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

    def _unlike_sgd(self, optimizer: Optimizer) -> str | None:
        if type(optimizer) is not SGD:
            return type(optimizer).__name__
        for group in optimizer.param_groups:
            extra = next((name for name in ("weight_decay", "maximize", "nesterov", "dampening") if group[name]), None)
            if extra is not None:
                return f"SGD with {extra} {group[extra]}"
            momentum = float(group["momentum"])
            if self.momentum is None:
                self.momentum = momentum
            if momentum != self.momentum:
                return f"SGD with momentum {momentum:g} after {self.momentum:g}"
            if float(group["lr"]) != self._rate:
                return f"SGD with lr {float(group['lr']):g}"
        return None


@dataclass(frozen=True)
class Covered:
    """A run that a theorem covers: what certificates read."""

    theorem: str
    gammas: Floats
    """Effective step sizes, [steps]: over the clip norm for normalized steps."""
    momentum: float
    normalized: bool


WEIGHTED = "the mean of ||grad f||^2 over the steps, each weighted by its step size times its mean clip factor"
PLAIN = "the mean of E ||grad f||^2 over the steps, weighted by their step sizes"
FLOOR = (
    "; steps over the threshold weigh steps with a small one more: the plain mean over the steps may stay near sigma^2 "
    "however few examples are clipped"
)


def covered(
    assumptions: theory.Assumptions,
    history: History,
    threshold: Threshold[Any],
    parameters: Iterable[Tensor],
    *,
    step_size: StepSize,
    rescale_to_unit_norm: bool,
    departures: Departures,
    applied: bool,
    plan: TrainingPlan,
    num_examples: int,
    num_groups: int,
    p_lo: float | None,
) -> Covered:
    """Return the theorem that covers a run, or refuse the run by what all theorems lack.

    Args:
        assumptions: The constants of the problem.
        history: The records of the run.
        threshold: The threshold of the run.
        parameters: The trained parameters.
        step_size: The ``step_size`` of the run.
        rescale_to_unit_norm: Whether released gradients were divided by the clip norm.
        departures: What the optimizers were.
        applied: Whether every released gradient was applied (`qclip.training.guard.Guard.applied`).
        plan: The public constants of the run.
        num_examples: The true number of examples.
        num_groups: The number of groups that were clipped separately.
        p_lo: A lower bound on the unclipped fraction of every step, if one is known.

    Raises:
        qclip.Refusal: By the first condition that the run does not meet.
    """
    departure = departures.so_far(applied=applied)
    if departure is not None:
        raise Refusal(
            f"the optimizer was {departure}, but a certificate needs SGD with one momentum at every step, at the "
            "recorded step size: no theorem covers weight decay, a second moment, or a gradient that was not applied"
        )
    _require_data(history, threshold, parameters, plan, num_examples, num_groups)
    if isinstance(step_size, AutoStepSize):
        raise Refusal(
            "the learning rate of each step was found from the gradient of that step itself, and no theorem covers "
            "that: pass a learning rate (--lr for qclip train, step_size= or the optimizer's for make_private)"
        )
    gammas, momentum = np.array([record.step_size for record in history]), departures.momentum or 0.0
    if momentum:
        rates = gammas * [record.tau[0] for record in history] if rescale_to_unit_norm else gammas
        if np.ptp(rates) > 1e-9 * rates.max():
            bound = "the same at every step with momentum, for a certificate"
            remedy = "take one learning rate, or no momentum"
            raise check.refuse("learning rate", f"{rates.min():g} to {rates.max():g}", bound, remedy)
    schedules = {"step_size": step_size, **vars(threshold)}.items()
    reacting = next((name for name, each in schedules if callable(each) and not fixed(each)), None)
    if reacting is None and step_size is None and np.ptp(gammas) > 0 and not rescale_to_unit_norm:
        reacting = "learning rate"
    fixed_ahead = not rescale_to_unit_norm and reacting is None and not momentum
    if assumptions.q == 2 and (p_lo is None or not fixed_ahead):
        name = "momentum, section 19" if momentum else "normalized steps, section 18" if rescale_to_unit_norm else ""
        return Covered(name or "mean clipped fraction, section 16", gammas, momentum, rescale_to_unit_norm)
    if not fixed_ahead:
        what = "momentum" if momentum else "rescale_to_unit_norm" if rescale_to_unit_norm else reacting
        raise check.refuse(
            "q", assumptions.q, f"2, for a certificate of a run with {what}",
            "a heavier tail is covered for plain SGD only, with step sizes that are fixed before the run",
        )  # fmt: skip
    return Covered("least unclipped fraction, section 13", gammas, momentum, rescale_to_unit_norm)


def certify(
    run: Covered,
    assumptions: theory.Assumptions,
    history: History,
    plan: TrainingPlan,
    *,
    noise_multiplier: float,
    dim: int,
    p_lo: float | None,
    confidence: float,
) -> theory.Certificate:
    """Return the certificate of a run.

    Args:
        run: The theorem that covers the run.
        assumptions: The constants of the problem.
        history: The records of the run.
        plan: The public constants of the run.
        noise_multiplier: The noise multiplier of the gradient sum.
        dim: The number of coordinates.
        p_lo: A lower bound on the unclipped fraction of every step, if one is known.
        confidence: The probability with which bounds on this run, and on noisy clipped fractions, hold.

    Raises:
        qclip.Refusal: The theorem does not hold at the step sizes of the run, or the clipped fraction is not known.
    """
    taus = np.array([record.tau[0] for record in history])
    clipped, noise, reach = _counted(history, p_lo)
    public: dict[str, Any] = {"batch_size": plan.batch_size, "noise_multiplier": noise_multiplier, "dim": dim}
    if run.theorem.startswith("least"):
        std = np.hypot(reach / plan.batch_size**0.5, noise)
        found = theory.certificate(
            assumptions, run.gammas, taus, clipped, p_lo=p_lo, fraction_std=std, confidence=confidence, **public
        )
        return theory.Certificate(**vars(found), theorem=run.theorem, mean=PLAIN, confidence=confidence)
    sampling: Sampling = "poisson" if plan.sampling == "poisson" else "iid"
    found = theory.weighted_certificate(
        assumptions, run.gammas, taus, clipped, momentum=run.momentum, sampling=sampling, **public
    )
    this_run = None
    if not run.momentum:
        try:
            this_run = theory.one_run_certificate(
                assumptions, run.gammas, taus, clipped, sampling=sampling, fraction_noise=noise,
                fraction_reach=float(reach.max()), p_lo=p_lo or 0.0, confidence=confidence, **public,
            )  # fmt: skip
        except Refusal:
            this_run = None  # too few steps, or too large ones: the bound over runs remains
    mean = WEIGHTED + (FLOOR if run.normalized else "")
    return theory.Certificate(**vars(found), theorem=run.theorem, mean=mean, this_run=this_run, confidence=confidence)


def _require_data(
    history: History,
    threshold: Threshold[Any],
    parameters: Iterable[Tensor],
    plan: TrainingPlan,
    num_examples: int,
    num_groups: int,
) -> None:
    """Refuse a run that no theorem covers, whatever its steps were."""
    if num_examples != plan.dataset_size:
        bound = f"{num_examples}, the number of examples, for a certificate"
        remedy = "leave it out: the theorem is about the mean over the examples, and the steps follow a multiple of it"
        raise check.refuse("dataset_size", plan.dataset_size, bound, remedy)
    if num_groups > 1:
        raise check.refuse("groups", num_groups, "1 (flat)", "certify a run with one threshold")
    if not history:
        raise check.refuse("steps", 0, ">= 1", "train first: the certificate reads the record")
    if threshold.raw_access in ("physical_batch", "batch"):
        bound = "one that is fixed before the examples of the step are drawn, for a certificate"
        remedy = 'take ExactQuantile(p, over="dataset") or a private threshold'
        raise check.refuse("threshold", type(threshold).__name__, bound, remedy)
    short_dtypes = {str(p.dtype) for p in parameters if p.dtype not in (torch.float32, torch.float64)}
    if short_dtypes:
        remedy = "16-bit parameters round small steps away, which the theorem does not allow for"
        raise check.refuse("parameters", min(short_dtypes), "float32 or float64, for a certificate", remedy)


def _counted(history: History, p_lo: float | None) -> tuple[Floats, Floats, Floats]:
    """Return the clipped fractions of the record with the sizes of their errors, [steps] each."""
    if all(record.clipped for record in history):
        return tuple(np.array([getattr(r, name)[0] for r in history]) for name in _COUNTED)  # type: ignore[return-value]
    if p_lo is None:
        raise Refusal(
            "the threshold did not count its clipped examples at every step, which a certificate needs: pass p_lo=, a "
            "lower bound that you know, or take another threshold"
        )
    known = np.full(len(history), 1 - p_lo)
    return known, np.zeros_like(known), np.zeros_like(known)


_COUNTED = ("clipped", "clipped_noise", "clipped_reach")
