"""Noise: from a raw sum to a release. The sum carries its own sensitivity, so no caller can pass a wrong one."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qclip.engine.kernels import noise as kernel
from qclip.theory import group_noise
from qclip.training.sums import BoundedSum, NoisySum, Place

CHUNK: Final = 2**16
"""Elements per random stream on a CPU, for any number of threads."""


def release(
    value: BoundedSum,
    noise_multiplier: float,
    source: "NoiseSource",
    *,
    divisor: float = 1.0,
    dtypes: Mapping[Any, torch.dtype] | None = None,
    places: Mapping[Any, Place] | None = None,
) -> NoisySum:
    """Add Gaussian noise to a sum and divide it: one Gaussian release at ``noise_multiplier``.

    Guarantees:
        * With one group, the standard deviation of the noise is ``noise_multiplier`` times the L2 bound of the sum.
          With several groups, the noise is shared so that its total power is least (`qclip.theory.group_noise`).
        * Every coordinate gets independent noise, from ``source`` alone. Global generators are not touched.
        * Noise and sum are added in float64 and rounded to a multiple of `grid_spacing` before the cast to the final
          dtype, so that the last bits reveal nothing about the sum.
        * ``divisor`` divides the noise as well as the sum.

    Edge cases:
        * ``noise_multiplier`` 0: no noise is drawn or added, and nothing is rounded to a grid.
        * An unresolved sum is resolved first.
        * A sum that holds only some coordinates of a group gets the noise of the whole group (``group_dims``).
        * Parts of tensors get the numbers that the whole tensors would get there, so that ranks with all parts make the
          release of one process.

    Args:
        value: The raw sum.
        noise_multiplier: The ratio of noise to sensitivity.
        source: The random numbers.
        divisor: A public number, such as the expected batch size.
        dtypes: The dtype of each released tensor, by key; by default that of the raw tensor.
        places: Where the raw tensors that are parts lie in the whole ones, by key.

    Returns:
        The noisy tensors, in the order and the shapes of the raw ones, and the standard deviations of their noise.
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
        spans = [(places or {}).get(key, Place(0, raw.numel())) for key, raw in zip(keys, raws, strict=True)]
        if fused:
            released = kernel.noisy_sums(raws, stds_of_means, spacings, 1 / divisor, source.words(), dtype, spans)
        else:
            released = noisy_sums(raws, stds_of_means, spacings, 1 / divisor, source.streams(), dtype, spans)
        noisy.update(zip(keys, released, strict=True))
    return NoisySum({key: noisy[key] for key in value.tensors}, stds, divisor)


def grid_spacing(std: float) -> float:
    """Return the distance of neighbouring released values: the largest power of two up to ``2**-16 * std``.

    The last bits of a floating-point sum carry traces of both terms, however large the noise. Values on a grid that
    depends on public numbers only have no such bits.
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 17)


def noise_stds(value: BoundedSum, noise_multiplier: float) -> tuple[float, ...]:
    """Return the standard deviation of the noise of each group, from public values only: the same on every rank."""
    return tuple(group_noise(value.group_bounds, value.group_dims, noise_multiplier).stds.tolist())


def group_dims(tensors: Mapping[str, Tensor], members: Mapping[str, int], num_groups: int) -> tuple[int, ...]:
    """Return the number of coordinates of each group."""
    dims = [0] * num_groups
    for name, tensor in tensors.items():
        dims[members[name]] += tensor.numel()
    return tuple(dims)


Stream = Callable[[int], np.random.Generator]
"""Returns the random generator of a chunk, given the chunk's number."""


