"""The cost model: how to compute the norms of a sum of outer products, layer by layer.

For T positions and an M x N weight, per example and up to a common factor:

- *gram*: T^2 (M + N) for the norm (after unfolding the windows of a convolution), T M N for the sum; memory T^2;
- *direct*: T M N for the norm, the gradients not kept, T M N again for the sum; memory for a chunk of examples;
- *kept*: T M N for the norm, the gradients kept, so that the sum only reads them: M N; memory M N for every example.

Where Triton kernels form and reduce gradients in one pass, Gram matrices do not pay: gradients are kept, or formed
twice where forming takes less time than writing and reading.

With one position the norm is a product of two lengths, and there is nothing to choose.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from qclip.engine.gradients.forms import Products
from qclip.engine.kernels.products import is_native
from qclip.engine.torch_settings import tf32_in_products

Method = Literal["gram", "direct", "kept"]
WORTH_KEEPING: Final = 128
"""Kernels keep gradients with more positions than this. On an H200, 64 positions of 256 x 2304 take 0.31 milliseconds
formed twice and 0.48 kept, 256 positions of 128 x 1152 take 0.24 and 0.19 (512 examples)."""


@dataclass(frozen=True)
class CostModel:
    """Chooses the cheapest method for each layer, within a memory budget for kept gradients.

    Args:
        kept_bytes: The memory of the kept gradients of one step. By default a sixteenth of a GPU's memory, and 256 MiB
            elsewhere. A compiled step frees the gradients of one memory phase before the next, so each phase has all
            of it.
        traffic: The number of multiplications that cost as much as writing one element to memory and reading it. By
            default chosen for the device.
        overhead: How much slower many small products are than one large one.
        method: The method for every layer, instead of a choice.
    """

    kept_bytes: int | None = None
    traffic: float | None = None
    overhead: float = 1.3
    method: Method | None = None

    def choose(self, form: Products, available_bytes: float) -> Method:
        """Return the cheapest method that fits the memory.

        Args:
            form: The gradients.
            available_bytes: The memory left for kept gradients.
        """
        if self.method is not None:
            return self.method
        fits = self.kept_bytes_of(form) <= available_bytes
        t, (m, n) = form.dims.positions, form.dims.sides
        if form.in_kernels:
            return "kept" if fits and t > WORTH_KEEPING else "direct"
        traffic = _traffic(form.sample) if self.traffic is None else self.traffic
        product = t * m * n
        gradients = self.overhead * product + traffic * m * n
        total = gradients if form.sums_gradients else product
        costs: dict[Method, float] = {
            "gram": self.overhead * t * t * (m + n) + traffic * (t * t + form.dims.unfolded) + total,
            "direct": gradients + total,
        }
        if fits:
            costs["kept"] = gradients
        return min(costs, key=lambda method: costs[method])

    def budget(self, device: torch.device) -> int:
        """Return the memory of the kept gradients of one step, in bytes."""
        if self.kept_bytes is not None:
            return self.kept_bytes
        return torch.cuda.mem_get_info(device)[1] // 16 if device.type == "cuda" else 2**28

    @staticmethod
    def kept_bytes_of(form: Products) -> int:
        """Return the memory of the gradients in bytes."""
        dtype = form.sample.dtype
        itemsize = dtype.itemsize if is_native(form.sample) else max(4, dtype.itemsize)
        return itemsize * form.dims.batch_size * form.dims.elements


def _traffic(x: Tensor) -> float:
    """Return the multiplications in the time of one memory round trip of an element, in the tensor's precision."""
    if not x.is_cuda:
        return 40.0
    fast = is_native(x) or (x.dtype == torch.float32 and tf32_in_products())
    return 450.0 if fast else 75.0
