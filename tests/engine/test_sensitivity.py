"""Removing any one example changes the vector of all sums by at most the declared bound, whatever the example holds."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from engine.cases import CASES, OPERATIONS, PARAMETERS, Case, Net, Problem, squared
from engine.cases.case import T
from engine.compare import distance, fast, middle, quiet, scaled, slow, usual
from qclip.engine import batch as batches
from qclip.engine import clipped_gradients

pytestmark = quiet

SLACK = 1 + 1e-5
B = T
"""As many examples as positions, so that sizes cannot tell them apart."""

every_row = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
operations = pytest.mark.parametrize("case", OPERATIONS + PARAMETERS, ids=lambda case: case.id)


def removed(case, problem, index, clip_norm, **options):
    """The answer without an example: left out of the batch, or masked where dropout would draw other numbers."""
    keep = torch.arange(B) != index
    if case.random:
        return fast(case, problem, clip_norm, mask=keep, **options)
    inputs, targets = batches.select((problem.inputs, problem.targets), keep, B)
    return fast(case, replace(problem, inputs=inputs, targets=targets), clip_norm, **options)


def assert_bounded(case, problem, clip_norm, indices=range(B), **options):
    """The sums are finite, and no example counts for more than the bound."""
    full = fast(case, problem, clip_norm, **options)
    assert all(sum_.isfinite().all() for sum_ in full.sums.values())
    for i in indices:
        assert distance(full, removed(case, problem, i, clip_norm, **options)) <= full.l2_bound * SLACK
    return full


@every_row
def test_at_the_median_norm(case):
    assert_bounded(case, case.build(B), usual(case, B))


@every_row
def test_tiny_threshold_for_each_layer(case):
    assert_bounded(case, case.build(B), 1e-6, indices=[0], groups="per-layer")


@operations
def test_an_example_with_an_absurd_loss(case):
    """Infinity and NaN are in test_exactness.py."""
    assert_bounded(case, scaled(case.build(B), [1.0, 1e30, 1.0]), usual(case, B), indices=[1])


def poisoned(problem, index, value):
    """The problem with the floating inputs of one example replaced."""

    def poison(leaf):
        return leaf.index_fill(0, torch.tensor([index]), value) if leaf.is_floating_point() else leaf

    if not any(leaf.is_floating_point() for leaf in batches.tensors(problem.inputs)):
        pytest.skip("the row's inputs are ids")
    return replace(problem, inputs=pytree.tree_map(poison, problem.inputs))


@every_row
def test_an_example_that_is_not_finite(case):
    """It is bounded, and costs nobody else: the sum is the oracle's, which runs each example alone."""
    problem, clip_norm = poisoned(case.build(B), 0, torch.nan), usual(case, B)
    full = assert_bounded(case, problem, clip_norm, indices=[0])
    if not case.random:
        assert distance(full, slow(case, problem, clip_norm)) <= 1e-4 * full.l2_bound


@operations
def test_an_example_that_overflows(case):
    """Whether its norm is large or infinite is for float32 to say; the bound holds."""
    assert_bounded(case, poisoned(case.build(B), 1, -1e30), usual(case, B), indices=[1])


def nearly_cancelling(B):
    """Two positions whose gradients cancel but for 1e-4: a Gram product rounds the norm away, the sum does not."""
    x = torch.randn(B, 1, 32)
    x = torch.cat([x, x + 1e-4 * torch.randn(B, 1, 32)], 1)
    function = lambda net, x: net.linear(x)[:, 0] - net.linear(x)[:, 1]  # noqa: E731
    return Problem(Net(function, linear=nn.Linear(32, 32)), x, loss=lambda outputs, targets: (outputs * 10).sum(1))


def nearly_cancelling_once(B):
    problem = nearly_cancelling(B)
    problem.model.function = lambda net, x: net.linear(x).diff(dim=1)[:, 0]
    return problem


@pytest.mark.parametrize("make", [nearly_cancelling, nearly_cancelling_once])
@pytest.mark.parametrize("share", [1.0, 0.1, 1e-3])
def test_norms_that_cancel(make, share):
    case = Case("cancelling", make)
    for seed in range(5):
        problem = case.build(B, seed)
        assert_bounded(case, problem, share * middle(case, problem))


@pytest.mark.parametrize("scale", [1e-11, 1e12, 1e19])
def test_gradients_whose_squares_leave_float32(scale):
    """1e19 squared and summed is inf in float32. Thresholds so small that squares vanish are refused."""
    case = Case("extreme", lambda B: Problem(nn.Linear(6, 5), torch.randn(B, 4, 6)))
    problem = scaled(case.build(B), [scale] * B)
    clip_norm = 0.1 * scale
    full = fast(case, problem, clip_norm)
    for i in range(B):
        assert distance(full, fast(case, problem, clip_norm, mask=torch.arange(B) != i)) <= full.l2_bound * SLACK


@pytest.mark.parametrize("pair", list(itertools.combinations(range(6), 2)), ids=str)
def test_any_two_examples_that_mix_are_refused(pair):
    """One gradient in two examples' losses is counted twice: the bound would not hold."""

    def mixed(net, x):
        return net.linear(x).index_add(0, torch.tensor(pair[:1]), net.linear(x)[[pair[1]]])

    torch.manual_seed(0)
    model = Net(mixed, linear=nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"examples mix|depends on others|cannot be attributed"):
        clipped_gradients(model, squared, torch.randn(6, 5), torch.randn(6), 1.0)