class NoiseSource:
    """Random numbers from a key of 128 bits: from the operating system, or from a seed.

    Each draw has Philox counters (4 x 64 bits) of its own. So no two draws share random numbers, and the start of a
    draw does not depend on the length of the last one. Philox is not cryptographic: its outputs may reveal its key.

    Args:
        seed: A seed, for tests and reproducible runs; None for entropy of the operating system.
    """

    def __init__(self, seed: int | np.random.SeedSequence | None = None) -> None:
        sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        low, high = sequence.generate_state(2, np.uint64).tolist()
        self._key: int = low | high << 64
        self._draws = 0

    def streams(self) -> Stream:
        """Begin a draw; return its independent streams, by number."""
        key, counter = self._key, self._begin(0)
        return lambda number: np.random.Generator(np.random.Philox(key=key, counter=counter | number << 64))

    def words(self) -> tuple[int, int]:
        """Begin a draw; return two secret words of 64 bits, the key of a kernel's own random numbers."""
        low, high = np.random.Philox(key=self._key, counter=self._begin(1)).random_raw(2).tolist()
        return low, high

    def state_dict(self) -> dict[str, int]:
        """Return the whole state as plain data. Keep it secret: the noise follows from it."""
        return {"key": self._key, "draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._key, self._draws = state["key"], state["draws"]

    def _begin(self, purpose: int) -> int:
        """Return the first counter of the next draw, 256 bits: purpose, draw, stream, and Philox's own count.

        The purpose is part of it because a resumed run may use the kernel where the saved one did not: words that
        became normal numbers once must not become a kernel's secret.
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
    places: Sequence[Place] | None = None,
) -> list[Tensor]:
    """Compute ``scale * raw + std * normal`` in float64, rounded to a multiple of ``spacing`` and then to ``dtype``.

    The slow twin of `qclip.engine.kernels.noise.noisy_sums`. Sums on other devices are copied to the CPU and back:
    correct, but slow.

    Args:
        raws: The raw sums, all on one device.
        stds: The standard deviation of the noise of each, after scaling.
        spacings: The grid spacing of each: a power of two.
        scale: A public factor.
        stream: The random generator of each chunk of the whole tensors, one after another.
        dtype: The dtype of the result.
        places: Where each sum lies in its whole tensor; by default it is whole.

    Returns:
        The noisy sums, in the shapes of the raw ones.
    """
    lengths = [raw.numel() for raw in raws]
    places = [Place(0, length) for length in lengths] if places is None else places
    flat_raw = torch.cat([raw.detach().reshape(-1) for raw in raws]).to("cpu")
    flat_noisy = torch.empty(len(flat_raw), dtype=torch.promote_types(dtype, torch.float32))  # numpy has no bfloat16
    raw_array = flat_raw.to(torch.promote_types(flat_raw.dtype, torch.float32)).numpy()
    noisy_array = flat_noisy.numpy()

    def fill(chunk: tuple[int, list[Piece]]) -> None:
        number, pieces = chunk
        normal = stream(number).standard_normal(pieces[-1].stop)
        for piece in pieces:
            k, here = piece.tensor, slice(piece.at, piece.at + piece.stop - piece.start)
            values = normal[piece.start : piece.stop]
            # In units of the spacing: dividing by a power of two rounds nothing.
            values *= stds[k] / spacings[k]
            values += np.multiply(raw_array[here], scale / spacings[k], dtype=np.float64)
            values += 0.5
            np.floor(values, out=values)
            values *= spacings[k]
            noisy_array[here] = values

    chunks = list(_chunks(lengths, stds, places))
    if (threads := min(torch.get_num_threads(), len(chunks))) > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, chunks))  # numpy releases the GIL while it draws
    else:
        for chunk in chunks:
            fill(chunk)
    noisy = flat_noisy.to(raws[0].device, dtype).split(lengths)
    # .data gives each tensor its own version counter: a change to one must not look like a change to all.
    return [tensor.view(raw.shape).data for tensor, raw in zip(noisy, raws, strict=True)]


class Piece(NamedTuple):
    """Elements of one standard deviation inside a chunk."""

    tensor: int
    """The first tensor that the elements belong to."""
    start: int
    """The first element, counted from the start of the chunk."""
    stop: int
    at: int
    """The place of the first element among the elements that are here."""


def _chunks(
    lengths: Sequence[int], stds: Sequence[float], places: Sequence[Place]
) -> Iterator[tuple[int, list[Piece]]]:
    """Cut the elements that are here into chunks of the whole tensors, one after another: (number, pieces)."""
    number, pieces = 0, []
    for k, start, stop, here in _spans(lengths, stds, places):
        cuts = [start, *range((start // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
        for begin, end in pairwise(cuts):
            if begin // CHUNK != number:
                if pieces:
                    yield number, pieces
                number, pieces = begin // CHUNK, []
            base = number * CHUNK
            pieces.append(Piece(k, begin - base, end - base, here + begin - start))
    if pieces:
        yield number, pieces


def _spans(
    lengths: Sequence[int], stds: Sequence[float], places: Sequence[Place]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield stretches of one standard deviation without gaps: (tensor, start and stop in the whole, place here)."""
    begin = here = 0
    span: tuple[int, int, int, int] | None = None
    for k, (length, place) in enumerate(zip(lengths, places, strict=True)):
        start = begin + place.start
        if span is not None and span[2] == start and stds[span[0]] == stds[k]:
            span = (*span[:2], start + length, span[3])
        else:
            if span is not None:
                yield span
            span = (k, start, start + length, here)
        begin, here = begin + place.whole, here + length
    if span is not None:
        yield span
