"""The oracle: one example at a time, by nothing but autograd, less its faults. Slow, obvious, and what every fast path
must equal."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qclip.engine import batch as batches
from qclip.engine import faults
from qclip.engine.engine import call
from qclip.engine.groups import ClipNorm, GroupSpec, partition
from qclip.engine.parts import accumulator
from qclip.engine.result import ClippedGradients
from qclip.engine.uncompiled import uncompiled


def clipped_gradients(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    clip_norm: ClipNorm,
    *,
    groups: GroupSpec = "flat",
    mask: Tensor | None = None,
    shared_forward: bool = False,
) -> ClippedGradients:
    """The same value as `qclip.clipped_gradients`, from one backward pass per example.

    Each example goes through the model alone, so nothing can mix. With ``shared_forward`` the batch goes through once
    and each example's loss is differentiated by itself: for models with dropout, whose masks belong to the batch.
    There an example that is not finite spoils the others, since zero times NaN is NaN.
    """

    def evaluate(pair: tuple[Any, Any]) -> Tensor:
        return loss(call(model, pair[0]), pair[1])

    keep = batches.full_mask(batches.size_of_pair(inputs, targets, mask), mask, torch.device("cpu"))
    return clipped(
        model, evaluate, (inputs, targets), clip_norm, groups=groups, mask=keep, shared_forward=shared_forward
    )


def clipped(
    model: nn.Module,
    evaluate: Callable[[Any], Tensor],
    batch: Any,
    clip_norm: ClipNorm,
    *,
    groups: GroupSpec = "flat",
    mask: Tensor | None = None,
    shared_forward: bool = False,
) -> ClippedGradients:
    """The same for a function from a batch to its losses."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parts = partition(parameters, groups)
    thresholds = parts.thresholds(clip_norm)
    count = batches.size(batch, mask)
    device = next(iter(parameters.values())).device
    keep = batches.full_mask(count, mask, device)
    sums = {name: torch.zeros_like(p, dtype=accumulator(p)) for name, p in parameters.items()}
    group_norms = torch.zeros(count, len(parts), dtype=torch.float64, device=device)
    losses = []
    with torch.enable_grad(), uncompiled(), faults.avoided():
        together = evaluate(batch) if shared_forward and count else None
        for i in range(count):
            alone = together if together is not None else evaluate(batches.select(batch, slice(i, i + 1), count))
            single = alone[i if together is not None else 0]
            losses.append(single.detach())
            if not keep[i]:
                continue
            grads = _gradients(single, list(parameters.values()))
            squares = torch.zeros(len(parts), dtype=torch.float64, device=device)
            for name, grad in zip(parameters, grads, strict=True):
                squares[parts.members[name]] += grad.double().square().sum()
            group_norms[i] = squares.sqrt() if squares.sum().isfinite() else torch.inf
            if not squares.sum().isfinite():
                continue
            for name, grad in zip(parameters, grads, strict=True):
                k = parts.members[name]
                sums[name] += grad.to(sums[name].dtype) * min(
                    1.0, thresholds[k] / max(float(group_norms[i, k]), 1e-300)
                )
    dtype = max((total.dtype for total in sums.values()), key=lambda dtype: dtype.itemsize)
    return ClippedGradients(
        sums=sums,
        norms=group_norms.square().sum(1).sqrt().to(dtype),
        group_norms=group_norms.to(dtype),
        clip_norms=thresholds,
        losses=torch.stack(losses) if losses else torch.zeros(0, device=device),
        mask=keep,
    )


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]
