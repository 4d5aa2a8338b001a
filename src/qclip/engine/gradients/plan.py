"""Plans: for every site of a forward pass, the layout of its examples and how its gradients are computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from qclip._validate import Refusal
from qclip.engine.gradients import fallback
from qclip.engine.gradients.convolutions import Windows
from qclip.engine.gradients.forms import Dense, Outer, Rows
from qclip.engine.gradients.layouts import Layout, relative
from qclip.engine.gradients.rules.registry import Gradient
from qclip.engine.gradients.sites import Site

_FEW: Final = 3
"""For how many parameters a message gives the reason."""


@dataclass(frozen=True)
class SitePlan:
    """How the gradients of one site are computed."""

    layout: Layout
    by_rule: bool
    dims: int | None
    """For the fallback: the number of dimensions of tensors that hold examples; None for any."""
    name: str
    """For messages."""


@dataclass(frozen=True)
class OneByOne:
    """How examples are run one at a time."""

    in_copies: bool
    """Whether an example runs in a batch of its own copies, for the random numbers of its row; else it runs alone."""
    own_draws: bool
    """Whether its random numbers are others than in the batch, where the rows of others decide which ones it draws."""


@dataclass(frozen=True)
class Plan:
    """How the gradients of every site are computed."""

    sites: tuple[SitePlan | None, ...]
    """None where the site's parameters are left to the whole-model fallback."""
    whole: frozenset[str]
    """Parameters left to the whole-model fallback."""
    reasons: Mapping[str, str]
    """Why they are, by parameter."""
    doubt: str = ""
    """Why the proof does not hold for later batches of the kind, such as routing by data; empty if it does."""
    silent: frozenset[int] = frozenset()
    """Sites whose gradient was zero, so that it did not show their rows: the proof holds as long as it is."""
    moved: bool = False
    """Whether buffers and frozen parameters were perturbed in the proof: it then holds while they drift."""
    reads_values: bool = True
    """Whether gradients are computed from values of parameters after the backward pass; known for sharded models."""
    one_by_one: OneByOne | None = None
    """Set if the gradients of all parameters come from running one example at a time; the sites are not used."""

    @property
    def proven(self) -> bool:
        """Whether the proof holds for later batches of the kind."""
        return not self.doubt

    @property
    def why(self) -> str:
        """The reasons in one line."""
        if self.one_by_one is not None:
            return next(iter(self.reasons.values()))
        reasons = sorted(f"{name!r}: {reason}" for name, reason in self.reasons.items())
        more = f"; and {len(reasons) - _FEW} more parameters" if len(reasons) > _FEW else ""
        return "; ".join(reasons[:_FEW]) + more


def gradient_forms(site: Site, plan: SitePlan, grads: Sequence[Tensor], batch_size: int) -> dict[int, Gradient]:
    """Return each source's per-example gradient at this site, by the id of the source's tensor in the call.

    Args:
        site: The site.
        plan: How its gradients are computed.
        grads: The gradients of its outputs.
        batch_size: B.
    """
    layout = site.placed(plan.layout, batch_size)
    if plan.by_rule:
        return _rule_forms(site, layout, grads[0], batch_size)
    carrying = fallback.carriers(site.call, layout, batch_size, plan.dims)
    gradients = fallback.site_gradients(site, layout, grads, carrying, batch_size)
    return {key: Dense(gradient) for key, gradient in gradients.items()}


def _rule_forms(site: Site, layout: Layout, grad: Tensor, batch_size: int) -> dict[int, Gradient]:
    assert site.entry is not None
    call, entry, dims = site.call, site.entry, grad.dim()
    if any(x.is_complex() for x, _ in call.versions):
        return {}  # rules are written for real numbers

    def by_example(x: Tensor) -> Tensor:
        if id(x) in call.fixed:
            return x
        if entry.broadcasts and x.dim() < dims:
            x = x[(None,) * (dims - x.dim())]
        return layout.by_example(x, batch_size) if layout.holds(x, batch_size) else x

    args, kwargs = call.with_tensors([by_example(x) for x, _ in call.versions])
    with torch.no_grad():
        gradients = entry.rule(layout.by_example(grad, batch_size), *args, **kwargs)
    bound = entry.signature.bind(grad, *args, **kwargs).arguments
    return {id(bound[name]): gradient for name, gradient in gradients.items() if id(bound.get(name)) in call.sources}


def signature(sites: Sequence[Site], batch_size: int) -> tuple[Any, ...]:
    """Return a key that is equal for forward passes that can share a plan; their batch sizes may differ."""
    return tuple(
        (
            site.call.function,
            site.cast_to,
            tuple((relative(output.shape, batch_size), output.dtype) for output in site.outputs),
            tuple(site.parameters),
        )
        for site in sites
    )


def plan_site(
    site: Site, layouts: Sequence[Layout], grads: Sequence[Tensor | None], batch_size: int
) -> tuple[list[SitePlan], str]:
    """Return a plan for each layout that fits, by the first strategy that does, and the reason if there is none.

    Args:
        site: The site, with its value.
        layouts: The layouts that the gradients admit.
        grads: The gradients of its outputs; None for outputs that the loss does not depend on.
        batch_size: B.
    """
    if not layouts:
        return [], site.note or "the rows of its output cannot be attributed to examples"
    assert site.value is not None
    filled = [
        grad if grad is not None else torch.zeros(output.shape, dtype=output.dtype, device=site.value.device)
        for grad, output in zip(grads, site.outputs, strict=True)
    ]
    plans: list[SitePlan] = []
    for layout in layouts:
        for by_rule, dims in _strategies(site):
            plan = SitePlan(layout, by_rule, dims, str(site))
            try:
                if (by_rule or _replays(site, plan, batch_size)) and _covers(site, plan, filled, batch_size):
                    plans.append(plan)
                    break
            except NotImplementedError as error:
                if not by_rule:
                    continue
                if not plans:
                    raise Refusal(f"{site}: {error}") from error
                break
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
                continue  # this strategy does not fit the call; the next one may
    return plans, site.note or "it has no rule, and running it again example by example does not reproduce its output"


def _covers(site: Site, plan: SitePlan, grads: Sequence[Tensor], batch_size: int) -> bool:
    """Return whether the plan gives a per-example gradient of every source."""
    forms = gradient_forms(site, plan, grads, batch_size)
    return all(_fits(forms.get(key), source.shape, batch_size) for key, source in site.call.sources.items())


def _replays(site: Site, plan: SitePlan, batch_size: int) -> bool:
    carrying = fallback.carriers(site.call, plan.layout, batch_size, plan.dims)
    return fallback.replay_agrees(site, plan.layout, carrying, batch_size)


def _strategies(site: Site) -> Iterator[tuple[bool, int | None]]:
    """Yield ``by_rule`` and ``dims`` of the plans to try, the best first."""
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
    if isinstance(form, Outer) and form.left.shape[1] * form.dims.sides[0] * form.dims.sides[1] != form.dims.elements:
        return False
    return isinstance(form, (Outer, Windows, Rows)) and form.shape == shape
