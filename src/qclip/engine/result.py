"""What the engine returns: a clipped sum that knows its own bound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qclip.engine.batch import to_device_async
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
    is_view: bool = False
    """Whether the next step overwrites the sums."""
    all_finite: Tensor | None = None
    """Whether all examples are finite, counted or not, where nobody has looked yet: else the sums are spoilt."""
    recompute: "Callable[[], ClippedGradients] | None" = None
    """The same with unspoilt sums."""

    @staticmethod
    def of(
        sums: dict[str, Tensor],
        group_norms: Tensor,
        clip_norms: tuple[float, ...],
        losses: Tensor,
        mask: Tensor,
        is_view: bool = False,
    ) -> "ClippedGradients":
        """From norms that are infinite where an example is masked or not finite."""
        group_norms = torch.where(mask[:, None], group_norms, 0)
        norms = torch.linalg.vector_norm(group_norms, dim=1)
        return ClippedGradients(sums, norms, group_norms, clip_norms, losses, mask, is_view)

    def resolve(self) -> "ClippedGradients":
        """With sums that hold; waits for the device where that is not known yet."""
        if self.all_finite is None or self.recompute is None:
            return self
        return replace(self, all_finite=None, recompute=None) if bool(self.all_finite) else self.recompute()

    @property
    def l2_bound(self) -> float:
        """The largest norm that one example can add to all the sums together."""
        return l2_bound(self.clip_norms)

    def count_under(self, radii: Sequence[Sequence[float]]) -> Tensor:
        """How many examples have a group norm of at most each of the group's radii, [K, M], int64.

        Masked examples and examples with non-finite gradients are not counted.
        """
        limits = to_device_async(torch.tensor(radii, dtype=self.group_norms.dtype), self.group_norms.device)
        norms = self.group_norms[:, :, None]
        return ((norms <= limits) & norms.isfinite() & self.mask[:, None, None]).sum(0)
