# ruff: noqa: ANN202, ARG001 - what Triton compiles has no types; a fake has the signature of its operator
"""Gradients of the weight and bias of a layer norm, example by example: every number is read once.

Written out in torch, the compiler delays these sums and reads the inputs of several layers for each.

Shapes: B examples, T positions, N numbers that are normalised together.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.kernels import DTYPES, installed, usable
from qclip.engine.kernels.products import full, position_sums

if installed():
    import triton
    import triton.language as tl
else:
    triton = None

ROWS: Final = 128
"""How many positions a program reads at once."""
COLUMNS: Final = 64
"""How many of their numbers."""
MOST_NUMBERS: Final = 2**20
"""A GPU's grid has an end."""


def layer_norm_sums(grads: Tensor, inputs: Tensor, eps: float, *, centred: bool = True) -> tuple[Tensor, Tensor]:
    """The sums over positions of [B, T, N] gradients times normalised inputs, and of gradients alone: [B, N] each.

    Not ``centred``, the inputs are only divided by their root mean square.

    >>> layer_norm_sums(torch.ones(1, 3, 2), torch.tensor([[[1.0, 3.0]]]).expand(1, 3, 2), 0.0)
    (tensor([[-3.,  3.]]), tensor([[3., 3.]]))
    """
    wide = full(inputs)
    if centred:  # written as in the forward pass, which can then share it
        squares, means = torch.var_mean(wide, 2, correction=0, keepdim=True)
    else:
        squares = wide.square().mean(2, keepdim=True)
        means = torch.zeros_like(squares)
    means, scales = means.squeeze(2), (squares + eps).rsqrt().squeeze(2)
    if not takes(grads, inputs):
        return twin(grads, inputs, means, scales)
    weights, biases = sums_in_parts(grads, inputs, means, scales).sum(2).unbind()
    return weights, biases


def takes(grads: Tensor, inputs: Tensor) -> bool:
    """Whether the kernel takes them."""
    return usable(grads) and inputs.is_cuda and inputs.dtype in DTYPES and inputs.shape[2] <= MOST_NUMBERS


def twin(grads: Tensor, inputs: Tensor, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch, for inputs with these means and scales, [B, T] each."""
    grads = full(grads)
    normalised = (full(inputs) - means[..., None]) * scales[..., None]
    return position_sums(grads * normalised), position_sums(grads)


@torch.library.custom_op("qclip::layer_norm_sums", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def sums_in_parts(grads: Tensor, inputs: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    """Both results of `twin` as sums over some of the positions each: [2, B, parts, N]."""
    if takes(grads, inputs):
        return launch(grads, inputs, means, scales)
    return F.pad(torch.stack(twin(grads, inputs, means, scales)).unsqueeze(2), (0, 0, 0, parts(grads) - 1))


@sums_in_parts.register_fake
def _(grads: Tensor, inputs: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    return full(grads.new_empty((2, len(grads), parts(grads), grads.shape[2])))


def parts(grads: Tensor) -> int:
    """In how many parts the positions are cut."""
    return max(1, -(-grads.shape[1] // ROWS))


def launch(grads: Tensor, inputs: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    """Run the kernel: [2, B, parts, N]."""
    tensors = [x.contiguous() for x in (grads, inputs, means.float(), scales.float())]
    count, positions, numbers = grads.shape
    shares = parts(grads)
    found = torch.empty(2, count, shares, numbers, dtype=torch.float32, device=grads.device)
    kernel: Any = _sums
    with torch.cuda.device_of(grads):
        kernel[(count, shares, -(-numbers // COLUMNS))](
            *(*tensors, found, positions, numbers, ROWS, COLUMNS), num_warps=4
        )
    return found


if triton is not None:

    @triton.jit
    def _sums(
        grads,
        inputs,
        means,
        scales,
        found,
        positions,
        N: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """Some positions of one example, and some of their numbers."""
        example, part, shares = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
        rows = part * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        known = rows < positions
        at = (example * positions + rows)[:, None] * N + columns[None, :]
        inside = known[:, None] & (columns < N)[None, :]
        x = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + example * positions + rows, mask=known, other=0.0)
        scale = tl.load(scales + example * positions + rows, mask=known, other=0.0)
        place = found + (example * shares + part) * N + columns
        tl.store(place, tl.sum(grad * ((x - mean[:, None]) * scale[:, None]), 0), mask=columns < N)
        tl.store(place + tl.num_programs(0).to(tl.int64) * shares * N, tl.sum(grad, 0), mask=columns < N)
