"""TF32: where a GPU may round the factors of float32 products to 10 bits. Torch's default, for convolutions.

Read and set by torch's newer names for it, which hold whichever way it was chosen; the older ones raise where both were
used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _switches() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


def settings() -> tuple[str, ...]:
    """Of matrix products, convolutions and recurrent layers."""
    return tuple(switch.fp32_precision for switch in _switches())


def in_products() -> bool:
    """Whether matrix products use it."""
    return settings()[0] == "tf32"


def anywhere(device: torch.device) -> bool:
    """Whether anything on this device uses it."""
    return device.type == "cuda" and "tf32" in settings()


@contextmanager
def off() -> Iterator[None]:
    """Nothing uses it meanwhile: its rounding, one part in 1000, hides what is to be compared."""
    before = settings()
    try:
        for switch in _switches():
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, setting in zip(_switches(), before, strict=True):
            switch.fp32_precision = setting
