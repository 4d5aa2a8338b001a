"""Rewrites of a step's graph: nothing that it computes changes, only when, from which copy, in which layout and, where
it draws them, by which random numbers.

Where ``forward`` and ``backward`` are given, the graph's first ``forward`` nodes are the forward pass, and those up to
``backward`` the backward pass.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten


def use_recomputed(graph: Graph, forward: int, backward: int) -> None:
    """Let norms and sums use what a checkpointed block computes again, instead of what it computed first.

    Else the inputs of its layers would be held from the forward pass on, and checkpointing would save nothing.
    """
    nodes = list(graph.nodes)
    for node in nodes:  # nothing is differentiated any more
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.all_input_nodes[0])
    written = written_to(nodes)
    original: dict[Node, Node] = {}  # for a node of the backward pass, the one of the forward pass that it repeats
    repeated: dict[Node, Node] = {}  # and the other way round

    def meaning(node: Node) -> str:
        arguments = map_arg((node.args, tuple(node.kwargs.items())), lambda x: original.get(x, x))
        return f"{node.target} {arguments}"

    def repeats(node: Node) -> bool:
        """Whether running it again gives the same."""
        return node.op == "call_function" and not is_random(node) and written.isdisjoint((node, *node.all_input_nodes))

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
        if node.target is not aten.convolution_backward.default:
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
            found = graph.call_function(aten.convolution.default, args)
        found.meta["val"] = taken[0].meta["val"] if taken else None
        for user in taken:
            user.replace_all_uses_with(found)
            graph.erase_node(user)
        graph.erase_node(node)


def compare_uniform(graph: Graph) -> None:
    """Draw a mask by comparing uniform numbers, instead of in place in memory that was never written to.

    Torch's compiler may read such memory before it is drawn (2.13, on a CPU, where it keeps to the order of the graph).
    The numbers are others, from the same generator.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.bernoulli_.float)):
        memory: Any = node.args[0]
        if memory.target is not aten.empty_like.default or len(memory.users) > 1 or "generator" in node.kwargs:
            continue
        chance = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        with graph.inserting_before(node):
            drawn = graph.call_function(aten.rand_like.default, memory.args, {**memory.kwargs, "dtype": torch.float32})
            below = graph.call_function(aten.lt.Scalar, (drawn, chance))
            mask = graph.call_function(aten.to.dtype, (below, memory.meta["val"].dtype))
        mask.meta["val"] = memory.meta["val"]
        node.replace_all_uses_with(mask)
        graph.erase_node(node)
        graph.erase_node(memory)


def clip_early(graph: Graph, forward: int, backward: int) -> None:
    """Move what comes after the backward pass to where its gradients are first known.

    Norms are then taken, gradients kept and, in groups of their own, whole layers clipped and summed while the backward
    pass goes on, and what that needs is let go. What needs only the forward pass waits until it is needed.
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
        view = node.target in (operator.getitem, aten._unsafe_view.default)  # the latter does not say so
        view = view or any(each.alias_info is not None for each in returned)
        where = node.kwargs.get("out") if isinstance(node.kwargs.get("out"), Node) else next(iter(inputs), None)
        found[node] = found[where] if view and where is not None else node
    return found


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def written_to(nodes: Sequence[Node]) -> set[Node]:
    """Those that lie in memory which something writes to."""
    memory = _memory(nodes)
    places = {memory[each] for node in nodes if _writes(node) for each in node.all_input_nodes}
    return {node for node in nodes if memory[node] in places}


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


def is_random(node: Node) -> bool:
    """Whether an operation draws random numbers; attention without dropout and all backward passes do not."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    named = {argument.name: k for k, argument in enumerate(operation._schema.arguments)}
    where = named.get("dropout_p")
    given = node.args[where] if where is not None and where < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return where is None or not (given == 0 or "backward" in str(operation))
