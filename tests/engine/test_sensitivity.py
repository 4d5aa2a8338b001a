"""Removing any one example changes the vector of all sums by at most the declared bound: hard cases.

Every row of the table is tested in test_rows.py.
"""

import itertools

import pytest
import torch
from torch import nn

from engine.cases import Case, Net, Problem, squared
from engine.compare import distance, middle, scaled
from qclip.engine import clipped_gradients

B = 3

ROUNDING = 1 + 1e-5
"""Of a sum against its bound."""


def assert_bounded(problem, clip_norm):
    """No example counts for more than the bound."""
    full = clipped_gradients(problem.model, problem.loss, problem.inputs, problem.targets, clip_norm)
    for i in range(B):
        keep = torch.arange(B) != i
        less = clipped_gradients(problem.model, problem.loss, problem.inputs, problem.targets, clip_norm, mask=keep)
        assert distance(full, less) <= full.l2_bound * ROUNDING


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
        assert_bounded(problem, share * middle(case, problem))


@pytest.mark.parametrize("scale", [1e-11, 1e12, 1e19])
def test_gradients_whose_squares_leave_float32(scale):
    """1e19 squared and summed is inf in float32. Thresholds so small that squares vanish are refused."""
    case = Case("extreme", lambda B: Problem(nn.Linear(6, 5), torch.randn(B, 4, 6)))
    assert_bounded(scaled(case.build(B), [scale] * B), 0.1 * scale)


@pytest.mark.parametrize("pair", list(itertools.combinations(range(6), 2)), ids=str)
def test_any_two_examples_that_mix_are_refused(pair):
    """One gradient in two examples' losses is counted twice: the bound would not hold."""

    def mixed(net, x):
        return net.linear(x).index_add(0, torch.tensor(pair[:1]), net.linear(x)[[pair[1]]])

    torch.manual_seed(0)
    model = Net(mixed, linear=nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"examples mix|depends on others|cannot be attributed"):
        clipped_gradients(model, squared, torch.randn(6, 5), torch.randn(6), 1.0)
