"""Products of matrices, added up in float32 whatever the precision of their entries.

Numbers in bfloat16 are multiplied as they are on a GPU: such products are exact in float32, so nothing is lost against
converting them first, and they run at full speed. Elsewhere they are converted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.torch_settings import tf32_in_products

ROUNDINGS = 4
"""How many units of rounding norms are taken from above."""
NATIVE_ROUNDINGS = 256
"""The same, of products of native 16-bit numbers."""
FEW_ROWS = 64
"""How many rows a GPU scales and adds up itself: compiled, that takes in how their factors came about."""
LONG = 256
"""How many positions are added up at once."""


def full(x: Tensor) -> Tensor:
    """At least float32."""
    return x.float() if is_half(x) else x


def is_half(x: Tensor) -> bool:
    """Whether its numbers have 16 bits."""
    return x.dtype in (torch.bfloat16, torch.float16)


def is_native(x: Tensor) -> bool:
    """Whether its numbers are bfloat16 and the device multiplies them as they are.

    Not float16: scaled by a small factor, its numbers would be lost.
    """
    return x.dtype == torch.bfloat16 and x.is_cuda


def product(left: Tensor, right: Tensor) -> Tensor:
    """[..., M, K] times [..., K, N], at least float32."""
    if not (is_native(left) and left.dtype == right.dtype):
        return torch.matmul(full(left), full(right))
    many = left.shape[:-2]
    left, right = left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:])
    if len(left) == 1:
        found = torch.mm(left[0], right[0], out_dtype=torch.float32)
    else:
        found = torch.bmm(left, right, out_dtype=torch.float32)
    return found.view(*many, *found.shape[-2:])


def rough_product(left: Tensor, right: Tensor) -> Tensor:
    """The same, rounded to the precision of its entries where the device multiplies them as they are."""
    native = is_native(left) and left.dtype == right.dtype
    return torch.matmul(left, right) if native else product(left, right)


def aligned(x: Tensor, *, positions: bool = False) -> Tensor:
    """Rows of zeros added until a GPU's fast kernels take it: native numbers lie in steps of 16 bytes then.

    The last dimension, and with ``positions`` the one before it, become multiples of 8. Zeros add nothing to products.
    """
    if not is_native(x):
        return x
    wanting = [-x.shape[-1] % 8, -x.shape[-2] % 8 if positions else 0]
    return F.pad(x, (0, wanting[0], 0, wanting[1])) if any(wanting) else x


def weighted_rows(factors: Tensor, rows: Tensor) -> Tensor:
    """The sum of the rows of [B, numbers] times their factors, in the rows' precision."""
    factors = factors.to(rows.dtype)
    if rows.is_cuda and len(rows) <= FEW_ROWS:
        return (factors[:, None] * rows).sum(0)
    return factors @ rows


def native_weighted_sum(factors: Tensor, rows: Tensor) -> Tensor:
    """The sum over the first dimension of native rows times float32 factors, in float32; every row is read once."""
    if len(rows) <= 16:
        total = factors[0] * rows[0].float()
        for factor, row in zip(factors[1:], rows[1:], strict=True):
            total = total + factor * row.float()
        return total
    # A float32 number is the sum of three of 16 bits, whose products with the rows are exact.
    shares, rest = [], factors
    for _ in range(3):
        shares.append(rest.to(rows.dtype))
        rest = rest - shares[-1].float()
    # In the order in which they lie in memory, so that nothing is copied.
    order = sorted(range(1, rows.dim()), key=lambda dim: -rows.stride(dim))
    lying = rows.permute(0, *order)
    flat = lying.reshape(len(rows), rows.shape[1:].numel())
    weights = torch.stack(shares)
    if len(rows) % 8 or flat.shape[1] % 8:
        weights = F.pad(weights, (0, -len(rows) % 8))
        flat = F.pad(flat, (0, -flat.shape[1] % 8, 0, -len(rows) % 8))
    total = product(weights, flat).sum(0)[: rows.shape[1:].numel()].view(lying.shape[1:])
    return total.permute(sorted(range(len(order)), key=lambda k: order[k])).contiguous()


def position_sums(x: Tensor) -> Tensor:
    """[B, T, ...] summed over the positions, at least float32.

    Long sums go in two steps where T can be divided into long parts: a GPU has little to do at once in one for which
    most of the work is inside each sum, and the compiler fuses whatever made the summands with it.
    """
    dtype = torch.float32 if is_half(x) else x.dtype
    positions = x.shape[1]
    step = max(step for step in range(1, LONG + 1) if positions % step == 0) if positions > LONG else 1
    if step >= LONG // 4:
        x = x.unflatten(1, (-1, step)).sum(2, dtype=dtype)
    return x.sum(1, dtype=dtype)


def rounding(x: Tensor) -> float:
    """The relative size of one rounding error."""
    return torch.finfo(x.dtype).eps / 2


def doubt(x: Tensor) -> float:
    """How much of its size a summand can be off when it is put into a product, in another order.

    With TF32 both sides of a product lose bits, in the norm and in the sum. Products of native 16-bit numbers are
    exact, but what a GPU adds them up with is not always quite float32.
    """
    if is_native(x):
        return NATIVE_ROUNDINGS * rounding(full(x))
    if x.is_cuda and x.dtype == torch.float32 and tf32_in_products():
        return 4 * 2.0**-11
    return ROUNDINGS * rounding(full(x))
