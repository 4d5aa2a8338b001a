"""Kernels for GPUs, written in Triton: each behind one torch operator, beside a twin in plain torch.

The operators run everywhere and trace as one node. They launch a kernel where `usable` allows it, and run the twin
elsewhere. Triton is optional: without it only the twins remain.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
"""The precisions of the kernels' inputs. Sums are in float32, products exact: never TF32."""


@cache
def installed() -> bool:
    """Return whether Triton can be imported."""
    return find_spec("triton") is not None


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the torch operator ``qclip::name``: one opaque node of a traced graph.

    Args:
        name: The operator's name.
        fake: A function of the same arguments that returns empty tensors of the result's shapes and precisions.
    """

    def register(function: Callable[..., Any]) -> Any:
        tags = (torch.Tag.flexible_layout,)
        registered = torch.library.custom_op(f"qclip::{name}", function, mutates_args=(), tags=tags)
        registered.register_fake(fake)
        return registered

    return register


def power_of_two(size: int) -> int:
    """Return the smallest power of two of at least this size: the sides of Triton's tiles are powers of two.

    >>> [power_of_two(size) for size in (1, 2, 3, 16, 17)]
    [1, 2, 4, 16, 32]
    """
    return 1 << (size - 1).bit_length()


def usable(*tensors: Tensor) -> bool:
    """Return whether the kernels take these tensors.

    Triton must be installed, and all tensors must have one of `DTYPES` and lie on one GPU of compute capability 8.0 or
    higher.

    >>> usable(torch.ones(2, 3, 4), torch.ones(2, 3, 5))
    False
    """
    first = tensors[0]
    if not (installed() and first.is_cuda and first.dtype in DTYPES):
        return False
    alike = all(x.device == first.device and x.dtype == first.dtype for x in tensors)
    return alike and torch.cuda.get_device_capability(first.device) >= (8, 0)  # earlier GPUs have no bfloat16
