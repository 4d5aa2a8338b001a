"""Proofs: the engine's assumptions, tested on the batch at hand instead of guessed from sizes.

At the first batch of each kind (and a few later ones) the evaluation runs again, with deterministic kernels and with
perturbed parameters and constants (`perturbation`). Four properties are tested:

- *ownership*: with some examples' losses left out, the gradient at every site must be exactly zero in the rows
  attributed to them. A few rounds separate any two examples (`separation`): 4 for 6 examples, 7 for 32, 11 for 256;
- *separation*: with those examples replaced by others, the rest must keep their losses, their values at every site and
  their gradients there, also where the inputs of the others are a thousand times as large;
- *batch size*: in a batch of another size the examples must give the same values and gradients;
- *replay*: a site without a rule, run again example by example, must give the same output.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from qclip._validate import Refusal
from qclip.engine import batch as batches
from qclip.engine.capture.capture import Capture
from qclip.engine.capture.repeat import Script
from qclip.engine.gradients.layouts import Layout, Single, candidates, is_interleaved, placed
from qclip.engine.gradients.plan import Plan, SitePlan, plan_site, signature
from qclip.engine.gradients.sites import Site
from qclip.engine.proof.separation import Mixing, mixing, replacement, require_separation, separating_subsets
from qclip.engine.proof.traces import Repetition, Rerun, SitePlans, Traces, Trial
from qclip.engine.randomness import SameDraws

TOLERANCE: Final = 1e-4
"""The relative difference that a proof tolerates: examples that mix by less are not noticed."""
ROUGH_TOLERANCE: Final = 1e-2
"""The same in 16 bits."""
LARGE: Final = 1000.0
"""The factor of the inputs of replaced examples in the last round."""
PROOFS: Final = frozenset({0, 1, *(16**k - 1 for k in range(1, 12))})
"""A kind of forward pass is proven after this many uses: at the 1st, 2nd, 16th, 256th... of them."""
_NOT_FINITE: Final = "no example has a finite gradient"
SAME_WAY: Final = (
    "Let all rows go through the same functions, with zero weights where they are not wanted, or sorted by expert "
    'through torch.nn.functional.grouped_mm; models of transformers do so with set_experts_implementation("grouped_mm")'
)
"""The remedy where data route rows."""


@dataclass(frozen=True)
class Subject:
    """The evaluation under proof: a batch, and how to run it again."""

    batch: Any
    batch_size: int
    device: torch.device
    rerun: Rerun
    perturbed: Callable[[], AbstractContextManager[None]]
    """A context with perturbed parameters and constants."""
    evaluation: Callable[[], AbstractContextManager[None]]
    """A context with the model in evaluation mode."""
    enlarged: Callable[[Tensor], AbstractContextManager[None]]
    """A context with the model's inputs multiplied by factors [B]."""
    in_float64: Callable[["Subject"], AbstractContextManager["Subject"]]
    """A context with the same evaluation in float64."""
    first_run: Callable[[Any], Trial]
    """Runs the evaluation again on a batch of the same size, and keeps the values of its sites."""
    require_totals: Callable[[Plan, Trial | None], None]
    """Refuses a plan by which the gradients of a run, or of one more run, do not add up to autograd's."""
    script: Script | None = None
    """A run of the evaluation that others repeat, unless they make other calls."""
    can_grow: bool = True
    """Whether the model has inputs that can be enlarged."""

    def trace(self, plans: SitePlans, batch: Any = None, batch_size: int | None = None) -> Traces:
        """Run and trace the evaluation, on this batch or another."""
        batch, batch_size = self.batch if batch is None else batch, batch_size or self.batch_size
        return Traces.of(self.rerun, batch, batch_size, plans, self.script)


