"""Noise on a CPU: drawn, added, divided and rounded in one pass over many tensors, in pieces that stay in the cache."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from torch import Tensor

from qclip.noise_source import NoiseSource

CHUNK: Final = 2**16
"""How many numbers come from one stream of random numbers, whichever thread makes them."""


def noisy_sums(
    raws: Sequence[Tensor],
    stds: Sequence[float],
    spacings: Sequence[float],
    scale: float,
    source: NoiseSource,
    dtype: torch.dtype,
) -> list[Tensor]:
    """``scale * raw + std * normal`` in float64, to the nearest multiple of ``spacing``; then rounded to ``dtype``.

    The twin of the kernel. Sums of other devices are fetched and sent back, noise and all: right, but slow.
    """
    sums = [raw.detach().to("cpu", torch.promote_types(raw.dtype, torch.float32)).contiguous() for raw in raws]
    wide = torch.promote_types(dtype, torch.float32)  # numpy has no bfloat16
    found = [torch.empty(raw.shape, dtype=wide, device="cpu") for raw in raws]
    given, written = ([x.view(-1).numpy() for x in each] for each in (sums, found))
    stream = source.streams()

    def fill(numbered: tuple[int, list[tuple[int, slice]]]) -> None:
        number, pieces = numbered
        noise = stream(number).standard_normal(sum(part.stop - part.start for _, part in pieces))
        at = 0
        for k, part in pieces:
            here = noise[at : (at := at + part.stop - part.start)]
            # In units of the spacing, a power of two: dividing by it rounds nothing.
            here *= stds[k] / spacings[k]
            here += np.multiply(given[k][part], scale / spacings[k], dtype=np.float64)
            here += 0.5
            np.floor(here, out=here)
            here *= spacings[k]
            written[k][part] = here

    chunks = list(enumerate(_chunks([raw.numel() for raw in raws])))
    if (threads := min(torch.get_num_threads(), len(chunks))) > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, chunks))  # numpy lets other threads run meanwhile
    else:
        for chunk in chunks:
            fill(chunk)
    return [x.to(raw.device, dtype) for x, raw in zip(found, raws, strict=True)]


def _chunks(lengths: Sequence[int]) -> Iterator[list[tuple[int, slice]]]:
    """All numbers one after the other, cut into chunks: which tensor, and which part of it."""
    pieces: list[tuple[int, slice]] = []
    room = CHUNK
    for k, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(start + room, length)
            pieces.append((k, slice(start, stop)))
            room -= stop - start
            start = stop
            if room == 0:
                yield pieces
                pieces, room = [], CHUNK
    if pieces:
        yield pieces
