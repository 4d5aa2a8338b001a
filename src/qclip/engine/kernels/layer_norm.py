# ruff: noqa: ANN202 - what Triton compiles has no types
"""Per-example gradients of the weight and bias of a layer norm, in one pass over its inputs.

Written in plain torch, the compiler would delay these sums and read the inputs of several layers for each.

Shapes: B batch size, T positions, N elements that are normalised together.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.kernels import DTYPES, installed, operator, usable
from qclip.engine.kernels.products import as_float32, position_sums

if installed():
    import triton
    import triton.language as tl
else:
    triton = None

ROWS: Final = 128
"""The positions of one program."""
COLUMNS: Final = 64
"""The elements of each position in one program."""
MOST_ELEMENTS: Final = 2**20
"""The largest N: a GPU's grid is limited."""


def layer_norm_sums(grads: Tensor, inputs: Tensor, eps: float, *, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Sum gradients times normalised inputs, and gradients alone, over the positions.

    Args:
        grads: The output gradients before weight and bias, [B, T, N].
        inputs: The inputs of the layer, [B, T, N].
        eps: Added to the variance.
        centred: Whether the mean is subtracted (layer norm), or the inputs are only divided by their root mean square.

    Returns:
        The gradients of weight and bias, [B, N] each.

    >>> layer_norm_sums(torch.ones(1, 3, 2), torch.tensor([[[1.0, 3.0]]]).expand(1, 3, 2), 0.0)
    (tensor([[-3.,  3.]]), tensor([[3., 3.]]))
    """
    wide = as_float32(inputs)
    if centred:  # written as in the forward pass, so that the two can share the result
        squares, means = torch.var_mean(wide, 2, correction=0, keepdim=True)
    else:
        squares = wide.square().mean(2, keepdim=True)
        means = torch.zeros_like(squares)
    means, scales = means.squeeze(2), (squares + eps).rsqrt().squeeze(2)
    if not takes(grads, inputs):
        return twin(grads, inputs, means, scales)
    weights, biases = sums_by_block(grads, inputs, means, scales).sum(2).unbind()
    return weights, biases


def takes(grads: Tensor, inputs: Tensor) -> bool:
    """Return whether the kernel takes the tensors."""
    return usable(grads) and inputs.is_cuda and inputs.dtype in DTYPES and inputs.shape[2] <= MOST_ELEMENTS


def twin(grads: Tensor, inputs: Tensor, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Compute both sums in plain torch, for inputs with these means and scales, [B, T] each."""
    grads = as_float32(grads)
    normalised = (as_float32(inputs) - means[..., None]) * scales[..., None]
    return position_sums(grads * normalised), position_sums(grads)


def num_blocks(grads: Tensor) -> int:
    """Return the number of blocks of positions."""
    return max(1, -(-grads.shape[1] // ROWS))


@operator(
    "layer_norm_sums",
    fake=lambda grads, *_: as_float32(grads.new_empty((2, len(grads), num_blocks(grads), grads.shape[2]))),
)
def sums_by_block(grads: Tensor, inputs: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    """Return both results of `twin`, by blocks of positions: [2, B, blocks, N]."""
    if takes(grads, inputs):
        return launch(grads, inputs, means, scales)
    return F.pad(torch.stack(twin(grads, inputs, means, scales)).unsqueeze(2), (0, 0, 0, num_blocks(grads) - 1))


def launch(grads: Tensor, inputs: Tensor, means: Tensor, scales: Tensor) -> Tensor:
    """Run the kernel: [2, B, blocks, N]."""
    tensors = [x.contiguous() for x in (grads, inputs, means.float(), scales.float())]
    batch_size, positions, elements = grads.shape
    blocks = num_blocks(grads)
    sums = torch.empty(2, batch_size, blocks, elements, dtype=torch.float32, device=grads.device)
    kernel: Any = _sums
    with torch.cuda.device_of(grads):
        kernel[(batch_size, blocks, -(-elements // COLUMNS))](
            *(*tensors, sums, positions, elements, ROWS, COLUMNS), num_warps=4
        )
    return sums


if triton is not None:

    @triton.jit
    def _sums(
        grads, inputs, means, scales, sums, positions, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
    ):
        """Sum one block of positions and of elements, of one example."""
        example, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
        rows = block * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        is_position = rows < positions
        at = (example * positions + rows)[:, None] * N + columns[None, :]
        inside = is_position[:, None] & (columns < N)[None, :]
        x = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + example * positions + rows, mask=is_position, other=0.0)
        scale = tl.load(scales + example * positions + rows, mask=is_position, other=0.0)
        place = sums + (example * blocks + block) * N + columns
        tl.store(place, tl.sum(grad * ((x - mean[:, None]) * scale[:, None]), 0), mask=columns < N)
        tl.store(place + tl.num_programs(0).to(tl.int64) * blocks * N, tl.sum(grad, 0), mask=columns < N)