class NotTogether(Refusal):
    """The gradients of a batch cannot be told apart; perhaps examples can be run one at a time.

    Args:
        problem: What cannot be told apart, without a full stop.
        remedy: What to change.
        detail: Other ways that failed, as a sentence with a full stop.
    """

    def __init__(self, problem: str, remedy: str, detail: str = "") -> None:
        super().__init__(" ".join(filter(None, (f"{problem}.", detail, remedy))))
        self.reason = f"{problem}. {remedy}"
        """Why examples are run one at a time, in few words."""


class NotBroadcast(Exception):
    """Some calls that seemed to give rows to examples, and were captured as sites, do not."""

    def __init__(self, ordinals: frozenset[int]) -> None:
        super().__init__(ordinals)
        self.ordinals = ordinals


class _OtherSites(Exception):
    """At perturbed parameters the evaluation does something else, from this site on."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.site = site


def prove(capture: Capture, unseen: Sequence[str], reached: Sequence[bool], subject: Subject) -> Plan:
    """Return a plan for the sites of a capture.

    Args:
        capture: The captured forward pass.
        unseen: The parameters that the loss depends on outside of the sites.
        reached: Whether the loss depends on each site.
        subject: The evaluation that was captured.

    Raises:
        Refusal: The evaluation cannot be proven; the message names the site and the remedy.
        NotBroadcast: Some captured calls are not sites.
    """
    try:
        with subject.perturbed():
            return _plan(capture, unseen, reached, subject)
    except _OtherSites as other:
        again = [subject.first_run(subject.batch).capture.sites for _ in range(2)]
        repeated = [_first_other(capture.sites, sites, subject.batch_size) for sites in again]
        raise (_routed(other.site) if repeated == [None, None] else _unrepeatable(unseen)) from None


def _plan(capture: Capture, unseen: Sequence[str], reached: Sequence[bool], subject: Subject) -> Plan:
    subject, trial, site_grads, healthy = _healthy(subject)
    subject = replace(subject, script=trial.script, can_grow=trial.can_grow)
    other = _first_other(capture.sites, trial.capture.sites, subject.batch_size)
    if other is not None:
        raise _OtherSites(other)
    layouts, has_gradient = _owners(trial, subject.batch_size)
    broadcasts = [site.broadcast_index for site in trial.capture.sites]
    wrong = {k for k, admitted in zip(broadcasts, layouts, strict=True) if not admitted}
    if wrong:  # perhaps because of others that no gradient shows
        wrong |= {k for k, shown in zip(broadcasts, has_gradient, strict=True) if not shown}
    if wrong - {None}:
        raise NotBroadcast(frozenset(k for k in wrong if k is not None))
    plans, reasons = _site_plans(trial, layouts, site_grads)
    reasons = dict.fromkeys(unseen, "the loss depends on it in a way that no torch function shows") | reasons
    before = Traces.of_trial(trial, site_grads, plans)
    whole = frozenset(reasons)
    silent = {k for k, shown in enumerate(has_gradient) if reached[k] and not shown}
    # Where the gradient admits several layouts, all of which fit, separation may leave one.
    ambiguous = {k for k, admitted in enumerate(layouts) if reached[k] and has_gradient[k] and len(admitted) > 1}
    undecidable = {k for k in ambiguous if len(plans[k]) < len(layouts[k])}

    def planned() -> Plan:
        sites = zip(capture.sites, plans, strict=True)
        used = tuple(None if whole.issuperset(site.parameters) else fitting[0] for site, fitting in sites)
        open_sites = [capture.sites[k] for k in sorted(ambiguous) if k in undecidable or len(plans[k]) > 1]
        doubt = _doubt(capture, used, open_sites) if healthy else _NOT_FINITE
        return Plan(used, whole, reasons, doubt, frozenset(silent))

    first, wrong_totals = planned(), None
    try:
        if not whole:
            subject.require_totals(first, trial)
    except Refusal as refusal:
        wrong_totals = refusal  # perhaps because examples mix, which is refused in better words
    del trial, site_grads  # and the graph
    if subject.batch_size > 1:
        plans = _require_separation(subject, before)
        if not before.random:
            plans = _require_any_size(subject, replace(before, plans=plans), [])
        else:
            with subject.evaluation():
                usual = _in_evaluation(subject, plans)
                plans = plans if usual is None else _require_any_size(subject, *usual)
    plan = planned()
    if whole or plan.sites != first.sites:
        subject.require_totals(plan, None)
    elif wrong_totals is not None:
        raise wrong_totals
    return plan


def _doubt(capture: Capture, used: Sequence[SitePlan | None], ambiguous: Sequence[Site]) -> str:
    """Return why the owners of the rows may be others in the next batch, or an empty string."""
    interleaved = any(how is not None and is_interleaved(how.layout) for how in used)
    if capture.routes and (capture.origins.lost or interleaved):
        return f"data decide which rows go where, at {capture.routed_by}"
    if capture.counted_by:
        return f"{capture.counted_by} counts over several examples, which mix once a count reaches a limit"
    more = f", and {len(ambiguous) - 1} more" if len(ambiguous) > 1 else ""
    return f"more than one layout fits {ambiguous[0]}{more}" if ambiguous else ""


def _site_plans(
    trial: Trial, layouts: Sequence[Sequence[Layout]], site_grads: Sequence[Sequence[Tensor | None]]
) -> tuple[SitePlans, dict[str, str]]:
    """Return the plans that fit each site, and for the parameters of sites without one the reason."""
    plans: SitePlans = []
    reasons: dict[str, str] = {}
    for site, admitted, grads in zip(trial.capture.sites, layouts, site_grads, strict=True):
        with torch.autocast(trial.losses.device.type, enabled=False):
            fitting, reason = plan_site(site, admitted, grads, len(trial.losses))
        plans.append(fitting)
        if not fitting:
            reasons.update(dict.fromkeys(site.parameters, f"{reason} at {site}"))
    return plans, reasons


def require_separation_in_float32(subject: Subject, plan: Plan) -> None:
    """Refuse examples that mix by less than 16 bits show; the subject must run in float32."""
    with subject.perturbed():
        same_sites = len(subject.trace([]).sites) == len(plan.sites)  # else only the losses are compared
        plans: SitePlans = [[how] if how is not None and same_sites else [] for how in plan.sites]
        _require_separation(subject, subject.trace(plans))


def _first_other(sites: Sequence[Site], others: Sequence[Site], batch_size: int) -> Site | None:
    """Return the first site that differs between two runs."""
    pairs = itertools.zip_longest(signature(sites, batch_size), signature(others, batch_size))
    k = next((k for k, (one, other) in enumerate(pairs) if one != other), None)
    return None if k is None else (sites if k < len(sites) else others)[k]


def _routed(site: object) -> NotTogether:
    return NotTogether(
        f"{site}: data and parameters decide which rows go there, such as tokens to experts. At the perturbed "
        "parameters of the proof these are other rows, so their owners cannot be proven",
        SAME_WAY,
    )


def _unrepeatable(unseen: Sequence[str]) -> Refusal:
    if unseen:
        names = ", ".join(map(repr, unseen))
        return Refusal(
            f"{names}: the loss depends on it outside of the forward pass; use training.step(batch), or a "
            "per_example_loss, which see the loss too"
        )
    return Refusal(
        "two runs of the model on the same batch differ; its forward pass must depend on nothing but its inputs, its "
        "parameters and random numbers from torch, numpy or random"
    )


def _healthy(subject: Subject) -> tuple[Subject, Trial, list[list[Tensor | None]], bool]:
    """Run the evaluation; replace every example whose gradient is not finite by one whose gradient is.

    An example that is not finite says nothing about ownership: its NaNs may be anywhere.

    Returns:
        The subject on the batch that was run, the run, the gradients of the sum of its losses, and whether there is
        an example that is finite.
    """

    def only(is_finite: Tensor) -> Any:
        return batches.select(subject.batch, replacement(is_finite), subject.batch_size)

    def run(batch: Any) -> tuple[Trial, list[list[Tensor | None]], bool]:
        trial = subject.first_run(batch)
        grads = trial.gradients(torch.ones_like(trial.losses), retain_graph=True)
        return trial, grads, all(bool(grad.isfinite().all()) for site in grads for grad in site if grad is not None)

    trial, grads, all_finite = run(subject.batch)
    is_finite = trial.losses.detach().isfinite()
    if all_finite and bool(is_finite.all()):
        return subject, trial, grads, True
    if bool(is_finite.any()) and not run(only(is_finite))[2]:  # a finite loss whose gradient is not: one by one
        alone = torch.eye(subject.batch_size, dtype=torch.bool, device=is_finite.device)
        flags = [bool(flag) and run(only(row))[2] for flag, row in zip(is_finite, alone, strict=True)]
        is_finite = torch.tensor(flags, device=is_finite.device)
    if not bool(is_finite.any()):
        return subject, trial, grads, False
    batch = only(is_finite)
    trial, grads, _ = run(batch)
    return replace(subject, batch=batch), trial, grads, True


def _owners(trial: Repetition, batch_size: int) -> tuple[list[list[Layout]], list[bool]]:
    """Return, for each site, the layouts that pass the proof of ownership, and whether it had any gradient."""
    layouts = [list(candidates(site.outputs[0].shape, batch_size, site.order)) for site in trial.capture.sites]
    has_gradient = [False] * len(layouts)
    for weights in separating_subsets(batch_size, trial.losses):
        for k, grads in enumerate(trial.gradients(weights, retain_graph=True)):
            layouts[k] = [layout for layout in layouts[k] if _owns(layout, grads, weights, batch_size)]
            has_gradient[k] |= any(grad is not None and bool(grad.count_nonzero()) for grad in grads)
    return layouts, has_gradient


def _owns(layout: Layout, grads: Sequence[Tensor | None], weights: Tensor, batch_size: int) -> bool:
    """Return whether the examples whose loss was left out have no gradient in the rows attributed to them."""
    if isinstance(layout, Single):
        return True
    for grad in grads:
        if grad is None:
            continue
        if not layout.holds(grad, batch_size):
            return False
        if bool(layout.by_example(grad, batch_size)[weights == 0].count_nonzero()):
            return False
    return True


def require_owners(run: Repetition, plan: Plan) -> None:
    """Refuse a plan whose owners are not those that the gradients show at the unperturbed parameters.

    The proof runs at perturbed parameters. Where parameters decide which rows go where, other rows may go there. An
    example whose loss is not finite may leave gradients that are not finite, though its loss is left out.
    """
    batch_size = len(run.losses)
    is_finite = run.losses.detach().isfinite()
    for weights in separating_subsets(batch_size, run.losses):
        is_left_out = weights == 0
        site_grads = run.gradients(weights, retain_graph=True)
        for site, how, grads in zip(run.capture.sites, plan.sites, site_grads, strict=True):
            if how is None:
                continue
            layout = placed(how.layout, site.outputs[0].shape[0], site.order, batch_size)
            for grad in (grad for grad in grads if grad is not None):
                rows = layout.by_example(grad, batch_size)[is_left_out].flatten(1)
                if bool(((rows != 0) & (rows.isfinite() | is_finite[is_left_out, None])).any()):
                    raise _routed(site)


def _require_separation(subject: Subject, before: Traces) -> SitePlans:
    """Return the plans by which no example depends on others, even where no gradient shows it; refuse if none.

    Args:
        subject: The evaluation.
        before: Its traces on the batch as it is.
    """
    plans, current = before.plans, replace(before)
    tolerance = ROUGH_TOLERANCE if before.rough else TOLERANCE

    def difference(after: Traces, is_kept: Tensor) -> str | None:
        current.plans, where = current.compare(after, is_kept, tolerance)
        return where

    try:
        require_separation(
            lambda others: subject.trace(plans, others), difference, subject.batch, subject.batch_size, before.losses
        )
        is_kept = separating_subsets(subject.batch_size, before.losses)[0] != 0
        large = _with_large_others(subject, plans, is_kept) if subject.can_grow else None
        if large is not None and (where := difference(large, is_kept)) is not None:
            raise mixing(where)
    except Mixing:
        everyone = torch.arange(subject.batch_size, device=before.losses.device)
        for again in (subject.trace(plans), subject.trace(plans)):
            if before.compare(again, everyone, tolerance)[1] is not None:
                raise _unrepeatable(()) from None
        raise
    return current.plans


def _with_large_others(subject: Subject, plans: SitePlans, is_kept: Tensor) -> Traces | None:
    """Return the traces with large inputs in the other examples, which show mixing by a thousandth, too.

    None if the model refuses such large ones.
    """
    try:
        with subject.enlarged(torch.where(is_kept, 1.0, LARGE)):
            return subject.trace(plans)
    except Refusal:
        return None


def _require_any_size(subject: Subject, usual: Traces, drawn: list[Tensor]) -> SitePlans:
    """Refuse a model whose examples depend on the batch size, such as a loss divided by it.

    Batches of other sizes run on other kernels, which round differently. Where that makes another element the largest
    of its pool, a gradient takes another path. So a few examples may differ; a division by the size changes them all.
    If many do, float64 tells the one from the other: it hardly rounds.

    Args:
        subject: The evaluation.
        usual: Its traces on the batch as it is.
        drawn: The random numbers that it drew for them.
    """
    try:
        return _same_at_another_size(subject, usual, drawn)
    except Mixing as refusal:
        try:
            with subject.in_float64(subject) as precise:
                return _same_at_another_size(precise, *_with_same_draws(precise, usual.plans))
        except (Refusal, torch.OutOfMemoryError) as error:
            raise refusal from error


def _same_at_another_size(subject: Subject, usual: Traces, drawn: list[Tensor]) -> SitePlans:
    batch_size, device = subject.batch_size, usual.losses.device
    size = batch_size // 2 if batch_size > 3 else batch_size + 1
    index = torch.arange(size, device=device) % batch_size
    few = batches.select(subject.batch, index, batch_size)
    with SameDraws(size, device, drawn) if drawn else nullcontext():
        other = subject.trace(usual.plans, few, size)
    if other.random and not drawn:
        with SameDraws(size, device, drawn):
            other = subject.trace(usual.plans, few, size)
    if other.random:
        return usual.plans  # random numbers that cannot be replayed, such as those of a fused dropout
    common = index[: min(size, batch_size)]
    tolerance = 0.2 if usual.rough else 1e-2
    plans, where = usual.compare(other, common, tolerance, allowed=len(common) // 20)
    if where is not None:
        raise Mixing(
            f"an example's gradient depends on the batch size, {where}: such as a loss divided by the batch size or "
            "its number of tokens. Reduce over each example only; the clipped sum is divided by the expected batch "
            "size later"
        )
    return plans


def _with_same_draws(subject: Subject, plans: SitePlans) -> tuple[Traces, list[Tensor]]:
    """Trace the evaluation with the same random numbers for every example; return these, too."""
    with SameDraws(subject.batch_size, subject.device) as draws:
        return subject.trace(plans), draws.drawn


def _in_evaluation(subject: Subject, plans: SitePlans) -> tuple[Traces, list[Tensor]] | None:
    """Trace the evaluation where the model is in evaluation mode, in which dropout draws nothing; None if it fails."""
    try:
        return _with_same_draws(subject, plans)
    except Refusal:  # such as a model that returns something else in evaluation mode
        return None
