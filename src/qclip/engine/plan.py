"""A plan: for every site of a forward pass, who owns which rows and how its gradients are computed. Made by proof.

At the first batch of each kind the forward pass is run again at perturbed parameters (a layer that starts at zero
would hide
everything behind it), and three things are tested:

- *ownership*: with some examples' losses left out, the gradient at every site must be exactly zero in the rows
  attributed to them;
- *values*: with those examples replaced by others, the remaining losses must not move;
- *replay*: a site without a rule, run again example by example, must give the output it gave.

The examples left out are those with a given bit in their index, and those without, so any two are told apart in
log2(B) rounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qclip.engine import batch as batches
from qclip.engine import fallback
from qclip.engine.capture import Capture, Site, output_gradients
from qclip.engine.convolutions import Windows
from qclip.engine.forms import Dense, Outer, Rows
from qclip.engine.layouts import Layout, Single, candidates
from qclip.engine.refusal import Refusal
from qclip.engine.rules.registry import Gradient


@dataclass(frozen=True)
class SitePlan:
    """How one site is dealt with."""

    layout: Layout
    by_rule: bool
    dims: int | None
    """Fallback only: the number of dimensions of tensors that hold examples; None for any."""


@dataclass(frozen=True)
class Plan:
    """How every site is dealt with; None where its parameters are left to the whole-model fallback."""

    sites: tuple[SitePlan | None, ...]
    whole: frozenset[str]
    """Parameters left to the whole-model fallback."""
    reasons: Mapping[str, str]
    """Why, by parameter."""
    proven: bool
    """Whether every site showed a gradient, so that the proof was not empty."""

    @property
    def why(self) -> str:
        """The reasons in one line."""
        return "; ".join(sorted(f"{name!r}: {reason}" for name, reason in self.reasons.items()))


def gradient_forms(site: Site, plan: SitePlan, grads: Sequence[Tensor], batch_size: int) -> dict[int, Gradient]:
    """Each source's per-example gradient at this site, by the id of its tensor in the call."""
    if plan.by_rule:
        return _rule_forms(site, plan.layout, grads[0], batch_size)
    carrying = fallback.carriers(site.call, plan.layout, batch_size, plan.dims)
    found = fallback.site_gradients(site, plan.layout, grads, carrying, batch_size)
    return {key: Dense(grad) for key, grad in found.items()}


def _rule_forms(site: Site, layout: Layout, grad: Tensor, batch_size: int) -> dict[int, Gradient]:
    assert site.entry is not None
    call, entry, dims = site.call, site.entry, grad.dim()
    if any(x.is_complex() for x, _ in call.versions):
        return {}  # rules are written for real numbers

    def by_example(x: Any) -> Any:
        if isinstance(x, Tensor) and id(x) not in call.fixed:
            if entry.broadcasts and x.dim() < dims:
                x = x[(None,) * (dims - x.dim())]
            return layout.by_example(x, batch_size) if layout.holds(x, batch_size) else x
        return type(x)(map(by_example, x)) if isinstance(x, (tuple, list)) else x

    args = tuple(map(by_example, call.args))
    kwargs = {key: by_example(x) for key, x in call.kwargs.items()}
    with torch.no_grad():
        gradients = entry.rule(layout.by_example(grad, batch_size), *args, **kwargs)
    bound = entry.signature.bind(grad, *args, **kwargs).arguments
    return {id(bound[name]): gradient for name, gradient in gradients.items() if id(bound.get(name)) in call.sources}


class Recapture(Protocol):
    """Run the evaluation again, on this batch or one like it, with the same random numbers."""

    def __call__(self, batch: Any, *, keep_values: bool = ...) -> tuple[Capture, Tensor]:
        """The capture and its losses."""
        ...


