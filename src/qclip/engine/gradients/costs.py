"""Costs: how the norms of a sum of outer products are computed, layer by layer.

For T positions and an M x N weight, per example and up to a common factor:

- *gram*: T^2 (M + N) for the norm (a convolution's windows written out first), T M N for the sum; memory T^2;
- *direct*: T M N for the norm, the gradients thrown away, T M N again for the sum; memory for a few examples;
- *kept*: T M N for the norm, the gradients kept, so that the sum only reads them: M N; memory M N for every example.

Where a GPU's kernels form gradients and use them in one go, Gram products do not pay: such are kept, or formed twice
where forming takes less time than writing and reading.

With one position the norm is a product of two lengths and none of this is needed.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from qclip.engine import tf32
from qclip.engine.gradients.forms import Products
from qclip.engine.kernels.products import is_native

Method = Literal["gram", "direct", "kept"]
WORTH_KEEPING: Final = 128
"""Of gradients that kernels form: those with more positions than this. On an H200, 64 positions of 256 x 2304 take 0.31
milliseconds formed twice and 0.48 kept, 256 positions of 128 x 1152 take 0.24 and 0.19 (512 examples)."""


@dataclass(frozen=True)
class CostModel:
    """Which way is cheapest, and how much memory the kept gradients of one step may take.

    ``method`` overrides the choice for every layer. ``traffic`` is how many multiplications one number written to
    memory and read again is worth; ``overhead`` how much slower many small products are than one large one. What is
    left out is chosen for the device: kept gradients may take a sixteenth of a GPU's memory, and 256 MiB elsewhere.
    A compiled step lets those of a group go before it comes to the next, where groups do not interlock: each then has
    as much.
    """

    kept_bytes: int | None = None
    traffic: float | None = None
    overhead: float = 1.3
    method: Method | None = None

    def choose(self, form: Products, available_bytes: float) -> Method:
        """The cheapest way that fits the memory."""
        if self.method is not None:
            return self.method
        fits = self.kept_bytes_of(form) <= available_bytes
        if form.in_kernels:
            return "kept" if fits and form.positions > WORTH_KEEPING else "direct"
        traffic = _traffic(form.like) if self.traffic is None else self.traffic
        t, (m, n) = form.positions, form.sides
        product = t * m * n
        gradients = self.overhead * product + traffic * m * n
        total = gradients if form.sums_gradients else product
        costs: dict[Method, float] = {
            "gram": self.overhead * t * t * (m + n) + traffic * (t * t + form.spelled_out) + total,
            "direct": gradients + total,
        }
        if fits:
            costs["kept"] = gradients
        return min(costs, key=lambda method: costs[method])

    def budget(self, device: torch.device) -> int:
        """How many bytes of gradients a step may keep."""
        if self.kept_bytes is not None:
            return self.kept_bytes
        return torch.cuda.mem_get_info(device)[1] // 16 if device.type == "cuda" else 2**28

    @staticmethod
    def kept_bytes_of(form: Products) -> int:
        """How much memory the gradients of all examples take."""
        itemsize = form.like.dtype.itemsize if is_native(form.like) else max(4, form.like.dtype.itemsize)
        return itemsize * form.examples * form.size


def _traffic(x: Tensor) -> float:
    """Multiplications in the time of a number's way to memory and back: how fast the device multiplies such numbers."""
    if not x.is_cuda:
        return 40.0
    fast = is_native(x) or (x.dtype == torch.float32 and tf32.in_products())
    return 450.0 if fast else 75.0
