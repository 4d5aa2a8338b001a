"""TF32: where a GPU may round the factors of float32 products to 10 bits. Torch's default, for convolutions.

Read and set by torch's newer names for it, which hold whichever way it was chosen; the older ones raise where both were
used.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

from qclip.engine.shared import Shared

_chosen: tuple[str, ...] | None = None


def settings() -> tuple[str, ...]:
    """Of matrix products, convolutions and recurrent layers; as they were chosen, also while it is `off`."""
    chosen = _chosen  # which another thread may change
    return _now() if chosen is None else chosen


def in_products() -> bool:
    """Whether matrix products use it."""
    return settings()[0] == "tf32"


def anywhere(device: torch.device) -> bool:
    """Whether anything on this device uses it."""
    return device.type == "cuda" and "tf32" in settings()


def off() -> AbstractContextManager[None]:
    """Nothing uses it meanwhile: its rounding, one part in 1000, hides what is to be compared."""
    return _off


@contextmanager
def using(setting: Literal["tf32", "ieee"]) -> Iterator[None]:
    """Everything uses it meanwhile, or nothing does; then as before."""
    before = _now()
    try:
        for switch in _switches():
            switch.fp32_precision = setting
        yield
    finally:
        for switch, chosen in zip(_switches(), before, strict=True):
            switch.fp32_precision = chosen


@contextmanager
def _all_exact() -> Iterator[None]:
    global _chosen  # noqa: PLW0603 - torch's setting is global
    _chosen = _now()
    try:
        with using("ieee"):
            yield
    finally:
        _chosen = None


_off = Shared(_all_exact)


def _now() -> tuple[str, ...]:
    return tuple(switch.fp32_precision for switch in _switches())


def _switches() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
