# ruff: noqa: ANN202 - what Triton compiles has no types
"""Gaussian noise on a GPU: drawn, added, divided and rounded in one Triton pass over many tensors.

The sum is read once and the noisy gradient written once; the noise itself is never stored. Normal numbers come from
Philox counters and the Box-Muller transform, as in torch's own CUDA generator, with the same smallest uniform number
2^-33: they end at 6.76. Angles have 32 bits, and all later arithmetic is in float64: the noise must be much finer than
the grid that the result is rounded to, or the grid of the noise would reveal where the sum was.
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
"""Philox returns four words at a time, so one program computes four blocks of this many elements."""

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    triton = None


def usable(raw: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel takes this sum: contiguous float32 on a GPU, with Triton, for these output types.

    Args:
        raw: The raw sum.
        dtype: The precision of the noisy result: float32 or bfloat16.
    """
    fits = raw.dtype == torch.float32 and dtype in (torch.float32, torch.bfloat16) and raw.is_contiguous()
    return triton is not None and raw.is_cuda and fits


def noisy_sums(
    raws: Sequence[Tensor],
    stds: Sequence[float],
    spacings: Sequence[float],
    scale: float,
    words: tuple[int, int],
    dtype: torch.dtype,
    places: Sequence[tuple[int, int]] | None = None,
) -> list[Tensor]:
    """Compute ``scale * raw + std * normal`` in float64, round to a multiple of ``spacing``, then to ``dtype``.

    Args:
        raws: The raw sums, all on one GPU.
        stds: The standard deviation of the noise of each sum.
        spacings: The grid of each result, a power of two.
        scale: The factor of all sums.
        words: 128 fresh secret bits: Philox's key, and the half of its counters that does not count.
        dtype: The precision of the results.
        places: Where each sum lies in its whole tensor, as (first element, elements of the whole); by default it is
            whole. A part gets the noise that the whole would get there.
    """
    device = raws[0].device
    rows, starts, total = _table(tuple(raw.numel() for raw in raws), device, None if places is None else tuple(places))
    memory = torch.empty(total, dtype=dtype, device=device)
    addresses = _addresses_of(tuple(raw.data_ptr() for raw in raws), device)
    values = to_device_async(_launch_values(words, stds, spacings, scale), device)
    aligned = all(raw.data_ptr() % 16 == 0 for raw in raws) and all(start % 4 == 0 for start, _ in places or ())
    with torch.cuda.device(device):
        kernel: Any = _add_noise
        arguments = rows, addresses, values, memory
        kernel[(len(rows),)](*arguments, ALIGNED=aligned, FAST=torch.version.hip is None, BLOCK=BLOCK, num_warps=4)
    views = [memory.as_strided(raw.shape, raw.stride(), start) for start, raw in zip(starts, raws, strict=True)]
    return [view.data for view in views]  # each with its own version counter: a change to one is not a change to all


def _launch_values(words: Sequence[int], stds: Sequence[float], spacings: Sequence[float], scale: float) -> Tensor:
    """Return the values that change at every launch, as 64-bit words [2 + 3 * tensors] in one tensor.

    First the secret words; then, for each tensor, standard deviation and scale in units of the spacing, and the
    spacing. It is a power of two, so the divisions are exact.
    """
    pairs = zip(stds, spacings, strict=True)
    sizes = np.array([size for std, spacing in pairs for size in (std / spacing, scale / spacing, spacing)])
    return torch.from_numpy(np.concatenate([np.array(words, np.uint64).view(np.int64), sizes.view(np.int64)]))


