"""Convolutions: every output position is a linear layer on its window."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.gradients.convolutions import Geometry, Windows
from qclip.engine.gradients.forms import Dense
from qclip.engine.gradients.rules.registry import Gradient, register_rule

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
    """Convolve in 1 to 3 dimensions, with any padding; padding modes other than zeros are a separate call before."""
    spatial = weight.dim() - 2
    if grad.dim() != spatial + 3:
        return {}  # a single image without batch dimension
    strides, dilations = _per_dimension(stride, spatial), _per_dimension(dilation, spatial)

    def weight_gradient() -> Windows:
        images, pads = input.flatten(0, 1), _pads(padding, weight.shape[2:], dilations)
        if any(before != after for before, after in pads):
            images = F.pad(images, [side for pair in reversed(pads) for side in pair])
            pads = [(0, 0)] * spatial
        symmetric = tuple(before for before, _ in pads)
        geometry = Geometry(strides, symmetric, dilations, groups)
        return Windows(images, grad.flatten(0, 1), len(grad), weight.shape, geometry)

    return {"weight": weight_gradient, "bias": lambda: Dense(grad.sum((1, *range(3, grad.dim()))))}


def _per_dimension(value: Sizes, spatial: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * spatial
    return tuple(value) * spatial if len(value) == 1 else tuple(value)


def _pads(padding: Sizes | str, kernel: Sequence[int], dilations: Sequence[int]) -> list[tuple[int, int]]:
    if padding == "valid":
        padding = 0
    if isinstance(padding, str):  # "same"; torch puts the odd one at the end
        totals = [spread * (length - 1) for length, spread in zip(kernel, dilations, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(pad, pad) for pad in _per_dimension(padding, len(kernel))]
