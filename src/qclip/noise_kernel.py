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

from qclip._transfer import sent

BLOCK: Final = 512
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
    addresses = _sent(tuple(raw.data_ptr() for raw in raws), torch.int64, device)
    spreads = _sent(tuple(stds), torch.float32, device)
    aligned = all(raw.data_ptr() % 16 == 0 for raw in raws)
    with torch.cuda.device(device):
        kernel: Any = _add_noise
        arguments = rows, addresses, spreads, memory, seed, scale
        kernel[(len(rows),)](*arguments, ALIGNED=aligned, FAST=torch.version.hip is None, BLOCK=BLOCK, num_warps=4)
    parts = [memory.as_strided(raw.shape, raw.stride(), start) for start, raw in zip(starts, raws, strict=True)]
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


@lru_cache(maxsize=16)
def _sent(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the device, without waiting for it; steps that are replayed have their sums in the same places."""
    return sent(torch.tensor(values, dtype=dtype), device)


if triton is not None:

    @triton.jit
    def _add_noise(
        rows,
        addresses,
        stds,
        memory,
        seed,
        scale,
        ALIGNED: tl.constexpr,
        FAST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One row of the table: four blocks of one tensor."""
        program = tl.program_id(0)
        tensor = tl.load(rows + 4 * program)
        address = tl.load(addresses + tensor) + 4 * tl.load(rows + 4 * program + 1)
        raw = address.to(tl.pointer_type(tl.float32))
        if ALIGNED:  # as the compiler cannot know; it then reads 16 bytes at once
            raw = tl.multiple_of(raw, 16)
        count = tl.load(rows + 4 * program + 2)
        target = memory + tl.multiple_of(tl.load(rows + 4 * program + 3), 64)
        std = tl.load(stds + tensor)
        key = tl.load(seed)
        if count == 4 * BLOCK:  # nearly always; a mask makes loads and stores narrow
            _four_blocks(raw, target, count, key, program, std, scale, True, FAST, BLOCK)
        else:
            _four_blocks(raw, target, count, key, program, std, scale, False, FAST, BLOCK)

    @triton.jit
    def _four_blocks(
        raw,
        target,
        count,
        seed,
        program,
        std,
        scale,
        WHOLE: tl.constexpr,
        FAST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        here = tl.arange(0, BLOCK)
        zero = here * 0
        # The sums are on their way while the noise is made.
        sums_1 = _get(raw, count, here, WHOLE)
        sums_2 = _get(raw, count, BLOCK + here, WHOLE)
        sums_3 = _get(raw, count, 2 * BLOCK + here, WHOLE)
        sums_4 = _get(raw, count, 3 * BLOCK + here, WHOLE)
        a, b, c, d = tl.philox(seed, here, zero + program, zero, zero)
        noise_1, noise_2 = _normals(a, b, FAST)
        noise_3, noise_4 = _normals(c, d, FAST)
        _put(target, count, here, scale * sums_1 + std * noise_1, WHOLE)
        _put(target, count, BLOCK + here, scale * sums_2 + std * noise_2, WHOLE)
        _put(target, count, 2 * BLOCK + here, scale * sums_3 + std * noise_3, WHOLE)
        _put(target, count, 3 * BLOCK + here, scale * sums_4 + std * noise_4, WHOLE)

    @triton.jit
    def _normals(a, b, FAST: tl.constexpr):
        """Two independent normal numbers from two random words, by the Box-Muller transform."""
        radius = tl.sqrt(-2.0 * _log(_uniform(a), FAST))
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
    def _log(x, FAST: tl.constexpr):
        """Of a number above 0, at most 1. Fast, it is off by less than 3e-6 of itself: the radius by half of that."""
        if FAST:
            # The GPU's own logarithm is off by up to 2^-22 in all: too much close to 1, where a series takes its place.
            binary = tl.inline_asm_elementwise(
                "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )
            y = 1.0 - x
            series = -y * (1.0 + y * (0.5 + y * (0.33333333 + y * (0.25 + y * 0.2))))
            # pyrefly: ignore [unsupported-operation] - one output is no tuple
            found = tl.where(y < 0.0625, series, 0.6931471805599453 * binary)
        else:
            found = tl.log(x)
        return found

    @triton.jit
    def _uniform(word):
        """Above 0, at most 1."""
        return word.to(tl.uint32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10

    @triton.jit
    def _get(raw, count, at, WHOLE: tl.constexpr):
        return tl.load(raw + at) if WHOLE else tl.load(raw + at, mask=at < count, other=0.0)

    @triton.jit
    def _put(target, count, at, noisy, WHOLE: tl.constexpr):
        if WHOLE:
            tl.store(target + at, noisy.to(target.dtype.element_ty))
        else:
            tl.store(target + at, noisy.to(target.dtype.element_ty), mask=at < count)
