"""Graph passes that preserve values: scheduling, reuse of recomputed activations, memory layouts, random number ops.

Random numbers alone become others, of the same distribution. In a pass with the arguments ``forward`` and
``backward``, the first ``forward`` nodes of the graph are the forward pass, and the following ones up to ``backward``
are the backward pass.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten


def use_recomputed(graph: Graph, forward: int, backward: int) -> None:
    """Let norms and sums use the recomputed activations of a checkpointed block instead of the original ones.

    Otherwise the inputs of its layers would be held from the forward pass on, and checkpointing would save no memory.
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
        """Return whether running the node again gives the same value."""
        return node.op == "call_function" and not is_random(node) and written.isdisjoint((node, *node.all_input_nodes))

    first = {meaning(node): node for node in reversed(nodes[:forward]) if repeats(node)}
    for node in nodes[forward:backward]:
        earlier = first.get(meaning(node)) if repeats(node) else None
        if earlier is not None:
            original[node] = earlier
            repeated.setdefault(earlier, node)
    for node in nodes[backward:]:
        if node.op == "call_function":
            node.args = map_arg(node.args, lambda x: repeated.get(x, x))
            node.kwargs = map_arg(node.kwargs, lambda x: repeated.get(x, x))


def free_layouts(graph: Graph) -> None:
    """Write the input gradient of a convolution as the transposed convolution that it is.

    The compiler chooses the memory layouts of convolutions, but not those of the general backward operation. That
    operation also holds the input, of which only the shape matters here.
    """
    for node in list(graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        grad, image, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
        users = list(node.users)
        if transposed or list(wanted) != [True, False, False] or any(user.args[1] != 0 for user in users):
            continue
        sizes = zip(image.meta["val"].shape[2:], grad.meta["val"].shape[2:], weight.meta["val"].shape[2:], strict=True)
        output_padding = [
            length - ((positions - 1) * s - 2 * p + d * (k - 1) + 1)
            for (length, positions, k), s, p, d in zip(sizes, stride, padding, dilation, strict=True)
        ]
        with graph.inserting_before(node):
            args = (grad, weight, None, stride, padding, dilation, True, output_padding, groups)
            transpose = graph.call_function(aten.convolution.default, args)
        transpose.meta["val"] = users[0].meta["val"] if users else None
        for user in users:
            user.replace_all_uses_with(transpose)
            graph.erase_node(user)
        graph.erase_node(node)


def compare_uniform(graph: Graph) -> None:
    """Draw a mask by comparing uniform random numbers, instead of in place in uninitialised memory.

    Torch's compiler may read such memory before the mask is drawn (2.13, on a CPU, if it keeps the order of the graph).
    The random numbers are others, from the same generator.
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.bernoulli_.float)):
        memory: Any = node.args[0]
        if memory.target is not aten.empty_like.default or len(memory.users) > 1 or "generator" in node.kwargs:
            continue
        probability = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        with graph.inserting_before(node):
            drawn = graph.call_function(aten.rand_like.default, memory.args, {**memory.kwargs, "dtype": torch.float32})
            below = graph.call_function(aten.lt.Scalar, (drawn, probability))
            mask = graph.call_function(aten.to.dtype, (below, memory.meta["val"].dtype))
        mask.meta["val"] = memory.meta["val"]
        node.replace_all_uses_with(mask)
        graph.erase_node(node)
        graph.erase_node(memory)


def clip_early(graph: Graph, forward: int, backward: int) -> None:
    """Move norms and sums, which come after the backward pass, to where their gradients are first available.

    Norms are then computed, gradients kept and, in groups of their own, whole layers clipped and summed during the
    backward pass, which frees their inputs. A node that needs only the forward pass waits until it is needed.
    """
    nodes = list(graph.nodes)
    index = {node: k for k, node in enumerate(nodes)}
    late = [node for node in nodes[backward:] if node.op not in ("placeholder", "output")]
    needs = _needs(nodes)
    users: dict[Node, list[Node]] = {node: [] for node in nodes}
    ready: dict[Node, int] = {}  # for a late node, the last early one that it needs
    for node in late:
        ready[node] = max((ready.get(need, index[need]) for need in needs[node]), default=0)
        for need in needs[node]:
            users[need].append(node)
    for node in reversed(late):  # a node that needs no gradient moves to its first use
        if ready[node] < forward and users[node]:
            ready[node] = max(min(ready[user] for user in users[node]), ready[node])
    place = {ready[node]: nodes[ready[node]] for node in late}
    for node in sorted(late, key=lambda node: (ready[node], index[node])):
        place[ready[node]].append(node)
        place[ready[node]] = node


def _memory(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Return for each node the one that allocated its memory: itself, unless it is a view or was written in place."""
    owners: dict[Node, Node] = {}
    for node in nodes:
        inputs, schema = node.all_input_nodes, getattr(node.target, "_schema", None)
        returned = () if schema is None else schema.returns
        is_view = node.target in (operator.getitem, aten._unsafe_view.default)  # the latter does not say so
        is_view = is_view or any(value.alias_info is not None for value in returned)
        base = node.kwargs.get("out") if isinstance(node.kwargs.get("out"), Node) else next(iter(inputs), None)
        owners[node] = owners[base] if is_view and base is not None else node
    return owners


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def written_to(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes whose memory is written to."""
    memory = _memory(nodes)
    written = {memory[x] for node in nodes if _writes(node) for x in node.all_input_nodes}
    return {node for node in nodes if memory[node] in written}


def _needs(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return what each node must come after: its inputs and, if memory is written to, other users of that memory."""
    memory = _memory(nodes)
    since: dict[Node, list[Node]] = {}  # by memory: the last write to it, and its users since then
    needs: dict[Node, list[Node]] = {}
    for node in nodes:
        needs[node] = list(node.all_input_nodes)
        for used in dict.fromkeys(memory[x] for x in node.all_input_nodes):
            uses = since.setdefault(used, [used])
            if _writes(node):
                needs[node] += uses
                uses.clear()
            needs[node] += uses[:1]
            uses.append(node)
    return needs


def is_random(node: Node) -> bool:
    """Return whether an operation draws random numbers; attention without dropout and backward passes do not."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    positions = {argument.name: k for k, argument in enumerate(operation._schema.arguments)}
    position = positions.get("dropout_p")
    if position is None:
        return True
    dropout = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not (dropout == 0 or "backward" in str(operation))
