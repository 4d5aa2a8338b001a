"""Convolutions: every output position is a linear layer on the window it looks at."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.forms import Dense, Outer
from qclip.engine.rules.registry import Gradient, register_rule

Sizes = int | Sequence[int]


@register_rule(torch.conv1d, torch.conv2d, torch.conv3d)
def convolution(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Mapping[str, Gradient]:
    """1 to 3 spatial dimensions, every padding; padding modes other than zeros are a separate call before this one."""
    spatial = weight.dim() - 2
    if grad.dim() != spatial + 3:
        return {}  # a single image without its batch dimension
    strides, dilations = _each(stride, spatial), _each(dilation, spatial)

    def weight_gradient() -> Outer:
        pads = _pads(padding, weight.shape[2:], dilations)
        columns = windows(input.flatten(0, 1), weight.shape[2:], strides, pads, dilations)
        return Outer(
            _by_group(grad.flatten(0, 1), groups, grad.shape), _by_group(columns, groups, grad.shape), weight.shape
        )

    return {"weight": weight_gradient, "bias": lambda: Dense(grad.sum((1, *range(3, grad.dim()))))}


def windows(
    images: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilations: Sequence[int],
) -> Tensor:
    """What each output position sees: [rows, channels * kernel, positions]."""
    if len(kernel) == 2 and all(before == after for before, after in pads):
        if tuple(kernel) == (1, 1) and not any(before for before, _ in pads):
            return images[:, :, :: strides[0], :: strides[1]].flatten(2)
        return F.unfold(images, tuple(kernel), tuple(dilations), tuple(before for before, _ in pads), tuple(strides))
    images = F.pad(images, [side for pair in reversed(pads) for side in pair])
    for k, (length, step, spread) in enumerate(zip(kernel, strides, dilations, strict=True)):
        images = images.unfold(2 + k, spread * (length - 1) + 1, step)[..., ::spread]
    count = len(kernel)  # now [rows, channels, *positions, *kernel]
    order = (0, 1, *range(2 + count, 2 + 2 * count), *range(2, 2 + count))
    return images.permute(order).flatten(1 + count + 1).flatten(1, 1 + count)


def _by_group(x: Tensor, groups: int, grad_shape: torch.Size) -> Tensor:
    """[B * rows, groups * channels, positions...] as [B, groups, rows * positions, channels]."""
    count, rows = grad_shape[:2]
    x = x.flatten(2).view(count, rows, groups, x.shape[1] // groups, -1)
    return x.permute(0, 2, 1, 4, 3).flatten(2, 3)


def _each(value: Sizes, count: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value)


def _pads(padding: Sizes | str, kernel: Sequence[int], dilations: Sequence[int]) -> list[tuple[int, int]]:
    if padding == "valid":
        padding = 0
    if isinstance(padding, str):  # "same"; torch puts the odd one at the end
        totals = [spread * (length - 1) for length, spread in zip(kernel, dilations, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(pad, pad) for pad in _each(padding, len(kernel))]
