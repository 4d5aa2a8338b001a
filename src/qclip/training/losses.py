"""Losses: from a criterion to one loss per example, where that is exact, and the loss that an ordinary loop gets."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from qclip import _validate as check

PerExample = Callable[[Any, Any], Tensor]
"""``f(outputs, targets)`` with one loss per example, [B]."""

ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss,
    nn.PoissonNLLLoss, nn.SoftMarginLoss,
)  # fmt: skip
"""One value for each element of outputs and targets, which have one shape; their mean is over all elements."""

ROWWISE = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
"""One value for each row; their mean is over the rows."""

CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
"""One value for each target; a mean is over the targets that are not ignored, weighted by their classes."""

REDUCTIONS = ("none", "mean", "sum", "batchmean")


def per_example(criterion: PerExample) -> PerExample:
    """The same criterion with one loss per example, [B].

    ``reduction="mean"`` becomes the mean over each example's own elements, so that the mean of the losses is the
    criterion's value on any batch; ``"sum"`` becomes the sum over them. (The step is the same in every case: the sum
    over examples divided by the expected batch size.) Where a mean couples the examples it is refused: with weighted
    classes, and with ignored labels. What has no ``reduction``, or none, is taken as it is: it must return [B].

    >>> import torch
    >>> per_example(nn.MSELoss())(torch.zeros(2, 3), torch.tensor([[3.0, 0, 0], [1, 1, 1]]))
    tensor([3., 1.])
    """
    reduction = getattr(criterion, "reduction", "none")
    if reduction == "none":
        return criterion
    check.choice("loss.reduction", reduction, REDUCTIONS)
    kind = type(criterion)
    if kind not in ELEMENTWISE + ROWWISE + CLASSES:
        remedy = 'give it reduction="none" and let it return [batch], or pass per_example_loss='
        raise check.refuse("loss", kind.__name__, f'a criterion of torch.nn with reduction="{reduction}"', remedy)
    if kind in CLASSES and reduction == "mean":
        _refuse_coupled_means(criterion)
    single = copy.copy(criterion)
    single.reduction = "none"  # type: ignore[attr-defined]

    def losses(outputs: Any, targets: Any) -> Tensor:
        _check_shapes(kind, reduction, outputs, targets)
        values = single(outputs, targets)
        if values.dim() <= 1:
            return values
        return values.flatten(1).mean(1) if reduction == "mean" else values.flatten(1).sum(1)

    return losses


def _refuse_coupled_means(criterion: Any) -> None:
    name = type(criterion).__name__
    if criterion.weight is not None:
        remedy = 'pass reduction="none", which weighs each example by its own class'
        raise check.refuse(
            f"{name}.weight", "given", "None under a mean, which divides by the weights of others", remedy
        )
    if criterion.ignore_index != -100:
        remedy = 'pass reduction="sum", or per_example_loss= with a normalisation of its own for each example'
        bound = "left out under a mean, which divides by the number of labels kept in the whole batch"
        raise check.refuse(f"{name}.ignore_index", criterion.ignore_index, bound, remedy)


def _check_shapes(kind: type, reduction: str, outputs: Tensor, targets: Tensor) -> None:
    if kind in ELEMENTWISE and outputs.shape != targets.shape:
        remedy = f"reshape one of them: broadcasting {tuple(targets.shape)} would mix examples"
        raise check.refuse("outputs.shape", tuple(outputs.shape), "the shape of the targets", remedy)
    labels = kind in CLASSES and not targets.is_floating_point()
    if labels and targets.dim() > 1 and reduction == "mean":
        remedy = (
            'pass reduction="sum", or per_example_loss= with a mean over each example\'s own labels, such as '
            'F.cross_entropy(outputs, targets, reduction="none").flatten(1).mean(1)'
        )
        bound = "of shape [batch] under a mean, which divides by the number of labels not ignored in the whole batch"
        raise check.refuse("targets", f"labels of shape {tuple(targets.shape)}", bound, remedy)


class PrivateLoss:
    """The loss of a physical batch: `backward` hands its clipped gradients over, instead of writing raw ones."""

    def __init__(self, raw_loss: Tensor, hand_over: Callable[[], None]) -> None:
        self._raw_loss = raw_loss
        self._hand_over: Callable[[], None] | None = hand_over

    def backward(self) -> None:
        """Add the batch to its logical batch; at the last one, write the noisy gradient to ``.grad``."""
        hand_over, self._hand_over = self._hand_over, None  # the raw gradients go with it
        if hand_over is None:
            raise stale_loss()
        hand_over()

    def item(self) -> float:
        """The mean loss of the batch: raw, for the screen only."""
        return self._raw_loss.item()

    def __iter__(self) -> Iterator[Tensor]:
        # GradScaler.scale takes a tensor or iterates: here is where it can be refused by name.
        remedy = "train in bfloat16, whose range is that of float32: autocast needs no GradScaler then"
        raise check.refuse("loss", "scaled by a GradScaler", "back-propagated as it is", remedy)

    def __truediv__(self, number: object) -> "PrivateLoss":
        # What loops that accumulate gradients do, and Accelerate's backward.
        remedy = "leave it: physical batches are added up, and divided by the batch size once"
        raise check.refuse("loss", f"divided by {number!r}", "back-propagated as it is", remedy)


def stale_loss() -> check.Refusal:
    """Return the error of a loss that is back-propagated twice, or too late."""
    remedy = "call training.loss(...).backward() once for each batch, before the next one"
    return check.refuse("this loss", "stale", "the latest, not yet back-propagated", remedy)
