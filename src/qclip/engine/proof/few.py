"""A proof on a few examples of a batch: when it may be made, and what remains to be shown on the whole batch."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from qclip.engine import batch as batches
from qclip.engine.capture.capture import Capture, RecordedCall
from qclip.engine.gradients.clipping import squared_norms
from qclip.engine.gradients.parts import Parts
from qclip.engine.proof.separation import mixing, replacement

NUM_PROVEN: Final = 5
"""The number of examples: few, to be fast, and no multiple or divisor of usual lengths."""
WORTH_IT: Final = 2 * NUM_PROVEN
"""Smaller batches are proven as they are."""


def same_calls(few: Capture, whole: Capture, num_few: int, num_whole: int) -> bool:
    """Return whether a whole batch makes the same calls as a few of its examples.

    Every length must be the same in both, or the same multiple of the number of examples. Two numbers of examples show
    which it is, where one does not: 64 may be the length of a text, or two rows for each of 32 examples.
    """
    if [site.parameters for site in few.sites] != [site.parameters for site in whole.sites]:
        return False

    def fit(one: Sequence[int], other: Sequence[int]) -> bool:
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(a == b or a * num_whole == b * num_few for a, b in pairs)

    def same(one: RecordedCall, other: RecordedCall) -> bool:
        if (one.function, one.others, len(one.shapes)) != (other.function, other.others, len(other.shapes)):
            return False
        return fit(one.integers, other.integers) and all(map(fit, one.shapes, other.shapes))

    return len(few.record) == len(whole.record) and all(map(same, few.record, whole.record))


def norms_by_parameter(parts: Parts) -> Tensor:
    """Return the norm of each example's gradient of each parameter, [B, P]."""
    squares = [squared_norms(contributions).norms for contributions in parts.values() if contributions]
    return torch.stack(squares, 1).clamp_min(0).sqrt()


def require_separate_halves(
    observe: Callable[[Any], tuple[Tensor, Tensor]], batch: Any, batch_size: int, tolerance: float
) -> None:
    """Refuse a batch in which replacing half of its examples changes the losses or the gradients of the others.

    What takes rows of one example for those of another does so all over the batch, and replacing half of it, chosen at
    random, does not hide that.

    Args:
        observe: Returns the losses [B] and gradient norms [B, P] of a batch.
        batch: The batch.
        batch_size: B.
        tolerance: The relative difference that is rounding.

    Raises:
        Mixing: Others have changed.
    """
    losses, norms = observe(batch)
    is_kept = torch.zeros(batch_size, dtype=torch.bool)
    is_kept[torch.randperm(batch_size, generator=torch.Generator().manual_seed(batch_size))[::2]] = True
    is_kept = is_kept.to(losses.device)
    other_losses, other_norms = observe(batches.select(batch, replacement(is_kept), batch_size))
    compared = ("in their losses", losses[:, None], other_losses[:, None]), ("in their gradients", norms, other_norms)
    for where, a, b in compared:
        apart, scale = (a - b)[is_kept].abs(), (a.abs() + b.abs())[is_kept]
        # A parameter whose gradient is zero but for rounding is held against the whole gradient.
        near = apart <= tolerance * scale + 1e-2 * tolerance * torch.linalg.vector_norm(scale, dim=1, keepdim=True)
        if not bool(near.all()):
            raise mixing(where)
