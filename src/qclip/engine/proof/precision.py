"""Precision: a model that computes in a higher precision for a while."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast

from qclip.engine.gradients.fallback import substituted

_RANKS = {torch.bfloat16: 0, torch.float16: 0, torch.float32: 1, torch.float64: 2}


def at_least(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Convert a floating-point tensor of lower precision to this one; other tensors stay as they are."""
    return x.to(dtype) if _RANKS.get(x.dtype, 2) < _RANKS[dtype] else x


@contextmanager
def in_precision(dtype: torch.dtype, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run the modules in at least this precision, without autocast, on copies of their tensors.

    Copies, because a change to the parameters themselves would invalidate graphs that lead to them.
    """
    with ExitStack() as stack:
        for module in modules:
            own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            copies = {name: _copy(dtype, x) for name, x in own.items() if at_least(dtype, x) is not x}
            stack.enter_context(substituted(module, copies))
        stack.enter_context(_autocast_ignored())
        for kind in {x.device.type for module in modules for x in module.parameters()}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _copy(dtype: torch.dtype, x: Tensor) -> Tensor:
    copy = x.detach().to(dtype)
    return nn.Parameter(copy, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else copy


@contextmanager
def _autocast_ignored() -> Iterator[None]:
    kind: Any = autocast
    enter = kind.__enter__

    def disabled(context: Any) -> Any:
        enabled, context._enabled = context._enabled, False
        try:
            return enter(context)
        finally:
            context._enabled = enabled

    kind.__enter__ = disabled
    try:
        yield
    finally:
        kind.__enter__ = enter
