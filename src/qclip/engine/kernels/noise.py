# ruff: noqa: ANN202 - what Triton compiles has no types
"""Noise for GPUs, written in Triton: drawn, added, divided and rounded in one pass over many tensors.

The sum is read once and the noisy gradient written once; the noise itself never lies in memory. Normal numbers come
from Philox counters and the Box-Muller transform, as those of torch's own CUDA generator do, with the same 2^-33 as the
smallest uniform number: they end at 6.76. Angles have 32 bits, and from there on all is in float64: the noise must be
much finer than the grid that is rounded to, or its own grid would tell where the sum was.
"""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from qclip.engine.batch import to_device_async

BLOCK: Final = 512
"""Normal numbers come in fours; one program makes four blocks."""

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    triton = None


def usable(raw: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel takes this sum: float32, contiguous, on a GPU, with Triton; for float32 or bfloat16."""
    fits = raw.dtype == torch.float32 and dtype in (torch.float32, torch.bfloat16) and raw.is_contiguous()
    return triton is not None and raw.is_cuda and fits


def noisy_sums(
    raws: Sequence[Tensor],
    stds: Sequence[float],
    spacings: Sequence[float],
    scale: float,
    words: tuple[int, int],
    dtype: torch.dtype,
) -> list[Tensor]:
    """``scale * raw + std * normal`` in float64, to the nearest multiple of ``spacing``; then rounded to ``dtype``.

    All on one GPU. ``words`` are 128 fresh secret bits: Philox's key, and the half of its counters that does not count.
    """
    device = raws[0].device
    rows, starts, total = _table(tuple(raw.numel() for raw in raws), device)
    memory = torch.empty(total, dtype=dtype, device=device)
    addresses = _addresses_of(tuple(raw.data_ptr() for raw in raws), device)
    numbers = to_device_async(_numbers(words, stds, spacings, scale), device)
    aligned = all(raw.data_ptr() % 16 == 0 for raw in raws)
    with torch.cuda.device(device):
        kernel: Any = _add_noise
        arguments = rows, addresses, numbers, memory
        kernel[(len(rows),)](*arguments, ALIGNED=aligned, FAST=torch.version.hip is None, BLOCK=BLOCK, num_warps=4)
    parts = [memory.as_strided(raw.shape, raw.stride(), start) for start, raw in zip(starts, raws, strict=True)]
    return [part.data for part in parts]  # each with a version of its own: a change to one is not a change to all


def _numbers(words: Sequence[int], stds: Sequence[float], spacings: Sequence[float], scale: float) -> Tensor:
    """What is new at every launch, in one piece, [2 + 3 tensors] of 64 bits each: the secret words, and floats.

    For each tensor deviation and scale in units of the spacing, a power of two, which rounds nothing; and the spacing.
    """
    pairs = zip(stds, spacings, strict=True)
    sizes = np.array([size for std, spacing in pairs for size in (std / spacing, scale / spacing, spacing)])
    return torch.from_numpy(np.concatenate([np.array(words, np.uint64).view(np.int64), sizes.view(np.int64)]))


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
def _addresses_of(values: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device, without waiting for it; steps that are replayed have their sums in the same places."""
    return to_device_async(torch.tensor(values), device)


if triton is not None:

    @triton.jit
    def _add_noise(
        rows,
        addresses,
        numbers,
        memory,
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
        sizes = numbers.to(tl.pointer_type(tl.float64)) + 2 + 3 * tensor
        if count == 4 * BLOCK:  # nearly always; a mask makes loads and stores narrow
            _four_blocks(raw, target, count, numbers, program, sizes, True, FAST, BLOCK)
        else:
            _four_blocks(raw, target, count, numbers, program, sizes, False, FAST, BLOCK)

    @triton.jit
    def _four_blocks(
        raw,
        target,
        count,
        secret,
        program,
        sizes,
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
        key, upper = tl.load(secret), tl.load(secret + 1)
        third, fourth = zero + upper.to(tl.int32), zero + (upper >> 32).to(tl.int32)
        a, b, c, d = tl.philox(key, here, zero + program, third, fourth)
        noise_1, noise_2 = _normals(a, b, FAST)
        noise_3, noise_4 = _normals(c, d, FAST)
        _put(target, count, here, _on_grid(sums_1, noise_1, sizes), WHOLE)
        _put(target, count, BLOCK + here, _on_grid(sums_2, noise_2, sizes), WHOLE)
        _put(target, count, 2 * BLOCK + here, _on_grid(sums_3, noise_3, sizes), WHOLE)
        _put(target, count, 3 * BLOCK + here, _on_grid(sums_4, noise_4, sizes), WHOLE)

    @triton.jit
    def _on_grid(sums, noise, sizes):
        """The noisy sum, to the nearest multiple of the spacing."""
        std, scale, spacing = tl.load(sizes), tl.load(sizes + 1), tl.load(sizes + 2)
        return spacing * tl.floor(scale * sums.to(tl.float64) + (std * noise + 0.5))

    @triton.jit
    def _normals(a, b, FAST: tl.constexpr):
        """Two independent normal numbers from two random words, by the Box-Muller transform."""
        radius = tl.sqrt(-2.0 * _log(_uniform(a), FAST)).to(tl.float64)
        # Two bits of the word say which quarter of a turn, the others how far from its middle. Up to an eighth of a
        # turn short series of sine and cosine are off by less than 3e-8, and cheaper than functions for any angle.
        word = b.to(tl.uint32, bitcast=True)
        quarter = (word >> 30).to(tl.int32)
        rest = (word & 0x3FFFFFFF).to(tl.int32) - 0x20000000
        x = 1.4629180792671596e-9 * (rest.to(tl.float64) + 0.5)  # a quarter of a turn over 2^30
        y = x * x
        sine = x + x * y * (-1.6666667e-1 + y * (8.3333333e-3 + y * (-1.9841270e-4 + y * 2.7557319e-6)))
        cosine = 1.0 + y * (-0.5 + y * (4.1666667e-2 + y * (-1.3888889e-3 + y * 2.4801587e-5)))
        swapped = (quarter & 1) == 1
        across = tl.where(swapped, sine, cosine) * tl.where((quarter == 1) | (quarter == 2), -radius, radius)
        up = tl.where(swapped, cosine, sine) * tl.where(quarter >= 2, -radius, radius)
        return across, up

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
        rounded = noisy.to(tl.float32).to(target.dtype.element_ty)
        if WHOLE:
            tl.store(target + at, rounded)
        else:
            tl.store(target + at, rounded, mask=at < count)
