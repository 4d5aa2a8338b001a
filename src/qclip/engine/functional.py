"""The engine as one function."""

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from qclip.engine import batch as batches
from qclip.engine.capture import checks
from qclip.engine.driver import Engine, Plans, call
from qclip.engine.gradients.costs import CostModel
from qclip.engine.groups import ClipNorm, GroupSpec
from qclip.engine.result import ClippedGradients

_known: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[Any, Plans]]" = weakref.WeakKeyDictionary()


def _plans_of(model: nn.Module, loss: Any) -> Plans:
    """What was proven about this model with this loss; forgotten with either."""
    if isinstance(loss, types.MethodType):
        loss = loss.__self__
    elif isinstance(loss, types.FunctionType) and not loss.__closure__ and not loss.__defaults__:
        loss = loss.__code__  # a lambda made anew in every step is the same function
    try:
        return _known.setdefault(model, weakref.WeakKeyDictionary()).setdefault(loss, {})
    except TypeError:  # a loss that cannot be referred to weakly is proven anew each time
        return {}


def clipped_gradients(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any,
    clip_norm: ClipNorm,
    *,
    groups: GroupSpec = "flat",
    mask: Tensor | None = None,
    data_independent: Sequence[str] = (),
    costs: CostModel | None = None,
) -> ClippedGradients:
    """The sum over the batch of per-example gradients, each clipped to ``clip_norm``, from one forward and one
    backward pass.

    >>> import torch, qclip
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> error = lambda outputs, targets: (outputs - targets).square().sum(1)
    >>> result = qclip.clipped_gradients(model, error, torch.eye(2), torch.full((2, 1), 9.0), clip_norm=1.0)
    >>> result.sums["weight"].round(decimals=4), result.l2_bound
    (tensor([[-1., -1.]]), 1.0)

    Args:
        model: any module whose examples do not mix; a compiled one is unwrapped.
        loss: ``loss(outputs, targets)`` returns one value per example, shape [B].
        inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments; tensors whose first
        dimension is not the batch are shared by all examples. targets: anything that ``loss`` takes. clip_norm: one
        threshold, or one per group. groups: ``"flat"``, ``"per-layer"`` or ``{name: patterns of parameter names}``;
        each group is clipped by itself, and ``l2_bound`` is the bound of all together. mask: [B]; examples where it
        is false contribute nothing. data_independent: patterns of buffers whose change in the forward pass has
        nothing to do with the data. costs: how to choose between Gram, direct and kept gradients.

    An example whose gradient is not finite contributes zero and has norm inf. An empty batch gives zero sums. What
    cannot be done exactly is refused with an error that names it. Nothing is left on the model, and no ``.grad`` is
    touched.
    """
    model = checks.unwrapped(model)
    engine = Engine(
        model,
        criterion=loss if isinstance(loss, nn.Module) else None,
        groups=groups,
        data_independent=data_independent,
        costs=costs,
        plans=_plans_of(model, loss),
    )

    def evaluate(pair: tuple[Any, Any]) -> Tensor:
        return loss(call(model, pair[0]), pair[1])

    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    keep = batches.full_mask(batches.size_of_pair(inputs, targets, mask), mask, engine.device)
    return engine.clipped(evaluate, (inputs, targets), clip_norm, mask=keep)
