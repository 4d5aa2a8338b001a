"""Cross entropy in the graph of a step: found there, and computed by kernels made for it."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from qclip.engine.compiled.rewrites import written_to
from qclip.engine.kernels.cross_entropy import cross_entropy, cross_entropy_gradients

aten = torch.ops.aten


def one_pass_cross_entropy(graph: Graph, most_classes: int = 2**12) -> None:
    """Compute cross entropy over more classes than this by kernels made for it, forwards and backwards.

    From the scores as the layer left them, whatever they were converted to on the way, to their gradient as it is
    converted back and, behind a widened layer, padded.
    """
    graph.eliminate_dead_code()
    written = written_to(list(graph.nodes))
    for node in list(graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)):
        found = _cross_entropy(node)
        if found is None or found.scores.meta["val"].shape[-1] <= most_classes or not written.isdisjoint(found.read):
            continue
        rows, classes = found.log_softmax.meta["val"].shape
        with graph.inserting_before(found.log_softmax):
            scores = _called(graph, aten.reshape.default, found.scores, [rows, classes])
        with graph.inserting_before(found.losses):
            both = _called(graph, cross_entropy._opoverload, scores, found.target, found.ignored)
            losses, sums = (_called(graph, operator.getitem, both, k) for k in range(2))
            losses = _called(graph, aten.to.dtype, losses, found.losses.meta["val"].dtype)
        found.losses.replace_all_uses_with(losses)
        final = found.final.meta["val"]
        with graph.inserting_before(found.final):
            arguments = scores, found.target, found.upstream, sums, found.ignored, final.shape[-1]
            wide = _called(graph, cross_entropy_gradients._opoverload, *arguments)
            wide = _called(graph, aten.view.default, wide, list(final.shape))
        found.final.replace_all_uses_with(wide)
    graph.eliminate_dead_code()


class _CrossEntropy(NamedTuple):
    scores: Node
    """[..., C], as precise as the layer left them."""
    log_softmax: Node
    """[R, C]."""
    target: Node
    ignored: int
    losses: Node
    """[R]."""
    upstream: Node
    """[R]."""
    final: Node
    """The gradient of the scores, of their precision, as wide as the layer."""
    read: Sequence[Node]
    """What must not change."""


def _cross_entropy(backward: Node) -> _CrossEntropy | None:
    """The whole of which this is the last step back; None where it is not cross entropy, row by row."""
    arguments: Any = backward.args
    chosen, log_softmax = arguments[:2]
    if chosen.target is not aten.nll_loss_backward.default or log_softmax.target is not aten._log_softmax.default:
        return None
    upstream, same, target, weight, reduction, ignored, _ = chosen.args
    forward = [user for user in log_softmax.users if user.target is aten.nll_loss_forward.default]
    alone = {*log_softmax.users} == {backward, chosen, *forward} and {*chosen.users} == {backward}
    asked = (log_softmax, target, weight, reduction, ignored)
    if not alone or same is not log_softmax or len(forward) != 1 or forward[0].args != asked:
        return None
    losses = [user for user in forward[0].users if user.args[1] == 0]
    by_rows = log_softmax.meta["val"].dim() == 2 and log_softmax.args[1] in (1, -1)
    if weight is not None or reduction != 0 or not by_rows or len(losses) != 1:
        return None
    chain = _scores(log_softmax)
    final = _gradient(backward, like=chain[-1].meta["val"])
    if final is None:
        return None
    read = [*chain, target, upstream]
    return _CrossEntropy(chain[-1], log_softmax, target, ignored, losses[0], upstream, final, read)


def _scores(log_softmax: Node) -> list[Node]:
    """What the logarithms are of, back to where the scores had another shape or less precision."""
    chain: list[Any] = [log_softmax.args[0]]
    while chain[-1].target in (aten.view.default, aten._unsafe_view.default, aten._to_copy.default):
        now, before = chain[-1].meta["val"], chain[-1].args[0].meta["val"]
        widening = (before.dtype, now.dtype) in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32))
        same = before.shape[-1:] == now.shape[-1:] and before.device == now.device
        if not same or not (before.dtype == now.dtype or widening):
            break
        chain.append(chain[-1].args[0])
    return chain


def _gradient(backward: Node, like: Tensor) -> Node | None:
    """The gradient in the precision of the scores that it is like, padded where they are part of something wider."""
    final, classes = backward, like.shape[-1]
    while len(final.users) == 1:
        (user,) = final.users
        found = user.meta.get("val")
        if not isinstance(found, Tensor) or found.device != like.device:
            break
        padded = user.target is aten.slice_backward.default and final.meta["val"].dtype == like.dtype
        if padded and user.args[2:] == (found.dim() - 1, 0, classes, 1):
            return user
        if user.target not in (aten.view.default, aten._to_copy.default) or found.shape[-1:] != (classes,):
            break
        final = user
    return final if final.meta["val"].dtype == like.dtype else None


def _called(graph: Graph, function: Callable[..., Any], *args: Any) -> Node:
    """A call added to the graph, with what is known of its result."""
    node = graph.call_function(function, args)
    node.meta["val"] = function(*map_arg(args, lambda each: each.meta["val"]))
    return node
