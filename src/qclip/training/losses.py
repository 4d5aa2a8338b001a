"""Losses: from a criterion to one loss per example, where that is exact, and the loss object of an ordinary loop."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from qclip import _validate as check
from qclip._validate import Refusal

PerExample = Callable[[Any, Any], Tensor]
"""A criterion ``f(outputs, targets)`` that returns one loss per example, [B]."""

ELEMENTWISE = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.KLDivLoss,
    nn.PoissonNLLLoss, nn.SoftMarginLoss,
)  # fmt: skip
"""Criteria with one value for each element of outputs and targets, of one shape; a mean is over all elements."""

ROWWISE = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
"""Criteria with one value for each row; a mean is over the rows."""

CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
"""Criteria with one value for each label; a mean is over the labels not ignored, weighted by class."""

REDUCTIONS = ("none", "mean", "sum", "batchmean")


def per_example(criterion: PerExample) -> PerExample:
    """Return the criterion with one loss per example, [B].

    * ``reduction="mean"`` becomes the mean over each example's own elements. The mean of the losses is then the value
      of the criterion, on any batch.
    * ``reduction="sum"`` and ``"batchmean"`` become the sum over each example's own elements.
    * ``reduction="none"``, or no ``reduction``: the criterion is used as it is and must return [B].

    The step is the same in every case: the sum over examples divided by the expected batch size.

    Args:
        criterion: A criterion such as ``nn.CrossEntropyLoss()``, or any ``f(outputs, targets)`` that returns [B].

    Raises:
        qclip.Refusal: For a mean that couples the examples (weighted classes, ignored labels), and for a criterion
            with a reduction that is not in `ELEMENTWISE`, `ROWWISE` or `CLASSES`.

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
        raise Refusal(
            f'loss = {kind.__name__} has reduction="{reduction}", which qclip cannot split into one loss per example: '
            'set reduction="none" and return [batch], or pass per_example_loss='
        )
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
        raise Refusal(
            f"{name}(weight=...) with a mean divides by the weights of other examples: pass "
            'reduction="none", which weights each example by its own class'
        )
    if criterion.ignore_index != -100:
        raise Refusal(
            f"{name}(ignore_index={criterion.ignore_index}) with a mean divides by the number of labels kept in the "
            'whole batch: pass reduction="sum", or per_example_loss= that normalizes each example by itself'
        )


def _check_shapes(kind: type, reduction: str, outputs: Tensor, targets: Tensor) -> None:
    if kind in ELEMENTWISE and outputs.shape != targets.shape:
        remedy = "reshape one of them: broadcasting would mix examples"
        raise check.refuse("outputs.shape", tuple(outputs.shape), f"targets.shape = {tuple(targets.shape)}", remedy)
    are_labels = kind in CLASSES and not targets.is_floating_point()
    if are_labels and targets.dim() > 1 and reduction == "mean":
        raise Refusal(
            f"targets are labels of shape {tuple(targets.shape)}, and a mean divides by the number of labels not "
            'ignored in the whole batch: pass reduction="sum", or per_example_loss= with a mean over each example\'s '
            'own labels, such as F.cross_entropy(outputs, targets, reduction="none").flatten(1).mean(1)'
        )


class PrivateLoss:
    """The loss of a physical batch. Its `backward` adds clipped gradients to the step instead of writing raw ones.

    Args:
        raw_loss: The mean loss of the batch, 0-dim.
        hand_over: Adds the clipped gradients of the batch to its logical batch.
    """

    def __init__(self, raw_loss: Tensor, hand_over: Callable[[], None]) -> None:
        self._raw_loss = raw_loss
        self._hand_over: Callable[[], None] | None = hand_over

    def backward(self) -> None:
        """Add the batch to its logical batch; after the last one, write the noisy gradient to ``.grad``."""
        hand_over, self._hand_over = self._hand_over, None  # frees the gradients, too
        if hand_over is None:
            raise stale_loss()
        hand_over()

    def item(self) -> float:
        """Return the mean loss of the batch. It is raw: show it to yourself only."""
        return self._raw_loss.item()

    def detach(self) -> Tensor:
        """Return the mean loss of the batch as a tensor, 0-dim, without a gradient. It is as raw as `item`."""
        return self._raw_loss.detach()

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __repr__(self) -> str:
        return f"PrivateLoss({self.item():.6g})"

    def __iter__(self) -> Iterator[Tensor]:
        # GradScaler.scale iterates over whatever is not a tensor.
        raise Refusal(
            "a private loss cannot be scaled by a GradScaler: train in bfloat16, which has the range of float32 and "
            "needs no GradScaler under autocast"
        )

    def __truediv__(self, number: object) -> "PrivateLoss":
        # Loops that accumulate gradients divide the loss, and so does Accelerate's backward: by 1 unless told to.
        if isinstance(number, int | float) and number == 1:
            return self
        raise Refusal(
            f"a private loss cannot be divided by {_shown(number)}: leave the division out, and set batch_size= and "
            "physical_batch_size= in make_private; physical batches are added up and divided by the batch size once. "
            "For a number to show, loss.item()"
        )

    def _refuse_factor(self, factor: object) -> NoReturn:
        raise Refusal(
            f"a private loss cannot be multiplied by {_shown(factor)}: put the factor into the criterion, or "
            "change the learning rate. For a number to show, loss.item()"
        )

    def _refuse_sum(self, other: object) -> NoReturn:
        raise Refusal(
            f"{_shown(other)} cannot be added to a private loss or subtracted from it: to keep account of losses, use "
            "loss.item(); a penalty on the parameters is the weight_decay of the optimizer; a term of each example "
            "belongs in the criterion or in per_example_loss="
        )

    __mul__ = __rmul__ = __rtruediv__ = _refuse_factor
    __add__ = __radd__ = __sub__ = __rsub__ = _refuse_sum

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a private loss has no {name!r}, only backward(), item() and detach(); loss.detach() is a tensor"
        )


def _shown(value: object) -> str:
    """Return a number as it is, and the kind of anything else."""
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def stale_loss() -> Refusal:
    """Return the error of a loss that is back-propagated twice, or too late."""
    return Refusal(
        "this loss was already back-propagated, or a later batch was used since: call training.loss(...).backward() "
        "once for each batch, before the next one"
    )
