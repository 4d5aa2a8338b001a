"""The engine's result: clipped gradient sums, with the bound on one example's contribution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qclip.engine.batch import to_device_async
from qclip.engine.groups import l2_bound


@dataclass(frozen=True)
class ClippedGradients:
    """The sum over examples of their gradients, each group clipped to its own clip norm.

    Every field is raw: nothing is private before the mechanism has added its noise.
    """

    sums: dict[str, Tensor]
    """The clipped sum for each trainable parameter, float32 (float64 for float64 parameters)."""
    norms: Tensor
    """Gradient norm of each example over all parameters, [B]; inf where it is not finite, 0 where masked."""
    group_norms: Tensor
    """Gradient norm of each example in each group, [B, K]."""
    clip_norms: tuple[float, ...]
    """The largest norm that one example can add to each group's sums."""
    losses: Tensor
    """The loss of each example, [B], detached."""
    mask: Tensor
    """Which examples count, [B], bool."""
    is_view: bool = False
    """Whether the next step overwrites the sums."""
    all_finite: Tensor | None = None
    """Whether all examples are finite, masked ones included; if not, neither are the sums. None if already checked."""
    recompute: "Callable[[], ClippedGradients] | None" = None
    """Compute the result again without the examples that are not finite."""

    @staticmethod
    def of(
        sums: dict[str, Tensor],
        group_norms: Tensor,
        clip_norms: tuple[float, ...],
        losses: Tensor,
        mask: Tensor,
        is_view: bool = False,
    ) -> "ClippedGradients":
        """Return a result from norms that are infinite where an example is masked or not finite.

        Args:
            sums: The clipped sum of each parameter.
            group_norms: The norms by group, [B, K].
            clip_norms: The clip norm of each group.
            losses: The loss of each example, [B].
            mask: The examples that count, [B].
            is_view: Whether the next step overwrites the sums.
        """
        group_norms = torch.where(mask[:, None], group_norms, 0)
        norms = torch.linalg.vector_norm(group_norms, dim=1)
        return ClippedGradients(sums, norms, group_norms, clip_norms, losses, mask, is_view)

    def resolve(self) -> "ClippedGradients":
        """Return the result with valid sums. Waits for the device if it is not yet known whether all are finite."""
        if self.all_finite is None or self.recompute is None:
            return self
        return replace(self, all_finite=None, recompute=None) if bool(self.all_finite) else self.recompute()

    @property
    def l2_bound(self) -> float:
        """The largest norm that one example can add to all sums together."""
        return l2_bound(self.clip_norms)

    def count_under(self, radii: Sequence[Sequence[float]]) -> Tensor:
        """Count the examples whose group norm is at most each of the group's radii.

        Masked examples and examples with non-finite gradients are not counted.

        Args:
            radii: M radii for each of the K groups.

        Returns:
            The counts [K, M], int64.
        """
        bounds = to_device_async(torch.tensor(radii, dtype=self.group_norms.dtype), self.group_norms.device)
        norms = self.group_norms[:, :, None]
        return ((norms <= bounds) & norms.isfinite() & self.mask[:, None, None]).sum(0)
