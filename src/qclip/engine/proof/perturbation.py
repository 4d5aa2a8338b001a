"""Perturbations: what a forward pass reads, moved a little while it is proven.

A layer that starts at zero would hide everything behind it, and so would a term whose weight is zero until later.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MOVABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_KEPT_ON_DEVICE = 2**28
"""How many numbers of constants are remembered on a GPU; the rest, such as a frozen language model's, on the CPU."""


@contextmanager
def perturbed(parameters: Iterable[Tensor], constants: Iterable[Tensor] = ()) -> Iterator[None]:
    """All of them moved at random by about 5 %, zeros by about 0.02, and put back bit by bit.

    What is positive stays so. Constants that are zero become positive: they may be variances.
    """
    moving = [(x, False) for x in parameters] + [(x, True) for x in constants if movable(x)]
    space = dict.fromkeys({x.device for x, _ in moving}, _KEPT_ON_DEVICE)
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
            limit = torch.finfo(x.dtype).max  # the least number there is stands for minus infinity in masks
            x.data.copy_(torch.where(x.detach().isfinite(), moved.clamp(-limit, limit), moved))
        torch.clear_autocast_cache()  # it holds casts of the parameters as they were
        yield
    finally:
        for (x, _), before in zip(moving, saved, strict=False):
            x.data.copy_(before)
        torch.clear_autocast_cache()


def movable(x: Tensor) -> bool:
    """Whether a constant can be moved and put back: real numbers, each in a place of its own."""
    return x.dtype in _MOVABLE and x.layout is torch.strided and not x.is_inference() and not _overlaps(x)


def _overlaps(x: Tensor) -> bool:
    """Whether several elements may lie in one place, as in an expanded tensor."""
    steps = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    reach = itertools.accumulate((stride * (size - 1) for stride, size in steps), initial=0)
    return any(stride <= before for (stride, _), before in zip(steps, reach, strict=False))
