"""The oracle: clipped sums from one backward pass of plain autograd per example. Every fast path must equal it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qclip.engine import batch as batches
from qclip.engine.capture import faults
from qclip.engine.driver import call
from qclip.engine.gradients.clipping import norm_dtype, rounding_margin, sum_dtype
from qclip.engine.groups import ClipNorm, Groups, GroupSpec, partition
from qclip.engine.result import ClippedGradients
from qclip.engine.torch_settings import uncompiled


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
    """Return the same value as `qclip.clipped_gradients`, from one backward pass per example.

    Guarantees:

    - Each example runs through the model alone, so examples cannot mix.
    - Gradients are autograd's own, except where torch's are known to be wrong; norms are in float64.

    Edge cases:

    - gradient 0: contributes zero and has norm 0.
    - gradient with inf or NaN: contributes zero and has norm inf.
    - masked example: no backward pass; contributes zero and has norm 0.
    - empty batch: zero sums.
    - ``shared_forward`` with a non-finite example: the others are not finite either, since 0 * NaN is NaN.

    Args:
        model: The model.
        loss: ``loss(outputs, targets)`` returns one value per example, [B].
        inputs: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        targets: Anything that ``loss`` takes.
        clip_norm: One clip norm, or one per group.
        groups: As in `qclip.clipped_gradients`.
        mask: [B]; examples where it is false contribute nothing.
        shared_forward: Run the batch through the model once, and differentiate each example's loss by itself: for
            models with dropout, whose masks are drawn for the whole batch.
    """

    def evaluate(pair: tuple[Any, Any]) -> Tensor:
        return loss(call(model, pair[0]), pair[1])

    mask = batches.full_mask(batches.size_of_pair(inputs, targets, mask), mask, torch.device("cpu"))
    return clipped(
        model, evaluate, (inputs, targets), clip_norm, groups=groups, mask=mask, shared_forward=shared_forward
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
    """Return the clipped sum for a function from a batch to its losses.

    Args:
        model: The model.
        evaluate: ``evaluate(batch)`` runs the model and returns one loss per example, [B].
        batch: The batch.
        clip_norm: As in `clipped_gradients`, like the arguments below.
        groups: The groups of parameters.
        mask: [B].
        shared_forward: Run the batch through the model once.
    """
    mask = batches.full_mask(batches.size(batch, mask), mask, _device(model))
    examples = per_example(model, evaluate, batch, mask=mask, shared_forward=shared_forward)
    return clip(model, examples, clip_norm, groups=groups, mask=mask)


@dataclass(frozen=True)
class Example:
    """One example's loss, and its gradient by parameter name; no gradient if the example is masked."""

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
    """Yield the loss and the raw gradient of each example; the arguments are those of `clipped`."""
    parameters = _trainable(model)
    batch_size = batches.size(batch, mask)
    with _exact():
        together = evaluate(batch) if shared_forward and batch_size else None
    for i in range(batch_size):
        with _exact():  # left before the caller goes on
            alone = evaluate(batches.select(batch, slice(i, i + 1), batch_size)) if together is None else together[i:]
            loss = alone[0]
            is_counted = mask is None or bool(mask[i])
            gradients = _gradients(loss, list(parameters.values())) if is_counted else []
        yield Example(loss.detach(), dict(zip(parameters, gradients, strict=False)))


@contextmanager
def _exact() -> Iterator[None]:
    """Enable gradients, and run nothing compiled and no backward pass that torch gets wrong."""
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
    """Return the sum of these gradients, each clipped.

    Args:
        model: The model, for its parameters.
        examples: The raw gradients (`per_example`).
        clip_norm: One clip norm, or one per group.
        groups: The groups of parameters.
        mask: [B]; examples where it is false add nothing.
    """
    parameters, device = _trainable(model), _device(model)
    partitioned = partition(parameters, groups)
    clip_norms = partitioned.clip_norms(clip_norm)
    sums = {name: torch.zeros_like(p, dtype=sum_dtype(p)) for name, p in parameters.items()}
    margin = rounding_margin(total.dtype for total in sums.values())
    norms, losses = [], []
    for i, example in enumerate(examples):
        is_counted = mask is None or bool(mask[i])
        losses.append(example.loss)
        norms.append(_group_norms(example if is_counted else None, partitioned, device))
        if not is_counted or not norms[-1].isfinite().all():
            continue
        pairs = zip(clip_norms, norms[-1].tolist(), strict=True)
        factors = [min(1.0, (1 - margin) * limit / max(norm, 1e-300)) for limit, norm in pairs]
        for name, gradient in example.gradients.items():
            sums[name] += gradient.to(sums[name].dtype) * factors[partitioned.members[name]]
    group_norms = torch.stack(norms) if norms else torch.zeros(0, len(partitioned), device=device)
    dtype = norm_dtype(parameters)
    return ClippedGradients(
        sums=sums,
        norms=group_norms.square().sum(1).sqrt().to(dtype),
        group_norms=group_norms.to(dtype),
        clip_norms=clip_norms,
        losses=torch.stack(losses) if losses else torch.zeros(0, device=device),
        mask=batches.full_mask(len(losses), mask, device),
    )


def _group_norms(example: Example | None, groups: Groups, device: torch.device) -> Tensor:
    """Return the norm of each group [K] in float64: 0 without an example, and all inf if one is not finite."""
    squares = torch.zeros(len(groups), dtype=torch.float64, device=device)
    for name, gradient in example.gradients.items() if example is not None else ():
        squares[groups.members[name]] += gradient.double().square().sum()
    return squares.sqrt() if squares.sum().isfinite() else torch.full_like(squares, torch.inf)


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _device(model: nn.Module) -> torch.device:
    return next(iter(_trainable(model).values())).device


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]
