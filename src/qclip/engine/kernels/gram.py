# ruff: noqa: ANN202 - what Triton compiles has no types
"""Squared norms from Gram products, without writing the Gram matrices.

Example b's gradient is ``left[b].mT @ right[b]``; its squared norm is the sum over s and t of
``(left_s . left_t)(right_s . right_t)``. Both factors are T x T and symmetric. The kernel computes them tile by tile,
multiplies, and writes one number per tile. Tiles above the diagonal are not computed; those below count twice.

Shapes: B batch size, T positions, M and N the two sides of a weight.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.kernels import installed, operator, power_of_two, usable
from qclip.engine.kernels.products import aligned, as_float32, is_half, is_native, product

if installed():
    import triton
    import triton.language as tl
else:
    triton = None

ROW_BLOCKS: Final = 4
"""The number of blocks of rows in which two Gram matrices are multiplied and summed."""
MOST_POSITIONS: Final = 256
"""The most positions of Gram matrices that `pair_sums` takes: a block of rows must fit one program."""


def gram_squares(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norms [B], without a rounding margin, and the summed lengths of the outer products [B].

    Rows that start at multiples of 16 bytes load several times faster than others: pad the last dimension with zeros
    where that is free.

    Args:
        left: [B, T, M]. Copied unless its last dimension has stride 1.
        right: [B, T, N], likewise.

    Returns:
        Two tensors [B], in float32 (float64 for float64).

    >>> gram_squares(torch.ones(1, 2, 3), torch.ones(1, 2, 5))
    (tensor([60.]), tensor([7.7460]))
    """
    squares, sizes = squares_and_sizes(left, right).unbind()
    return squares, sizes


