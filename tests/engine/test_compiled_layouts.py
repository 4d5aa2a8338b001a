"""One compiled step serves a kind of batch, wherever in memory its numbers lie."""

import pytest
import torch
from torch import nn

from engine.cases import Net
from engine.compare import assert_same
from engine.driven import Pair, as_traced, batch

B = 7
LAYOUTS = {
    "every other example": lambda x: x.repeat_interleave(2, 0)[::2],
    "every other column": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "examples last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "one example, expanded": lambda x: x[:1].expand_as(x),
    "one column, expanded": lambda x: x[..., :1].expand_as(x),
}


def model():
    """A convolution, and a linear layer that sees its input in the order of the logical dimensions."""
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 4, 2), "linear": nn.Linear(60, 3)}
    return Net(lambda n, x: n.conv(x).flatten(1) @ torch.ones(48, 3) + n.linear(x.flatten(1)), **parts)


@pytest.mark.parametrize(
    ("first", "padded"),
    [("contiguous", False), ("every other column", False), ("channels last", False), ("channels last", True)],
)
def test_one_graph_serves_every_layout(first, padded, monkeypatch):
    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)
    pair = Pair(model(), slots=9 if padded else None)
    x, y = batch(B, 3, 4, 5)
    layouts = {"contiguous": lambda x: x, **LAYOUTS}
    for layout in (layouts.pop(first), *layouts.values()):
        assert_same(pair.compiled(layout(x), y), pair.expected(layout(x), y), 2e-5)
    assert len(pair.driver._steps) == 1


def test_through_the_compiler():
    """It checks strides, and proofs and repairs give it selected examples, which lie in memory of their own."""
    pair = Pair(nn.Linear(8, 3))
    x, y = batch(2 * B, 8)
    assert_same(pair.compiled(x[::2], y[::2]), pair.expected(x[::2], y[::2]), 2e-5)
    for layout in (
        lambda x: x,
        LAYOUTS["every other column"],
        LAYOUTS["examples last"],
        LAYOUTS["one example, expanded"],
    ):
        given, targets = layout(x[:B]), y[:B].clone()
        assert_same(pair.compiled(given, targets), pair.expected(given, targets), 2e-5)
    y[2] = torch.nan
    found, mask = pair.compiled(x[::2], y[::2]), torch.arange(B) != 1
    expected = pair.expected(x[::2], y[::2], mask=mask)
    torch.testing.assert_close(found.sums, expected.sums)
    assert len(pair.driver._steps) == 1


def test_an_example_alone_through_the_compiler():
    """The stride of a dimension of length 1 may be anything."""
    pair = Pair(nn.Linear(8, 3))
    x, y = batch(3, 8)
    for given, targets in ((x[:1], y[:1]), (x[::3], y[::3]), (x.T.contiguous().T[:1], y[:1])):
        assert_same(pair.compiled(given, targets), pair.expected(given, targets), 2e-5)
    assert len(pair.driver._steps) == 1
