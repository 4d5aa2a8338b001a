"""Parts: what the sites contribute to each parameter, from output gradients to norms and clipped sums."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qclip._validate import Refusal
from qclip.engine.gradients import derivations
from qclip.engine.gradients.costs import CostModel, Method
from qclip.engine.gradients.forms import Dense, Form, Outer, Products, Rows, Squares, join, joint_squared_norms
from qclip.engine.gradients.plan import Plan, gradient_forms
from qclip.engine.gradients.rules.registry import Gradient
from qclip.engine.gradients.sites import Site, Source, output_gradients


@dataclass(eq=False)
class Part:
    """What one site, or several joined, contributes to one parameter."""

    form: Form
    source: Source | None = None
    """Set where the form is still of a derived value that keeps the norm: only the sum is carried on."""
    method: Method | None = None
    """How the norms of a sum of outer products are computed."""

    def formed(self) -> Form:
        """The form, with gradients that are to be kept as such."""
        return self.form.kept() if self.method == "kept" and isinstance(self.form, Products) else self.form


Parts = dict[str, list[Part]]
"""By parameter."""


def accumulator(parameter: Tensor) -> torch.dtype:
    """Sums are kept in float32, whatever the parameter's precision; in float64 for float64 parameters."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def collect(
    sites: Sequence[Site],
    plan: Plan,
    losses: Tensor,
    keep: Tensor,
    parameters: Mapping[str, Tensor],
    *,
    after_backward: Callable[[], object] = lambda: None,
) -> Parts:
    """Each parameter's contributions, by one backward pass to the sites."""
    chosen = [(site, how) for site, how in zip(sites, plan.sites, strict=True) if how is not None]
    weights = keep.to(losses.dtype)
    found = output_gradients(
        losses,
        weights,
        [site for site, _ in chosen],
        parameters,
        retain_graph=False,
        after_backward=after_backward,
    )
    parts: Parts = {name: [] for name in parameters}
    with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
        for (site, how), grads in zip(chosen, found, strict=True):
            known = [grad for grad in grads if grad is not None]
            if not known:
                continue
            filled = [known[0].new_zeros(o.shape) if g is None else g for g, o in zip(grads, site.outputs, strict=True)]
            forms = gradient_forms(site, how, filled, len(losses))
            for key, source in site.call.sources.items():
                if source.parameters <= plan.whole:
                    continue
                if key not in forms:
                    raise Refusal(f"{site} was called in another way than when it was proven; keep the call as it was")
                _attribute(parts, source, forms[key], parameters)
        return {name: _joined(name, each, parameters) for name, each in parts.items()}


