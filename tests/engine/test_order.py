"""The order of a step's graph: what is let go when, counted in bytes that are alive."""

import functools
import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qclip.apps.bench import measure
from qclip.apps.data.models import Block
from qclip.engine import CostModel, Engine
from qclip.engine.compiled.driver import Compiled

VIEWS = (
    "view",
    "permute",
    "transpose",
    "unsqueeze",
    "expand",
    "slice",
    "t",
    "alias",
    "_unsafe_view",
    "split",
    "select",
)


class Stack(nn.Module):
    """Blocks of a transformer, checkpointed or not."""

    def __init__(self, checkpointed, blocks=4):
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(blocks))

    def forward(self, x):
        """[B, T, 32] to the same."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


@functools.cache
def step(checkpointed, groups):
    """The graph of a step, and how far its sums are from the eager driver's."""
    torch.manual_seed(0)
    model, x = Stack(checkpointed), torch.randn(9, 64, 32)
    graphs = []

    def keep(graph, inputs, options):
        graphs.append(graph)
        return graph

    def evaluate(batch):
        return model(batch).square().mean((1, 2))

    driver = Compiled(Engine(model, groups=groups))
    with mock.patch("qclip.engine.compiled.driver.compile_graph", keep):
        found = driver.clipped(evaluate, x, 0.05)
    expected = driver.engine.clipped(evaluate, x, 0.05)
    for name, value in expected.sums.items():
        torch.testing.assert_close(found.sums[name], value, rtol=1e-5, atol=1e-6)
    return graphs[0].graph


def owner(node):
    """The node whose memory a view shows."""
    while node.op == "call_function" and (
        getattr(node.target, "__name__", "").split(".")[0] in VIEWS
        or (node.target.__name__ == "getitem" and "split" in node.args[0].name)
    ):
        node = node.all_input_nodes[0]
    return node


def most_alive(graph):
    """The most bytes of computed tensors that are still needed at any point."""
    nodes, last = list(graph.nodes), {}
    for k, node in enumerate(nodes):
        for each in node.all_input_nodes:
            last[owner(each)] = k
    alive, most, ending = 0, 0, {}
    for k, node in enumerate(nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and owner(node) is node and node in last:
            size = value.numel() * value.element_size()
            alive += size
            ending[last[node]] = ending.get(last[node], 0) + size
        most = max(most, alive)
        alive -= ending.pop(k, 0)
    return most


def sums_at(graph):
    """Where in the graph each clipped sum is computed, as a fraction of its length."""
    nodes = list(graph.nodes)
    *sums, _, _, _ = nodes[-1].args[0]
    return sorted(nodes.index(owner(node)) / len(nodes) for node in sums)


@pytest.mark.slow
def test_groups_of_their_own_are_clipped_inside_the_backward_pass():
    flat, per_layer = step(False, "flat"), step(False, "per-layer")
    assert sums_at(flat)[0] > 0.5  # only when all norms are known
    places = sums_at(per_layer)
    assert places[0] < 0.4
    assert max(b - a for a, b in itertools.pairwise(places)) < 0.15  # spread over all of it
    assert most_alive(per_layer) <= most_alive(flat)


@pytest.mark.parametrize(
    ("groups", "fraction"), [pytest.param("flat", 0.8, marks=pytest.mark.slow), ("per-layer", 0.4)]
)
@pytest.mark.slow
def test_checkpointed_blocks_save_memory(groups, fraction):
    """With one norm for all layers, what their sums need is held until it is known; block by block, nothing is."""
    assert most_alive(step(True, groups)) < fraction * most_alive(step(False, groups))


@pytest.mark.slow
def test_the_compiler_keeps_to_the_order():
    """What checkpointing saves in the graph it saves in memory."""

    def peak(checkpointed):
        torch.manual_seed(0)
        model, x = Stack(checkpointed, blocks=3), torch.randn(16, 64, 32)
        driver = Compiled(Engine(model, groups="per-layer", costs=CostModel(method="gram")))

        def evaluate(batch):
            return model(batch).square().mean((1, 2))

        for _ in range(2):
            driver.clipped(evaluate, x, 0.05)
        return measure.peak_bytes(lambda: driver.clipped(evaluate, x, 0.05), torch.device("cpu"))

    assert peak(True) < 0.7 * peak(False)
