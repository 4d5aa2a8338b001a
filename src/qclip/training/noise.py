"""Noise: a raw sum goes in, a release comes out. The size of the noise is read off the sum, never passed beside it."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from qclip.engine.kernels import noise as kernel
from qclip.theory import group_noise
from qclip.training.sums import BoundedSum, NoisySum

CHUNK: Final = 2**16
"""How many elements come from one random stream on a CPU, whichever thread makes them."""


def release(
    value: BoundedSum,
    noise_multiplier: float,
    source: "NoiseSource",
    *,
    divisor: float = 1.0,
    dtypes: Mapping[Any, torch.dtype] | None = None,
) -> NoisySum:
    """Add Gaussian noise to a sum and divide: as private as one Gaussian release at ``noise_multiplier``.

    Guarantees:
        * The noise is ``noise_multiplier`` times the L2 bound of the sum with one group. With several it is shared so
          that its total power is least (`qclip.theory.group_noise`).
        * Every coordinate gets independent noise, from ``source`` alone.
        * Noise and sum are added in float64, and the result is rounded to a multiple of `grid_spacing` before it gets
          its final precision: its last bits tell nothing about the sum.
        * A multiplier of 0 draws nothing and adds nothing.

    Args:
        value: The raw sum; resolved if it was not.
        noise_multiplier: The ratio of noise to sensitivity.
        source: Where the random numbers come from.
        divisor: A public number, such as the expected batch size.
        dtypes: The precision of the result, by key; that of the raw tensor where left out.

    Returns:
        The noisy tensors and the standard deviation of their noise.
    """
    value = value.resolve()
    dtypes = {} if dtypes is None else dtypes
    if noise_multiplier == 0:
        tensors = {key: (raw / divisor).to(dtypes.get(key, raw.dtype)) for key, raw in value.tensors.items()}
        return NoisySum(tensors, (0.0,) * len(value.group_bounds), divisor)
    stds = noise_stds(value, noise_multiplier)
    launches: dict[tuple[torch.device, torch.dtype, bool], list[Any]] = {}
    for key, raw in value.tensors.items():
        dtype = dtypes.get(key, raw.dtype)
        launches.setdefault((raw.device, dtype, kernel.usable(raw, dtype)), []).append(key)
    noisy: dict[Any, Tensor] = {}
    for (_, dtype, fused), keys in launches.items():
        raws = [value.tensors[key] for key in keys]
        stds_of_means = [stds[value.members[key]] / divisor for key in keys]
        spacings = [grid_spacing(std) for std in stds_of_means]
        if fused:
            released = kernel.noisy_sums(raws, stds_of_means, spacings, 1 / divisor, source.words(), dtype)
        else:
            released = noisy_sums(raws, stds_of_means, spacings, 1 / divisor, source.streams(), dtype)
        noisy.update(zip(keys, released, strict=True))
    return NoisySum({key: noisy[key] for key in value.tensors}, stds, divisor)


def grid_spacing(std: float) -> float:
    """Return the distance of neighbouring released values: the largest power of two up to 2^-16 of the noise's std.

    A floating-point sum carries traces of both terms in its last bits, whatever the noise. Values on one grid that
    depends on public numbers only have no such bits.
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 17)


def noise_stds(value: BoundedSum, noise_multiplier: float) -> tuple[float, ...]:
    """Return the standard deviation of the noise of each group: from public values only, so the same everywhere."""
    return tuple(group_noise(value.group_bounds, value.group_dims, noise_multiplier).stds.tolist())


def group_dims(tensors: Mapping[str, Tensor], members: Mapping[str, int], num_groups: int) -> tuple[int, ...]:
    """Return the number of coordinates of each group."""
    dims = [0] * num_groups
    for name, tensor in tensors.items():
        dims[members[name]] += tensor.numel()
    return tuple(dims)


Stream = Callable[[int], np.random.Generator]
"""From the number of a chunk to that chunk's own random numbers."""


class NoiseSource:
    """Random numbers from a key of 128 bits, which are the operating system's unless there is a seed.

    Each draw takes counters of Philox (4 x 64 bits) that no other draw uses, so no two share random numbers, and where
    a draw begins does not depend on how much the last one used. Not cryptographic: nobody has promised that outputs of
    Philox do not tell its key.
    """

    def __init__(self, seed: int | np.random.SeedSequence | None = None) -> None:
        sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        low, high = sequence.generate_state(2, np.uint64).tolist()
        self._key: int = low | high << 64
        self._draws = 0

    def streams(self) -> Stream:
        """A new draw, in as many parts as are asked for, each independent of the others."""
        key, counter = self._key, self._begin(0)
        return lambda part: np.random.Generator(np.random.Philox(key=key, counter=counter | part << 64))

    def words(self) -> tuple[int, int]:
        """A new draw: two secret words of 64 bits, for a kernel that makes its own random numbers of them."""
        low, high = np.random.Philox(key=self._key, counter=self._begin(1)).random_raw(2).tolist()
        return low, high

    def state_dict(self) -> dict[str, int]:
        """All there is to know, as plain data: a secret."""
        return {"key": self._key, "draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        self._key, self._draws = state["key"], state["draws"]

    def _begin(self, purpose: int) -> int:
        """Where the next draw's counters begin, of 256 bits: purpose, draw, part, and what Philox counts itself.

        The purpose is in it because a run may go on by another way than it was saved, and words that were used as
        normal numbers once must not become a kernel's secret.
        """
        counter = purpose << 192 | self._draws << 128
        self._draws += 1
        return counter


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
