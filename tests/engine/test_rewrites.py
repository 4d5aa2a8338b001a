"""Rewrites leave what a graph computes as it is; what they do to memory in whole steps: test_order.py."""

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from engine.driven import Pair
from qclip.engine.compiled import rewrites


def test_what_comes_late_moves_up_to_what_it_needs():
    g = Graph()
    x = g.placeholder("x")
    forward = g.call_function(torch.ops.aten.sin.default, (x,))
    one = g.call_function(torch.ops.aten.cos.default, (forward,))
    two = g.call_function(torch.ops.aten.cos.default, (one,))
    late_two = g.call_function(torch.ops.aten.exp.default, (two,))
    late_one = g.call_function(torch.ops.aten.exp.default, (one,))
    g.output((late_one, late_two))
    rewrites.clip_early(g, 2, 4)
    g.lint()
    assert list(g.nodes)[2:-1] == [one, late_one, two, late_two]


def test_writes_to_memory_keep_their_order():
    """A view is written to and its base is read afterwards: no edge of the graph says so."""
    g = Graph()
    x = g.placeholder("x")
    one = g.call_function(torch.ops.aten.cos.default, (x,))
    two = g.call_function(torch.ops.aten.cos.default, (one,))
    zeros = g.call_function(torch.ops.aten.zeros.default, ([3, 2],))
    row = g.call_function(torch.ops.aten.select.int, (zeros, 0, 1))
    early_read = g.call_function(torch.ops.aten.clone.default, (zeros,))
    g.call_function(torch.ops.aten.copy_.default, (row, two))
    total = g.call_function(torch.ops.aten.add.Tensor, (zeros, one))
    g.output((total, early_read))
    module = torch.fx.GraphModule({}, g)
    before = module(torch.ones(2))
    rewrites.clip_early(g, 1, 3)
    g.lint()
    module.recompile()
    for a, b in zip(module(torch.ones(2)), before, strict=True):
        torch.testing.assert_close(a, b)


def test_memory_written_in_the_forward_pass_is_read_after_it():
    g = Graph()
    x = g.placeholder("x")
    made = g.call_function(torch.ops.aten.sin.default, (x,))
    view = g.call_function(torch.ops.aten.view.default, (made, [2]))
    g.call_function(torch.ops.aten.add_.Scalar, (view, 1))
    one = g.call_function(torch.ops.aten.cos.default, (x,))
    late = g.call_function(torch.ops.aten.mul.Tensor, (made, one))
    read = g.call_function(torch.ops.aten.exp.default, (made,))
    g.output((late, read))
    module = torch.fx.GraphModule({}, g)
    before = module(torch.ones(2))
    rewrites.clip_early(g, 2, 5)
    module.recompile()
    for a, b in zip(module(torch.ones(2)), before, strict=True):
        torch.testing.assert_close(a, b)


def test_memory_that_is_written_to_is_not_taken_for_the_same():
    """Two zeros are alike until something is written into one of them."""
    g = Graph()
    x = g.placeholder("x")
    mine = g.call_function(torch.ops.aten.zeros.default, ([3, 2],))
    row = g.call_function(torch.ops.aten.select.int, (mine, 0, 1))
    g.call_function(torch.ops.aten.copy_.default, (row, x))
    forward = len(g.nodes)
    other = g.call_function(torch.ops.aten.zeros.default, ([3, 2],))
    grad = g.call_function(torch.ops.aten.cos.default, (other,))
    backward = len(g.nodes)
    late = g.call_function(torch.ops.aten.mul.Tensor, (mine, grad))
    g.output((late,))
    module = torch.fx.GraphModule({}, g)
    (before,) = module(torch.ones(2))
    rewrites.use_recomputed(g, forward, backward)
    rewrites.clip_early(g, forward, backward)
    module.recompile()
    torch.testing.assert_close(module(torch.ones(2))[0], before)


def test_what_is_computed_again_is_used():
    g = Graph()
    x = g.placeholder("x")
    mine = g.call_function(torch.ops.aten.sin.default, (x,))
    forward = len(g.nodes)
    again = g.call_function(torch.ops.aten.sin.default, (x,))
    backward = len(g.nodes)
    late = g.call_function(torch.ops.aten.exp.default, (mine,))
    g.output((late,))
    rewrites.use_recomputed(g, forward, backward)
    assert late.args == (again,)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.Conv2d(3, 4, (2, 3), stride=(3, 2), padding=(0, 2), dilation=(2, 1)),
        nn.Conv2d(3, 6, 3, groups=3),
        nn.Conv1d(3, 4, 4, stride=3),
        nn.Conv3d(3, 4, 2, stride=2),
    ],
    ids=str,
)
def test_an_input_gradient_is_a_transposed_convolution(layer, monkeypatch):
    """Whatever remainder the strides leave."""
    graphs = []

    def compile(graph, inputs, options):
        rewrites.free_layouts(graph.graph)
        graph.recompile()
        graphs.append(graph)
        return graph

    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", compile)
    spatial = layer.weight.dim() - 2
    before = type(layer)(2, 3, 3, padding=1)
    pair = Pair(nn.Sequential(before, nn.Tanh(), layer, nn.Flatten()))
    x, y = torch.randn(7, 2, *(11, 10, 9)[:spatial]), torch.randn(7)
    found, expected = pair.compiled(x, y), pair.expected(x, y)
    operations = [node.target for node in graphs[0].graph.nodes]
    backward = [node for node in graphs[0].graph.nodes if node.target is torch.ops.aten.convolution_backward.default]
    assert all(list(node.args[-1]) == [False, True, False] for node in backward)  # only those of weights are left
    assert operations.count(torch.ops.aten.convolution.default) == 3  # two forward, one back
    for name, value in expected.sums.items():
        torch.testing.assert_close(found.sums[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("chance", [0.0, 0.003, 0.5, 0.8, 1.0])
def test_masks_are_drawn_by_comparison(chance, dtype):
    """20,000 numbers: six standard deviations fail once in 5e8 times, were the seed not fixed."""
    images = torch.empty(4, 10, 10, 50, dtype=dtype).to(memory_format=torch.channels_last)

    def draw(x):
        return torch.empty_like(x).bernoulli_(chance).div_(2)

    module = make_fx(draw, tracing_mode="fake")(images)
    rewrites.compare_uniform(module.graph)
    module.graph.lint()
    module.recompile()
    assert not list(module.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli_.float))
    torch.manual_seed(0)
    mask, another = 2 * module(images), 2 * module(images)
    assert mask.dtype == dtype
    assert mask.stride() == images.stride()
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    assert abs(mask.double().mean() - chance) <= 6 * (chance * (1 - chance) / images.numel()) ** 0.5
    assert torch.equal(mask, another) == (chance in (0.0, 1.0))


def test_a_mask_whose_memory_has_other_uses_is_left_as_it_is():
    def draw(x):
        memory = torch.empty_like(x)
        row = memory[0]
        memory.bernoulli_(0.5)
        return row + 1

    module = make_fx(draw, tracing_mode="fake")(torch.zeros(3, 4))
    rewrites.compare_uniform(module.graph)
    assert list(module.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli_.float))
