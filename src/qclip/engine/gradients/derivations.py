"""From the gradient of a source back to the parameters it was made from."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qclip.engine.gradients.forms import Dense, Form, Outer
from qclip.engine.gradients.rules.embedding import lookup
from qclip.engine.gradients.sites import Call, Source

_T = torch.Tensor
_CASTS = {_T.to, _T.float, _T.double, _T.bfloat16, _T.type, _T.type_as, _T.contiguous, _T.clone, torch.clone}
_TRANSPOSES = {_T.t, torch.t, *(getattr(_T, name).__get__ for name in ("T", "mT"))}
# Each of these copies every number at most once, so the gradient keeps its norm.
_SELECTIONS = _CASTS | _TRANSPOSES | {
    _T.view, _T.view_as, _T.reshape, torch.reshape, _T.flatten, torch.flatten, _T.unflatten, torch.unflatten,
    _T.squeeze, torch.squeeze, _T.unsqueeze, torch.unsqueeze, _T.transpose, torch.transpose, _T.permute, torch.permute,
    _T.movedim, torch.movedim, _T.select, torch.select, _T.narrow, torch.narrow, _T.split, torch.split,
    _T.chunk, torch.chunk, _T.unbind, torch.unbind,
}  # fmt: skip


def simplify(source: Source, form: Form) -> tuple[Source, Form]:
    """Undo the derivations that leave a form a form: casts, transposes of matrices, constant lookups."""
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
    """Whether a gradient of the source has the norm it gives its parameter, without rounding on the way."""
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
    """The source's gradient (``batched``: one for each example) carried to every parameter it was made from."""
    names = sorted(source.parameters)
    found = torch.autograd.grad(
        [source.edge],
        [parameters[name] for name in names],
        grad_outputs=[grads.to(source.dtype)],
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=batched,
    )
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}


def _transposes(call: Call) -> bool:
    """Whether the call swaps the sides of a matrix."""
    if call.function in (_T.transpose, torch.transpose):
        return not call.kwargs and (call.args[1] - call.args[2]) % 2 == 1
    return call.function in _TRANSPOSES


def _is_plain_lookup(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Without padding or frequencies: ``embedding(weight, ids)``."""
    return not kwargs and all(arg in (-1, False) for arg in args[2:])


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)
