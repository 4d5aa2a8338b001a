"""Constants: what a forward pass reads and training does not move, such as buffers and frozen parameters.

A proof is made at other values of them (`perturbed`), so it holds while they drift; where one goes further than that,
the forward pass is proven again.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_COPIED = 2**12
"""Up to how many elements a tensor is compared by value; of more, a few sums are."""
_LOOKED_AT = 16
"""Up to how many elements a tensor on the CPU is compared at every step: writes through ``.data`` raise no version."""


def values(x: Tensor) -> Tensor:
    """What tells whether a tensor has changed: a copy of it, or a few sums if it is large."""
    x = x.detach()
    if x.numel() <= _COPIED:
        return x.clone()
    flat = torch.view_as_real(x).flatten() if x.is_complex() else x.flatten()
    return torch.stack([flat[::every].sum(dtype=torch.float64) for every in (1, 2, 3)])


def same(before: Tensor, now: Tensor) -> bool:
    """Whether these are the same `values`."""
    if before.shape != now.shape:
        return False
    unknown = before.isnan() & now.isnan()  # which are not equal to themselves
    return bool(((before == now) | unknown).all())


class Snapshot:
    """Constants as they were when a forward pass was proven."""

    def __init__(self, constants: Mapping[str, Tensor], *, moved: bool) -> None:
        """``moved``: the proof was made at other values of all that can be moved."""
        self._moved = moved
        self._held = {name: (x, x._version, values(x)) for name, x in constants.items()}

    def left(self, constants: Mapping[str, Tensor]) -> list[str]:
        """The names of those that have gone further since than the proof did."""
        return list(self._left(constants))

    def _left(self, constants: Mapping[str, Tensor]) -> Iterator[str]:
        for name, x in constants.items():
            tensor, version, before = self._held.get(name, (None, 0, None))
            if tensor is x and x._version == version and (x.numel() > _LOOKED_AT or x.device.type != "cpu"):
                continue
            if before is None or not self._covers(before, values(x)):
                yield name

    def _covers(self, before: Tensor, now: Tensor) -> bool:
        if same(before, now):
            return True
        if not self._moved or before.shape != now.shape or not now.is_floating_point():
            return False
        distance, length = (torch.linalg.vector_norm(x.double()) for x in (now - before, before))
        return bool(distance <= 0.5 * length + 0.02 * before.numel() ** 0.5)
