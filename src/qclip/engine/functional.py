"""The engine as one function."""

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from qclip._validate import renamed
from qclip.engine import batch as batches
from qclip.engine.capture import checks
from qclip.engine.driver import Engine, Plans, call
from qclip.engine.gradients.costs import CostModel
from qclip.engine.groups import ClipNorm, GroupSpec
from qclip.engine.result import ClippedGradients

_cache: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[Any, Plans]]" = weakref.WeakKeyDictionary()


def _plans_of(model: nn.Module, loss: Any) -> Plans:
    """Return the plans that were proven for this model with this loss; they are dropped with either."""
    if isinstance(loss, types.MethodType):
        loss = loss.__self__
    elif isinstance(loss, types.FunctionType) and not loss.__closure__ and not loss.__defaults__:
        loss = loss.__code__  # a lambda that is created in every step is the same function
    try:
        return _cache.setdefault(model, weakref.WeakKeyDictionary()).setdefault(loss, {})
    except TypeError:  # a loss without weak references is proven at every call
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
    data_independent_buffers: Sequence[str] = (),
    costs: CostModel | None = None,
    data_independent: Sequence[str] | None = None,
) -> ClippedGradients:
    """Return the sum over the batch of per-example gradients, each clipped, from one forward and one backward pass.

    >>> import torch, qclip
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> error = lambda outputs, targets: (outputs - targets).square().sum(1)
    >>> result = qclip.clipped_gradients(model, error, torch.eye(2), torch.full((2, 1), 9.0), clip_norm=1.0)
    >>> result.sums["weight"].round(decimals=4), result.l2_bound
    (tensor([[-1., -1.]]), 1.0)

    Guarantees:

    - Adding or removing one example changes the sums by at most ``l2_bound`` in L2 norm, and each group's sums by at
      most that group's clip norm.
    - A model or loss that cannot be clipped exactly is refused, with an error that names the function or parameter.
    - Nothing is left on the model, and no ``.grad`` is touched.

    Edge cases:

    - clip norm 0, negative, inf or NaN: refused.
    - gradient 0: contributes zero and has norm 0.
    - gradient with inf or NaN: contributes zero and has norm inf.
    - masked example: contributes zero and has norm 0, whatever its gradient.
    - empty batch: zero sums.

    Args:
        model: Any module whose examples do not mix; a compiled one is unwrapped.
        loss: ``loss(outputs, targets)`` returns one value per example, [B].
        inputs: A tensor, a tuple of positional arguments or a dict of keyword arguments. Tensors whose first dimension
            is not the batch are shared by all examples.
        targets: Anything that ``loss`` takes.
        clip_norm: One clip norm, or one per group.
        groups: ``"flat"``, ``"per-layer"`` or ``{name: patterns of parameter names}``. Each group is clipped by itself;
            ``l2_bound`` is the bound of all together.
        mask: [B]; examples where it is false contribute nothing.
        data_independent_buffers: Patterns of buffers whose changes in the forward pass do not depend on the data.
        costs: How to choose between Gram matrices, direct and kept gradients.
        data_independent: The old name of ``data_independent_buffers``, accepted until 1.0.

    Returns:
        The clipped sums with norms, losses and bounds. All of it is raw: nothing is private before noise is added.

    Raises:
        Refusal: The model, the loss or an argument is not supported; the message names it and the remedy.
    """
    if data_independent is not None:
        data_independent_buffers = renamed("data_independent", data_independent, "data_independent_buffers")
    model = checks.unwrapped(model)
    engine = Engine(
        model,
        criterion=loss if isinstance(loss, nn.Module) else None,
        groups=groups,
        data_independent_buffers=data_independent_buffers,
        costs=costs,
        plans=_plans_of(model, loss),
    )

    def evaluate(pair: tuple[Any, Any]) -> Tensor:
        return loss(call(model, pair[0]), pair[1])

    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    mask = batches.full_mask(batches.size_of_pair(inputs, targets, mask), mask, engine.device)
    return engine.clipped(evaluate, (inputs, targets), clip_norm, mask=mask)