def plain_gradients(losses: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Autograd's own gradients of the sum of the losses; the graph stays."""
    found = torch.autograd.grad([losses.sum()], list(parameters.values()), retain_graph=True, allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if grad is None else grad.to_dense() for (name, p), grad in pairs}


def require_totals(
    parts: Parts, expected: Mapping[str, Tensor], sites: Sequence[Site], parameters: Mapping[str, Tensor]
) -> None:
    """Refuse if the unclipped sums are not autograd's: the last line against a wrong rule or a wrong capture."""
    tolerance, overall = (3e-2, 3e-3) if any(map(is_rough, sites)) else (1e-4, 1e-6)
    # Some gradients are zero but for rounding, such as those of the keys' biases in attention.
    noise = overall * sum(float(torch.linalg.vector_norm(grad)) for grad in expected.values())
    for name, wanted in expected.items():
        found = parts[name]
        squares = squared_norms(found).norms if found else wanted.new_zeros(1, dtype=accumulator(wanted))
        total = weighted_sum(name, found, torch.ones_like(squares), None, parameters)
        difference = torch.linalg.vector_norm(total - wanted.to(total.dtype))
        if bool(difference > tolerance * (squares.sqrt().sum() + torch.linalg.vector_norm(wanted)) + noise):
            functions = ", ".join(sorted({str(site) for site in sites if name in site.parameters}))
            raise Refusal(
                f"the gradients of {name!r} do not add up to autograd's: a rule for {functions or 'it'} is "
                "wrong, or the model does something that the engine does not see; compare with qclip.engine.oracle"
            )


def is_rough(site: Site) -> bool:
    """Whether autograd rounds to 16 bits on the way to the parameters."""
    sources = list(site.call.sources.values())
    dtypes = {x.dtype for x, _ in site.call.versions}
    while sources:
        source = sources.pop()
        dtypes.add(source.dtype)
        sources.extend(source.parents)
    return site.cast_to is not None or not dtypes.isdisjoint((torch.bfloat16, torch.float16))


def _attribute(parts: Parts, source: Source, gradient: Gradient, parameters: Mapping[str, Tensor]) -> None:
    """Carry a source's gradient to its parameters, as far as that is free."""
    source, form = derivations.simplify(source, gradient() if callable(gradient) else gradient)
    if source.call is None or derivations.keeps_norm(source):
        (name,) = source.parameters
        parts[name].append(Part(form, None if source.call is None else source))
    else:
        _materialise(parts, source, form, parameters)


def _materialise(parts: Parts, source: Source, form: Form, parameters: Mapping[str, Tensor]) -> None:
    for name, grads in derivations.to_parameters(source, form.dense(), parameters, batched=True).items():
        parts[name].append(Part(Dense(grads)))


def _joined(name: str, found: list[Part], parameters: Mapping[str, Tensor]) -> list[Part]:
    """Contributions that are clipped as one; those of a derived value keep their norm only if alone."""
    if len(found) < 2:
        return found
    plain: Parts = {name: []}
    for part in found:
        if part.source is None:
            plain[name].append(part)
        else:
            _materialise(plain, part.source, part.form, parameters)
    return [Part(form) for form in join([part.form for part in plain[name]])]


def prepare(parts: Parts, costs: CostModel, stretches: Mapping[str, int] | None = None) -> None:
    """Choose how each sum of outer products is dealt with; gradients to be kept are formed here, once.

    Args:
        parts: The contributions to every parameter; changed in place.
        costs: The cost model that chooses.
        stretches: The memory phase of each parameter, one for all by default. Each memory phase gets the whole budget:
            its gradients are freed before the next phase starts.
    """
    available: dict[int, int] = {}
    for name, found in parts.items():
        part = found[0] if len(found) == 1 else None
        if part is None or not isinstance(part.form, Products) or part.form.positions == 1:
            continue
        stretch = 0 if stretches is None else stretches[name]
        if stretch not in available:
            available[stretch] = costs.budget(part.form.like.device)
        part.method = costs.choose(part.form, available[stretch])
        if part.method == "kept":
            available[stretch] -= costs.kept_bytes_of(part.form)
            part.form = part.form.kept()


def squared_norms(found: Sequence[Part]) -> Squares:
    """Of all contributions to one parameter together."""
    if len(found) == 2:
        outer, table = (part.form for part in found)
        assert isinstance(outer, Outer)
        assert isinstance(table, Rows)
        return joint_squared_norms(outer, table)
    form, method = found[0].formed(), found[0].method
    if isinstance(form, Products) and method is not None:
        return form.gram_norms() if method == "gram" else form.direct_norms()
    return form.squared_norms()


def weighted_sum(
    name: str, found: Sequence[Part], factors: Tensor, keep: Tensor | None, parameters: Mapping[str, Tensor]
) -> Tensor:
    """One parameter's sum over examples times their factors; examples not kept are left out, NaN and all."""
    parameter = parameters[name]
    total = None
    for part in found:
        form = part.formed() if keep is None else part.formed().masked(keep)
        value = form.weighted_sum(factors)
        if part.source is not None:
            value = derivations.to_parameters(part.source, value, parameters, batched=False)[name]
        value = value.to(accumulator(parameter)).view(parameter.shape)
        total = value if total is None else total + value
    return torch.zeros_like(parameter, dtype=accumulator(parameter)) if total is None else total
