# ruff: noqa: ANN202 - what Triton compiles has no types
"""Per-example gradients of a convolution's weight without unfolded windows: kept, squared, or summed.

With w = (i, j, c) an offset in the kernel and an input channel, and t = (p, q) an output position,

    gradient[b, m, w] = sum over t of grads[b, m, p, q] * images[b, c, p * stride - pad + i * dilation, ...]

is a product of two matrices per example. The second one repeats every pixel once for each offset of the kernel. The
Triton kernel reads the pixels from the image instead; pixels outside the image are zero.

All three operators compute the same tiles in the same way and round them alike, so that norms and sums agree on every
element of a gradient, whether it was written or computed again.

Shapes: B batch size, C and M input and output channels, H x W pixels, P x Q positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.kernels import installed, operator, power_of_two, usable
from qclip.engine.kernels.products import as_float32, rough_product

if installed():
    import triton
    import triton.language as tl
else:
    triton = None

PROGRAMS: Final = 4 * 132
"""The number of programs of a sum: a few for each multiprocessor of a large GPU."""

TWIN_ELEMENTS: Final = 2**24
"""The most elements of windows and gradients that the twins write at once, where no gradient is returned."""

Pair = Sequence[int]
"""Vertical and horizontal."""


def window_gradients(
    images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    """Compute the gradients and their squared norms.

    Sums are in float32, then rounded to the precision of the inputs. The norms are those of the rounded gradients.

    Args:
        images: The inputs, [B, C, H, W], with any strides: channels last is fastest.
        grads: The output gradients, [B, M, P, Q], of the same precision and with any strides.
        kernel: The size of the kernel.
        stride: The stride of the convolution.
        padding: The zeros around the images.
        dilation: The spacing of the kernel's elements.

    Returns:
        The gradients [B, M, C, *kernel], with C last in memory, and the squared norms [B], at least float32.

    >>> weights, squares = window_gradients(
    ...     torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), (3, 3), (1, 1), (1, 1), (1, 1)
    ... )
    >>> weights[0, 0, 0].tolist(), squares.item()
    ([[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]], 289.0)
    """
    weights, squares = gradients_and_squares(images, grads, kernel, stride, padding, dilation)
    return weights.permute(0, 1, 4, 2, 3), squares


def window_squares(images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Return the squared norms [B] of `window_gradients`, without writing the gradients.

    >>> window_squares(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), (3, 3), (1, 1), (1, 1), (1, 1))
    tensor([289.])
    """
    return squares_alone(images, grads, kernel, stride, padding, dilation)