def twin(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `gram_squares` in plain torch."""
    return pair_sums_twin(*matrices(left, right))


def squares_from_matrices(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `gram_squares` from whole Gram matrices, by the device's own matrix products."""
    lefts, rights = matrices(left, right)
    if is_native(left) and 0 < lefts.shape[1] <= MOST_POSITIONS:
        squares, sizes = pair_sums(lefts, rights).sum(1).unbind()  # so few summands that the compiler unrolls the sum
        return squares, sizes
    return pair_sums_twin(lefts, rights)


def matrices(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gram matrices [B, T, T] of both sides, T padded with zeros where that is faster."""
    left, right = aligned(left, positions=True), aligned(right, positions=True)
    return product(left, left.mT), product(right, right.mT)


def pair_sums_twin(lefts: Tensor, rights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the elements of ``lefts * rights`` [B, T, T], and of the roots of its diagonal, [B] each."""
    sizes = (lefts.diagonal(dim1=1, dim2=2) * rights.diagonal(dim1=1, dim2=2)).clamp(min=0).sqrt().sum(1)
    return (lefts * rights).sum((1, 2)), sizes


def kernel_is_faster(left: Tensor, right: Tensor) -> bool:
    """Return whether the kernel takes the tensors and was measured to be faster than two whole Gram matrices."""
    if not (is_native(left) and is_native(right)) or max(left.shape[2], right.shape[2]) > 2**13:
        return False
    positions = left.shape[1]
    return positions > 128 and (positions >= 1024 or positions % 64 > 0)


@operator("gram_squares", fake=lambda left, *_: as_float32(left.new_empty((2, len(left)))))
def squares_and_sizes(left: Tensor, right: Tensor) -> Tensor:
    """Return both results of `gram_squares`, as [2, B]."""
    return launch(left, right) if usable(left, right) else torch.stack(twin(left, right))


@operator("pair_sums", fake=lambda lefts, *_: lefts.new_empty((2, ROW_BLOCKS, len(lefts))))
def pair_sums(lefts: Tensor, rights: Tensor) -> Tensor:
    """Return both results of `pair_sums_twin` for Gram matrices [B, T, T], by blocks of rows: [2, ROW_BLOCKS, B]."""
    if usable(lefts, rights):
        return launch_pairs(lefts, rights)
    return F.pad(torch.stack(pair_sums_twin(lefts, rights)).unsqueeze(1), (0, 0, 0, ROW_BLOCKS - 1))


def launch_pairs(lefts: Tensor, rights: Tensor) -> Tensor:
    """Run the kernel of `pair_sums`: [2, ROW_BLOCKS, B]."""
    lefts, rights = lefts.contiguous(), rights.contiguous()
    batch_size, positions, _ = lefts.shape
    sums = torch.empty(2, ROW_BLOCKS, batch_size, dtype=torch.float32, device=lefts.device)
    kernel: Any = _pairs
    with torch.cuda.device_of(lefts):
        rows = power_of_two(-(-positions // ROW_BLOCKS))
        kernel[(batch_size, ROW_BLOCKS)](lefts, rights, sums, batch_size, positions, rows, power_of_two(positions))
    return sums


@dataclass(frozen=True)
class GramTiling:
    """Tiles of ``positions`` x ``positions``, summed over ``depth`` elements at a time."""

    positions: int
    depth: int
    warps: int
    stages: int


def choose_tiling(positions: int, dtype: torch.dtype) -> GramTiling:
    """Choose a tiling with little padding and enough programs to fill a GPU."""
    if dtype == torch.float32:  # no matrix units: accumulators and operands compete for registers
        return GramTiling(32, 32, 4, 2)
    if positions <= 32:
        return GramTiling(16 if positions <= 16 else 32, 64, 4, 3)
    return GramTiling(64, 64, 4, 4) if positions <= 256 else GramTiling(128, 64, 8, 3)


def launch(left: Tensor, right: Tensor, tiling: GramTiling | None = None) -> Tensor:
    """Run the kernel of `squares_and_sizes`: [2, B]. Partial sums are added in a fixed order, so results repeat."""
    left, right = (x if x.stride(2) == 1 else x.contiguous() for x in (left, right))
    batch_size, positions, _ = left.shape
    tiling = tiling or choose_tiling(positions, left.dtype)
    tiles = -(-positions // tiling.positions)
    pairs = tiles * (tiles + 1) // 2
    partial = torch.empty(2, batch_size, pairs, dtype=torch.float32, device=left.device)
    tile: Any = _tile  # a launch takes options that are not parameters
    with torch.cuda.device_of(left):
        tile[(batch_size * pairs,)](
            *(left, *_steps(left), right, *_steps(right)),
            *(partial, positions, pairs, batch_size * pairs),
            *(left.shape[2], _alignment(left), right.shape[2], _alignment(right)),
            *(tiling.positions, tiling.depth),
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return partial.sum(2)


def _alignment(x: Tensor) -> int:
    """Return the number of elements that every row's start is a multiple of: 16 bytes' worth, or 1."""
    vector = 8 if is_half(x) else 4
    return vector if x.stride(0) % vector == 0 and x.stride(1) % vector == 0 else 1


def _steps(x: Tensor) -> tuple[int, int]:
    """Return the strides of examples and positions, in units of the alignment."""
    return x.stride(0) // _alignment(x), x.stride(1) // _alignment(x)


if triton is not None:

    @triton.jit
    def _pairs(lefts, rights, sums, batch_size, T: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        """Multiply and sum a block of rows of one example's two Gram matrices."""
        example, block = tl.program_id(0), tl.program_id(1)
        lefts += example.to(tl.int64) * (T * T)
        rights += example.to(tl.int64) * (T * T)
        rows, columns = block * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        at = rows[:, None] * T + columns[None, :]
        inside = (rows < T)[:, None] & (columns < T)[None, :]
        both = tl.load(lefts + at, mask=inside, other=0.0) * tl.load(rights + at, mask=inside, other=0.0)
        own = tl.sum(tl.where(rows[:, None] == columns[None, :], both, 0.0), 1)
        place = sums + block * batch_size + example
        tl.store(place, tl.sum(both))
        tl.store(place + tl.num_programs(1) * batch_size, tl.sum(tl.sqrt(tl.maximum(own, 0.0))))

    @triton.jit
    def _tile(
        left,
        left_example,
        left_row,
        right,
        right_example,
        right_row,
        partial,
        positions,
        pairs,
        programs,
        M: tl.constexpr,
        LEFT_ALIGNED: tl.constexpr,
        N: tl.constexpr,
        RIGHT_ALIGNED: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        """Multiply and sum one tile of one example's two Gram matrices; tile (i, j) with i >= j."""
        program = tl.program_id(0)
        pair = program % pairs
        example = (program // pairs).to(tl.int64)
        i = ((tl.sqrt_rn(8.0 * pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        j = pair - i * (i + 1) // 2
        # The constant factor shows the compiler that rows are aligned, so that it loads 16 bytes at once.
        left += example * (left_example * LEFT_ALIGNED)
        right += example * (right_example * RIGHT_ALIGNED)
        lefts = _gram(left, left_row * LEFT_ALIGNED, i, j, positions, M, BLOCK_T, BLOCK_K)
        rights = _gram(right, right_row * RIGHT_ALIGNED, i, j, positions, N, BLOCK_T, BLOCK_K)
        both = lefts * rights
        here = tl.arange(0, BLOCK_T)
        diagonal = (here[:, None] == here[None, :]) & (i == j)
        sizes = tl.sqrt(tl.maximum(tl.sum(tl.where(diagonal, both, 0.0), 1), 0.0))
        tl.store(partial + program, tl.sum(both) * tl.where(i == j, 1.0, 2.0))
        tl.store(partial + programs + program, tl.sum(sizes))

    @triton.jit
    def _gram(x, row, i, j, positions, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
        """Compute tile (i, j) of ``x @ x.mT``; zero beyond the last position."""
        s = i * BLOCK_T + tl.arange(0, BLOCK_T)
        t = j * BLOCK_T + tl.arange(0, BLOCK_T)
        k = tl.arange(0, BLOCK_K)
        at_s = x + s.to(tl.int64)[:, None] * row + k[None, :]
        at_t = x + t.to(tl.int64)[:, None] * row + k[None, :]
        is_s, is_t = (s < positions)[:, None], (t < positions)[:, None]
        gram = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
        for start in range(0, K // BLOCK_K * BLOCK_K, BLOCK_K):
            a = tl.load(at_s + start, mask=is_s, other=0.0)
            b = tl.load(at_t + start, mask=is_t, other=0.0)
            gram = tl.dot(a, tl.trans(b), gram, input_precision="ieee")
        if K % BLOCK_K > 0:  # separate, because a mask along a row makes its loads narrow
            end = K // BLOCK_K * BLOCK_K
            is_k = (end + k < K)[None, :]
            a = tl.load(at_s + end, mask=is_s & is_k, other=0.0)
            b = tl.load(at_t + end, mask=is_t & is_k, other=0.0)
            gram = tl.dot(a, tl.trans(b), gram, input_precision="ieee")
        return gram
