# ruff: noqa: ANN202, ARG001 - what Triton compiles has no types; a fake has the signature of its operator
"""Each example's gradient of a convolution's weight, without writing its windows: kept, squared, or added up.

With w = (i, j, c) a place of the kernel and an input channel, and t = (p, q) an output position,

    found[b, m, w] = sum over t of grads[b, m, p, q] * images[b, c, p * stride - pad + i * dilation, ...]

is a product of two matrices per example. The second one repeats every pixel once for each place of the kernel. The
kernel reads the pixels from the image instead; what lies outside the image is zero.

All three operators compute the same tiles in the same way and round them alike, so that norms and sums agree on every
number of a gradient, whether it was written or computed anew.

Shapes: B examples, C and M input and output channels, H x W pixels, P x Q positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.kernels import installed, power_of_two, usable
from qclip.engine.kernels.products import full, rough_product

if installed():
    import triton
    import triton.language as tl
else:
    triton = None

PROGRAMS: Final = 4 * 132
"""How many programs a sum is cut into: a few for each multiprocessor of a large GPU."""

TWIN_NUMBERS: Final = 2**24
"""How many numbers of windows and gradients the twins write at once where no gradient is asked for."""

Pair = Sequence[int]
"""Down and right."""


def window_gradients(
    images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    """The gradients [B, M, C, *kernel] and their squared norms [B].

    ``images`` is [B, C, H, W] and ``grads`` [B, M, P, Q], of one precision and with any strides: channels last is
    fastest. Sums are in float32, then rounded to that precision; in memory C comes last. The norms, at least float32,
    are those of the rounded gradients.

    >>> found, squares = window_gradients(
    ...     torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), (3, 3), (1, 1), (1, 1), (1, 1)
    ... )
    >>> found[0, 0, 0].tolist(), squares.item()
    ([[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]], 289.0)
    """
    found, squares = gradients_and_squares(images, grads, kernel, stride, padding, dilation)
    return found.permute(0, 1, 4, 2, 3), squares


def window_squares(images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """The squared norms [B] that `window_gradients` gives; the gradients are not written.

    >>> window_squares(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), (3, 3), (1, 1), (1, 1), (1, 1))
    tensor([289.])
    """
    return squares_alone(images, grads, kernel, stride, padding, dilation)


def window_sums(
    images: Tensor, grads: Tensor, factors: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """The sum [M, C, *kernel] of the gradients that `window_gradients` gives times ``factors`` [B]; at least float32.

    The gradients are rounded as there, and not written. An example that is not finite spoils the sum, whatever its
    factor.

    >>> ones, twice = torch.ones(2, 1, 3, 3), torch.tensor([2.0, 0.0])
    >>> window_sums(ones, ones, twice, (3, 3), (1, 1), (1, 1), (1, 1))[0, 0].tolist()
    [[8.0, 12.0, 8.0], [12.0, 18.0, 12.0], [8.0, 12.0, 8.0]]
    """
    return weighted_sums(images, grads, factors, kernel, stride, padding, dilation).permute(0, 3, 1, 2).contiguous()


def twin(
    images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    """`window_gradients` in plain torch, by writing the windows; the gradients are [B, M, *kernel, C]."""
    (high, wide), (down, right) = padding, dilation
    windows = F.pad(images, (wide, wide, high, high))
    windows = windows.unfold(2, down * (kernel[0] - 1) + 1, stride[0])[..., ::down]
    windows = windows.unfold(3, right * (kernel[1] - 1) + 1, stride[1])[..., ::right]  # [B, C, P, Q, *kernel]
    windows = windows.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    found = rough_product(grads.flatten(2), windows).to(images.dtype)
    return found.view(*found.shape[:2], *kernel, images.shape[1]), full(found).square().sum((1, 2))


def twin_squares(images: Tensor, grads: Tensor, *geometry: Pair) -> Tensor:
    """`window_squares` in plain torch, a few examples at a time."""
    return torch.cat([twin(*some, *geometry)[1] for some in _in_chunks(images, grads, geometry[0])])


def twin_sums(images: Tensor, grads: Tensor, factors: Tensor, *geometry: Pair) -> Tensor:
    """`window_sums` in plain torch, a few examples at a time; [M, *kernel, C]."""
    totals, done = [], 0
    for some in _in_chunks(images, grads, geometry[0]):
        found = full(twin(*some, *geometry)[0])
        chosen = factors[done : done + len(found)].to(found.dtype)
        totals.append((found * chosen.view(-1, 1, 1, 1, 1)).sum(0))  # no product of matrices: that may be TF32
        done += len(found)
    return torch.stack(totals).sum(0)


def _in_chunks(images: Tensor, grads: Tensor, kernel: Pair) -> Iterator[tuple[Tensor, Tensor]]:
    """A few examples at a time, the same ones for norms and sums."""
    side, places, positions = _sizes(images, grads, kernel)
    step = max(1, TWIN_NUMBERS // max(1, (positions + side) * places))
    return zip(images.split(step), grads.split(step), strict=True)


def _sizes(images: Tensor, grads: Tensor, kernel: Pair) -> tuple[int, int, int]:
    """Of the two matrices: M, the places (i, j, c), and the positions."""
    return grads.shape[1], images.shape[1] * kernel[0] * kernel[1], grads.shape[2] * grads.shape[3]


@torch.library.custom_op("qclip::window_gradients", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def gradients_and_squares(
    images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    """The gradients, as [B, M, *kernel, C], and their squared norms: one opaque node of a traced graph."""
    geometry = kernel, stride, padding, dilation
    return launch(images, grads, *geometry) if usable(images, grads) else twin(images, grads, *geometry)


@gradients_and_squares.register_fake
def _(
    images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    (count, channels), side = images.shape[:2], grads.shape[1]
    return images.new_empty((count, side, *kernel, channels)), full(images.new_empty(count))


@torch.library.custom_op("qclip::window_squares", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def squares_alone(images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """The squared norms: one opaque node of a traced graph."""
    run = launch_squares if usable(images, grads) else twin_squares
    return run(images, grads, kernel, stride, padding, dilation)


@squares_alone.register_fake
def _(images: Tensor, grads: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    return full(images.new_empty(len(images)))


@torch.library.custom_op("qclip::window_sums", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def weighted_sums(
    images: Tensor, grads: Tensor, factors: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """The weighted sum, as [M, *kernel, C]: one opaque node of a traced graph."""
    run = launch_sums if usable(images, grads) else twin_sums
    return run(images, grads, factors, kernel, stride, padding, dilation)


@weighted_sums.register_fake
def _(
    images: Tensor, grads: Tensor, factors: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    return full(images.new_empty((grads.shape[1], *kernel, images.shape[1])))


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: tiles of ``side`` x ``places`` numbers, summed over ``positions`` at a time."""

    side: int
    places: int
    positions: int
    warps: int
    stages: int


