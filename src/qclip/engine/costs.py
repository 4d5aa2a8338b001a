"""Costs: how the norms of a sum of outer products are computed, layer by layer.

For T positions and an M x N weight, per example and up to a common factor:

- *gram*: T^2 (M + N) for the norm (a convolution's windows written out first), T M N for the sum; memory T^2;
- *direct*: T M N for the norm, the gradients thrown away, T M N again for the sum; memory for a few examples;
- *kept*: T M N for the norm, the gradients kept, so that the sum only reads them: M N; memory M N for every example.

With one position the norm is a product of two lengths and none of this is needed.
"""

from dataclasses import dataclass
from typing import Literal

from qclip.engine.forms import Products

Method = Literal["gram", "direct", "kept"]


@dataclass(frozen=True)
class CostModel:
    """Which way is cheapest, and how much memory the kept gradients of one step may take.

    ``method`` overrides the choice for every layer. ``traffic`` is how many multiplications one number written to
    memory and read again is worth; ``overhead`` how much slower many small products are than one large one.
    """

    kept_bytes: int = 2**28
    traffic: float = 40.0
    overhead: float = 1.3
    method: Method | None = None

    def choose(self, form: Products, available_bytes: float) -> Method:
        """The cheapest way that fits the memory."""
        if self.method is not None:
            return self.method
        t, (m, n) = form.positions, form.sides
        product = t * m * n
        costs: dict[Method, float] = {
            "gram": self.overhead * t * t * (m + n) + self.traffic * (t * t + form.spelled_out) + product,
            "direct": self.overhead * product + self.traffic * m * n + product,
        }
        if self.kept_bytes_of(form) <= available_bytes:
            costs["kept"] = self.overhead * product + self.traffic * m * n
        return min(costs, key=lambda method: costs[method])

    @staticmethod
    def kept_bytes_of(form: Products) -> int:
        """How much memory all gradients of the form take."""
        return max(4, form.dtype.itemsize) * form.examples * form.size
