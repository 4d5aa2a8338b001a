"""Perturbations: a proof runs at slightly different parameters and constants.

A layer that is initialised to zero would hide everything behind it, and so would a term whose weight is still zero.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MOVABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SAVED_ON_DEVICE = 2**28
"""The most elements of constants that are saved on a GPU; others, such as a frozen language model's, go to the CPU."""


@contextmanager
def perturbed(parameters: Iterable[Tensor], constants: Iterable[Tensor] = ()) -> Iterator[None]:
    """Perturb tensors at random, in place, and restore every bit on exit.

    Elements move by about 5 %, zeros by about 0.02. Signs are kept, and zeros of constants become positive: they may be
    variances.

    Args:
        parameters: The parameters.
        constants: Buffers and frozen parameters; those that are not `movable` stay as they are.
    """
    moving = [(x, False) for x in parameters] + [(x, True) for x in constants if movable(x)]
    space = dict.fromkeys({x.device for x, _ in moving}, _SAVED_ON_DEVICE)
    saved: list[Tensor] = []
    for x, constant in moving:
        space[x.device] -= x.numel() if constant else 0
        saved.append(x.detach().clone() if not constant or space[x.device] >= 0 else x.detach().cpu())
    generators: dict[torch.device, torch.Generator] = {}
    try:
        for x, constant in moving:
            generator = generators.setdefault(x.device, torch.Generator(x.device).manual_seed(0))
            noise = torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)
            from_zero = 0.02 * (noise.abs() if constant else noise)
            moved = torch.where(x.detach() == 0, from_zero, x.detach() * (1 + 0.05 * noise.clamp(-3, 3)))
            limit = torch.finfo(x.dtype).max  # the lowest number stands for minus infinity in masks
            x.data.copy_(torch.where(x.detach().isfinite(), moved.clamp(-limit, limit), moved))
        torch.clear_autocast_cache()  # it holds casts of the unperturbed parameters
        yield
    finally:
        for (x, _), before in zip(moving, saved, strict=False):
            x.data.copy_(before)
        torch.clear_autocast_cache()


def movable(x: Tensor) -> bool:
    """Return whether a constant can be perturbed and restored: real elements that do not overlap in memory."""
    return x.dtype in _MOVABLE and x.layout is torch.strided and not x.is_inference() and not _overlaps(x)


def _overlaps(x: Tensor) -> bool:
    """Return whether elements may overlap in memory, as in an expanded tensor."""
    steps = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    reach = itertools.accumulate((stride * (size - 1) for stride, size in steps), initial=0)
    return any(stride <= before for (stride, _), before in zip(steps, reach, strict=False))