def make_plan(
    capture: Capture, unseen: Sequence[str], batch: Any, batch_size: int, recapture: Recapture, live: Tensor | None
) -> Plan:
    """Prove who owns which rows at the sites of this capture, or refuse.

    ``live`` are the losses of the capture itself, where `recapture` can only come close to them: ownership is then
    proven on their graph too.
    """
    reasons = dict.fromkeys(unseen, "the loss depends on it by a way that no torch function shows")
    with perturbed(capture.parameters.values()):
        batch, healthy = _healthy(recapture, batch, batch_size)
        again, losses = recapture(batch)
        if signature(again.sites) != signature(capture.sites):
            raise Refusal(
                "the model did not do the same twice on the same batch; its forward pass must depend on nothing but "
                "its inputs, its parameters and torch's random numbers"
            )
        layouts, shown = _owners(again.sites, losses, batch_size)
        if live is not None and healthy:
            live_layouts, _ = _owners(capture.sites, live, batch_size)
            layouts = [[x for x in each if x in alive] for each, alive in zip(layouts, live_layouts, strict=True)]
        plans = []
        grads = output_gradients(losses, torch.ones_like(losses), again.sites, retain_graph=False)
        for site, admitted, found in zip(again.sites, layouts, grads, strict=True):
            with torch.autocast(losses.device.type, enabled=False):
                plan, reason = _plan_site(site, admitted, found, batch_size)
            plans.append(plan)
            if plan is None:
                reasons.update(dict.fromkeys(site.parameters, f"{reason} at {site}"))
        del again, losses, grads
        _require_same_values(recapture, batch, batch_size, plans)
    whole = frozenset(reasons)
    used = tuple(
        None if whole.issuperset(site.parameters) else plan for plan, site in zip(plans, capture.sites, strict=True)
    )
    return Plan(used, whole, reasons, proven=healthy and all(shown))


def _healthy(recapture: Recapture, batch: Any, batch_size: int) -> tuple[Any, bool]:
    """The batch with every example whose gradient is not finite replaced by one whose is; whether there is one.

    Such an example tells nothing about who owns what: its NaNs may be anywhere.
    """

    def only(good: Tensor) -> Any:
        index = torch.arange(batch_size, device=good.device)
        index[~good] = index[good].repeat(batch_size)[: int((~good).sum())]
        return batches.select(batch, index, batch_size)

    def is_finite(other: Any) -> bool:
        again, losses = recapture(other, keep_values=False)
        grads = output_gradients(losses, torch.ones_like(losses), again.sites, retain_graph=False)
        return all(bool(grad.isfinite().all()) for each in grads for grad in each if grad is not None)

    _, losses = recapture(batch, keep_values=False)
    good = losses.detach().isfinite()
    if bool(good.any()) and not is_finite(only(good)):  # a finite loss with a gradient that is not: one by one
        alone = torch.eye(batch_size, dtype=torch.bool, device=good.device)
        good = torch.tensor(
            [bool(g) and is_finite(only(row)) for g, row in zip(good, alone, strict=True)], device=good.device
        )
    if not bool(good.any()):
        return batch, False
    return batch if bool(good.all()) else only(good), True


def _owners(sites: Sequence[Site], losses: Tensor, batch_size: int) -> tuple[list[list[Layout]], list[bool]]:
    """For each site the layouts that pass the proof, and whether it showed any gradient."""
    layouts = [list(candidates(site.outputs[0].shape, batch_size)) for site in sites]
    shown = [False] * len(sites)
    for half in _halves(batch_size, losses):
        for k, grads in enumerate(output_gradients(losses, half, sites, retain_graph=True)):
            layouts[k] = [layout for layout in layouts[k] if _owns(layout, grads, half, batch_size)]
            shown[k] |= any(grad is not None and bool(grad.count_nonzero()) for grad in grads)
    return layouts, shown


def signature(sites: Sequence[Site]) -> tuple[Any, ...]:
    """What two forward passes must have in common to share a plan."""
    return tuple(
        (site.call.function, site.cast_to, tuple((o.shape, o.dtype) for o in site.outputs), tuple(site.parameters))
        for site in sites
    )


@contextmanager
def perturbed(parameters: Any) -> Iterator[None]:
    """The parameters moved a little at random, and put back bit by bit."""
    parameters = list(parameters)
    saved = [p.detach().clone() for p in parameters]
    generators: dict[torch.device, torch.Generator] = {}
    try:
        for p in parameters:
            generator = generators.setdefault(p.device, torch.Generator(p.device).manual_seed(0))
            noise = torch.randn(p.shape, generator=generator, device=p.device, dtype=torch.float32)
            p.data.add_((0.05 * (p.detach().float().square().mean().sqrt() + 0.1) * noise).to(p.dtype))
        yield
    finally:
        for p, before in zip(parameters, saved, strict=True):
            p.data.copy_(before)


def _halves(batch_size: int, losses: Tensor) -> list[Tensor]:
    """Halves of the batch as loss weights, such that for any two examples some half has the one and not the other."""
    if batch_size == 1:
        return [torch.ones_like(losses).detach()]
    index = torch.arange(batch_size, device=losses.device)
    bits = [(index >> k) & 1 for k in range((batch_size - 1).bit_length())]
    return [half.to(losses.dtype) for bit in bits for half in (bit, 1 - bit)]


