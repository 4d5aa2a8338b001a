"""Gaussian noise: what makes a raw sum a release. Its size is read off the value, never passed beside it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from qclip import noise_kernel
from qclip.theory import group_noise


@dataclass(frozen=True)
class BoundedSum:
    """A raw sum over examples, in groups, that knows how far one example can move each group.

    Raw: it must not be shown, logged or stored.
    """

    tensors: Mapping[str, Tensor]
    members: Mapping[str, int]
    """Name to the index of its group."""
    group_bounds: tuple[float, ...]
    """The largest norm that one example can add to each group."""
    group_dims: tuple[int, ...]
    """The number of coordinates of each group in the whole run, also where ``tensors`` holds only some of them."""

    @property
    def l2_bound(self) -> float:
        """The largest norm that one example can add to all of it."""
        return math.hypot(*self.group_bounds)


def release(
    value: BoundedSum,
    noise_multiplier: float,
    generator: torch.Generator,
    *,
    divisor: float = 1.0,
    like: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The sum with Gaussian noise, over ``divisor``: as private as one Gaussian release at ``noise_multiplier``.

    The noise of the sum is that many times its L2 bound with one group; with several it is shared so that its total
    power is least (`qclip.theory.group_noise`). Guarantees: every coordinate gets independent noise, in the precision
    of the sum, from this generator alone, and only then is rounded to the precision of the tensor it is ``like``; a
    multiplier of 0 draws nothing. Torch's generators are not cryptographic, and the CPU's uses 32 bits of its seed.
    """
    like = {} if like is None else like
    dtypes = {name: like[name].dtype if name in like else raw.dtype for name, raw in value.tensors.items()}
    if noise_multiplier == 0:
        return {name: (raw / divisor).to(dtypes[name]) for name, raw in value.tensors.items()}
    stds = [std / divisor for std in noise_stds(value, noise_multiplier)]
    noisy = {}
    for names in _buckets(value, dtypes):
        raws = [value.tensors[name] for name in names]
        spread = [stds[value.members[name]] for name in names]
        fused = noise_kernel.usable(raws) and dtypes[names[0]] in _FUSED
        add = noise_kernel.noisy_sums if fused else _noisy_sums
        noisy.update(zip(names, add(raws, spread, 1 / divisor, generator, dtypes[names[0]]), strict=True))
    return {name: noisy[name] for name in value.tensors}


BUCKET: Final = 2**25
"""How many numbers are drawn at once."""
_FUSED = (torch.float32, torch.bfloat16)


def _buckets(value: BoundedSum, dtypes: Mapping[str, torch.dtype]) -> Iterator[list[str]]:
    """Names whose noise is drawn at once: one launch for many tensors, and no second copy of all of them."""
    names: list[str] = []
    numbers = 0
    for name, raw in value.tensors.items():
        alike = names and (raw.dtype, dtypes[name]) == (value.tensors[names[0]].dtype, dtypes[names[0]])
        if names and (not alike or (numbers + raw.numel() > BUCKET and not noise_kernel.usable([raw]))):
            yield names
            names, numbers = [], 0
        names.append(name)
        numbers += raw.numel()
    yield names


def _noisy_sums(
    raws: Sequence[Tensor], stds: Sequence[float], scale: float, generator: torch.Generator, dtype: torch.dtype
) -> list[Tensor]:
    """``scale * raw + std * normal``, by torch's own operations: the twin of the kernel."""
    found = _drawn(raws, stds, generator)
    torch._foreach_add_(found, list(raws), alpha=scale)
    if found[0].dtype == dtype:
        return found
    rounded = [torch.empty_like(x, dtype=dtype) for x in found]
    torch._foreach_copy_(rounded, found)
    return rounded


def _drawn(raws: Sequence[Tensor], stds: Sequence[float], generator: torch.Generator) -> list[Tensor]:
    """Normal numbers of these shapes and standard deviations, in one piece of memory."""
    lengths = [raw.numel() for raw in raws]
    noise = torch.empty(sum(lengths), dtype=raws[0].dtype, device=raws[0].device)
    noise.normal_(0.0, stds[0], generator=generator)
    # .data: each part has a version of its own, so that a change to one does not look like a change to all.
    parts = [part.view(raw.shape).data for part, raw in zip(noise.split(lengths), raws, strict=True)]
    if any(std != stds[0] for std in stds):
        torch._foreach_mul_(parts, [std / stds[0] for std in stds])
    return parts


def noise_stds(value: BoundedSum, noise_multiplier: float) -> tuple[float, ...]:
    """The standard deviation of the noise in each group: of public values only, so that it is the same everywhere."""
    return tuple(group_noise(value.group_bounds, value.group_dims, noise_multiplier).stds.tolist())


def group_dims(tensors: Mapping[str, Tensor], members: Mapping[str, int], num_groups: int) -> tuple[int, ...]:
    """The number of coordinates of each group."""
    dims = [0] * num_groups
    for name, tensor in tensors.items():
        dims[members[name]] += tensor.numel()
    return tuple(dims)
