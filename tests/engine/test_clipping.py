"""Clip factors keep what their docstring promises, at every edge."""

import math

import pytest
import torch

from qclip.engine.gradients.clipping import bundled, clip_factors, clipped_sums, group_norms
from qclip.engine.gradients.forms import Dense
from qclip.engine.gradients.parts import Part
from qclip.engine.groups import Groups

TAU = 2.0


def clipped(grads, mask=None, *, assume_finite=False, split=False):
    """Norms, factors and the sum of each group for gradients [B, N]; with ``split`` every column is a group."""
    columns = {f"p{k}": x for k, x in enumerate(grads.T[:, :, None])} if split else {"p": grads}
    names = tuple(columns) if split else ("all",)
    groups = Groups(names, {name: k if split else 0 for k, name in enumerate(columns)})
    parameters = {name: torch.zeros(x.shape[1]) for name, x in columns.items()}
    parts = {name: [Part(Dense(x))] for name, x in columns.items()}
    is_counted = torch.ones(len(grads), dtype=torch.bool) if mask is None else torch.tensor(mask)
    bundles = bundled(parts, groups)
    norms = group_norms(parts, bundles, groups, parameters, is_counted)
    factors = clip_factors(norms, torch.full((len(names),), TAU), assume_finite=assume_finite)
    return norms, factors, clipped_sums(parts, bundles, factors, groups, parameters, norms.is_usable)


def test_a_factor_is_one_below_the_clip_norm_and_a_quotient_above():
    grads = torch.tensor([[0.6, 0.8], [6.0, 8.0]])
    _, (factors,), sums = clipped(grads)
    assert factors[0] == 1
    assert factors[1] == pytest.approx(TAU / 10, rel=1e-5)
    assert factors[1] * 10 < TAU  # by the rounding margin
    torch.testing.assert_close(sums["p"], grads[0] + 0.2 * grads[1])


def test_a_zero_gradient_has_factor_one():
    norms, (factors,), sums = clipped(torch.zeros(3, 4))
    assert factors.tolist() == [1.0] * 3
    assert norms.by_group.eq(0).all()
    assert sums["p"].eq(0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("split", [False, True], ids=["flat", "per-layer"])
def test_an_example_that_is_not_finite_in_one_group_has_factor_zero_in_all(value, split):
    grads = torch.tensor([[value, 1.0], [1.0, 1.0]])
    norms, factors, sums = clipped(grads, split=split)
    assert all(factor.tolist() == [0.0, 1.0] for factor in factors)
    assert norms.by_group[0].isinf().all()
    assert torch.cat(list(sums.values())).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("assume_finite", [False, True])
@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_masked_example_has_factor_zero(value, assume_finite):
    grads = torch.tensor([[value, 3.0], [1.0, 1.0]])
    _, (factors,), sums = clipped(grads, [False, True], assume_finite=assume_finite)
    assert factors.tolist() == [0.0, 1.0]
    assert sums["p"].tolist() == [1.0, 1.0]


def test_an_empty_batch_has_no_factors_and_a_zero_sum():
    _, (factors,), sums = clipped(torch.zeros(0, 3))
    assert factors.shape == (0,)
    assert sums["p"].tolist() == [0.0] * 3
