"""Gaussian noise: what makes a raw sum a release. Its size is read off the value, never passed beside it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qclip.engine.kernels import noise as noise_kernel
from qclip.theory import group_noise
from qclip.training import noise_cpu
from qclip.training.noise_source import NoiseSource


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
    source: NoiseSource,
    *,
    divisor: float = 1.0,
    like: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The sum with Gaussian noise, over ``divisor``: as private as one Gaussian release at ``noise_multiplier``.

    The noise of the sum is that many times its L2 bound with one group; with several it is shared so that its total
    power is least (`qclip.theory.group_noise`). Guarantees: every coordinate gets independent noise, from this source
    alone; it is added in float64, and the result is rounded to a multiple of `grid_spacing` before it gets the
    precision of the tensor it is ``like``, so that its last bits tell nothing about the sum; a multiplier of 0 draws
    nothing.
    """
    like = {} if like is None else like
    dtypes = {name: like[name].dtype if name in like else raw.dtype for name, raw in value.tensors.items()}
    if noise_multiplier == 0:
        return {name: (raw / divisor).to(dtypes[name]) for name, raw in value.tensors.items()}
    stds = [std / divisor for std in noise_stds(value, noise_multiplier)]
    together: dict[tuple[torch.device, torch.dtype, bool], list[str]] = {}
    for name, raw in value.tensors.items():
        fused = noise_kernel.usable(raw, dtypes[name])
        together.setdefault((raw.device, dtypes[name], fused), []).append(name)
    noisy: dict[str, Tensor] = {}
    for (_, dtype, fused), names in together.items():
        raws = [value.tensors[name] for name in names]
        spread = [stds[value.members[name]] for name in names]
        spacings = [grid_spacing(std) for std in spread]
        if fused:
            found = noise_kernel.noisy_sums(raws, spread, spacings, 1 / divisor, source.words(), dtype)
        else:
            found = noise_cpu.noisy_sums(raws, spread, spacings, 1 / divisor, source.streams(), dtype)
        noisy.update(zip(names, found, strict=True))
    return {name: noisy[name] for name in value.tensors}


def grid_spacing(std: float) -> float:
    """The distance of neighbouring released values: the largest power of two up to 2^-16 of the noise's deviation.

    Floating-point numbers that are added leave a trace of both in the last bits of their sum, whatever the noise. All
    values on one grid, which depends on public numbers only, have no such bits.
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 17)


def noise_stds(value: BoundedSum, noise_multiplier: float) -> tuple[float, ...]:
    """The standard deviation of the noise in each group: of public values only, so that it is the same everywhere."""
    return tuple(group_noise(value.group_bounds, value.group_dims, noise_multiplier).stds.tolist())


def group_dims(tensors: Mapping[str, Tensor], members: Mapping[str, int], num_groups: int) -> tuple[int, ...]:
    """The number of coordinates of each group."""
    dims = [0] * num_groups
    for name, tensor in tensors.items():
        dims[members[name]] += tensor.numel()
    return tuple(dims)
