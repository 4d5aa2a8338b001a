"""Parts: the contributions of the sites to each parameter's per-example gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qclip._validate import Refusal
from qclip.engine.gradients import derivations
from qclip.engine.gradients.costs import CostModel, Method
from qclip.engine.gradients.forms import Dense, GradientForm, Products, join
from qclip.engine.gradients.plan import Plan, gradient_forms
from qclip.engine.gradients.sites import Site, Source, output_gradients


@dataclass(eq=False)
class Part:
    """The contribution of one site, or of several joined, to one parameter."""

    form: GradientForm
    source: Source | None = None
    """Set if the form is still that of a derived value with the same norm: only the sum is carried to the parameter."""
    method: Method | None = None
    """How the norms of a sum of outer products are computed."""

    def materialised(self) -> GradientForm:
        """Return the form, with the gradients themselves if they are to be kept."""
        return self.form.kept() if self.method == "kept" and isinstance(self.form, Products) else self.form


class Awoken(Exception):
    """A site whose gradient was zero in the proof has a gradient."""


Parts = dict[str, list[Part]]
"""By parameter."""


def collect(
    sites: Sequence[Site],
    plan: Plan,
    losses: Tensor,
    is_counted: Tensor,
    parameters: Mapping[str, Tensor],
    *,
    after_backward: Callable[[], object] = lambda: None,
) -> Parts:
    """Return each parameter's contributions, by one backward pass to the sites.

    Args:
        sites: The sites of a captured forward pass.
        plan: How each site is handled.
        losses: The loss of each example, [B].
        is_counted: [B]; other examples have zero gradients.
        parameters: The trainable parameters by name.
        after_backward: Called between the backward pass and the computation of the forms.

    Raises:
        Awoken: If a site has a gradient that the plan does not expect to have one.
    """
    places = [k for k, how in enumerate(plan.sites) if how is not None]
    planned = [(site, how) for site, how in zip(sites, plan.sites, strict=True) if how is not None]
    site_grads = output_gradients(
        losses,
        is_counted.to(losses.dtype),
        [site for site, _ in planned],
        parameters,
        retain_graph=False,
        after_backward=after_backward,
    )
    silent = [grad for k, grads in zip(places, site_grads, strict=True) if k in plan.silent for grad in grads]
    counts = [grad.count_nonzero().to(losses.device) for grad in silent if grad is not None]
    if counts and bool(torch.stack(counts).any()):
        raise Awoken
    parts: Parts = {name: [] for name in parameters}
    with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
        for (site, how), grads in zip(planned, site_grads, strict=True):
            sample = next((grad for grad in grads if grad is not None), None)
            if sample is None:
                continue
            pairs = zip(grads, site.outputs, strict=True)
            filled = [sample.new_zeros(output.shape) if grad is None else grad for grad, output in pairs]
            forms = gradient_forms(site, how, filled, len(losses))
            for key, source in site.call.sources.items():
                if source.parameters <= plan.whole:
                    continue
                if key not in forms:
                    raise Refusal(
                        f"{site} is not called as it was when it was proven; make the same call in every step"
                    )
                gradient = forms[key]
                _attribute(parts, source, gradient() if callable(gradient) else gradient, parameters)
        return {name: _joined(name, contributions, parameters) for name, contributions in parts.items()}


def _attribute(parts: Parts, source: Source, form: GradientForm, parameters: Mapping[str, Tensor]) -> None:
    """Carry a source's gradient to its parameters, as far as that is free."""
    if source.call is not None:
        source, form = derivations.simplify(source, form)
    if source.call is None or derivations.keeps_norm(source):
        (name,) = source.parameters
        parts[name].append(Part(form, None if source.call is None else source))
    else:
        _carry(parts, source, form, parameters)


def _carry(parts: Parts, source: Source, form: GradientForm, parameters: Mapping[str, Tensor]) -> None:
    """Carry the gradients themselves to the parameters of the source."""
    for name, grads in derivations.to_parameters(source, form.dense(), parameters, batched=True).items():
        parts[name].append(Part(Dense(grads)))


def _joined(name: str, contributions: list[Part], parameters: Mapping[str, Tensor]) -> list[Part]:
    """Join the contributions to one parameter; a derived value's gradient has the parameter's norm only if alone."""
    if len(contributions) < 2:
        return contributions
    plain: Parts = {name: []}
    for part in contributions:
        if part.source is None:
            plain[name].append(part)
        else:
            _carry(plain, part.source, part.form, parameters)
    return [Part(form) for form in join([part.form for part in plain[name]])]


def prepare(parts: Parts, costs: CostModel, memory_phases: Mapping[str, int] | None = None) -> None:
    """Choose a method for each sum of outer products; gradients to be kept are formed here, once.

    Args:
        parts: The contributions, which are changed in place.
        costs: The cost model.
        memory_phases: The phase of each parameter. Each phase gets the whole budget: its gradients are freed before
            the next phase starts.
    """
    available: dict[int, int] = {}
    for name, contributions in parts.items():
        part = contributions[0] if len(contributions) == 1 else None
        if part is None or not isinstance(part.form, Products) or part.form.dims.positions == 1:
            continue
        phase = 0 if memory_phases is None else memory_phases[name]
        if phase not in available:
            available[phase] = costs.budget(part.form.sample.device)
        part.method = costs.choose(part.form, available[phase])
        if part.method == "kept":
            available[phase] -= costs.kept_bytes_of(part.form)
            part.form = part.form.kept()
