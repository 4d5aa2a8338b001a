"""Matrix products: linear, addmm, matmul."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.gradients.forms import Dense, Outer
from qclip.engine.gradients.rules.registry import Gradient, register_rule, rows_of, sum_to
from qclip.engine.kernels.products import position_sums


def outer(left: Tensor, right: Tensor, shape: torch.Size) -> Outer:
    """Return the form of outer products over sides [B, T, M] and [B, T, N], with one group."""
    return Outer(left.unsqueeze(1), right.unsqueeze(1), shape)


@register_rule(F.linear)
def linear(grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Mapping[str, Gradient]:
    """``input @ weight.T + bias`` over the last dimension."""
    rows = rows_of(grad) if weight.dim() == 2 else grad.reshape(grad.shape[0], -1, 1)  # a vector of weights: one output
    return {
        "weight": lambda: outer(rows, rows_of(input), weight.shape),
        "bias": lambda: Dense(
            position_sums(rows)[:, : weight.shape[0]]
            if bias is None or bias.dim()
            else rows.sum((1, 2))  # see `widened_linear`
        ),
    }


def is_ragged(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether the output rows of a large layer are not multiples of 16 bytes, as a GPU's fast products need."""
    rough = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    native = input.is_cuda and (rough or input.dtype == weight.dtype == torch.bfloat16)
    return native and weight.dim() == 2 and weight.shape[0] > 64 and weight.shape[0] % 8 > 0


def widened_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the layer's output as a slice of a padded layer's output, and that padded output.

    In the backward pass the padded output's gradient is zero in the additional outputs, and every product with it is
    aligned, for the backward pass, the norms and the sums, without a padded copy for each.
    """
    missing = -weight.shape[0] % 8
    wide = F.linear(input, F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing)))
    return wide[..., : weight.shape[0]], wide


@register_rule(torch.addmm, torch.Tensor.addmm, torch.baddbmm, torch.Tensor.baddbmm)
def addmm(
    grad: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Mapping[str, Gradient]:
    """``beta * input + alpha * mat1 @ mat2``: the linear layer of GPT-2, whose weight is [in, out]."""
    scaled = alpha * grad if alpha != 1 else grad
    return {
        "input": lambda: Dense(beta * sum_to(grad, input.shape)),
        **_right(mat1, scaled, mat2, "mat2"),
        **_left(mat1, scaled, mat2, "mat1"),
    }


@register_rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm
)
def matmul(grad: Tensor, input: Tensor, other: Tensor) -> Mapping[str, Gradient]:
    """``input @ other`` with a matrix parameter on either side."""
    return {**_right(input, grad, other, "other"), **_left(input, grad, other, "input")}


@register_rule(torch.Tensor.__rmatmul__)
def rmatmul(grad: Tensor, other: Tensor, input: Tensor) -> Mapping[str, Gradient]:
    """``input @ other``, called as a method of ``other``."""
    return {**_right(input, grad, other, "other"), **_left(input, grad, other, "input")}


def _right(data: Tensor, grad: Tensor, weight: Tensor, name: str) -> Mapping[str, Gradient]:
    """Return the gradient of the right side: [B, *, M] @ [M, N], or with G experts [B, G, T, M] @ [G, M, N]."""
    if weight.dim() == 3 and data.dim() == grad.dim() == 4 and data.shape[1] == len(weight):
        return {name: lambda: Outer(data, grad, weight.shape)}
    if weight.dim() != 2 or data.dim() < 3:
        return {}
    return {name: lambda: outer(rows_of(data), rows_of(grad), weight.shape)}


def _left(weight: Tensor, grad: Tensor, data: Tensor, name: str) -> Mapping[str, Gradient]:
    """Return the gradient of the left side: [M, N] @ [B, *, N, D], or G of them; positions are the columns."""
    if weight.dim() == 3 and data.dim() == grad.dim() == 4 and data.shape[1] == len(weight):
        return {name: lambda: Outer(grad.mT, data.mT, weight.shape)}
    if weight.dim() != 2 or data.dim() < 3:
        return {}
    return {name: lambda: outer(rows_of(grad.mT), rows_of(data.mT), weight.shape)}
