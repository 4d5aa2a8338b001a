"""Faults of torch that the engine goes round: functions whose gradients are wrong, and what is run in their place.

The one known: on a CPU the backward pass of ``batch_norm`` (seen in 2.13) reads memory in the wrong order where its
input is contiguous, the gradient of its output channels-last or the other way round, and torch takes both for the same.
It tells them apart by strides, and the stride of a dimension of length 1 may be anything: a batch of one example, or
images of one line, made of tokens. Gradients of input, weight and bias are then off by as much as they are long.
``instance_norm`` runs by the same code, with all examples as the channels of one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qclip.engine.opened import opened


@contextmanager
def avoided() -> Iterator[None]:
    """Nothing runs by a faulty backward pass meanwhile. Around the backward pass as well, for checkpointed blocks."""
    with _Avoiding():
        yield


class _Avoiding(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inside = opened(func) if func in _OPENED else None
        if inside is not None:  # which the mode would not see into otherwise
            with self:
                return inside(*args, **(kwargs or {}))
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Where a dimension has length 1. In training mode it mixes the examples, and is refused."""
    if _is_image(input) and 1 in input.shape and not training and running_mean is not None and running_var is not None:
        return _fixed(input, weight, bias, running_mean, running_var, eps)
    return torch.batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)


def _instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """As a group norm with one group for each channel, which has other code, or with fixed statistics."""
    if _is_image(input) and not use_input_stats and running_mean is not None and running_var is not None:
        return _fixed(input, weight, bias, running_mean, running_var, eps)
    if _is_image(input) and use_input_stats and running_mean is None and running_var is None:
        return torch.group_norm(input, input.shape[1], weight, bias, eps, cudnn_enabled).to(input.dtype)
    return torch.instance_norm(
        input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
    )


def _fixed(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """With fixed statistics, in single steps; in float32 or more, as torch does inside."""
    precise = torch.promote_types(input.dtype, torch.float32)
    across = (-1, *[1] * (input.dim() - 2))
    result = (input.to(precise) - mean.view(across)) * (variance.to(precise) + eps).rsqrt().view(across)
    result = result if weight is None else result * weight.view(across)
    result = result if bias is None else result + bias.view(across)
    return result.to(input.dtype)


def _is_image(x: Tensor) -> bool:
    """Whether it has memory formats to mistake, on a device where that was seen."""
    return x.device.type == "cpu" and x.dim() > 3


_OPENED: Final = frozenset({F.batch_norm, F.instance_norm, torch.autograd.grad})
_INSTEAD: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = {
    torch.batch_norm: _batch_norm,
    torch.instance_norm: _instance_norm,
}
