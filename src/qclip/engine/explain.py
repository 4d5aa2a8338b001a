"""Explain: for each parameter, how its per-example gradients are computed, and why not better."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qclip._validate import Refusal
from qclip.engine import batch as batches
from qclip.engine.capture import checks
from qclip.engine.driver import Engine, call
from qclip.engine.gradients.costs import CostModel
from qclip.engine.gradients.forms import Products, Rows
from qclip.engine.gradients.parts import Part, prepare
from qclip.engine.gradients.plan import Plan, SitePlan
from qclip.engine.gradients.sites import Site


@dataclass(frozen=True)
class ParameterWay:
    """How one parameter is dealt with."""

    name: str
    shape: tuple[int, ...]
    way: str
    """``rule``, ``vmap of the function``, ``vmap of the model``, ``frozen`` or ``unused``."""
    detail: str


@dataclass(frozen=True)
class Explanation:
    """What the engine does with a model; prints as a table."""

    parameters: tuple[ParameterWay, ...]

    def __str__(self) -> str:
        rows = [(row.name, "x".join(map(str, row.shape)) or "scalar", row.way, row.detail) for row in self.parameters]
        rows = [("parameter", "shape", "way", "detail"), *rows]
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
        )


def explain(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    targets: Any = None,
    costs: CostModel | None = None,
) -> Explanation:
    """For each parameter, how the engine gets its per-example gradients on this batch of inputs; refuses what it
    would refuse.

    Without a ``loss`` the model's outputs stand for one, which sees everything but the loss itself.

    >>> import torch, qclip
    >>> print(qclip.explain(torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.PReLU()), torch.randn(4, 8)))
    parameter  shape  way                   detail
    0.weight   2x8    rule                  torch.nn.functional.linear: 1 position, product of two lengths
    0.bias     2      rule                  torch.nn.functional.linear
    1.weight   1      vmap of the function  torch.nn.functional.prelu
    """
    engine = Engine(model, costs=costs)
    count = batches.size_of_pair(batch, targets)

    def evaluate(pair: tuple[Any, Any]) -> Tensor:
        returned = call(engine.model, pair[0])
        return _stand_in(returned, batches.size_of_pair(*pair)) if loss is None else loss(returned, pair[1])

    run = engine.record(evaluate, (batch, targets), count)
    checks.require_losses(run.losses, count)
    keep = batches.full_mask(count, None, engine.device)
    run, plan, parts = engine.parts(run, keep, evaluate, (batch, targets))
    prepare(parts, engine.costs)
    rows = []
    for name, parameter in engine.model.named_parameters():
        sites = [
            (site, how) for site, how in zip(run.capture.sites, plan.sites, strict=True) if name in site.parameters
        ]
        way, detail = _way(name, sites, plan, parts[name]) if name in parts else ("frozen", "")
        rows.append(ParameterWay(name, tuple(parameter.shape), way, detail))
    return Explanation(tuple(rows))


def _way(name: str, sites: list[tuple[Site, SitePlan | None]], plan: Plan, parts: list[Part]) -> tuple[str, str]:
    if name in plan.whole:
        return "vmap of the model", plan.reasons[name]
    if not sites:
        return "unused", "the loss does not depend on it"
    functions = Counter(site.call.function_name for site, _ in sites)
    uses = ", ".join(function if count == 1 else f"{count} x {function}" for function, count in functions.items())
    derived = sorted({source.call.function_name for site, _ in sites for source in site.call.sources.values()
                      if source.call is not None and name in source.parameters})  # fmt: skip
    through = f" of {', '.join(derived)}" if derived else ""
    by_rule = all(how is not None and how.by_rule for _, how in sites)
    norms = ", ".join(filter(None, map(_norms, parts)))
    return "rule" if by_rule else "vmap of the function", f"{uses}{through}{': ' if norms else ''}{norms}"


def _norms(part: Part) -> str:
    """How the norm of a part is computed."""
    if part.method == "kept":
        return "kept gradients"
    if isinstance(part.form, Rows):
        return f"{part.form.ids.shape[1]} rows"
    if not isinstance(part.form, Products):
        return ""
    if part.form.positions == 1:
        return "1 position, product of two lengths"
    return f"{part.form.positions} positions, {part.method or 'cheapest'}"


def _stand_in(returned: Any, batch_size: int) -> Tensor:
    """One number per example from all that a model returned, to stand for a loss that is not known."""
    found = [x for x in batches.tensor_leaves(returned) if batches.is_example_wise(x, batch_size) and x.requires_grad]
    if not found:
        raise Refusal("the model returns no tensor with one row per example that depends on its parameters")
    return torch.stack(
        [x.float().flatten(1).square().mean(1) if x.dim() > 1 else x.float().square() for x in found]
    ).sum(0)
