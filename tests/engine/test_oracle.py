"""The oracle against gradients worked out by hand: nothing else in the engine's suite checks the oracle."""

import math
from operator import attrgetter

import pytest
import torch
from torch import nn

from engine.cases import CASES
from engine.compare import assert_same, quiet, slow
from qclip.engine import oracle
from shards import every

pytestmark = quiet


def linear(weight, bias=None):
    model = nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    model.weight.data = torch.tensor(weight)
    if bias is not None:
        model.bias.data = torch.tensor(bias)
    return model


def half_square(outputs, targets):
    return 0.5 * (outputs - targets).square().sum(1)


X = torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 0.0]])
"""Residuals are 2, 0.5 and 0 below, so that gradients are (6, 8), (0, 0.5) and 0."""
Y = torch.tensor([[-2.0], [-0.5], [0.0]])
ZERO = linear([[0.0, 0.0]])


def test_gradients_below_the_threshold_are_summed_as_they_are():
    found = oracle.clipped_gradients(ZERO, half_square, X, Y, 100.0)
    torch.testing.assert_close(found.sums["weight"], torch.tensor([[6.0, 8.5]]))
    torch.testing.assert_close(found.norms, torch.tensor([10.0, 0.5, 0.0]))
    torch.testing.assert_close(found.losses, torch.tensor([2.0, 0.125, 0.0]))
    assert found.l2_bound == 100.0
    assert found.mask.all()


def test_gradients_above_the_threshold_are_scaled_to_it():
    found = oracle.clipped_gradients(ZERO, half_square, X, Y, 1.0)
    torch.testing.assert_close(found.sums["weight"], torch.tensor([[0.6, 0.8 + 0.5]]))
    torch.testing.assert_close(found.norms, torch.tensor([10.0, 0.5, 0.0]))


def test_a_gradient_within_the_threshold_is_left_alone():
    """At it, it gives way to rounding."""
    found = oracle.clipped_gradients(ZERO, half_square, X[:1], Y[:1], 10.0001)
    assert torch.equal(found.sums["weight"], torch.tensor([[6.0, 8.0]]))
    at = oracle.clipped_gradients(ZERO, half_square, X[:1], Y[:1], 10.0).sums["weight"].double()
    assert 10 * (1 - 3e-6) < torch.linalg.vector_norm(at) < 10


