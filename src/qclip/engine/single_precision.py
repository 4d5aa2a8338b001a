"""Single precision: what a model computes in 16 bits, computed in float32 for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import autocast

HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_single_precision(tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """The 16-bit ones of these tensors in float32, and no autocast, wherever it is entered."""
    half = [(x, x.data) for x in tensors if x.dtype in HALF]
    try:
        for x, data in half:
            x.data = data.float()
        with _autocast_ignored(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for x, data in half:
            x.data = data


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
