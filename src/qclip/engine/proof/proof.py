"""Proofs: what the engine relies on, tested on the batch at hand instead of guessed from sizes.

At the first batch of each kind (and a few later ones) the evaluation is run again, by repeatable kernels and with
everything it reads moved a little (`perturbation`), and four things are tested:

- *ownership*: with some examples' losses left out, the gradient at every site must be exactly zero in the rows
  attributed to them. A few rounds tell any two apart (`halves`): 4 for 6 examples, 7 for 32, 11 for 256;
- *separation*: with those examples replaced by others, the rest must keep their losses, their values at every site and
  their gradients there, also where the inputs of the others are a thousand times as large;
- *size*: in a batch of another size the examples must give the same values and gradients;
- *replay*: a site without a rule, run again example by example, must give the output it gave.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from qclip._validate import Refusal
from qclip.engine import batch as batches
from qclip.engine.capture.capture import Capture
from qclip.engine.gradients.layouts import Layout, Single, candidates
from qclip.engine.gradients.plan import Plan, SitePlan, plan_site, signature
from qclip.engine.gradients.sites import Site, output_gradients
from qclip.engine.randomness import SameDraws

_NOTED: Final = 2**24
"""How many numbers are looked at at once."""
TOLERANCE: Final = 1e-4
"""By how much of itself a value may differ in a proof: examples that mix by less are not seen to."""
ROUGH_TOLERANCE: Final = 1e-2
"""The same in 16 bits."""
PROOFS: Final = frozenset({0, 1, *(16**k - 1 for k in range(1, 12))})
"""After how many uses a kind of forward pass is proven: at the 1st, 2nd, 16th, 256th... of them."""


@dataclass(eq=False)
class Repetition:
    """One more run of the evaluation, as a proof sees it."""

    capture: Capture
    losses: Tensor
    random: bool
    """Whether it drew random numbers."""

    def gradients(self, weights: Tensor, *, retain_graph: bool = False) -> list[list[Tensor | None]]:
        """Of the weighted losses, at every output of every site."""
        sites, parameters = self.capture.sites, self.capture.parameters
        return output_gradients(self.losses, weights, sites, parameters, retain_graph=retain_graph)


class Rerun(Protocol):
    """Run the evaluation again, on this batch or one like it, with the same random numbers."""

    def __call__(
        self,
        batch: Any,
        count: int,
        *,
        keep_values: bool = ...,
        observe: Callable[[int, Tensor], None] | None = ...,
    ) -> Repetition:
        """``observe`` is shown every site's output on the way."""
        ...


class Mixing(Refusal):
    """Examples are not independent of each other."""


@dataclass(frozen=True)
class Modes:
    """Ways to run the evaluation in a proof, each for as long as its context lasts."""

    perturbed: Callable[[], AbstractContextManager[None]]
    """With all that it reads moved a little."""
    evaluation: Callable[[], AbstractContextManager[None]]
    """With the model in evaluation mode."""
    enlarged: Callable[[Tensor], AbstractContextManager[list[bool]]]
    """With the model's inputs multiplied by these factors, one for each example; notes whether there were any."""


class NotSpreading(Exception):
    """These calls, taken for sites because they seem to give rows to examples, do not."""

    def __init__(self, ordinals: frozenset[int]) -> None:
        super().__init__(ordinals)
        self.ordinals = ordinals


def prove(
    capture: Capture,
    unseen: Sequence[str],
    reached: Sequence[bool],
    batch: Any,
    count: int,
    rerun: Rerun,
    modes: "Modes",
) -> Plan:
    """A plan for the sites of this capture, or a refusal.

    ``unseen`` are parameters that the loss depends on outside of the sites, ``reached`` says which sites it depends on.
    """
    try:
        with modes.perturbed():
            return _proven(capture, unseen, reached, batch, count, rerun, modes)
    except _OtherSites as other:
        again = [_first_other(capture.sites, rerun(batch, count).capture.sites, count) for _ in range(2)]
        raise (_routed(other.site) if again == [None, None] else _unrepeatable(unseen)) from None


