# ruff: noqa: ANN202 - what Triton compiles has no types
"""Noise for GPUs, written in Triton: drawn, added, divided and rounded in one pass over many tensors.

The sum is read once and the noisy gradient written once; the noise itself never lies in memory. Normal numbers come
from Philox counters and the Box-Muller transform, as those of torch's own CUDA generator do, with the same 2^-33 as the
smallest uniform number.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

BLOCK: Final = 1024
"""Normal numbers come in fours; one program makes four blocks."""

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    triton = None


def usable(raws: Sequence[Tensor]) -> bool:
    """Whether the kernel takes these sums: float32, contiguous, on one GPU, with Triton installed."""
    first = raws[0].device
    return (
        triton is not None
        and first.type == "cuda"
        and all(x.dtype == torch.float32 and x.device == first and x.is_contiguous() for x in raws)
    )


def noisy_sums(
    raws: Sequence[Tensor], stds: Sequence[float], scale: float, generator: torch.Generator, dtype: torch.dtype
) -> list[Tensor]:
    """``scale * raw + std * normal``, in float32 and then rounded; ``dtype`` is float32 or bfloat16.

    The generator gives a fresh seed of 64 bits for each call.
    """
    device = raws[0].device
    lengths = tuple(raw.numel() for raw in raws)
    rows, starts, total = _table(lengths, device)
    memory = torch.empty(total, dtype=dtype, device=device)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator, device=device)
    addresses = _sent([raw.data_ptr() for raw in raws], torch.int64, device)
    spreads = _sent(stds, torch.float32, device)
    aligned = all(raw.data_ptr() % 16 == 0 for raw in raws)
    with torch.cuda.device(device):
        kernel: Any = _add_noise
        kernel[(len(rows),)](rows, addresses, spreads, memory, seed, scale, ALIGNED=aligned, BLOCK=BLOCK, num_warps=4)
    parts = [memory[start : start + raw.numel()].view(raw.shape) for start, raw in zip(starts, raws, strict=True)]
    return [part.data for part in parts]  # each with a version of its own: a change to one is not a change to all


@lru_cache(maxsize=16)
def _table(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[int], int]:
    """For each program: which tensor, from where in it, how many numbers, and where to. Then where each tensor goes."""
    rows: list[tuple[int, int, int, int]] = []
    starts: list[int] = []
    total = 0
    for k, length in enumerate(lengths):
        starts.append(total)
        rows += [(k, at, min(4 * BLOCK, length - at), total + at) for at in range(0, length, 4 * BLOCK)]
        total += -(-length // 64) * 64  # aligned
    return torch.tensor(rows, dtype=torch.int64).to(device), starts, total


def _sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


if triton is not None:

    @triton.jit
    def _add_noise(rows, addresses, stds, memory, seed, scale, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
        """One row of the table: four blocks of one tensor."""
        program = tl.program_id(0)
        tensor = tl.load(rows + 4 * program)
        address = tl.load(addresses + tensor) + 4 * tl.load(rows + 4 * program + 1)
        if ALIGNED:  # as the compiler cannot know; it then reads 16 bytes at once
            address = tl.multiple_of(address, 16)
        raw = address.to(tl.pointer_type(tl.float32))
        count = tl.load(rows + 4 * program + 2)
        target = memory + tl.multiple_of(tl.load(rows + 4 * program + 3), 64)
        std = tl.load(stds + tensor)
        here = tl.arange(0, BLOCK)
        zero = here * 0
        a, b, c, d = tl.philox(tl.load(seed), here, zero + program, zero, zero)
        first, second = _normals(a, b)
        third, fourth = _normals(c, d)
        _put(raw, target, count, here, first * std, scale)
        _put(raw, target, count, BLOCK + here, second * std, scale)
        _put(raw, target, count, 2 * BLOCK + here, third * std, scale)
        _put(raw, target, count, 3 * BLOCK + here, fourth * std, scale)

    @triton.jit
    def _normals(a, b):
        """Two independent normal numbers from two random words, by the Box-Muller transform."""
        radius = tl.sqrt(-2.0 * tl.log(_uniform(a)))
        # A whole turn in quarters: series of sine and cosine up to an eighth of a turn are exact to rounding, and
        # cheaper than functions that also take large angles.
        quarters = 4.0 * _uniform(b)
        whole = tl.floor(quarters + 0.5)
        x = 1.5707963267948966 * (quarters - whole)
        y = x * x
        sine = x + x * y * (-1.6666667e-1 + y * (8.3333333e-3 + y * (-1.9841270e-4 + y * 2.7557319e-6)))
        cosine = 1.0 + y * (-0.5 + y * (4.1666667e-2 + y * (-1.3888889e-3 + y * 2.4801587e-5)))
        quarter = whole.to(tl.int32) & 3
        swapped = (quarter & 1) == 1
        across = tl.where(swapped, sine, cosine) * tl.where((quarter == 1) | (quarter == 2), -1.0, 1.0)
        up = tl.where(swapped, cosine, sine) * tl.where(quarter >= 2, -1.0, 1.0)
        return radius * across, radius * up

    @triton.jit
    def _uniform(word):
        """Above 0, at most 1."""
        return word.to(tl.uint32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10

    @triton.jit
    def _put(raw, target, count, at, noise, scale):
        noisy = scale * tl.load(raw + at, mask=at < count, other=0.0) + noise
        tl.store(target + at, noisy.to(target.dtype.element_ty), mask=at < count)
