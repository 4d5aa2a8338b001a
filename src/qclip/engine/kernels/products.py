"""Products and sums of per-example tensors, accumulated in float32 whatever the precision of their elements.

A GPU multiplies bfloat16 elements as they are ("native"): such products are exact in float32, so nothing is lost
against a conversion, and they run at full speed. Elsewhere the elements are converted first.

Shapes: B batch size, G groups of channels, T positions, M and N the two sides of a weight.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.torch_settings import tf32_in_products

ROUNDINGS: Final = 4
"""The rounding margin of norms, in units of one rounding error."""
NATIVE_ROUNDINGS: Final = 256
"""The same for products of native 16-bit elements."""
FEW_ROWS: Final = 64
"""Up to this batch size a GPU multiplies and sums: the compiler fuses that with the computation of the clip factors."""
LONG: Final = 256
"""The most positions that are summed in one step."""
BLOCK: Final = 256
"""The most squares that are summed in one step."""
CHUNK_BYTES: Final = 2**26
"""The memory of temporary products on a CPU."""
CHUNK_SHARE: Final = 128
"""The same on a GPU, as a fraction of its memory: in a compiled step every chunk is more code to compile."""


def as_float32(x: Tensor) -> Tensor:
    """Convert 16-bit elements to float32; float32 and float64 stay as they are."""
    return x.float() if is_half(x) else x


def is_half(x: Tensor) -> bool:
    """Return whether the elements have 16 bits."""
    return x.dtype in (torch.bfloat16, torch.float16)


def is_native(x: Tensor) -> bool:
    """Return whether the elements are bfloat16 and the device multiplies them as they are.

    Never for float16: times a small factor, its elements would underflow.
    """
    return x.dtype == torch.bfloat16 and x.is_cuda


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [..., M, K] by [..., K, N], in float32 (float64 for float64)."""
    if not (is_native(left) and left.dtype == right.dtype):
        return torch.matmul(as_float32(left), as_float32(right))
    batch_shape = left.shape[:-2]
    left, right = left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:])
    if len(left) == 1:
        result = torch.mm(left[0], right[0], out_dtype=torch.float32)
    else:
        result = torch.bmm(left, right, out_dtype=torch.float32)
    return result.view(*batch_shape, *result.shape[-2:])


def rough_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply as `product` does, but round the result of native elements to their precision."""
    native = is_native(left) and left.dtype == right.dtype
    return torch.matmul(left, right) if native else product(left, right)


def aligned(x: Tensor, *, positions: bool = False) -> Tensor:
    """Pad native elements with zeros to rows of whole multiples of 16 bytes, which a GPU's fast kernels require.

    The last dimension, and with ``positions`` the one before it, become multiples of 8. Zeros add nothing to products.
    """
    if not is_native(x):
        return x
    missing = [-x.shape[-1] % 8, -x.shape[-2] % 8 if positions else 0]
    return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x


def keep_examples(x: Tensor, is_kept: Tensor) -> Tensor:
    """Return [B, ...] with zeros in the examples where ``is_kept`` [B] is false, even where they hold NaN."""
    return torch.where(is_kept.view(-1, *[1] * (x.dim() - 1)), x, 0)


def scale_examples(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply each example of [B, ...] by its factor, in float32 (float64 for float64)."""
    x = as_float32(x)
    return x * factors.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


