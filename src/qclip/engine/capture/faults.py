"""Faults of torch: functions with wrong gradients, and what runs in their place.

One fault is known. On a CPU the backward pass of ``batch_norm`` (seen in 2.13) reads memory in the wrong order if its
input is contiguous and the gradient of its output is channels-last, or the other way round, and torch takes both for
the same layout. Torch tells the layouts apart by strides, and the stride of a dimension of length 1 may be anything:
that of a batch of one example, or of images with one row of pixels, made of tokens. The gradients of input, weight and
bias are then wrong by as much as their own norm. ``instance_norm`` uses the same code, with all examples as the
channels of one.

Memory that is not initialised is no fault, but holds other numbers every time, which a proof would find: a capture
fills it with zeros.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from qclip.engine.torch_settings import SharedContext


def avoided() -> AbstractContextManager[None]:
    """Return a context in which no faulty backward pass runs.

    It belongs around the backward pass, too: checkpointed blocks run again there.
    """
    return _avoided


@contextmanager
def _replaced() -> Iterator[None]:
    """Replace the functions in the module ``torch``, where torch's functional norms look them up.

    A mode would see them, too, but costs a Python call for every torch function.
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
        # A mode, such as a capture, must see torch's own function; it looks up `CORRECTED` itself.
        chosen = function if torch._C._is_torch_function_mode_enabled() else CORRECTED[function]
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
    """Normalise with fixed statistics if a dimension has length 1; in training mode, which mixes examples, run torch's.

    The proof refuses the latter.
    """
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
    """Normalise by fixed statistics, or by a group norm with one group per channel, which torch computes otherwise."""
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
    """Normalise by fixed statistics in elementary operations; in float32 or more, as torch does inside."""
    precise = torch.promote_types(input.dtype, torch.float32)
    across = (-1, *[1] * (input.dim() - 2))
    result = (input.to(precise) - mean.view(across)) * (variance.to(precise) + eps).rsqrt().view(across)
    result = result if weight is None else result * weight.view(across)
    result = result if bias is None else result + bias.view(across)
    return result.to(input.dtype)


def _filled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            return function(*args, **kwargs).zero_()

    return run


def _is_image(x: Tensor) -> bool:
    """Return whether a tensor has memory formats to mistake, on a device where that was seen."""
    return x.device.type == "cpu" and x.dim() > 3


_FAULTY: Final = {"batch_norm": torch.batch_norm, "instance_norm": torch.instance_norm}
_EMPTY: Final = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)
CORRECTED: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = {
    torch.batch_norm: _batch_norm,
    torch.instance_norm: _instance_norm,
    **{function: _filled(function) for function in _EMPTY},
}
"""What to run in place of a function that is faulty, or leaves memory as it is."""
_avoided: Final = SharedContext(_replaced)
