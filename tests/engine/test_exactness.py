"""The engine equals the oracle on every row, in float32, for every way of grouping. Other dtypes: test_precision.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engine.cases import CASES, LAYERS, OPERATIONS, STRUCTURE, WIRING
from engine.cases.case import T, param
from engine.compare import assert_same, fast, middle, patterns, quiet, scaled, slow, trainable, usual
from qclip.engine.engine import call

pytestmark = quiet

SHIELDED = {"embedding-all-padding", "interface-all-labels-ignored"}
"""Rows where padding or ignored labels keep everything from the parameters, NaN included."""

every_row = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@pytest.mark.parametrize("grouping", [pytest.param("flat", marks=pytest.mark.smoke), "per-layer", "patterns"])
@every_row
def test_equals_the_oracle(case, grouping):
    problem = case.build()
    groups = patterns(problem) if grouping == "patterns" else grouping
    clip_norm = middle(case, problem, groups)
    found = fast(case, problem, clip_norm, groups=groups)
    assert_same(found, slow(case, problem, clip_norm, groups=groups), case.rtol)
    assert all(p.grad is None for p in problem.model.parameters())
    for name, parameter in trainable(problem).items():
        assert found.sums[name].shape == parameter.shape
        assert found.sums[name].dtype == torch.promote_types(parameter.dtype, torch.float32)
        assert not found.sums[name].requires_grad


@every_row
def test_batch_as_long_as_the_sequence(case):
    """Sizes alone cannot tell examples from positions here."""
    problem, clip_norm = case.build(batch_size=T), usual(case, T)
    assert_same(fast(case, problem, clip_norm), slow(case, problem, clip_norm), case.rtol)


@every_row
def test_one_example(case):
    problem = case.build(batch_size=1)
    clip_norm = 0.5 * middle(case, problem)
    assert_same(fast(case, problem, clip_norm), slow(case, problem, clip_norm), case.rtol)


@every_row
def test_no_examples(case):
    problem = case.build(batch_size=0)
    found = fast(case, problem)
    assert found.norms.shape == found.losses.shape == found.mask.shape == (0,)
    assert found.group_norms.shape == (0, 1)
    assert found.l2_bound == 1.0
    for name, parameter in trainable(problem).items():
        assert torch.equal(found.sums[name], torch.zeros_like(parameter))


@every_row
def test_the_plain_gradient_when_nobody_is_clipped(case):
    """The one test here that needs no oracle."""
    if case.id == "embedding-scaled-by-frequency":
        pytest.skip("the plain gradient of the batch counts the words of other examples")
    problem = case.build()
    found = fast(case, problem, 1e6)
    assert (found.norms < 1e6).all()
    torch.manual_seed(1)
    losses = problem.loss(call(problem.model, problem.inputs), problem.targets)
    parameters = trainable(problem)
    plain = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    for (name, parameter), grad in zip(parameters.items(), plain, strict=True):
        expected = torch.zeros_like(parameter) if grad is None else grad.to_dense()
        atol = case.rtol * float(expected.abs().max()) + 1e-6 * float(found.norms.sum())
        torch.testing.assert_close(found.sums[name], expected, rtol=0, atol=atol)


@every_row
def test_masked_examples_count_for_nothing(case):
    """Whatever they hold, NaN included."""
    problem = case.build()
    mask = torch.tensor([True, False, True, True])
    clip_norm = middle(case, problem, mask=mask)
    found = fast(case, scaled(problem, torch.ones(4).where(mask, torch.nan)), clip_norm, mask=mask)
    assert_same(found, slow(case, problem, clip_norm, mask=mask), case.rtol)
    assert found.norms[1] == 0


@every_row
def test_non_finite_examples_add_zero_and_count_as_clipped(case):
    """As if they were masked, with an infinite norm."""
    problem = case.build(batch_size=T)
    factors = torch.tensor([1.0, torch.nan, torch.inf])
    finite = factors.isfinite()
    healthy = scaled(problem, factors.where(finite, 1.0))
    clip_norm = 0.5 * usual(case, T)
    found, expected = fast(case, scaled(problem, factors), clip_norm), slow(case, healthy, clip_norm, mask=finite)
    if case.id not in SHIELDED:
        assert (found.norms[~finite] == torch.inf).all()
        assert (found.group_norms[~finite] == torch.inf).all()
    shown = {"norms": found.norms.where(finite, 0), "group_norms": found.group_norms.where(finite[:, None], 0)}
    assert_same(replace(found, **shown, mask=finite), expected, case.rtol)


@pytest.mark.parametrize("case", OPERATIONS + LAYERS, ids=lambda case: case.id)
def test_behind_a_trainable_input(case):
    """The same layers when their input has a gradient too."""
    problem = case.build()
    if not (isinstance(problem.inputs, Tensor) and problem.inputs.is_floating_point()):
        pytest.skip("the row's input is no single tensor of floats")
    problem = replace(problem, model=Scaled(problem.model, problem.inputs.shape[-1]))
    clip_norm = middle(case, problem)
    assert_same(fast(case, problem, clip_norm), slow(case, problem, clip_norm), case.rtol)


class Scaled(nn.Module):
    """A model behind a trainable scale of its input."""

    def __init__(self, model, width):
        super().__init__()
        self.model, self.scale = model, param(width)

    def forward(self, x):
        return self.model(x * self.scale)


@pytest.mark.parametrize("case", STRUCTURE + WIRING, ids=lambda case: case.id)
def test_twice_gives_the_same(case):
    """Nothing that a call leaves behind changes the next one."""
    problem = case.build()
    first = fast(case, problem)
    assert_same(fast(case, problem), first, rtol=1e-6)