def scale_natively(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply each example of [B, ...] by its factor, and round native elements to their precision again."""
    scaled = scale_examples(x, factors)
    return scaled.to(x.dtype) if is_native(x) else scaled


def weighted_rows(factors: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of the rows [B, N] times their factors [B], in the rows' precision."""
    factors = factors.to(rows.dtype)
    if rows.is_cuda and len(rows) <= FEW_ROWS:
        return (factors[:, None] * rows).sum(0)
    return factors @ rows


def native_weighted_sum(factors: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over B of native rows [B, ...] times float32 factors [B], in float32; every row is read once."""
    if len(rows) <= 16:
        total = factors[0] * rows[0].float()
        for factor, row in zip(factors[1:], rows[1:], strict=True):
            total = total + factor * row.float()
        return total
    # A float32 factor is the sum of three bfloat16 numbers, whose products with the rows are exact.
    shares, rest = [], factors
    for _ in range(3):
        shares.append(rest.to(rows.dtype))
        rest = rest - shares[-1].float()
    # In memory order, so that nothing is copied.
    order = sorted(range(1, rows.dim()), key=lambda dim: -rows.stride(dim))
    in_memory_order = rows.permute(0, *order)
    flat = in_memory_order.reshape(len(rows), rows.shape[1:].numel())
    weights = torch.stack(shares)
    if len(rows) % 8 or flat.shape[1] % 8:
        weights = F.pad(weights, (0, -len(rows) % 8))
        flat = F.pad(flat, (0, -flat.shape[1] % 8, 0, -len(rows) % 8))
    total = product(weights, flat).sum(0)[: rows.shape[1:].numel()].view(in_memory_order.shape[1:])
    return total.permute(sorted(range(len(order)), key=lambda k: order[k])).contiguous()


def position_sums(x: Tensor) -> Tensor:
    """Sum [B, T, ...] over the positions, in float32 (float64 for float64).

    Long sums take two steps where T has a large divisor. In one step a GPU would have few sums to compute in parallel,
    and the compiler would fuse the computation of the summands with each of them.
    """
    dtype = torch.float32 if is_half(x) else x.dtype
    positions = x.shape[1]
    step = max(step for step in range(1, LONG + 1) if positions % step == 0) if positions > LONG else 1
    if step >= LONG // 4:
        x = x.unflatten(1, (-1, step)).sum(2, dtype=dtype)
    return x.sum(1, dtype=dtype)


def lengths(x: Tensor) -> Tensor:
    """Return the L2 norm of every row [..., N], as [...].

    Long rows are reduced block by block. A CPU adds the squares of a row sequentially, in a few sums, and would leave
    the norm of 10 million float32 elements up to 1 % too small.
    """
    x = as_float32(x)
    while (length := x.shape[-1]) > BLOCK:
        whole = length - length % BLOCK
        blocks = torch.linalg.vector_norm(x[..., :whole].unflatten(-1, (whole // BLOCK, BLOCK)), dim=-1)
        rest = torch.linalg.vector_norm(x[..., whole:], dim=-1, keepdim=True)
        x = torch.cat([blocks, rest], -1) if whole < length else blocks
    return torch.linalg.vector_norm(x, dim=-1)


def outer_lengths(left: Tensor, right: Tensor) -> Tensor:
    """Return the norms of the outer products of the rows of [B, G, T, M] and [B, G, T, N], as [B, G, T]."""
    return lengths(left) * lengths(right)


def square_sums(x: Tensor) -> Tensor:
    """Return the sum of squares of each example of [B, ...], as [B]."""
    return lengths(x.flatten(1)).square() if x.dim() > 1 else as_float32(x).square()


def round_up(squares: Tensor, sizes: Tensor, relative_error: float) -> Tensor:
    """Return squared norms [B] with a rounding margin.

    Args:
        squares: The squared norms [B] of sums.
        sizes: The summed lengths [B] of their summands.
        relative_error: A bound on the error of each summand, relative to its length.
    """
    return (squares.sqrt() + relative_error * sizes).square()


def chunk(elements: int, sample: Tensor) -> int:
    """Return how many examples fit the memory of temporary products.

    Args:
        elements: The number of elements per example.
        sample: A tensor on the device.
    """
    available = CHUNK_BYTES
    if sample.is_cuda:
        available = torch.cuda.get_device_properties(sample.device).total_memory // CHUNK_SHARE
    return max(1, available // (4 * max(1, elements)))


def rounding(x: Tensor) -> float:
    """Return the relative size of one rounding error in the tensor's precision."""
    return torch.finfo(x.dtype).eps / 2


def scaling_error(*sides: Tensor) -> float:
    """Return the relative error of an outer product whose sides are scaled natively; 0 if nothing is rounded."""
    return max(rounding(x) if is_native(x) else 0.0 for x in sides)


def relative_error_bound(x: Tensor) -> float:
    """Return a bound on the relative error of a summand of a product, computed in another order than its norm.

    With TF32 both sides of a product lose bits, in the norm and in the sum. Products of native 16-bit elements are
    exact, but a GPU does not always accumulate them in full float32.
    """
    if is_native(x):
        return NATIVE_ROUNDINGS * rounding(as_float32(x))
    if x.is_cuda and x.dtype == torch.float32 and tf32_in_products():
        return 4 * 2.0**-11
    return ROUNDINGS * rounding(as_float32(x))
