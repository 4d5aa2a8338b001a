"""The graph of a physical step: the eager driver's own code, traced once on shapes alone.

Forward pass, backward pass to the sites, norms, clip factors and clipped sums become one graph of torch operations.
Parameters, buffers, the batch, which examples count and the limits are its inputs, so that it can be run again on
others of the same shapes; everything else that Python decided on the way is frozen in it.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from qclip.engine import checks, clipping
from qclip.engine.checks import Evaluate
from qclip.engine.engine import Engine, Run
from qclip.engine.fallback import Evaluation
from qclip.engine.parts import Parts, collect, prepare
from qclip.engine.plan import Plan
from qclip.engine.randomness import RandomState
from qclip.engine.sites import Site, map_leaves


class Untraceable(Exception):
    """Why a step cannot be traced."""


def model_tensors(engine: Engine) -> list[Tensor]:
    """The first inputs of a step's graph: trainable parameters, then frozen ones and buffers."""
    return [*engine.parameters.values(), *_others(engine).values()]


def inputs_of(model: Sequence[Tensor], batch: Any, keep: Tensor, limits: Tensor) -> list[Tensor]:
    """What a step's graph is called with, in order."""
    batch_tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [*model, *batch_tensors, keep, limits]


def trace(
    engine: Engine, run: Run, plan: Plan, evaluate: Evaluate, batch: Any, keep: Tensor, limits: Tensor
) -> GraphModule:
    """The graph of a step on batches like this one, dealt with as was proven on a forward pass of fewer examples.

    It returns the clipped sum of each parameter, the norms [B, K], the losses [B] and which examples are finite [B].
    """
    names, others = list(engine.parameters), list(_others(engine))
    leaves, structure = pytree.tree_flatten(batch)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    ends: list[int] = []  # how many nodes the graph has after the forward pass, and after the backward pass

    def step(*inputs: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
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

        def losses_and_parts(batch: Any) -> tuple[Tensor, Parts]:
            start = RandomState.now(torch.device("cpu"))
            with capture:
                losses = evaluate(batch)
            if not start.python_unmoved():
                raise Untraceable("random numbers of Python or numpy decide in the forward pass")
            checks.require_losses(losses, len(keep))
            _require_same_sites(capture.sites, len(keep), run)
            ends.append(len(_nodes()))
            backward_ends = lambda: ends.append(len(_nodes()))  # noqa: E731
            return losses, collect(capture.sites, plan, losses, keep, parameters, after_backward=backward_ends)

        # The backward pass, too, sees the inputs as the model's tensors: a checkpointed block runs again in it.
        lifted = {f"model.{name}": x for name, x in (parameters | constants).items()}
        with torch.enable_grad():
            losses, parts = torch.func.functional_call(Evaluation(engine.model, losses_and_parts), lifted, (mine,))
        with torch.no_grad(), torch.autocast(keep.device.type, enabled=False):
            prepare(parts, engine.costs)
            bundles = clipping.bundled(parts, engine.groups)
            norms = clipping.group_norms(parts, bundles, engine.groups, parameters, keep)
            factors = clipping.clip_factors(norms, limits, hasty=True)
            sums = clipping.clipped_sums(parts, bundles, factors, engine.groups, parameters, None)
        if any(map(_is_random, _nodes()[ends[0] :])):
            raise Untraceable("random numbers of the forward pass would have to be drawn again in the backward pass")
        return list(sums.values()), norms.by_group, losses.detach(), norms.finite

    with _attributes_kept(engine.model):
        graph = _traced(step, inputs_of(model_tensors(engine), batch, keep, limits))
    use_recomputed(graph.graph, *ends)
    clip_early(graph.graph, *ends)
    graph.graph.eliminate_dead_code()
    if keep.is_cuda:
        free_layouts(graph.graph)
    graph.recompile()
    return graph


def use_recomputed(graph: Graph, forward: int, backward: int) -> None:
    """Let norms and sums use what a checkpointed block computes again, instead of what it computed first.

    Else the inputs of its layers would be held from the forward pass on, and checkpointing would save nothing.
    """
    nodes = list(graph.nodes)
    for node in nodes:  # nothing is differentiated any more
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.all_input_nodes[0])
    memory = _memory(nodes)
    written = {memory[each] for node in nodes if _writes(node) for each in node.all_input_nodes}
    original: dict[Node, Node] = {}  # for a node of the backward pass, the one of the forward pass that it repeats
    repeated: dict[Node, Node] = {}  # and the other way round

    def meaning(node: Node) -> str:
        arguments = map_leaves((node.args, tuple(node.kwargs.items())), lambda x: original.get(x, x))
        return f"{node.target} {arguments}"

    def repeats(node: Node) -> bool:
        """Whether running it again gives the same."""
        return (
            node.op == "call_function"
            and not _is_random(node)
            and written.isdisjoint(memory[each] for each in (node, *node.all_input_nodes))
        )

    first = {meaning(node): node for node in reversed(nodes[:forward]) if repeats(node)}
    for node in nodes[forward:backward]:
        known = first.get(meaning(node)) if repeats(node) else None
        if known is not None:
            original[node] = known
            repeated.setdefault(known, node)
    for node in nodes[backward:]:
        if node.op == "call_function":
            node.args = map_arg(node.args, lambda x: repeated.get(x, x))
            node.kwargs = map_arg(node.kwargs, lambda x: repeated.get(x, x))


