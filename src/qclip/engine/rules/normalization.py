"""Normalisations: the weight scales what is normalised, the bias is added; both see every position."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qclip.engine.forms import Dense
from qclip.engine.products import full
from qclip.engine.rules.registry import Gradient, register_rule


def scale_and_shift(grad: Tensor, normalised: Tensor, over: tuple[int, ...]) -> Mapping[str, Gradient]:
    """Gradients of ``weight * normalised + bias`` summed over the given dimensions."""
    grad = full(grad)
    return {"weight": lambda: Dense((grad * normalised).sum(over)), "bias": lambda: Dense(grad.sum(over))}


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
    """Normalised over the last dimensions."""
    return scale_and_shift(
        grad, torch.layer_norm(full(input), normalized_shape, eps=eps), _leading(grad, normalized_shape)
    )


@register_rule(torch.rms_norm)
def rms_norm(
    grad: Tensor, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Mapping[str, Gradient]:
    """Divided by the root mean square over the last dimensions; the default eps is that of the input's precision."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return scale_and_shift(
        grad, torch.rms_norm(full(input), normalized_shape, eps=eps), _leading(grad, normalized_shape)
    )


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
    """Normalised over groups of channels of one image."""
    normalised = torch.group_norm(full(input).flatten(0, 1), num_groups, eps=eps).view(input.shape)
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
    """Each channel of one image by itself; with running statistics (evaluation) as in batch norm."""
    if not use_input_stats:
        return batch_norm(grad, input, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled)
    images = full(input).flatten(0, 1)
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
    """Only with fixed statistics: statistics of the batch mix its examples."""
    if training or running_mean is None or running_var is None:
        return {}
    across = [1, 1, -1, *[1] * (input.dim() - 3)]
    normalised = (full(input) - running_mean.view(across)) * (running_var.view(across) + eps).rsqrt()
    return scale_and_shift(grad, normalised, _all_but_channels(grad))


def _leading(grad: Tensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of positions; there is at least the example's own, of length 1."""
    return tuple(range(1, grad.dim() - len(normalized_shape)))


def _all_but_channels(grad: Tensor) -> tuple[int, ...]:
    """[B, rows, channels, *spatial]: everything but B and the channels."""
    return (1, *range(3, grad.dim()))
