"""Noise on a CPU: drawn, added, divided and rounded in one pass over many tensors, in pieces that stay in the cache."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from torch import Tensor

from qclip.training.noise_source import Stream

CHUNK: Final = 2**16
"""How many numbers come from one stream of random numbers, whichever thread makes them."""


def noisy_sums(
    raws: Sequence[Tensor],
    stds: Sequence[float],
    spacings: Sequence[float],
    scale: float,
    stream: Stream,
    dtype: torch.dtype,
) -> list[Tensor]:
    """``scale * raw + std * normal`` in float64, to the nearest multiple of ``spacing``; then rounded to ``dtype``.

    The twin of the kernel: ``stream`` gives each chunk its own random numbers.
    Sums of other devices are fetched and sent back, noise and all: right, but slow.
    """
    lengths = [raw.numel() for raw in raws]
    together = torch.cat([raw.detach().reshape(-1) for raw in raws]).to("cpu")
    found = torch.empty(len(together), dtype=torch.promote_types(dtype, torch.float32))  # numpy has no bfloat16
    given, written = together.to(torch.promote_types(together.dtype, torch.float32)).numpy(), found.numpy()

    def fill(numbered: tuple[int, list[tuple[int, slice]]]) -> None:
        number, pieces = numbered
        start = pieces[0][1].start
        noise = stream(number).standard_normal(pieces[-1][1].stop - start)
        for k, part in pieces:
            here = noise[part.start - start : part.stop - start]
            # In units of the spacing, a power of two: dividing by it rounds nothing.
            here *= stds[k] / spacings[k]
            here += np.multiply(given[part], scale / spacings[k], dtype=np.float64)
            here += 0.5
            np.floor(here, out=here)
            here *= spacings[k]
            written[part] = here

    chunks = list(enumerate(_chunks(lengths, stds)))
    if (threads := min(torch.get_num_threads(), len(chunks))) > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, chunks))  # numpy lets other threads run meanwhile
    else:
        for chunk in chunks:
            fill(chunk)
    parts = found.to(raws[0].device, dtype).split(lengths)
    # .data: each part has a version of its own, so that a change to one does not look like a change to all.
    return [part.view(raw.shape).data for part, raw in zip(parts, raws, strict=True)]


def _chunks(lengths: Sequence[int], stds: Sequence[float]) -> Iterator[list[tuple[int, slice]]]:
    """All numbers in a row, cut into chunks, and these where another deviation begins: for which tensor, from where."""
    pieces: list[tuple[int, slice]] = []
    start = 0
    for _, same in itertools.groupby(range(len(lengths)), key=stds.__getitem__):
        tensors = list(same)
        end = start + sum(lengths[k] for k in tensors)
        while start < end:
            stop = min(end, start - start % CHUNK + CHUNK)
            pieces.append((tensors[0], slice(start, stop)))
            start = stop
            if start % CHUNK == 0:
                yield pieces
                pieces = []
    if pieces:
        yield pieces
