"""The graph of a physical step: the eager driver's own code, traced once on shapes alone.

Forward pass, backward pass to the sites, norms, clip factors and clipped sums become one graph of torch operations. Its
inputs are the parameters, the buffers, the batch, a mask of the counted examples and the clip norms, so that it can run
again on others of the same shapes. All other values that Python code looked at are constants of the graph.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from qclip.engine import batch as batches
from qclip.engine.capture import checks, faults
from qclip.engine.capture.capture import Capture
from qclip.engine.capture.checks import Evaluate
from qclip.engine.capture.overrides import Overrides
from qclip.engine.compiled.rewrites import clip_early, free_layouts, is_random, use_recomputed
from qclip.engine.driver import Engine, Run
from qclip.engine.gradients import clipping
from qclip.engine.gradients.costs import Method
from qclip.engine.gradients.fallback import substituted
from qclip.engine.gradients.parts import Parts, collect, prepare
from qclip.engine.gradients.plan import Plan
from qclip.engine.gradients.sites import Output, Site
from qclip.engine.randomness import RandomState

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A step: a function of `inputs_of`, which returns the outputs of its graph."""
Outputs = tuple[Sequence[Tensor], Tensor, Tensor, Tensor]
"""The clipped sum of each parameter, the norms [B, K], the losses [B] and which examples are finite [B]."""


class Untraceable(Exception):
    """A step cannot be traced; the message says why."""


class Traced(NamedTuple):
    """A traced step."""

    graph: GraphModule
    """Returns `Outputs`, flattened."""
    methods: Mapping[str, Method | None]
    """How the norms of each parameter are computed."""

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Interpret the graph, operation by operation."""
        return self.graph(*inputs)


def model_tensors(engine: Engine) -> list[Tensor]:
    """Return the first inputs of a step's graph: trainable parameters, then frozen ones and buffers."""
    return [*engine.parameters.values(), *_others(engine).values()]


def inputs_of(model: Sequence[Tensor], batch: Any, is_counted: Tensor, clip_norms: Tensor) -> list[Tensor]:
    """Return the inputs of a step's graph, in order: the model's tensors, the batch's, a mask [B], clip norms [K]."""
    return [*model, *batches.tensor_leaves(batch), is_counted, clip_norms]


@contextmanager
def as_a_step_runs(device: torch.device) -> Iterator[None]:
    """Disable gradients and autocast: the graph contains both."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def outputs_of(function: Function, inputs: Sequence[Tensor]) -> Outputs:
    """Run a step."""
    with as_a_step_runs(inputs[0].device):
        *sums, norms, losses, is_finite = function(inputs)
    return sums, norms, losses, is_finite


def trace(
    engine: Engine, run: Run, plan: Plan, evaluate: Evaluate, batch: Any, is_counted: Tensor, clip_norms: Tensor
) -> Traced:
    """Trace a physical step.

    Args:
        engine: The engine whose model is trained.
        run: A forward pass on a few examples.
        plan: The plan that was proven on it.
        evaluate: Runs the model on a batch and returns one loss per example.
        batch: A batch of the kind that the step is for.
        is_counted: Which examples count, [B].
        clip_norms: One clip norm per group, [K].

    Returns:
        The graph of the step, for batches of the same shapes.

    Raises:
        Untraceable: If one graph cannot compute the step for all such batches.
    """
    names, others = list(engine.parameters), list(_others(engine))
    leaves, structure = pytree.tree_flatten(batch)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    ends: list[int] = []  # the number of nodes after the forward pass, and after the backward pass
    methods: dict[str, Method | None] = {}

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(inputs)
        parameters = {name: next(remaining) for name in names}
        constants = {name: next(remaining) for name in others}
        filled = list(leaves)
        for k in places:
            filled[k] = next(remaining)
        is_counted, clip_norms = remaining
        traced_batch = pytree.tree_unflatten(filled, structure)
        batch_size = len(is_counted)
        frozen = [x for x in constants.values() if not x.requires_grad]
        overrides = Overrides()
        capture = Capture(
            parameters,
            [*frozen, *batches.shared_tensors(traced_batch, batch_size)],
            batch_size,
            attributes=checks.plain_attributes(engine.model),
            broadcasts=[site.broadcast_index for site in run.capture.sites if site.broadcast_index is not None],
            overrides=overrides,
        )
        start = RandomState.now(torch.device("cpu"))
        # The backward pass, too, sees the inputs as the model's tensors: a checkpointed block runs again in it.
        with torch.enable_grad(), faults.avoided(), substituted(engine.model, parameters | constants):
            with capture:
                losses = evaluate(traced_batch)
            if not start.python_unmoved():
                raise Untraceable("random numbers of Python or numpy decide in the forward pass")
            checks.require_losses(losses, batch_size)
            _require_same_sites(capture.sites, batch_size, run)
            ends.append(len(_nodes()))
            backward_ends = lambda: ends.append(len(_nodes()))  # noqa: E731
            with overrides:
                parts = collect(capture.sites, plan, losses, is_counted, parameters, after_backward=backward_ends)
        with as_a_step_runs(is_counted.device):
            prepare(parts, engine.costs, engine.groups.memory_phases())  # gradients are freed by `clip_early`
            methods.update(_methods(parts))
            bundles = clipping.bundled(parts, engine.groups)
            norms = clipping.group_norms(parts, bundles, engine.groups, parameters, is_counted)
            factors = clipping.clip_factors(norms, clip_norms, assume_finite=True)
            sums = clipping.clipped_sums(parts, bundles, factors, engine.groups, parameters, None)
        if any(map(is_random, _nodes()[ends[0] :])):
            raise Untraceable("random numbers of the forward pass would have to be drawn again in the backward pass")
        return *sums.values(), norms.by_group, losses.detach(), norms.is_finite

    graph = _traced(step, inputs_of(model_tensors(engine), batch, is_counted, clip_norms))
    use_recomputed(graph.graph, *ends)
    clip_early(graph.graph, *ends)
    graph.graph.eliminate_dead_code()
    if is_counted.is_cuda:
        free_layouts(graph.graph)
    graph.recompile()
    return Traced(graph, methods)


def _methods(parts: Parts) -> dict[str, Method | None]:
    return {name: found[0].method for name, found in parts.items() if len(found) == 1}


def _others(engine: Engine) -> dict[str, Tensor]:
    """Return the model's frozen parameters and buffers."""
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


def _require_same_sites(sites: list[Site], batch_size: int, run: Run) -> None:
    """Refuse to apply a plan that was proven on fewer examples to other calls, or other numbers of rows per example."""
    proven = run.capture.sites
    if len(sites) != len(proven) or not all(
        _is_same_call(site, other)
        and all(
            _is_same_output(a, b, batch_size, run.batch_size) for a, b in zip(site.outputs, other.outputs, strict=True)
        )
        for site, other in zip(sites, proven, strict=True)
    ):
        raise Untraceable("the model makes other calls on a batch of another size")


def _is_same_call(site: Site, proven: Site) -> bool:
    return (
        site.call.function is proven.call.function
        and site.parameters == proven.parameters
        and len(site.outputs) == len(proven.outputs)
    )


def _is_same_output(output: Output, proven: Output, batch_size: int, proven_size: int) -> bool:
    """Return whether the shapes agree: in lengths, in lengths per example, or in lengths widened for alignment."""
    return (
        output.dtype == proven.dtype
        and len(output.shape) == len(proven.shape)
        and all(
            length in (other, other + -other % 8) or length * proven_size == other * batch_size
            for length, other in zip(output.shape, proven.shape, strict=True)
        )
    )
