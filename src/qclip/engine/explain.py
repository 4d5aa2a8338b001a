"""Explain: for each parameter, how the engine computes its per-example gradients, and why not in a better way."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qclip._display import Row, html_table, text_table
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
class ParameterStrategy:
    """How the per-example gradients of one parameter are computed."""

    name: str
    shape: tuple[int, ...]
    strategy: str
    """``rule``, ``vmap of the function``, ``vmap of the model``, ``one example at a time``, ``frozen``, ``unused``."""
    detail: str


@dataclass(frozen=True)
class Explanation:
    """How the engine handles each parameter of a model; prints as a table."""

    parameters: tuple[ParameterStrategy, ...]

    def __str__(self) -> str:
        return text_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    def _table(self) -> tuple[Row, Sequence[Row]]:
        rows = [
            (row.name, "x".join(map(str, row.shape)) or "scalar", row.strategy, row.detail) for row in self.parameters
        ]
        return ("parameter", "shape", "strategy", "detail"), rows


def explain(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    targets: Any = None,
    costs: CostModel | None = None,
) -> Explanation:
    """Explain how the engine computes the per-example gradients of each parameter on this batch.

    >>> import torch, qclip
    >>> print(qclip.explain(torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.PReLU()), torch.randn(4, 8)))
    parameter  shape  strategy              detail
    0.weight   2x8    rule                  torch.nn.functional.linear: 1 position, norm = |input| |gradient|
    0.bias     2      rule                  torch.nn.functional.linear
    1.weight   1      vmap of the function  torch.nn.functional.prelu

    Args:
        model: The model.
        batch: Its inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        loss: ``loss(outputs, targets)`` returns one value per example, [B]. Without it a function of the outputs
            stands in, and everything but the loss itself is explained.
        targets: Anything that ``loss`` takes.
        costs: How to choose between Gram matrices, direct and kept gradients.

    Raises:
        Refusal: The engine would refuse the model.
    """
    engine = Engine(model, costs=costs)
    batch_size = batches.size_of_pair(batch, targets)

    def evaluate(pair: tuple[Any, Any]) -> Tensor:
        outputs = call(engine.model, pair[0])
        return _stand_in(outputs, batches.size_of_pair(*pair)) if loss is None else loss(outputs, pair[1])

    run = engine.record(evaluate, (batch, targets), batch_size)
    checks.require_losses(run.losses, batch_size)
    is_counted = batches.full_mask(batch_size, None, engine.device)
    run, plan, parts = engine.parts(run, is_counted, evaluate, (batch, targets))
    prepare(parts, engine.costs)
    planned = [] if plan.one_by_one is not None else list(zip(run.capture.sites, plan.sites, strict=True))
    rows = []
    for name, parameter in engine.model.named_parameters():
        sites = [(site, how) for site, how in planned if name in site.parameters]
        strategy, detail = _strategy(name, sites, plan, parts[name]) if name in parts else ("frozen", "")
        rows.append(ParameterStrategy(name, tuple(parameter.shape), strategy, detail))
    return Explanation(tuple(rows))


def _strategy(
    name: str, sites: Sequence[tuple[Site, SitePlan | None]], plan: Plan, parts: Sequence[Part]
) -> tuple[str, str]:
    """Return the strategy of a parameter and its detail: the functions, derivations and norm methods."""
    if plan.one_by_one is not None:
        return "one example at a time", plan.reasons[name]
    if name in plan.whole:
        return "vmap of the model", plan.reasons[name]
    if not sites:
        return "unused", "the loss does not depend on it"
    functions = Counter(site.call.function_name for site, _ in sites)
    detail = ", ".join(function if count == 1 else f"{count} x {function}" for function, count in functions.items())
    sources = [source for site, _ in sites for source in site.call.sources.values() if name in source.parameters]
    if derivations := sorted({source.call.function_name for source in sources if source.call is not None}):
        detail += f" of {', '.join(derivations)}"
    if methods := ", ".join(filter(None, map(_norm_method, parts))):
        detail += f": {methods}"
    by_rule = all(how is not None and how.by_rule for _, how in sites)
    return "rule" if by_rule else "vmap of the function", detail


def _norm_method(part: Part) -> str:
    """Return how the norm of a part is computed."""
    if part.method == "kept":
        return "kept gradients"
    if isinstance(part.form, Rows):
        return f"{part.form.ids.shape[1]} rows"
    if not isinstance(part.form, Products):
        return ""
    if part.form.dims.positions == 1:
        return "1 position, norm = |input| |gradient|"
    return f"{part.form.dims.positions} positions, {part.method or 'cheapest'}"


def _stand_in(outputs: Any, batch_size: int) -> Tensor:
    """Return one number per example from all outputs of a model, in place of an unknown loss."""
    rows = [x for x in batches.tensor_leaves(outputs) if batches.is_example_wise(x, batch_size) and x.requires_grad]
    if not rows:
        raise Refusal("the model returns no tensor with one row per example that depends on its parameters")
    squares = [x.float().square() for x in rows]
    return torch.stack([x.flatten(1).mean(1) if x.dim() > 1 else x for x in squares]).sum(0)
