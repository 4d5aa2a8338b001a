"""Faults of torch that the engine goes round: functions whose gradients are wrong, and what is run in their place.

The one known: on a CPU the backward pass of ``batch_norm`` (seen in 2.13) reads memory in the wrong order where its
input is contiguous, the gradient of its output channels-last or the other way round, and torch takes both for the same.
It tells them apart by strides, and the stride of a dimension of length 1 may be anything: a batch of one example, or
images of one line, made of tokens. Gradients of input, weight and bias are then off by as much as they are long.
``instance_norm`` runs by the same code, with all examples as the channels of one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from qclip.engine.torch_settings import SharedContext


def right(function: Callable[..., Any]) -> Callable[..., Any]:
    """What to run in place of a torch function: nearly always the function itself."""
    return _RIGHT.get(function, function)


def avoided() -> AbstractContextManager[None]:
    """Nothing runs by a faulty backward pass meanwhile. Around the backward pass as well, for checkpointed blocks."""
    return _avoided


@contextmanager
def _replaced() -> Iterator[None]:
    """Torch's functional norms look these functions up in ``torch``, where others stand meanwhile.

    A mode would see them, too, but at the price of a Python call for every torch function.
    """
    for name, function in _FAULTY.items():
        setattr(torch, name, _instead_of(function))
    try:
        yield
    finally:
        for name, function in _FAULTY.items():
            setattr(torch, name, function)


def _instead_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # A mode, such as a capture, is to see torch's own function; what it runs is its own affair.
        chosen = function if torch._C._is_torch_function_mode_enabled() else right(function)
        return chosen(*args, **kwargs)

    return run


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
    return _FAULTY["batch_norm"](input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)


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
    return _FAULTY["instance_norm"](
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


_FAULTY: Final = {"batch_norm": torch.batch_norm, "instance_norm": torch.instance_norm}
_RIGHT: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = {
    torch.batch_norm: _batch_norm,
    torch.instance_norm: _instance_norm,
}
_avoided: Final = SharedContext(_replaced)