def test_weight_and_bias_share_one_norm_when_flat():
    found = oracle.clipped_gradients(linear([[0.0, 0.0]], [0.0]), half_square, X[:1], Y[:1], math.sqrt(104) / 2)
    torch.testing.assert_close(found.norms, torch.tensor([math.sqrt(104)]))
    torch.testing.assert_close(found.sums["weight"], torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(found.sums["bias"], torch.tensor([1.0]))


def test_each_group_has_its_own_norm_and_threshold():
    groups = {"weights": "*weight", "biases": "*bias"}
    model = linear([[0.0, 0.0]], [0.0])
    found = oracle.clipped_gradients(model, half_square, X, Y, {"weights": 1.0, "biases": 3.0}, groups=groups)
    torch.testing.assert_close(found.group_norms, torch.tensor([[10.0, 2.0], [0.5, 0.5], [0.0, 0.0]]))
    torch.testing.assert_close(found.norms, found.group_norms.norm(dim=1))
    torch.testing.assert_close(found.sums["weight"], torch.tensor([[0.6, 1.3]]))
    torch.testing.assert_close(found.sums["bias"], torch.tensor([2.5]))
    assert found.l2_bound == pytest.approx(math.sqrt(10))


def test_positions_of_one_example_are_added_before_clipping():
    def loss(outputs, targets):
        return (outputs[..., 0] * targets).sum(1)

    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    found = oracle.clipped_gradients(ZERO, loss, x, torch.tensor([[2.0, 3.0, 2.0]]), 2.5)
    torch.testing.assert_close(found.norms, torch.tensor([5.0]))
    torch.testing.assert_close(found.sums["weight"], torch.tensor([[2.0, 1.5]]))


def test_masked_examples_add_nothing():
    found = oracle.clipped_gradients(ZERO, half_square, X, Y, 100.0, mask=torch.tensor([False, True, True]))
    torch.testing.assert_close(found.sums["weight"], torch.tensor([[0.0, 0.5]]))
    torch.testing.assert_close(found.norms, torch.tensor([0.0, 0.5, 0.0]))
    assert found.mask.tolist() == [False, True, True]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_examples_add_nothing_and_have_infinite_norms(value):
    x = X.clone()
    x[0, 0] = value
    groups = {"weights": "*weight", "biases": "*bias"}
    found = oracle.clipped_gradients(linear([[0.0, 0.0]], [0.0]), half_square, x, Y, 100.0, groups=groups)
    torch.testing.assert_close(found.sums["weight"], torch.tensor([[0.0, 0.5]]))
    torch.testing.assert_close(found.sums["bias"], torch.tensor([0.5]))
    assert (found.group_norms[0] == torch.inf).all()
    assert found.norms[0] == torch.inf
    assert found.count_under([[1e30], [1e30]]).tolist() == [[2], [2]]


def test_one_group_that_is_not_finite_drops_the_whole_example():
    """A NaN in one group says nothing good about the others."""
    model = nn.Sequential(linear([[1.0]]), linear([[0.0]]))
    x = torch.tensor([[torch.inf]])  # gradient of the first weight is 0 * inf, of the second -inf * inf
    found = oracle.clipped_gradients(model, half_square, x, torch.tensor([[1.0]]), [1.0, 1.0], groups="per-layer")
    assert (found.group_norms == torch.inf).all()
    assert not any(sum_.any() for sum_ in found.sums.values())


def test_no_examples():
    found = oracle.clipped_gradients(ZERO, half_square, X[:0], Y[:0], 1.0)
    assert found.norms.shape == found.losses.shape == (0,)
    assert found.group_norms.shape == (0, 1)
    assert torch.equal(found.sums["weight"], torch.zeros(1, 2))


def test_only_trainable_parameters_have_sums():
    model = linear([[0.0, 0.0]], [0.0])
    model.weight.requires_grad_(False)
    found = oracle.clipped_gradients(model, half_square, X, Y, 100.0)
    assert list(found.sums) == ["bias"]
    torch.testing.assert_close(found.norms, torch.tensor([2.0, 0.5, 0.0]))


@pytest.mark.parametrize(
    ("parameter", "sum_"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sums_are_at_least_float32(parameter, sum_):
    model = nn.Linear(2, 1, bias=False).to(parameter)
    found = oracle.clipped_gradients(model, half_square, X.to(parameter), Y.to(parameter), 1.0)
    assert found.sums["weight"].dtype == sum_
    assert found.norms.dtype == found.group_norms.dtype == sum_


def test_inputs_by_position_and_by_name():
    class Affine(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x, shift=0.0):
            return self.scale * x + shift

    shift = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    by_position = oracle.clipped_gradients(Affine(), half_square, (X, shift), Y, 1.0)
    by_name = oracle.clipped_gradients(Affine(), half_square, {"x": X, "shift": shift}, Y, 1.0)
    alone = oracle.clipped_gradients(Affine(), half_square, X, Y - shift, 1.0)
    assert torch.equal(by_position.sums["scale"], by_name.sums["scale"])
    torch.testing.assert_close(by_position.norms, alone.norms)


def test_gradients_are_enabled_whatever_the_caller_says():
    with torch.no_grad():
        found = oracle.clipped_gradients(ZERO, half_square, X, Y, 100.0)
    torch.testing.assert_close(found.sums["weight"], torch.tensor([[6.0, 8.5]]))
    assert ZERO.weight.grad is None


@pytest.mark.parametrize(
    "case", every(3, [c for c in CASES if c.id != "embedding-scaled-by-frequency"], name=attrgetter("id"))
)
def test_a_shared_forward_pass_changes_nothing_where_examples_do_not_mix(case):
    """So the rows themselves are sound: they do not mix examples, and dropout is the only reason to share the pass."""
    problem = case.build()
    torch.manual_seed(1)
    arguments = (problem.model, problem.loss, problem.inputs, problem.targets, 1.0)
    assert_same(oracle.clipped_gradients(*arguments, shared_forward=True), slow(case, problem), case.rtol)
