"""Single precision: a model that computes in 16 bits, computing in float32 for a while."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast

from qclip.engine.swapped import swapped

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_single_precision(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The modules on float32 copies of their 16-bit tensors, and no autocast, wherever it is entered.

    Copies: to put other numbers into the parameters themselves would cut them off from graphs that lead to them.
    """
    with ExitStack() as stack:
        for module in modules:
            own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            half = {name: x for name, x in own.items() if x.dtype in HALF}
            stack.enter_context(swapped(module, {name: _in_float32(x) for name, x in half.items()}))
        stack.enter_context(_autocast_ignored())
        for kind in {x.device.type for module in modules for x in module.parameters()}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _in_float32(x: Tensor) -> Tensor:
    copy = x.detach().float()
    return nn.Parameter(copy, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else copy


@contextmanager
def _autocast_ignored() -> Iterator[None]:
    enter = autocast.__enter__

    def disabled(context: Any) -> Any:
        enabled, context._enabled = context._enabled, False
        try:
            return enter(context)
        finally:
            context._enabled = enabled

    autocast.__enter__ = disabled
    try:
        yield
    finally:
        autocast.__enter__ = enter
