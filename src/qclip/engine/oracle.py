"""The oracle: one example at a time, by nothing but autograd, less its faults. Slow, obvious, and what every fast path
must equal.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qclip.engine import batch as batches
from qclip.engine.capture import faults
from qclip.engine.driver import call
from qclip.engine.gradients.clipping import rounding_room
from qclip.engine.gradients.parts import accumulator
from qclip.engine.groups import ClipNorm, GroupSpec, partition
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
    keep = batches.full_mask(batches.size(batch, mask), mask, _device(model))
    examples = per_example(model, evaluate, batch, mask=keep, shared_forward=shared_forward)
    return clip(model, examples, clip_norm, groups=groups, mask=keep)


@dataclass(frozen=True)
class Example:
    """One example's loss and its gradient by name of parameter; nothing where the example is masked."""

    loss: Tensor
    gradients: dict[str, Tensor]


def per_example(
    model: nn.Module,
    evaluate: Callable[[Any], Tensor],
    batch: Any,
    *,
    mask: Tensor | None = None,
    shared_forward: bool = False,
) -> Iterator[Example]:
    """The raw gradients of the examples, one after the other."""
    parameters = _trainable(model)
    count = batches.size(batch, mask)
    with _exact():
        together = evaluate(batch) if shared_forward and count else None
    for i in range(count):
        with _exact():  # left before the caller goes on
            alone = together if together is not None else evaluate(batches.select(batch, slice(i, i + 1), count))
            loss = alone[i if together is not None else 0]
            counts = mask is None or bool(mask[i])
            gradients = _gradients(loss, list(parameters.values())) if counts else []
        yield Example(loss.detach(), dict(zip(parameters, gradients, strict=False)))


@contextmanager
def _exact() -> Iterator[None]:
    """Gradients are enabled, and nothing is compiled or has a backward pass that torch gets wrong."""
    with torch.enable_grad(), uncompiled(), faults.avoided():
        yield


def clip(
    model: nn.Module,
    examples: Iterable[Example],
    clip_norm: ClipNorm,
    *,
    groups: GroupSpec = "flat",
    mask: Tensor | None = None,
) -> ClippedGradients:
    """The sum of these gradients, each clipped; examples where ``mask`` is false add nothing."""
    parameters, device = _trainable(model), _device(model)
    parts = partition(parameters, groups)
    thresholds = parts.thresholds(clip_norm)
    sums = {name: torch.zeros_like(p, dtype=accumulator(p)) for name, p in parameters.items()}
    room = rounding_room(total.dtype for total in sums.values())  # what is clipped stays so far below its bound
    limits = [(1 - room) * threshold for threshold in thresholds]
    norms, losses = [], []
    for i, example in enumerate(examples):
        losses.append(example.loss)
        squares = torch.zeros(len(parts), dtype=torch.float64, device=device)
        norms.append(squares)
        if mask is not None and not mask[i]:
            continue
        for name, gradient in example.gradients.items():
            squares[parts.members[name]] += gradient.double().square().sum()
        if not squares.sum().isfinite():
            squares.fill_(torch.inf)
            continue
        pairs = zip(limits, squares.sqrt().tolist(), strict=True)
        factors = [min(1.0, limit / max(norm, 1e-300)) for limit, norm in pairs]
        for name, gradient in example.gradients.items():
            sums[name] += gradient.to(sums[name].dtype) * factors[parts.members[name]]
    group_norms = torch.stack(norms).sqrt() if norms else torch.zeros(0, len(parts), device=device)
    dtype = max((total.dtype for total in sums.values()), key=lambda dtype: dtype.itemsize)
    return ClippedGradients(
        sums=sums,
        norms=group_norms.square().sum(1).sqrt().to(dtype),
        group_norms=group_norms.to(dtype),
        clip_norms=thresholds,
        losses=torch.stack(losses) if losses else torch.zeros(0, device=device),
        mask=batches.full_mask(len(losses), mask, device),
    )


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _device(model: nn.Module) -> torch.device:
    return next(iter(_trainable(model).values())).device


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]
