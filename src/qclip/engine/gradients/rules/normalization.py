"""Normalisations: the weight scales the normalised input, the bias is added, at every position."""

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from qclip.engine.gradients.forms import Dense
from qclip.engine.gradients.rules.registry import Gradient, register_rule
from qclip.engine.kernels.layer_norm import layer_norm_sums
from qclip.engine.kernels.products import as_float32


def scale_and_shift(grad: Tensor, normalised: Tensor, over: tuple[int, ...]) -> Mapping[str, Gradient]:
    """Return the gradients of ``weight * normalised + bias``, summed over the given dimensions."""
    grad = as_float32(grad)
    return {"weight": lambda: Dense((grad * normalised).sum(over)), "bias": lambda: Dense(grad.sum(over))}


def last_dimensions(
    grad: Tensor, input: Tensor, shape: Sequence[int], eps: float, *, centred: bool
) -> Mapping[str, Gradient]:
    """Return the gradients of weight and bias where the last dimensions are normalised together.

    Args:
        grad: The output gradient, [B, *, *shape].
        input: The input, [B, *, *shape].
        shape: The shape of the normalised dimensions.
        eps: Added to the variance.
        centred: Whether the mean is subtracted.
    """

    @cache
    def sums() -> tuple[Tensor, Tensor]:
        before = grad.dim() - len(shape)  # there is at least the example's own position
        grads, inputs = (x.flatten(before).flatten(1, before - 1) for x in (grad, input))
        return layer_norm_sums(grads, inputs, eps, centred=centred)

    return {name: lambda k=k: Dense(sums()[k].unflatten(1, shape)) for k, name in enumerate(("weight", "bias"))}


@register_rule(torch.layer_norm)
def layer_norm(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Mapping[str, Gradient]:
    """Normalise over the last dimensions."""
    return last_dimensions(grad, input, normalized_shape, eps, centred=True)


@register_rule(torch.rms_norm)
def rms_norm(
    grad: Tensor, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Mapping[str, Gradient]:
    """Divide by the root mean square over the last dimensions; the default eps is that of the arithmetic."""
    eps = torch.finfo(as_float32(input).dtype).eps if eps is None else eps
    return last_dimensions(grad, input, normalized_shape, eps, centred=False)


@register_rule(torch.group_norm)
def group_norm(
    grad: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Mapping[str, Gradient]:
    """Normalise over groups of channels of one image."""
    normalised = torch.group_norm(as_float32(input).flatten(0, 1), num_groups, eps=eps).view(input.shape)
    return scale_and_shift(grad, normalised, _all_but_channels(grad))


@register_rule(torch.instance_norm)
def instance_norm(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Mapping[str, Gradient]:
    """Normalise each channel of one image; with running statistics (evaluation) as in batch norm."""
    if not use_input_stats:
        return batch_norm(grad, input, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled)
    images = as_float32(input).flatten(0, 1)
    normalised = torch.group_norm(images, images.shape[1], eps=eps).view(input.shape)
    return scale_and_shift(grad, normalised, _all_but_channels(grad))


@register_rule(torch.batch_norm)
def batch_norm(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Mapping[str, Gradient]:
    """Normalise with fixed statistics only: statistics of the batch mix its examples."""
    if training or running_mean is None or running_var is None:
        return {}
    across = [1, 1, -1, *[1] * (input.dim() - 3)]
    normalised = (as_float32(input) - running_mean.view(across)) * (running_var.view(across) + eps).rsqrt()
    return scale_and_shift(grad, normalised, _all_but_channels(grad))


def _all_but_channels(grad: Tensor) -> tuple[int, ...]:
    """Return the dimensions of [B, rows, channels, *spatial] other than B and the channels."""
    return (1, *range(3, grad.dim()))
