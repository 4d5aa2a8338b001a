"""What could let one example add more than its bound to a compiled step, or freeze what must not be frozen."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from engine.compare import distance
from engine.driven import Pair, as_traced
from qclip._validate import Refusal
from qclip.engine.compiled.driver import MOST_KINDS, _modules


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """The traced graph runs as it is."""
    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)


class Penalty(torch.autograd.Function):
    """Adds a gradient of its own for values above 3, whatever the loss."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad + 10 * torch.relu(x - 3)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 3), nn.Linear(3, 1), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def test_padding_adds_nothing_even_where_a_backward_pass_has_gradients_of_its_own():
    torch.manual_seed(0)
    pair = Pair(Net(Penalty.apply), slots=32)
    x, y = 0.3 * torch.randn(6, 4), torch.randn(6)
    for _ in range(3):
        without = pair.compiled(x[1:], y[1:])
    x[0] = 100 * pair.model.first.weight[0].detach()  # repeated 26 times to fill the slots
    assert distance(pair.compiled(x, y), without) <= 1.0 + 1e-5


def test_an_example_that_is_finite_by_chance_is_refused():
    """The one that replaces it meets its random numbers."""

    class Chance(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x):
            return self.linear(x) / torch.where(x[:, :1] > 0, 1.0, torch.bernoulli(torch.full((len(x), 1), 0.5)))

    torch.manual_seed(0)
    pair = Pair(Chance())
    x, y = torch.randn(8, 4), torch.randn(8)
    x[:, 0] = 1
    pair.compiled(x, y)
    x[:, 0] = -1
    with pytest.raises(Refusal, match="train without compile"):
        pair.compiled(x, y)


@pytest.mark.parametrize("changed", ["batch", "model"])
def test_what_changed_meanwhile_is_not_computed_again(changed):
    torch.manual_seed(0)
    pair = Pair(Net(torch.tanh))
    x, y = torch.randn(8, 4), torch.randn(8)
    x[3] = torch.nan
    found = pair.driver.clipped(pair.evaluate, (x, y), 1.0, wait=False)
    with torch.no_grad():
        (x if changed == "batch" else pair.model.first.weight).zero_()
    with pytest.raises(Refusal, match="changed in place meanwhile"):
        found.resolve()


@pytest.mark.parametrize("decide", [random.random, np.random.rand])
def test_decisions_by_other_generators_are_not_frozen(decide):
    pair = Pair(Net(lambda x: x * 2 if decide() < 2 else x))
    with pytest.warns(UserWarning, match="random numbers of Python or numpy decide"):
        pair.compiled(torch.randn(6, 4), torch.randn(6))


def test_what_a_trace_leaves_in_attributes_is_taken_back():
    class Caching(Net):
        def forward(self, x):
            if len(self.table) < len(x):
                self.table = torch.ones(len(x), 1)
            return self.last(self.first(x)) * self.table[: len(x)]

    model = Caching(None)
    model.table = torch.ones(0, 1)
    pair = Pair(model)
    x, y = torch.randn(8, 4), torch.randn(8)
    pair.compiled(x, y)
    assert type(model.table) is torch.Tensor
    model(x).sum().item()


def test_many_kinds_are_not_all_compiled():
    pair = Pair(Net(torch.tanh))
    for k in range(MOST_KINDS):
        pair.compiled(torch.randn(6 + k, 4), torch.randn(6 + k))
    with pytest.warns(UserWarning, match="pad them to a few shapes"):
        pair.compiled(torch.randn(5, 4), torch.randn(5))


def test_the_warning_points_at_the_caller():
    pair = Pair(Net(lambda x: x if float(x.detach().sum()) < 1e9 else -x))
    with pytest.warns(UserWarning, match="not compiled") as caught:
        pair.driver.clipped(pair.evaluate, (torch.randn(6, 4), torch.randn(6)), 1.0)
    assert caught[0].filename == __file__


def test_modules_are_walked_once_each():
    """Whether they are shared or hold each other."""
    one, two = nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2))
    whole = nn.ModuleDict({"one": one, "again": one, "two": two})
    two.add_module("whole", whole)
    two.register_module("none", None)
    assert len(_modules(whole)) == 5
    assert set(_modules(whole)) == set(whole.modules())