def tiling(side: int, places: int, positions: int, dtype: torch.dtype) -> Tiling:
    """What suits a weight of ``side`` x ``places`` numbers: large tiles read the images less often."""
    if dtype == torch.float32:  # no matrix units: accumulators and operands compete for registers
        return Tiling(_power(side, 32), _power(places, 32), _power(positions, 32), 4, 2)
    tall, wide = _power(side, 128), _power(places, 128)
    return Tiling(tall, wide, _power(positions, 64), 8 if tall * wide > 2**13 else 4, 3)


def _power(size: int, most: int) -> int:
    """The power of two that holds so many, from 16 (the least that matrix units take) to ``most``."""
    return min(most, max(16, power_of_two(size)))


class Known(NamedTuple):
    """What a kernel knows at compile time, so that divisions are cheap and aligned loads are wide."""

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
    """How many places (i, j, c) there are."""
    COLUMNS: int
    TILES: int


def _known(images: Tensor, grads: Tensor, geometry: Sequence[Pair], cut: Tiling) -> Known:
    kernel, stride, padding, dilation = geometry
    side, places, _ = _sizes(images, grads, kernel)
    columns = -(-places // cut.places)
    return Known._make(
        (
            *(*images.shape[1:], *images.stride()[1:]),
            *(*grads.shape[1:], *grads.stride()[1:]),
            *(*kernel, *stride, *padding, *dilation),
            *(cut.side, cut.places, cut.positions),
            *(places, columns, -(-side // cut.side) * columns),
        )
    )


def launch(images: Tensor, grads: Tensor, *geometry: Pair, cut: Tiling | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernel: what `twin` gives. Partial sums are added up in a fixed order, so that results repeat."""
    found = images.new_empty((len(images), grads.shape[1], *geometry[0], images.shape[1]))
    return found, _launch_tiles(images, grads, found, geometry, cut)


def launch_squares(images: Tensor, grads: Tensor, *geometry: Pair, cut: Tiling | None = None) -> Tensor:
    """Run the same kernel without writing the gradients: what `twin_squares` gives."""
    return _launch_tiles(images, grads, None, geometry, cut)


def _launch_tiles(
    images: Tensor, grads: Tensor, found: Tensor | None, geometry: Sequence[Pair], cut: Tiling | None
) -> Tensor:
    """The squared norms; and the gradients, written to ``found``."""
    cut = cut or tiling(*_sizes(images, grads, geometry[0]), images.dtype)
    known = _known(images, grads, geometry, cut)
    partial = torch.empty(len(images), known.TILES, dtype=torch.float32, device=images.device)
    kernel: Any = _tiles  # a launch takes options that are no parameters
    with torch.cuda.device_of(images):
        kernel[(partial.numel(),)](
            *(images, images.stride(0), grads, grads.stride(0), found, partial, known),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
    return partial.sum(1)


def launch_sums(
    images: Tensor,
    grads: Tensor,
    factors: Tensor,
    *geometry: Pair,
    cut: Tiling | None = None,
    shares: int | None = None,
) -> Tensor:
    """Run the kernel: what `twin_sums` gives. The examples are cut into ``shares``, added up in a fixed order.

    By default there are enough shares for all of a GPU: about `PROGRAMS` tiles in all (35 MB), or one weight if larger.
    """
    if cut is None:  # smaller than the tiles that gave the norms, in the same steps over the positions: the same bits
        side, places, positions = _sizes(images, grads, geometry[0])
        cut = tiling(min(side, 64), places, positions, images.dtype)
    known = _known(images, grads, geometry, cut)
    count = len(images)
    shares = min(count, shares or -(-PROGRAMS // known.TILES))
    partial = torch.empty(shares, known.M, *geometry[0], known.C, dtype=torch.float32, device=images.device)
    kernel: Any = _sums
    with torch.cuda.device_of(images):
        kernel[(shares * known.TILES,)](
            *(images, images.stride(0), grads, grads.stride(0), factors.float().contiguous(), partial),
            *(count, shares, known),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
    return partial.sum(0)


if TYPE_CHECKING:
    constexpr = Known
elif triton is not None:
    constexpr = tl.constexpr  # Triton's interpreter goes by the name

if triton is not None:

    @triton.jit
    def _tiles(images, images_example, grads, grads_example, found, partial, K: constexpr):
        """One tile of one example's gradient [M, N], written where ``found`` is given, and the sum of its squares."""
        program = tl.program_id(0)
        example = (program // K.TILES).to(tl.int64)
        m, n = _places(program % K.TILES, K)
        rounded = _rounded(images + example * images_example, grads + example * grads_example, m, n, K)
        inside = (m < K.M)[:, None] & (n < K.N)[None, :]
        if found is not None:
            tl.store(found + example * K.M * K.N + (m * K.N)[:, None] + n[None, :], rounded, mask=inside)
        kept = tl.where(inside, rounded.to(tl.float32), 0.0)
        tl.store(partial + program, tl.sum(kept * kept))

    @triton.jit
    def _sums(images, images_example, grads, grads_example, factors, partial, count, shares, K: constexpr):
        """One tile of the sum over one share of the examples, each rounded and times its factor."""
        program = tl.program_id(0)
        share = program // K.TILES
        m, n = _places(program % K.TILES, K)
        total = tl.full((K.BLOCK_M, K.BLOCK_N), 0.0, tl.float32)
        for number in range(share * count // shares, (share + 1) * count // shares):
            example = tl.cast(number, tl.int64)
            rounded = _rounded(images + example * images_example, grads + example * grads_example, m, n, K)
            total += tl.load(factors + example) * rounded.to(tl.float32)
        inside = (m < K.M)[:, None] & (n < K.N)[None, :]
        at = partial + share.to(tl.int64) * K.M * K.N + (m * K.N)[:, None] + n[None, :]
        tl.store(at, total, mask=inside)

    @triton.jit
    def _places(tile, K: constexpr):
        """The rows and columns of a tile."""
        m = tile // K.COLUMNS * K.BLOCK_M + tl.arange(0, K.BLOCK_M)
        n = tile % K.COLUMNS * K.BLOCK_N + tl.arange(0, K.BLOCK_N)
        return m, n

    @triton.jit
    def _rounded(images, grads, m, n, K: constexpr):
        """Rows m and columns n of one example's gradient, rounded to the precision of the images."""
        i, j = n // K.C // K.KERNEL_W, n // K.C % K.KERNEL_W
        down, right = i * K.DILATION_H - K.PAD_H, j * K.DILATION_W - K.PAD_W
        # Address and bounds are sums of a part that depends on the position and one that depends on the place.
        of_place = down * K.IMAGES_H + right * K.IMAGES_W + n % K.C * K.IMAGES_C
        total = tl.full((K.BLOCK_M, K.BLOCK_N), 0.0, tl.float32)
        for start in range(0, K.P * K.Q, K.BLOCK_T):
            t = start + tl.arange(0, K.BLOCK_T)
            p, q = t // K.Q, t % K.Q
            y, x = p * K.STRIDE_H, q * K.STRIDE_W
            row, column = y[:, None] + down[None, :], x[:, None] + right[None, :]
            # A place beyond the last one reads some pixel of the image or none, and is not stored.
            inside = (row >= 0) & (row < K.H) & (column >= 0) & (column < K.W) & (t < K.P * K.Q)[:, None]
            pixels = tl.load(
                images + (y * K.IMAGES_H + x * K.IMAGES_W)[:, None] + of_place[None, :], mask=inside, other=0.0
            )
            at = t * K.GRADS_Q if K.GRADS_P == K.Q * K.GRADS_Q else p * K.GRADS_P + q * K.GRADS_Q
            known = (m < K.M)[:, None] & (t < K.P * K.Q)[None, :]
            errors = tl.load(grads + (m * K.GRADS_M)[:, None] + at[None, :], mask=known, other=0.0)
            total = tl.dot(errors, pixels, total, input_precision="ieee")
        return total.to(images.dtype.element_ty)
