"""What the engine returns: a clipped sum that knows its own bound."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qclip.engine.groups import l2_bound


@dataclass(frozen=True)
class ClippedGradients:
    """The sum over examples of their gradients, each group clipped at its own threshold.

    Everything here is raw: nothing is private until the mechanism has added its noise.
    """

    sums: dict[str, Tensor]
    """The clipped sum for each trainable parameter, float32 (float64 for float64 parameters)."""
    norms: Tensor
    """Gradient norm of each example over all parameters, [B]; inf where it is not finite, 0 where masked."""
    group_norms: Tensor
    """The same for each group, [B, K]."""
    clip_norms: tuple[float, ...]
    """The largest norm that one example can add to each group's sums."""
    losses: Tensor
    """The loss of each example, [B], detached."""
    mask: Tensor
    """Which examples count, [B], bool."""

    @property
    def l2_bound(self) -> float:
        """The largest norm that one example can add to all the sums together."""
        return l2_bound(self.clip_norms)

    def count_under(self, radii: Sequence[Sequence[float]]) -> Tensor:
        """How many examples have a group norm of at most each of the group's radii, [K, M], int64.

        Masked examples and examples with non-finite gradients are not counted.
        """
        limits = torch.tensor(radii, dtype=self.group_norms.dtype, device=self.group_norms.device)
        norms = self.group_norms[:, :, None]
        return ((norms <= limits) & norms.isfinite() & self.mask[:, None, None]).sum(0)