def window_sums(
    images: Tensor, grads: Tensor, factors: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the sum [M, C, *kernel] of the gradients of `window_gradients` times ``factors`` [B], at least float32.

    The gradients are rounded as there, and not written. An example that is not finite makes the sum not finite,
    whatever its factor. The other arguments are those of `window_gradients`.

    >>> ones, twice = torch.ones(2, 1, 3, 3), torch.tensor([2.0, 0.0])
    >>> window_sums(ones, ones, twice, (3, 3), (1, 1), (1, 1), (1, 1))[0, 0].tolist()
    [[8.0, 12.0, 8.0], [12.0, 18.0, 12.0], [8.0, 12.0, 8.0]]
    """
    return weighted_sums(images, grads, factors, kernel, stride, padding, dilation).permute(0, 3, 1, 2).contiguous()


def twin(
    images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    """Compute `window_gradients` in plain torch, from unfolded windows; the gradients are [B, M, *kernel, C]."""
    (high, wide), (down, right) = padding, dilation
    windows = F.pad(images, (wide, wide, high, high))
    windows = windows.unfold(2, down * (kernel[0] - 1) + 1, stride[0])[..., ::down]
    windows = windows.unfold(3, right * (kernel[1] - 1) + 1, stride[1])[..., ::right]  # [B, C, P, Q, *kernel]
    windows = windows.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    weights = rough_product(grads.flatten(2), windows).to(images.dtype)
    return weights.view(*weights.shape[:2], *kernel, images.shape[1]), as_float32(weights).square().sum((1, 2))


def twin_squares(images: Tensor, grads: Tensor, *geometry: Pair) -> Tensor:
    """Compute `window_squares` in plain torch, chunk by chunk."""
    return torch.cat([twin(*chunk, *geometry)[1] for chunk in _in_chunks(images, grads, geometry[0])])


def twin_sums(images: Tensor, grads: Tensor, factors: Tensor, *geometry: Pair) -> Tensor:
    """Compute `window_sums` in plain torch, chunk by chunk; [M, *kernel, C]."""
    totals, done = [], 0
    for chunk in _in_chunks(images, grads, geometry[0]):
        weights = as_float32(twin(*chunk, *geometry)[0])
        chunk_factors = factors[done : done + len(weights)].to(weights.dtype)
        totals.append((weights * chunk_factors.view(-1, 1, 1, 1, 1)).sum(0))  # a matrix product might use TF32
        done += len(weights)
    return torch.stack(totals).sum(0)


def _in_chunks(images: Tensor, grads: Tensor, kernel: Pair) -> Iterator[tuple[Tensor, Tensor]]:
    """Split the batch, in the same way for norms and sums."""
    side, places, positions = _sizes(images, grads, kernel)
    step = max(1, TWIN_ELEMENTS // max(1, (positions + side) * places))
    return zip(images.split(step), grads.split(step), strict=True)


def _sizes(images: Tensor, grads: Tensor, kernel: Pair) -> tuple[int, int, int]:
    """Return the sizes of the two matrices: M, the number of places (i, j, c), and the number of positions."""
    return grads.shape[1], images.shape[1] * kernel[0] * kernel[1], grads.shape[2] * grads.shape[3]


@operator(
    "window_gradients",
    fake=lambda images, grads, kernel, *_: (
        images.new_empty((len(images), grads.shape[1], *kernel, images.shape[1])),
        as_float32(images.new_empty(len(images))),
    ),
)
def gradients_and_squares(
    images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    """Return the gradients, as [B, M, *kernel, C], and their squared norms [B]."""
    geometry = kernel, stride, padding, dilation
    return launch(images, grads, *geometry) if usable(images, grads) else twin(images, grads, *geometry)


@operator("window_squares", fake=lambda images, *_: as_float32(images.new_empty(len(images))))
def squares_alone(images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Return the squared norms [B]."""
    run = launch_squares if usable(images, grads) else twin_squares
    return run(images, grads, kernel, stride, padding, dilation)


@operator(
    "window_sums",
    fake=lambda images, grads, _, kernel, *__: as_float32(images.new_empty((grads.shape[1], *kernel, images.shape[1]))),
)
def weighted_sums(
    images: Tensor, grads: Tensor, factors: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the weighted sum, as [M, *kernel, C]."""
    run = launch_sums if usable(images, grads) else twin_sums
    return run(images, grads, factors, kernel, stride, padding, dilation)


@dataclass(frozen=True)
class WindowTiling:
    """Tiles of ``side`` x ``places`` elements, summed over ``positions`` at a time."""

    side: int
    places: int
    positions: int
    warps: int
    stages: int


def choose_tiling(side: int, places: int, positions: int, dtype: torch.dtype) -> WindowTiling:
    """Choose a tiling for a weight of ``side`` x ``places`` elements: large tiles read the images less often."""
    if dtype == torch.float32:  # no matrix units: accumulators and operands compete for registers
        return WindowTiling(_power(side, 32), _power(places, 32), _power(positions, 32), 4, 2)
    tall, wide = _power(side, 128), _power(places, 128)
    return WindowTiling(tall, wide, _power(positions, 64), 8 if tall * wide > 2**13 else 4, 3)


def _power(size: int, most: int) -> int:
    """Return the next power of two, from 16 (the least that matrix units take) to ``most``."""
    return min(most, max(16, power_of_two(size)))


class Constants(NamedTuple):
    """The compile-time constants of a kernel, so that divisions are cheap and aligned loads are wide."""

    C: int
    H: int
    W: int
    IMAGES_C: int
    IMAGES_H: int
    IMAGES_W: int
    M: int
    P: int
    Q: int
    GRADS_M: int
    GRADS_P: int
    GRADS_Q: int
    KERNEL_H: int
    KERNEL_W: int
    STRIDE_H: int
    STRIDE_W: int
    PAD_H: int
    PAD_W: int
    DILATION_H: int
    DILATION_W: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_T: int
    N: int
    """The number of places (i, j, c)."""
    COLUMNS: int
    TILES: int


def _constants(images: Tensor, grads: Tensor, geometry: Sequence[Pair], tiling: WindowTiling) -> Constants:
    kernel, stride, padding, dilation = geometry
    side, places, _ = _sizes(images, grads, kernel)
    columns = -(-places // tiling.places)
    return Constants._make(
        (
            *(*images.shape[1:], *images.stride()[1:]),
            *(*grads.shape[1:], *grads.stride()[1:]),
            *(*kernel, *stride, *padding, *dilation),
            *(tiling.side, tiling.places, tiling.positions),
            *(places, columns, -(-side // tiling.side) * columns),
        )
    )


def launch(images: Tensor, grads: Tensor, *geometry: Pair, tiling: WindowTiling | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernel of `gradients_and_squares`. Partial sums are added in a fixed order, so that results repeat."""
    weights = images.new_empty((len(images), grads.shape[1], *geometry[0], images.shape[1]))
    return weights, _launch_tiles(images, grads, weights, geometry, tiling)


def launch_squares(images: Tensor, grads: Tensor, *geometry: Pair, tiling: WindowTiling | None = None) -> Tensor:
    """Run the same kernel without writing the gradients."""
    return _launch_tiles(images, grads, None, geometry, tiling)


def _launch_tiles(
    images: Tensor, grads: Tensor, weights: Tensor | None, geometry: Sequence[Pair], tiling: WindowTiling | None
) -> Tensor:
    """Return the squared norms, and write the gradients to ``weights`` if given."""
    tiling = tiling or choose_tiling(*_sizes(images, grads, geometry[0]), images.dtype)
    constants = _constants(images, grads, geometry, tiling)
    partial = torch.empty(len(images), constants.TILES, dtype=torch.float32, device=images.device)
    kernel: Any = _tiles  # a launch takes options that are not parameters
    with torch.cuda.device_of(images):
        kernel[(partial.numel(),)](
            *(images, images.stride(0), grads, grads.stride(0), weights, partial, constants),
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return partial.sum(1)


def launch_sums(
    images: Tensor,
    grads: Tensor,
    factors: Tensor,
    *geometry: Pair,
    tiling: WindowTiling | None = None,
    shares: int | None = None,
) -> Tensor:
    """Run the kernel of `weighted_sums`. The batch is split into ``shares``, added in a fixed order.

    By default there are enough shares to fill a GPU: about `PROGRAMS` tiles in all (35 MB), or one weight if larger.
    """
    if tiling is None:  # smaller than the tiles of the norms, but with the same steps over the positions: the same bits
        side, places, positions = _sizes(images, grads, geometry[0])
        tiling = choose_tiling(min(side, 64), places, positions, images.dtype)
    constants = _constants(images, grads, geometry, tiling)
    batch_size = len(images)
    shares = min(batch_size, shares or -(-PROGRAMS // constants.TILES))
    partial = torch.empty(shares, constants.M, *geometry[0], constants.C, dtype=torch.float32, device=images.device)
    kernel: Any = _sums
    with torch.cuda.device_of(images):
        kernel[(shares * constants.TILES,)](
            *(images, images.stride(0), grads, grads.stride(0), factors.float().contiguous(), partial),
            *(batch_size, shares, constants),
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return partial.sum(0)


if TYPE_CHECKING:
    constexpr = Constants
elif triton is not None:
    constexpr = tl.constexpr  # Triton's interpreter goes by the name

if triton is not None:

    @triton.jit
    def _tiles(images, images_example, grads, grads_example, weights, partial, K: constexpr):
        """Compute one tile of one example's gradient, [M, N], and the sum of its squares; write it to ``weights``."""
        program = tl.program_id(0)
        example = (program // K.TILES).to(tl.int64)
        m, n = _places(program % K.TILES, K)
        rounded = _rounded(images + example * images_example, grads + example * grads_example, m, n, K)
        inside = (m < K.M)[:, None] & (n < K.N)[None, :]
        if weights is not None:
            tl.store(weights + example * K.M * K.N + (m * K.N)[:, None] + n[None, :], rounded, mask=inside)
        kept = tl.where(inside, rounded.to(tl.float32), 0.0)
        tl.store(partial + program, tl.sum(kept * kept))

    @triton.jit
    def _sums(images, images_example, grads, grads_example, factors, partial, batch_size, shares, K: constexpr):
        """Compute one tile of the sum over one share of the examples, each rounded and times its factor."""
        program = tl.program_id(0)
        share = program // K.TILES
        m, n = _places(program % K.TILES, K)
        total = tl.full((K.BLOCK_M, K.BLOCK_N), 0.0, tl.float32)
        for number in range(share * batch_size // shares, (share + 1) * batch_size // shares):
            example = tl.cast(number, tl.int64)
            rounded = _rounded(images + example * images_example, grads + example * grads_example, m, n, K)
            total += tl.load(factors + example) * rounded.to(tl.float32)
        inside = (m < K.M)[:, None] & (n < K.N)[None, :]
        at = partial + share.to(tl.int64) * K.M * K.N + (m * K.N)[:, None] + n[None, :]
        tl.store(at, total, mask=inside)

    @triton.jit
    def _places(tile, K: constexpr):
        """Return the rows and columns of a tile."""
        m = tile // K.COLUMNS * K.BLOCK_M + tl.arange(0, K.BLOCK_M)
        n = tile % K.COLUMNS * K.BLOCK_N + tl.arange(0, K.BLOCK_N)
        return m, n

    @triton.jit
    def _rounded(images, grads, m, n, K: constexpr):
        """Compute rows m and columns n of one example's gradient, rounded to the precision of the images."""
        i, j = n // K.C // K.KERNEL_W, n // K.C % K.KERNEL_W
        down, right = i * K.DILATION_H - K.PAD_H, j * K.DILATION_W - K.PAD_W
        # Address and bounds are sums of a term that depends on the position and one that depends on the place.
        of_place = down * K.IMAGES_H + right * K.IMAGES_W + n % K.C * K.IMAGES_C
        total = tl.full((K.BLOCK_M, K.BLOCK_N), 0.0, tl.float32)
        for start in range(0, K.P * K.Q, K.BLOCK_T):
            t = start + tl.arange(0, K.BLOCK_T)
            p, q = t // K.Q, t % K.Q
            y, x = p * K.STRIDE_H, q * K.STRIDE_W
            row, column = y[:, None] + down[None, :], x[:, None] + right[None, :]
            # A place beyond the last one reads some pixel of the image or none, and its result is not stored.
            inside = (row >= 0) & (row < K.H) & (column >= 0) & (column < K.W) & (t < K.P * K.Q)[:, None]
            pixels = tl.load(
                images + (y * K.IMAGES_H + x * K.IMAGES_W)[:, None] + of_place[None, :], mask=inside, other=0.0
            )
            at = t * K.GRADS_Q if K.GRADS_P == K.Q * K.GRADS_Q else p * K.GRADS_P + q * K.GRADS_Q
            is_grad = (m < K.M)[:, None] & (t < K.P * K.Q)[None, :]
            errors = tl.load(grads + (m * K.GRADS_M)[:, None] + at[None, :], mask=is_grad, other=0.0)
            total = tl.dot(errors, pixels, total, input_precision="ieee")
        return total.to(images.dtype.element_ty)