@lru_cache(maxsize=16)
def _table(
    lengths: tuple[int, ...], device: torch.device, places: tuple[tuple[int, int], ...] | None = None
) -> tuple[Tensor, list[int], int]:
    """Return one row per program, and the layout of the output.

    A row is (tensor, offset in it, first and last element to process, offset in the output, number of the program in
    the whole tensors). Programs of a part begin where those of the whole begin, perhaps before the part does. The
    layout is the offset of each tensor in the output, and the output's length.
    """
    rows: list[tuple[int, ...]] = []
    starts: list[int] = []
    total = number = 0
    size = 4 * BLOCK
    for k, length in enumerate(lengths):
        start, whole = (0, length) if places is None else places[k]
        starts.append(total + start % 64)  # so that programs write to aligned places
        for begin in range(start - start % size, start + length if length else 0, size):
            at = begin - start
            row = (k, at, max(0, -at), min(size, length - at), starts[k] + at, number + begin // size)
            rows.append(row)
        number += -(-whole // size)
        total = -(-(starts[k] + length) // 64) * 64
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 6).to(device), starts, total


@lru_cache(maxsize=16)
def _addresses_of(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the addresses on the device, without waiting for it. Replayed steps have their sums at the same ones."""
    return to_device_async(torch.tensor(values), device)


if triton is not None:

    @triton.jit
    def _add_noise(rows, addresses, values, memory, ALIGNED: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
        """Process one row of the table: four blocks of one tensor."""
        row = rows + 6 * tl.program_id(0)
        tensor = tl.load(row)
        address = tl.load(addresses + tensor) + 4 * tl.load(row + 1)
        raw = address.to(tl.pointer_type(tl.float32))
        if ALIGNED:  # tell the compiler, so that it reads 16 bytes at once
            raw = tl.multiple_of(raw, 16)
        first, last = tl.load(row + 2), tl.load(row + 3)
        target = memory + tl.multiple_of(tl.load(row + 4), 64)
        number = tl.load(row + 5).to(tl.int32)
        sizes = values.to(tl.pointer_type(tl.float64)) + 2 + 3 * tensor
        if last - first == 4 * BLOCK:  # nearly always; a mask makes loads and stores narrow
            _four_blocks(raw, target, first, last, values, number, sizes, True, FAST, BLOCK)
        else:
            _four_blocks(raw, target, first, last, values, number, sizes, False, FAST, BLOCK)

    @triton.jit
    def _four_blocks(
        raw, target, first, last, secret, number, sizes, WHOLE: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr
    ):
        here = tl.arange(0, BLOCK)
        zero = here * 0
        # Loads are in flight while the noise is computed.
        sums_1 = _get(raw, first, last, here, WHOLE)
        sums_2 = _get(raw, first, last, BLOCK + here, WHOLE)
        sums_3 = _get(raw, first, last, 2 * BLOCK + here, WHOLE)
        sums_4 = _get(raw, first, last, 3 * BLOCK + here, WHOLE)
        key, upper = tl.load(secret), tl.load(secret + 1)
        third, fourth = zero + upper.to(tl.int32), zero + (upper >> 32).to(tl.int32)
        a, b, c, d = tl.philox(key, here, zero + number, third, fourth)
        noise_1, noise_2 = _normals(a, b, FAST)
        noise_3, noise_4 = _normals(c, d, FAST)
        _put(target, first, last, here, _on_grid(sums_1, noise_1, sizes), WHOLE)
        _put(target, first, last, BLOCK + here, _on_grid(sums_2, noise_2, sizes), WHOLE)
        _put(target, first, last, 2 * BLOCK + here, _on_grid(sums_3, noise_3, sizes), WHOLE)
        _put(target, first, last, 3 * BLOCK + here, _on_grid(sums_4, noise_4, sizes), WHOLE)

    @triton.jit
    def _on_grid(sums, noise, sizes):
        """Round the noisy sum to the nearest multiple of the spacing."""
        std, scale, spacing = tl.load(sizes), tl.load(sizes + 1), tl.load(sizes + 2)
        return spacing * tl.floor(scale * sums.to(tl.float64) + (std * noise + 0.5))

    @triton.jit
    def _normals(a, b, FAST: tl.constexpr):
        """Return two independent normal numbers from two random words, by the Box-Muller transform."""
        radius = tl.sqrt(-2.0 * _log(_uniform(a), FAST)).to(tl.float64)
        # Two bits of the word select a quarter turn, the others the angle from its middle. Up to an eighth of a turn,
        # short series of sine and cosine have errors below 3e-8, and are cheaper than functions for any angle.
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
        """Return the logarithm of x in (0, 1]. FAST has a relative error below 3e-6; the radius, half of that."""
        if FAST:
            # The GPU's own logarithm has an absolute error of up to 2^-22: too much close to 1, where a series is used.
            binary = tl.inline_asm_elementwise(
                "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )
            y = 1.0 - x
            series = -y * (1.0 + y * (0.5 + y * (0.33333333 + y * (0.25 + y * 0.2))))
            # pyrefly: ignore [unsupported-operation] - one output is no tuple
            logarithm = tl.where(y < 0.0625, series, 0.6931471805599453 * binary)
        else:
            logarithm = tl.log(x)
        return logarithm

    @triton.jit
    def _uniform(word):
        """Return a uniform number in (0, 1]."""
        return word.to(tl.uint32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10

    @triton.jit
    def _get(raw, first, last, at, WHOLE: tl.constexpr):
        return tl.load(raw + at) if WHOLE else tl.load(raw + at, mask=(at >= first) & (at < last), other=0.0)

    @triton.jit
    def _put(target, first, last, at, noisy, WHOLE: tl.constexpr):
        rounded = noisy.to(tl.float32).to(target.dtype.element_ty)
        if WHOLE:
            tl.store(target + at, rounded)
        else:
            tl.store(target + at, rounded, mask=(at >= first) & (at < last))
