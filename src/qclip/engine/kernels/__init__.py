"""Kernels for GPUs, written in Triton: each behind one operator, beside its twin in plain torch.

The operators run everywhere and trace as one node. They launch a kernel where `usable` says so, and run the twin
elsewhere. Triton is optional: without it only the twins remain.
"""

from functools import cache
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels take. Sums are in float32, products exact: never TF32."""


@cache
def installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def power_of_two(size: int) -> int:
    """The least that is not smaller: what Triton's tiles are made of.

    >>> [power_of_two(size) for size in (1, 2, 3, 16, 17)]
    [1, 2, 4, 16, 32]
    """
    return 1 << (size - 1).bit_length()


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: Triton is installed, all lie on one GPU that can, in one precision.

    >>> usable(torch.ones(2, 3, 4), torch.ones(2, 3, 5))
    False
    """
    first = tensors[0]
    if not (installed() and first.is_cuda and first.dtype in DTYPES):
        return False
    alike = all(x.device == first.device and x.dtype == first.dtype for x in tensors)
    return alike and torch.cuda.get_device_capability(first.device) >= (8, 0)  # older ones do not know bfloat16
