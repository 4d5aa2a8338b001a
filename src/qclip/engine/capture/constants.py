"""Constants: tensors that a forward pass reads and training does not move, such as buffers and frozen parameters.

A proof is made at other values of them (`perturbed`), so it holds while they drift. When one moves further than that,
the forward pass is proven again.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_COPIED = 2**12
"""Tensors of up to so many elements are compared by value, larger ones by a few sums."""
_LOOKED_AT = 16
"""Tensors of up to so many elements on a CPU are compared at every step: writes to ``.data`` do not raise a version."""


def values(x: Tensor) -> Tensor:
    """Return what shows whether a tensor has changed: a copy of it, or a few sums if it is large."""
    x = x.detach()
    if x.numel() <= _COPIED:
        return x.clone()
    flat = torch.view_as_real(x).flatten() if x.is_complex() else x.flatten()
    return torch.stack([flat[::step].sum(dtype=torch.float64) for step in (1, 2, 3)])


def same(before: Tensor, now: Tensor) -> bool:
    """Return whether two results of `values` are equal; NaN equals NaN."""
    if before.shape != now.shape:
        return False
    return bool(((before == now) | (before.isnan() & now.isnan())).all())


class Snapshot:
    """Constants as they were when a forward pass was proven.

    Args:
        constants: The constants by name.
        moved: Whether the proof was made at other values of all constants that can be moved.
    """

    def __init__(self, constants: Mapping[str, Tensor], *, moved: bool) -> None:
        self._moved = moved
        self._held = {name: (x, x._version, values(x)) for name, x in constants.items()}

    def left(self, constants: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the constants that have moved further than the proof covers."""
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
