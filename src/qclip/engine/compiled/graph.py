"""The graph of a physical step: the eager driver's own code, traced once on shapes alone.

Forward pass, backward pass to the sites, norms, clip factors and clipped sums become one graph of torch operations.
Parameters, buffers, the batch, which examples count and the limits are its inputs, so that it can be run again on
others of the same shapes; everything else that Python decided on the way is frozen in it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from qclip.engine import batch as batches
from qclip.engine.capture import checks, faults
from qclip.engine.capture.checks import Evaluate
from qclip.engine.compiled.cross_entropy import one_pass_cross_entropy
from qclip.engine.compiled.rewrites import clip_early, free_layouts, is_random, use_recomputed
from qclip.engine.driver import Engine, Run
from qclip.engine.gradients import clipping
from qclip.engine.gradients.fallback import substituted
from qclip.engine.gradients.parts import collect, prepare
from qclip.engine.gradients.plan import Plan
from qclip.engine.gradients.sites import Site
from qclip.engine.randomness import RandomState

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A step: from `inputs_of` to what its graph returns."""
Outputs = tuple[Sequence[Tensor], Tensor, Tensor, Tensor]
"""The clipped sum of each parameter, the norms [B, K], the losses [B] and which examples are finite [B]."""


class Untraceable(Exception):
    """Why a step cannot be traced."""


def model_tensors(engine: Engine) -> list[Tensor]:
    """The first inputs of a step's graph: trainable parameters, then frozen ones and buffers."""
    return [*engine.parameters.values(), *_others(engine).values()]


def inputs_of(model: Sequence[Tensor], batch: Any, keep: Tensor, limits: Tensor) -> list[Tensor]:
    """What a step's graph is called with, in order."""
    return [*model, *batches.tensor_leaves(batch), keep, limits]


@contextmanager
def as_a_step_runs(device: torch.device) -> Iterator[None]:
    """Nothing is differentiated or made less precise: the graph says it all."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def outputs_of(function: Function, inputs: Sequence[Tensor]) -> Outputs:
    """What a step gives."""
    with as_a_step_runs(inputs[0].device):
        *sums, norms, losses, finite = function(inputs)
    return sums, norms, losses, finite


def trace(
    engine: Engine, run: Run, plan: Plan, evaluate: Evaluate, batch: Any, keep: Tensor, limits: Tensor
) -> GraphModule:
    """The graph of a step on batches like this one, dealt with as was proven on a forward pass of fewer examples.

    It returns what is in `Outputs`, in one row.
    """
    names, others = list(engine.parameters), list(_others(engine))
    leaves, structure = pytree.tree_flatten(batch)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    ends: list[int] = []  # how many nodes the graph has after the forward pass, and after the backward pass

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = iter(inputs)
        parameters = {name: next(given) for name in names}
        constants = {name: next(given) for name in others}
        filled = list(leaves)
        for k in places:
            filled[k] = next(given)
        keep, limits = given
        mine = pytree.tree_unflatten(filled, structure)
        frozen = [x for x in constants.values() if not x.requires_grad]
        capture = engine.capture(parameters, frozen, mine, len(keep), like=run.count, traced=True)

        start = RandomState.now(torch.device("cpu"))
        # The backward pass, too, sees the inputs as the model's tensors: a checkpointed block runs again in it.
        with torch.enable_grad(), faults.avoided(), substituted(engine.model, parameters | constants):
            with capture:
                losses = evaluate(mine)
            if not start.python_unmoved():
                raise Untraceable("random numbers of Python or numpy decide in the forward pass")
            checks.require_losses(losses, len(keep))
            _require_same_sites(capture.sites, len(keep), run)
            ends.append(len(_nodes()))
            backward_ends = lambda: ends.append(len(_nodes()))  # noqa: E731
            parts = collect(capture.sites, plan, losses, keep, parameters, after_backward=backward_ends)
        with torch.no_grad(), torch.autocast(keep.device.type, enabled=False):
            prepare(parts, engine.costs, engine.groups.memory_phases())  # `clip_early` lets gradients go
            bundles = clipping.bundled(parts, engine.groups)
            norms = clipping.group_norms(parts, bundles, engine.groups, parameters, keep)
            factors = clipping.clip_factors(norms, limits, assume_finite=True)
            sums = clipping.clipped_sums(parts, bundles, factors, engine.groups, parameters, None)
        if any(map(is_random, _nodes()[ends[0] :])):
            raise Untraceable("random numbers of the forward pass would have to be drawn again in the backward pass")
        return *sums.values(), norms.by_group, losses.detach(), norms.is_finite

    graph = _traced(step, inputs_of(model_tensors(engine), batch, keep, limits))
    use_recomputed(graph.graph, *ends)
    clip_early(graph.graph, *ends)
    graph.graph.eliminate_dead_code()
    if keep.is_cuda:
        one_pass_cross_entropy(graph.graph)
        free_layouts(graph.graph)
    graph.recompile()
    return graph


def _others(engine: Engine) -> dict[str, Tensor]:
    """The model's frozen parameters and buffers."""
    return {name: x for name, x in checks.named_tensors(engine.model) if name not in engine.parameters}


def _traced(step: Callable[..., Any], inputs: list[Tensor]) -> GraphModule:
    device = inputs[0].device.type
    autocast = torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,  # it would keep a trace's tensors for the next real forward pass
    )
    with autocast:
        return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def _nodes() -> list[Node]:
    mode = get_proxy_mode()
    assert mode is not None
    return list(mode.tracer.graph.nodes)


def _fits(length: int, proven: int, count: int, few: int) -> bool:
    """The same, as many for each example, or widened for alignment."""
    return length in (proven, proven + -proven % 8) or length * few == proven * count


def _require_same_sites(sites: list[Site], count: int, run: Run) -> None:
    """A plan proven on fewer examples serves where the same calls were made, on as many rows per example."""

    def agree(mine: Site, proven: Site) -> bool:
        return (
            mine.call.function is proven.call.function
            and mine.parameters == proven.parameters
            and len(mine.outputs) == len(proven.outputs)
            and all(
                a.dtype == b.dtype
                and len(a.shape) == len(b.shape)
                and all(_fits(m, n, count, run.count) for m, n in zip(a.shape, b.shape, strict=True))
                for a, b in zip(mine.outputs, proven.outputs, strict=True)
            )
        )

    proven = run.capture.sites
    if len(sites) != len(proven) or not all(map(agree, sites, proven)):
        raise Untraceable("the model makes other calls on a batch of another size")