def _plan_site(
    site: Site, layouts: Sequence[Layout], grads: Sequence[Tensor | None], batch_size: int
) -> tuple[SitePlan | None, str]:
    """A plan, or why there is none."""
    if not layouts:
        return None, "the rows of its output cannot be attributed to examples"
    assert site.value is not None
    filled = [
        grad if grad is not None else torch.zeros(output.shape, dtype=output.dtype, device=site.value.device)
        for grad, output in zip(grads, site.outputs, strict=True)
    ]
    for layout in layouts:
        for by_rule, dims in _ways(site):
            plan = SitePlan(layout, by_rule, dims)
            try:
                if by_rule or _replays(site, plan, batch_size):
                    forms = gradient_forms(site, plan, filled, batch_size)
                    if all(
                        _fits(forms.get(key), source.shape, batch_size) for key, source in site.call.sources.items()
                    ):
                        return plan, ""
            except NotImplementedError as error:
                raise Refusal(f"{site}: {error}") from error
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
                continue  # this way does not fit the call; the next one may
    return None, "it has no rule, and running it again example by example does not give what it gave"


def _replays(site: Site, plan: SitePlan, batch_size: int) -> bool:
    carrying = fallback.carriers(site.call, plan.layout, batch_size, plan.dims)
    return fallback.replay_agrees(site, plan.layout, carrying, batch_size)


def _ways(site: Site) -> Iterator[tuple[bool, int | None]]:
    if site.entry is not None and len(site.outputs) == 1:
        yield True, None
    yield False, len(site.outputs[0].shape)
    yield False, None


def _fits(gradient: Gradient | None, shape: torch.Size, batch_size: int) -> bool:
    if gradient is None:
        return False
    form = gradient() if callable(gradient) else gradient
    if isinstance(form, Dense):
        return form.grads.shape == (batch_size, *shape)
    return isinstance(form, (Outer, Windows, Rows)) and form.shape == shape


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


def _require_same_values(recapture: Recapture, batch: Any, batch_size: int, plans: Sequence[SitePlan | None]) -> None:
    """Refuse a model in which one example's loss depends on the others, even where no gradient shows it."""
    if batch_size == 1:
        return
    first, before = recapture(batch)
    for half in _halves(batch_size, before):
        stay, index = _replacement(half)
        second, after = recapture(batches.select(batch, index, batch_size))
        if fallback.close(before.detach()[stay], after.detach()[stay]):
            continue
        where = _first_difference(first, second, stay, batch_size, plans)
        raise Refusal(
            f"examples mix: replacing some examples changed the losses of others, {where}. Per-example clipping needs "
            "a model in which they do not: replace batch statistics (BatchNorm by GroupNorm), attention or contrast "
            "across the batch; inputs that are not one row per example must not have the batch's length as first "
            "dimension"
        )


def surrogate_losses(returned: Any, batch_size: int) -> Tensor:
    """One number per example from all that a model returned, to stand for a loss that is not known."""
    found = [x for x in batches.tensors(returned) if batches.is_example_wise(x, batch_size) and x.requires_grad]
    if not found:
        raise Refusal("the model returns no tensor with one row per example that depends on its parameters")
    return torch.stack(
        [x.float().flatten(1).square().mean(1) if x.dim() > 1 else x.float().square() for x in found]
    ).sum(0)


def require_separate_losses(loss: Any, outputs: Any, targets: Any, losses: Tensor, batch_size: int) -> None:
    """Refuse a loss function that gives an example another loss when the others change."""
    if batch_size == 1 or losses.shape != (batch_size,):
        return
    for half in _halves(batch_size, losses):
        stay, index = _replacement(half)
        with torch.no_grad():
            other = loss(*batches.select((outputs, targets), index, batch_size))
        if not fallback.close(losses.detach()[stay], other[stay]):
            raise Refusal("the loss of one example depends on others; the loss must treat every example by itself")


def _replacement(half: Tensor) -> tuple[Tensor, Tensor]:
    """Which examples stay, and a batch in which copies of them replace the others."""
    stay = half != 0
    index = torch.arange(len(half), device=half.device)
    index[~stay] = index[stay].repeat(len(half))[: int((~stay).sum())]
    return stay, index


def _first_difference(a: Capture, b: Capture, stay: Tensor, batch_size: int, plans: Sequence[SitePlan | None]) -> str:
    for one, other, plan in zip(a.sites, b.sites, plans, strict=False):
        assert one.value is not None
        assert other.value is not None
        layout = plan.layout if plan is not None else next(candidates(one.value.shape, batch_size), None)
        if layout is None or one.value.shape != other.value.shape:
            return f"at or before {one}"
        values = [layout.by_example(value, batch_size)[stay] for value in (one.value, other.value)]
        if not fallback.close(*values):
            return f"at or before {one}"
    return "after the last layer"