class _OtherSites(Exception):
    """At perturbed parameters the evaluation does something else, from this site on."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.site = site


def _proven(
    capture: Capture,
    unseen: Sequence[str],
    reached: Sequence[bool],
    batch: Any,
    count: int,
    rerun: Rerun,
    modes: "Modes",
) -> Plan:
    reasons = dict.fromkeys(unseen, "the loss depends on it by a way that no torch function shows")
    batch, healthy = _healthy(rerun, batch, count)
    trial = rerun(batch, count, keep_values=True)
    other = _first_other(capture.sites, trial.capture.sites, count)
    if other is not None:
        raise _OtherSites(other)
    layouts, shown = _owners(trial, count)
    failed = [site.broadcast_index for site, each in zip(trial.capture.sites, layouts, strict=True) if not each]
    if any(ordinal is not None for ordinal in failed):
        raise NotSpreading(frozenset(ordinal for ordinal in failed if ordinal is not None))
    plans: Plans = []
    grads = trial.gradients(torch.ones_like(trial.losses))
    for site, admitted, found in zip(trial.capture.sites, layouts, grads, strict=True):
        with torch.autocast(trial.losses.device.type, enabled=False):
            fitting, reason = plan_site(site, admitted, found, count)
        plans.append(fitting)
        if not fitting:
            reasons.update(dict.fromkeys(site.parameters, f"{reason} at {site}"))
    random, device = trial.random, trial.losses.device
    del trial, grads
    if count > 1:
        plans = _require_separation(rerun, batch, count, plans, modes)
        if not random:
            plans = _require_any_size(rerun, batch, count, plans, device)
        elif _runs_in_evaluation(rerun, batch, count, modes):
            with modes.evaluation():
                plans = _require_any_size(rerun, batch, count, plans, device)
    whole = frozenset(reasons)
    sites = capture.sites
    used = tuple(
        None if whole.issuperset(site.parameters) else fitting[0] for fitting, site in zip(plans, sites, strict=True)
    )
    certain = all(
        (seen and len(each) == 1) or not used for seen, each, used in zip(shown, layouts, reached, strict=True)
    )
    return Plan(used, whole, reasons, proven=healthy and certain and not capture.routes)


def require_separation_in_float32(rerun: Rerun, batch: Any, count: int, plan: Plan, modes: Modes) -> None:
    """For what is computed in 16 bits, with a batch that is not: refuse examples that mix by less than those show."""
    with modes.perturbed():
        sites = rerun(batch, count).capture.sites
        known = len(sites) == len(plan.sites)  # else the losses alone are compared
        plans = [[how] if how is not None and known else [] for how in plan.sites]
        _require_separation(rerun, batch, count, plans, modes)


def _first_other(sites: Sequence[Site], others: Sequence[Site], count: int) -> Site | None:
    """The first site that is not the same in both."""
    pairs = itertools.zip_longest(signature(sites, count), signature(others, count))
    k = next((k for k, (mine, its) in enumerate(pairs) if mine != its), None)
    return None if k is None else (sites if k < len(sites) else others)[k]


SAME_WAY: Final = (
    "Let all rows go through the same functions, with zero weights where they are not wanted; models of transformers "
    'with experts do so after model.set_experts_implementation("batched_mm")'
)
"""What to do where data route rows."""


def _routed(site: Site) -> Refusal:
    return Refusal(
        f"{site}: data and parameters decide which rows go there, such as tokens to experts. At the slightly other "
        f"parameters of the proof these are other rows, so whose rows they are cannot be proven. {SAME_WAY}"
    )


def _unrepeatable(unseen: Sequence[str]) -> Refusal:
    if unseen:
        names = ", ".join(map(repr, unseen))
        return Refusal(
            f"{names}: the loss depends on it outside of the forward pass; use training.step(batch), or a "
            "per_example_loss, which see the loss too"
        )
    return Refusal(
        "the model did not do the same twice on the same batch; its forward pass must depend on nothing but its "
        "inputs, its parameters and random numbers from torch, numpy or random"
    )


def _healthy(rerun: Rerun, batch: Any, batch_size: int) -> tuple[Any, bool]:
    """The batch with every example whose gradient is not finite replaced by one whose is; whether there is one.

    Such an example tells nothing about who owns what: its NaNs may be anywhere.
    """

    def only(good: Tensor) -> Any:
        return batches.select(batch, replacement(good), batch_size)

    def is_finite(other: Any) -> bool:
        trial = rerun(other, batch_size)
        grads = trial.gradients(torch.ones_like(trial.losses))
        return all(bool(grad.isfinite().all()) for each in grads for grad in each if grad is not None)

    good = rerun(batch, batch_size).losses.detach().isfinite()
    if bool(good.any()) and not is_finite(only(good)):  # a finite loss with a gradient that is not: one by one
        alone = torch.eye(batch_size, dtype=torch.bool, device=good.device)
        good = torch.tensor(
            [bool(g) and is_finite(only(row)) for g, row in zip(good, alone, strict=True)], device=good.device
        )
    if not bool(good.any()):
        return batch, False
    return batch if bool(good.all()) else only(good), True


def _owners(trial: Repetition, batch_size: int) -> tuple[list[list[Layout]], list[bool]]:
    """For each site the layouts that pass the proof, and whether it showed any gradient."""
    layouts = [list(candidates(site.outputs[0].shape, batch_size)) for site in trial.capture.sites]
    shown = [False] * len(layouts)
    for half in halves(batch_size, trial.losses):
        for k, grads in enumerate(trial.gradients(half, retain_graph=True)):
            layouts[k] = [layout for layout in layouts[k] if _owns(layout, grads, half, batch_size)]
            shown[k] |= any(grad is not None and bool(grad.count_nonzero()) for grad in grads)
    return layouts, shown


def halves(batch_size: int, losses: Tensor) -> list[Tensor]:
    """Halves of the batch as loss weights, such that for any two examples some half has the one and not the other.

    Each example is in another choice of half of the halves: no choice contains another, and no fewer halves would do.
    """
    if batch_size == 1:
        return [torch.ones_like(losses).detach()]
    count = next(k for k in itertools.count(2) if math.comb(k, k // 2) >= batch_size)
    choices = list(itertools.islice(itertools.combinations(range(count), count // 2), batch_size))
    weights = torch.zeros(batch_size, count, dtype=losses.dtype).scatter_(1, torch.tensor(choices), 1)
    return list(weights.to(losses.device).T)


def _owns(layout: Layout, grads: Sequence[Tensor | None], half: Tensor, batch_size: int) -> bool:
    """Whether the examples whose loss was left out have no gradient in the rows attributed to them."""
    if isinstance(layout, Single):
        return True
    for grad in grads:
        if grad is None:
            continue
        if not layout.holds(grad, batch_size):
            return False
        if bool(layout.by_example(grad, batch_size)[half == 0].count_nonzero()):
            return False
    return True


def require_owners(run: Repetition, plan: Plan) -> None:
    """Refuse a plan by which rows belong to other examples than the gradients say at the parameters as they are.

    The proof is made at others. Where these decide which rows go where, other rows may have gone there. An example
    whose loss is not finite may leave gradients behind that are not finite, though it is left out.
    """
    count = len(run.losses)
    finite = run.losses.detach().isfinite()
    for half in halves(count, run.losses):
        out = half == 0
        found = run.gradients(half, retain_graph=True)
        for site, how, grads in zip(run.capture.sites, plan.sites, found, strict=True):
            if how is None:
                continue
            for grad in (grad for grad in grads if grad is not None):
                rows = how.layout.by_example(grad, count)[out].flatten(1)
                if bool(((rows != 0) & (rows.isfinite() | finite[out, None])).any()):
                    raise _routed(site)


Plans = list[list[SitePlan]]
"""For each site those that fit: none, or more than one where no gradient tells its layouts apart."""
Notes = dict[tuple[int, Layout], Tensor]
"""By site and layout."""


@dataclass(eq=False)
class Traces:
    """What each example left at every site: random projections and sizes of its values and gradients.

    A projection on a Gaussian direction moves by as much as what is projected, so few numbers stand for many.
    """

    plans: Plans
    count: int
    values: Notes = field(default_factory=dict)
    grads: Notes = field(default_factory=dict)
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    sites: list[str] = field(default_factory=list)
    random: bool = False
    rough: bool = False
    """Whether something was rounded to 16 bits on the way."""

    @staticmethod
    def of(rerun: Rerun, batch: Any, count: int, plans: Plans) -> "Traces":
        """Run the evaluation and trace it."""
        traces = Traces(plans, count)
        trial = rerun(batch, count, observe=lambda k, value: traces._note(traces.values, k, value))
        traces.losses, traces.random = trial.losses.detach(), trial.random
        traces.rough |= torch.is_autocast_enabled(traces.losses.device.type) or traces.losses.dtype == torch.bfloat16
        traces.sites = [str(site) for site in trial.capture.sites]
        for k, grads in enumerate(trial.gradients(torch.ones_like(traces.losses))):
            if grads[0] is not None:
                traces._note(traces.grads, k, grads[0])
        return traces

    def _note(self, notes: Notes, k: int, x: Tensor) -> None:
        for plan in self.plans[k] if k < len(self.plans) else ():
            if plan.layout.holds(x, self.count) and (x.is_floating_point() or x.is_complex()):
                self.rough |= x.dtype in (torch.bfloat16, torch.float16)
                notes[k, plan.layout] = _projected(plan.layout.by_example(x.detach(), self.count))

    def agreeing(
        self, other: "Traces", mine: Tensor, its: Tensor, tolerance: float, *, allowed: int = 0
    ) -> tuple[Plans, str | None]:
        """The plans by which all but ``allowed`` of the examples ``mine`` are the other's ``its`` at their sites.

        And, in words, where they are not by any plan, or None. Values differ from where they were mixed onward,
        gradients from there backward.
        """
        plans = [list(fitting) for fitting in self.plans]
        if self.sites == other.sites:
            for kind, words in (("values", "at or before"), ("grads", "at or after")):
                here, there = getattr(self, kind), getattr(other, kind)
                common = here.keys() & there.keys()
                known = [[plan for plan in fitting if (k, plan.layout) in common] for k, fitting in enumerate(plans)]
                order = [k for k, fitting in enumerate(known) if fitting][:: -1 if kind == "grads" else 1]
                largest = max((float(here[k, known[k][0].layout][mine, 2].max()) for k in order), default=0.0)
                for k in order:
                    plans[k] = []
                    for plan in known[k]:
                        a, b = here[k, plan.layout][mine], there[k, plan.layout][its]
                        room = tolerance * (a[:, 2:] + b[:, 2:]) + 1e-3 * tolerance * largest
                        if int(((a - b).abs() > room).any(1).sum()) <= allowed:
                            plans[k].append(plan)
                    if not plans[k]:
                        return plans, f"{words} {self.sites[k]}"
        a, b = self.losses[mine].double(), other.losses[its].double()
        if int(((a - b).abs() > tolerance * (a.abs() + b.abs()) + 1e-12).sum()) <= allowed:
            return plans, None
        unknown = [name for name, fitting in zip(self.sites, self.plans, strict=False) if not fitting]
        return plans, f"at or after {unknown[-1]}" if unknown else "in the loss"


def _projected(rows: Tensor) -> Tensor:
    """[B, 3]: two projections of each example's part, and its size."""
    rows = rows.reshape(len(rows), -1)
    rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    direction = torch.Generator(rows.device).manual_seed(rows.shape[1])
    with torch._C.DisableTorchFunction():  # `SameDraws` would take as many rows as examples for theirs
        onto = torch.randn(rows.shape[1], 2, generator=direction, dtype=torch.float64, device=rows.device)
    some = rows.split(max(1, _NOTED // max(1, rows.shape[1])))  # in float64 all of them may be too large
    return torch.cat([torch.cat([x @ onto, x.norm(dim=1, keepdim=True)], 1) for x in map(Tensor.double, some)])


_MIX = (
    "Per-example clipping needs a model in which they do not: replace batch statistics (BatchNorm by GroupNorm), "
    "attention or contrast across the batch; inputs that are not one row per example must not have the batch's length "
    "as first dimension"
)


LARGE: Final = 1000.0
"""How much larger the inputs of replaced examples are in the last round."""


def _require_separation(rerun: Rerun, batch: Any, count: int, plans: Plans, modes: Modes) -> Plans:
    """The plans by which no example depends on the others, even where no gradient shows it, or a refusal."""
    before = Traces.of(rerun, batch, count, plans)
    everyone = torch.arange(count, device=before.losses.device)
    again = Traces.of(rerun, batch, count, plans)
    tolerance = ROUGH_TOLERANCE if before.rough else TOLERANCE
    if before.agreeing(again, everyone, everyone, tolerance)[1] is not None:
        raise _unrepeatable(())

    def require_agreement(after: Traces, stay: Tensor) -> None:
        before.plans, where = before.agreeing(after, stay, stay, tolerance)
        if where is not None:
            raise Mixing(f"examples mix: replacing some of them changed others, {where}. {_MIX}")

    rounds = halves(count, before.losses)
    for half in rounds:
        stay = half != 0
        others = batches.select(batch, replacement(stay), count)
        require_agreement(Traces.of(rerun, others, count, plans), stay)
    large = _with_large_others(rerun, batch, count, plans, stay := rounds[0] != 0, modes)
    if large is not None:
        require_agreement(large, stay)
    return before.plans


def _with_large_others(rerun: Rerun, batch: Any, count: int, plans: Plans, stay: Tensor, modes: Modes) -> Traces | None:
    """The traces where those that do not stay have large inputs: what is mixed by a thousandth shows, too.

    None where the model takes no floating-point numbers, or none that are so large.
    """
    try:
        with modes.enlarged(torch.where(stay, 1.0, LARGE)) as applied:
            traces = Traces.of(rerun, batch, count, plans)
    except Refusal:
        return None
    return traces if any(applied) else None


def _require_any_size(rerun: Rerun, batch: Any, count: int, plans: Plans, device: torch.device) -> Plans:
    """Refuse a model that treats an example in another way when there are fewer: a loss divided by the batch's size.

    Other sizes are computed by other kernels, which round in another way: where that makes another element the largest
    of its pool, a gradient takes another path. So a few examples may differ; a division by the size changes them all.
    """
    with SameDraws(count, device) as first:
        usual = Traces.of(rerun, batch, count, plans)
    size = count // 2 if count > 3 else count + 1
    index = torch.arange(size, device=usual.losses.device) % count
    with SameDraws(size, device, first.drawn):
        other = Traces.of(rerun, batches.select(batch, index, count), size, plans)
    if other.random:
        return plans  # random numbers that cannot be held still, such as those of a fused dropout
    both = index[: min(size, count)]
    tolerance = 0.2 if usual.rough else 1e-2
    plans, where = usual.agreeing(other, both, both, tolerance, allowed=len(both) // 20)
    if where is not None:
        raise Mixing(
            f"an example's gradient depends on how many others there are, {where}: such as a loss divided "
            "by the batch's size or its number of tokens. Reduce over each example only; the clipped sum is divided by "
            "the expected batch size later"
        )
    return plans


def _runs_in_evaluation(rerun: Rerun, batch: Any, count: int, modes: Modes) -> bool:
    """Whether the evaluation can be made with the model in evaluation mode, where dropout draws nothing."""
    try:
        with modes.evaluation():
            rerun(batch, count)
    except Refusal:  # such as a model that returns something else then
        return False
    return True


def replacement(stay: Tensor) -> Tensor:
    """The indices of a batch in which copies of the examples that stay replace the others."""
    index = torch.arange(len(stay), device=stay.device)
    index[~stay] = index[stay].repeat(len(stay))[: int((~stay).sum())]
    return index