def free_layouts(graph: Graph) -> None:
    """Write the input gradient of a convolution as the transposed convolution that it is.

    The compiler chooses memory layouts of convolutions, but takes those of the general backward operation as given;
    that one also holds on to the input, of which only the shape counts here.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.convolution_backward.default:
            continue
        grad, image, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
        taken = list(node.users)
        if transposed or list(wanted) != [True, False, False] or any(user.args[1] != 0 for user in taken):
            continue
        sizes = zip(image.meta["val"].shape[2:], grad.meta["val"].shape[2:], weight.meta["val"].shape[2:], strict=True)
        rest = [
            length - ((found - 1) * s - 2 * p + d * (k - 1) + 1)
            for (length, found, k), s, p, d in zip(sizes, stride, padding, dilation, strict=True)
        ]
        with graph.inserting_before(node):
            args = (grad, weight, None, stride, padding, dilation, True, rest, groups)
            found = graph.call_function(torch.ops.aten.convolution.default, args)
        found.meta["val"] = taken[0].meta["val"] if taken else None
        for user in taken:
            user.replace_all_uses_with(found)
            graph.erase_node(user)
        graph.erase_node(node)


def clip_early(graph: Graph, forward: int, backward: int) -> None:
    """Move what comes after the backward pass to where its gradients are first known.

    Norms are then taken, gradients kept and, in groups of their own, whole layers clipped and summed while the backward
    pass goes on, and what that needs is let go. The first ``forward`` nodes are the forward pass, those up to
    ``backward`` the backward pass. What needs only the forward pass waits until it is needed.
    """
    nodes = list(graph.nodes)
    index = {node: k for k, node in enumerate(nodes)}
    late = [node for node in nodes[backward:] if node.op not in ("placeholder", "output")]
    needs = _needs(nodes)
    users: dict[Node, list[Node]] = {node: [] for node in nodes}
    known: dict[Node, int] = {}  # for a late node, the last early one it needs
    for node in late:
        known[node] = max((known.get(each, index[each]) for each in needs[node]), default=0)
        for each in needs[node]:
            users[each].append(node)
    for node in reversed(late):  # what needs no gradient moves to its first use
        if known[node] < forward and users[node]:
            known[node] = max(min(known[user] for user in users[node]), known[node])
    place = {known[node]: nodes[known[node]] for node in late}
    for node in sorted(late, key=lambda node: (known[node], index[node])):
        place[known[node]].append(node)
        place[known[node]] = node


def _memory(nodes: Sequence[Node]) -> dict[Node, Node]:
    """For each node the one that made the memory it lies in: itself, unless it is a view or was written in place."""
    found: dict[Node, Node] = {}
    for node in nodes:
        inputs, schema = node.all_input_nodes, getattr(node.target, "_schema", None)
        returned = () if schema is None else schema.returns
        view = node.target is operator.getitem or any(each.alias_info is not None for each in returned)
        where = node.kwargs.get("out") if isinstance(node.kwargs.get("out"), Node) else next(iter(inputs), None)
        found[node] = found[where] if view and where is not None else node
    return found


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _needs(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """What each node must come after: its inputs and, where memory is written to, whatever else uses that memory."""
    memory = _memory(nodes)
    since: dict[Node, list[Node]] = {}  # by memory: the last write to it, and what has used it since
    needs: dict[Node, list[Node]] = {}
    for node in nodes:
        needs[node] = list(node.all_input_nodes)
        for used in dict.fromkeys(memory[each] for each in node.all_input_nodes):
            uses = since.setdefault(used, [used])
            if _writes(node):
                needs[node] += uses
                uses.clear()
            needs[node] += uses[:1]
            uses.append(node)
    return needs


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """What a forward pass on shapes alone leaves in attributes, such as a cached table, is of no use to a real one."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


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


def _is_random(node: Node) -> bool:
    """Whether an operation draws random numbers; attention without dropout and all backward passes do not."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    named = {argument.name: k for k, argument in enumerate(operation._schema.arguments)}
    where = named.get("dropout_p")
    given = node.args[where] if where is not None and where < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return where is None or not (given == 0 or "backward" in str(operation))


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
