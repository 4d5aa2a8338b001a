"""The faults that PEERS.md lists for Opacus and FastDP's engines, one test each.

Those of their thresholds, accounting and checkpoints are tested where qclip has these.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.cases import Case, Net, Problem
from engine.cases.case import squared, token_loss
from engine.compare import assert_same, distance, fast, middle, slow
from qclip.engine import clipped_gradients


def check(model, inputs, targets=None, loss=squared, groups="flat"):
    """The engine equals the oracle at the median norm, and no example counts for more than the bound."""
    case = Case("peer", lambda batch_size: Problem(model, inputs, targets, loss))
    problem = case.build(len(inputs))
    clip_norm = middle(case, problem, groups)
    found = fast(case, problem, clip_norm, groups=groups)
    assert_same(found, slow(case, problem, clip_norm, groups=groups), rtol=2e-5)
    for i in range(len(inputs)):
        without = fast(case, problem, clip_norm, groups=groups, mask=torch.arange(len(inputs)) != i)
        assert distance(found, without) <= found.l2_bound * (1 + 1e-5)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Opacus 1.6.0


def test_a_huge_example_is_clipped():
    """Its ghost adaptive engine moved the sum by 2353 at C = 1 when one example left."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    x, y = torch.randn(6, 5), torch.randn(6)
    x[0] *= 1000
    full = clipped_gradients(model, squared, x, y, 1.0)
    rest = clipped_gradients(model, squared, x[1:], y[1:], 1.0)
    assert full.norms[0] > 1000
    assert distance(full, rest) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
        functools.partial(F.cross_entropy, reduction="none"),
        nn.CrossEntropyLoss(reduction="none"),
    ],
    ids=["function", "partial", "module"],
)
def test_a_loss_without_a_reduction_attribute_is_clipped(loss):
    """Its flat ghost mode does not clip with any loss function that has no `.reduction`."""
    x, y = 100 * torch.randn(4, 5), torch.randint(3, (4,))
    found = clipped_gradients(nn.Linear(5, 3), loss, x, y, 0.1)
    total = sum(sum_.square().sum() for sum_ in found.sums.values()).sqrt()
    assert (found.norms > 1).any()
    assert 0.01 < total <= 4 * 0.1 * (1 + 1e-5)


def test_a_weight_used_functionally():
    """Its norms are 0.7 of the true ones, silently."""
    model = Net(lambda n, i: F.linear(n.words(i), n.words.weight), words=nn.Embedding(7, 5))
    check(model, torch.randint(7, (4, 3)), torch.randint(7, (4, 3)), token_loss)


def test_linear_on_four_dimensions():
    check(nn.Linear(6, 5), torch.randn(4, 2, 3, 6))


def test_layer_norm_without_bias():
    check(nn.Sequential(nn.LayerNorm(6, bias=False), nn.Linear(6, 2)), torch.randn(4, 3, 6))


def test_in_place_relu():
    check(nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)), torch.randn(4, 6))


@pytest.mark.parametrize("batch_size", [3, 4], ids=["batch equals length", "batch differs"])
def test_position_ids_without_a_batch_dimension(batch_size):
    model = Net(
        lambda n, i: n.words(i) + n.places(torch.arange(3)[None]), words=nn.Embedding(7, 5), places=nn.Embedding(8, 5)
    )
    check(model, torch.randint(7, (batch_size, 3)))


def test_tied_weights_are_accepted():
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    model[1].weight = model[0].weight
    check(model, torch.randint(7, (4, 3)), torch.randint(7, (4, 3)), token_loss)


def test_an_empty_batch():
    """An empty Poisson batch crashes it."""
    found = clipped_gradients(nn.Linear(6, 5), squared, torch.randn(0, 6), torch.randn(0), 1.0)
    assert found.norms.shape == (0,)
    assert not found.sums["weight"].any()
    assert found.sums["weight"].shape == (5, 6)


# FastDP


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
def test_tied_weights_contribute_no_more_than_the_threshold(groups):
    """Its contribution is 1.46 C: it clips the two uses apart. Here one example alone shows the whole of it."""
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    model[1].weight = model[0].weight
    words = torch.randint(7, (1, 6))
    free = clipped_gradients(model, token_loss, words, words, 1e6, groups=groups)
    clip_norm = 0.3 * float(free.norms)
    found = clipped_gradients(model, token_loss, words, words, clip_norm, groups=groups)
    assert list(found.sums) == ["0.weight"]
    assert found.sums["0.weight"].norm() == pytest.approx(clip_norm, rel=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_convolution(groups):
    check(nn.Conv2d(4, 8, 3, groups=groups, padding=1), torch.randn(4, 4, 5, 5))


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
def test_parameters_registered_in_another_order_than_executed(groups):
    """It silently drops some of them."""
    parts = {
        "head": nn.Linear(5, 2),
        "scale": nn.Parameter(torch.ones(6)),
        "norm": nn.LayerNorm(5),
        "body": nn.Linear(6, 5),
    }
    model = Net(lambda n, x: n.head(n.norm(n.body(x * n.scale))), **parts)
    check(model, torch.randn(4, 3, 6), groups=groups)
    found = clipped_gradients(model, squared, torch.randn(4, 3, 6), torch.randn(4), 1.0, groups=groups)
    assert list(found.sums) == [name for name, _ in model.named_parameters()]
    assert all(sum_.any() for sum_ in found.sums.values())


class LargestTensor(TorchDispatchMode):
    """The most numbers that any operation put into one tensor of its own; views and in-place results own nothing."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
            if isinstance(output, Tensor):
                stored = output.untyped_storage().nbytes() // output.element_size()
                self.numel = max(self.numel, min(stored, output.numel()))
        return outputs


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_builds_nothing_of_the_vocabulary_for_each_example(tied):
    """Its embedding makes a (batch, T, vocabulary) one-hot. We need the table's gradient, and the logits if tied."""
    B, T, V, D = 16, 8, 5000, 16
    if tied:
        model = Net(lambda n, i: F.linear(n.words(i), n.words.weight), words=nn.Embedding(V, D))
    else:
        model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, 3))
    loss = token_loss if tied else squared
    inputs = torch.randint(V, (B, T))
    targets = inputs if tied else torch.randn(B)
    with LargestTensor() as largest:
        clipped_gradients(model, loss, inputs, targets, 1.0)
    assert largest.numel <= (B * T * V if tied else V * D)
