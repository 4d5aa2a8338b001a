"""bfloat16 and autocast: norms, factors and sums stay in float32. Every row of the table: test_rows.py."""

import pytest
import torch
from torch import nn

from engine.cases.case import squared
from engine.compare import assert_nearly
from qclip.engine import clipped_gradients, oracle


def linear_with_positions(positions, width):
    """A bfloat16 layer with correlated positions, and its exact norms from the same activations and gradients."""
    torch.manual_seed(0)
    model = nn.Linear(width, width, bias=False).to(torch.bfloat16)
    x = (1 + 0.2 * torch.randn(4, positions, width)).bfloat16()
    targets = 5 + torch.randn(4)
    outputs = model(x)
    (grad,) = torch.autograd.grad(squared(outputs, targets).sum(), outputs)
    exact = torch.einsum("bti,bto->bio", x.double(), grad.double()).flatten(1).norm(dim=1)
    return model, x, targets, exact


@pytest.mark.parametrize(("positions", "width"), [(2, 64), (16, 64), (64, 8), (1, 16)])
@pytest.mark.parametrize("autocast", [False, True])
def test_norms_are_accumulated_in_float32(positions, width, autocast):
    """Gram products in bfloat16 are up to 2.5 % off; gradients rounded to bfloat16, as by the oracle, 0.1 %."""
    model, x, targets, exact = linear_with_positions(positions, width)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = clipped_gradients(model, squared, x, targets, 1.0)
    torch.testing.assert_close(found.norms.double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_normalisations_of_small_numbers(norm):
    """An eps that is not given is that of the arithmetic: bfloat16's would outweigh the squares of small inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), norm(8)).to(torch.bfloat16)
    x, targets = (0.02 * torch.randn(4, 3, 8)).bfloat16(), 5 + torch.randn(4)
    found, expected = (
        clipped_gradients(model, squared, x, targets, 1.0),
        oracle.clipped_gradients(model, squared, x, targets, 1.0),
    )
    assert_nearly(found, expected)


def test_sum_keeps_what_bfloat16_would_lose():
    """Many small examples beside a large one: a bfloat16 sum would stop growing."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    x = torch.ones(1025, 1).bfloat16()
    scale = torch.full((1025,), 2.0**-8)
    scale[0] = 1.0
    found = clipped_gradients(model, lambda outputs, targets: outputs[:, 0].float() * targets, x, scale, 10.0)
    assert found.sums["weight"].item() == pytest.approx(1 + 1024 / 256, rel=1e-6)
