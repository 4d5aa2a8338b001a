"""Elementwise uses of parameters: biases, scales, tables that are added, expansion to the batch, tokens written."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qclip.engine.gradients.forms import Dense
from qclip.engine.gradients.rules.registry import Gradient, register_rule, sum_to
from qclip.engine.kernels.products import as_float32

_T = torch.Tensor


def _shape(x: Tensor | float) -> Sequence[int]:
    return x.shape if isinstance(x, Tensor) else ()


@register_rule(torch.add, _T.add, _T.add_, _T.__add__, _T.__radd__, _T.__iadd__, broadcasts=True)
def add(grad: Tensor, input: Tensor | float, other: Tensor | float, *, alpha: float = 1) -> Mapping[str, Gradient]:
    """``input + alpha * other``."""
    return {
        "input": lambda: Dense(sum_to(grad, _shape(input))),
        "other": lambda: Dense(alpha * sum_to(grad, _shape(other)) if alpha != 1 else sum_to(grad, _shape(other))),
    }


@register_rule(torch.sub, _T.sub, _T.sub_, _T.__sub__, _T.__isub__, broadcasts=True)
def sub(grad: Tensor, input: Tensor | float, other: Tensor | float, *, alpha: float = 1) -> Mapping[str, Gradient]:
    """``input - alpha * other``."""
    return add(grad, input, other, alpha=-alpha)


@register_rule(torch.rsub, _T.__rsub__, broadcasts=True)
def rsub(grad: Tensor, input: Tensor | float, other: Tensor | float, *, alpha: float = 1) -> Mapping[str, Gradient]:
    """``other - alpha * input``."""
    return {
        "input": lambda: Dense(-alpha * sum_to(grad, _shape(input))),
        "other": lambda: Dense(sum_to(grad, _shape(other))),
    }


@register_rule(torch.mul, _T.mul, _T.mul_, _T.__mul__, _T.__rmul__, _T.__imul__, broadcasts=True)
def mul(grad: Tensor, input: Tensor | float, other: Tensor | float) -> Mapping[str, Gradient]:
    """``input * other``."""
    return {
        "input": lambda: Dense(sum_to(as_float32(grad) * other, _shape(input))),
        "other": lambda: Dense(sum_to(as_float32(grad) * input, _shape(other))),
    }


@register_rule(_T.expand, _T.expand_as, torch.broadcast_to, _T.broadcast_to)
def expand(grad: Tensor, input: Tensor, *size: object, **kwargs: object) -> Mapping[str, Gradient]:
    """Expand a parameter without a copy, such as a class token: one row per example."""
    return {"input": lambda: Dense(sum_to(grad, input.shape))}


@register_rule(_T.repeat, _T.tile, torch.tile)
def repeat(grad: Tensor, input: Tensor, *repeats: object, **kwargs: object) -> Mapping[str, Gradient]:
    """Tile a parameter: each dimension is (times, length)."""
    return {"input": lambda: Dense(_untile(grad, input.shape))}


def _untile(grad: Tensor, shape: torch.Size) -> Tensor:
    extra = grad.dim() - 1 - len(shape)
    grad = grad.sum(tuple(range(1, 1 + extra))) if extra else grad
    for k, length in enumerate(shape):
        grad = grad.unflatten(k + 1, (-1, length)).sum(k + 1)
    return grad


@register_rule(_T.__setitem__)
def setitem(grad: Tensor, input: Tensor, index: Any, value: Tensor | float) -> Mapping[str, Gradient]:
    """``input[index] = value``, where the value is written to every place: a mask token, or tokens at fixed places."""
    if not isinstance(value, Tensor):
        return {}
    indices = index if isinstance(index, tuple) else (index,)
    mask = indices[0]
    if len(indices) == 1 and isinstance(mask, Tensor) and mask.dtype == torch.bool:
        row = grad.dim() - mask.dim()
        if value.dim() > row and value.shape[: value.dim() - row].numel() > 1:
            return {}  # each place has a value of its own
        places = mask.view(*mask.shape, *[1] * row)
        return {"value": lambda: Dense(sum_to(torch.where(places, grad, 0), value.shape))}
    if all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in indices):
        return {"value": lambda: Dense(sum_to(grad[(slice(None), *indices)], value.shape))}
    return {}
