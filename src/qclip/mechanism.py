"""Gaussian noise: what makes a raw sum a release. Its size is read off the value, never passed beside it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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

    @property
    def l2_bound(self) -> float:
        """The largest norm that one example can add to all of it."""
        return math.hypot(*self.group_bounds)


def release(value: BoundedSum, noise_multiplier: float, generator: torch.Generator) -> dict[str, Tensor]:
    """The sum with Gaussian noise: as private as one Gaussian release at ``noise_multiplier`` times its L2 bound.

    With one group its standard deviation is ``noise_multiplier * l2_bound``; with several the noise is shared so that
    its total power is least (`qclip.theory.group_noise`). Guarantees: every coordinate gets independent noise, in the
    precision of the sum, from this generator alone; a multiplier of 0 draws nothing and returns the sum as it is.
    Torch's generators are not cryptographic, and the CPU's uses 32 bits of its seed.
    """
    if noise_multiplier == 0:
        return dict(value.tensors)
    stds = noise_stds(value, noise_multiplier)
    noisy = {}
    for name, raw in value.tensors.items():
        noise = torch.randn(raw.shape, dtype=raw.dtype, device=raw.device, generator=generator)
        noisy[name] = noise.mul_(stds[value.members[name]]).add_(raw)
    return noisy


def noise_stds(value: BoundedSum, noise_multiplier: float) -> tuple[float, ...]:
    """The standard deviation of the noise in each group."""
    dims = group_dims(value.tensors, value.members, len(value.group_bounds))
    return tuple(group_noise(value.group_bounds, dims, noise_multiplier).stds.tolist())


def group_dims(tensors: Mapping[str, Tensor], members: Mapping[str, int], num_groups: int) -> tuple[int, ...]:
    """The number of coordinates of each group."""
    dims = [0] * num_groups
    for name, tensor in tensors.items():
        dims[members[name]] += tensor.numel()
    return tuple(dims)
