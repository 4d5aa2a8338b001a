"""Derivations: from the gradient of a source back to the parameters that the source was computed from."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qclip.engine.gradients.forms import Dense, GradientForm, Outer
from qclip.engine.gradients.rules.embedding import lookup
from qclip.engine.gradients.sites import Call, Source

_T = torch.Tensor
_CASTS = {_T.to, _T.float, _T.double, _T.bfloat16, _T.type, _T.type_as, _T.contiguous, _T.clone, torch.clone}
_TRANSPOSES = {_T.t, torch.t, *(getattr(_T, name).__get__ for name in ("T", "mT"))}
# Each of these copies every element at most once, so the gradient keeps its norm.
_SELECTIONS = _CASTS | _TRANSPOSES | {
    _T.view, _T.view_as, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.unflatten, torch.unflatten,
    _T.squeeze, torch.squeeze, _T.unsqueeze, torch.unsqueeze, _T.transpose, torch.transpose, _T.permute, torch.permute,
    _T.movedim, torch.movedim, _T.select, torch.select, _T.narrow, torch.narrow, _T.split, torch.split,
    _T.chunk, torch.chunk, _T.unbind, torch.unbind,
}  # fmt: skip


def simplify(source: Source, form: GradientForm) -> tuple[Source, GradientForm]:
    """Undo the derivations after which the gradient still has a form: casts, matrix transposes, constant lookups."""
    while source.call is not None and len(source.parents) == 1:
        (parent,) = source.parents
        function = source.call.function
        if function in _CASTS and source.shape == parent.shape:
            pass
        elif isinstance(form, Outer) and len(parent.shape) == 2 and _transposes(source.call):
            form = form.mT
        elif (
            function is torch.embedding
            and isinstance(form, Dense)
            and _is_plain_lookup(source.call.args, source.call.kwargs)
        ):
            ids = source.call.args[1]
            form = lookup(ids.expand(form.grads.shape[0], *ids.shape), form.grads, parent.shape)
        else:
            break
        source = parent
    return source, form


def keeps_norm(source: Source) -> bool:
    """Return whether the source's gradient has the same norm as its parameter's, without rounding on the way."""
    while source.call is not None:
        basic = source.call.function is _T.__getitem__ and _is_basic(source.call.args[1])
        if not (basic or source.call.function in _SELECTIONS) or source.dtype not in (torch.float32, torch.float64):
            return False
        if len(source.parents) != 1:
            return False
        (source,) = source.parents
    return True


def to_parameters(
    source: Source, grads: Tensor, parameters: Mapping[str, Tensor], *, batched: bool
) -> dict[str, Tensor]:
    """Carry the source's gradient to every parameter that it was computed from.

    Args:
        source: The source.
        grads: Its gradient, or with ``batched`` one for each example, [B, *shape].
        parameters: The trainable parameters by name.
        batched: Whether ``grads`` has a batch dimension.
    """
    names = sorted(source.parameters)

    def carried(grads: Tensor, *, batched: bool) -> dict[str, Tensor]:
        parameter_grads = torch.autograd.grad(
            [source.edge],
            [parameters[name] for name in names],
            grad_outputs=[grads],
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )
        return {name: grad for name, grad in zip(names, parameter_grads, strict=True) if grad is not None}

    grads = grads.to(source.dtype)
    try:
        return carried(grads, batched=batched)
    except RuntimeError:
        if not batched:
            raise
    one_by_one = [carried(grad, batched=False) for grad in grads]  # a custom function that vmap does not support
    return {name: torch.stack([found[name] for found in one_by_one]) for name in one_by_one[0]}


def _transposes(call: Call) -> bool:
    """Return whether the call swaps the sides of a matrix."""
    if call.function in (_T.transpose, torch.transpose):
        return not call.kwargs and (call.args[1] - call.args[2]) % 2 == 1
    return call.function in _TRANSPOSES


def _is_plain_lookup(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this is ``embedding(weight, ids)``, without padding or frequencies."""
    return not kwargs and all(arg in (-1, False) for arg in args[2:])


def _is_basic(index: Any) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in indices)
