"""Routing: calls that move rows of a tensor to where an index says, or that count over rows."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.capture.invocation import Invocation

_T = torch.Tensor
_INDEXING = {
    _T.__getitem__, _T.__setitem__, torch.index_select, _T.index_select, torch.gather, _T.gather, torch.take, _T.take,
    torch.take_along_dim, _T.take_along_dim, torch.masked_select, _T.masked_select, torch.scatter, _T.scatter,
    _T.scatter_, torch.scatter_add, _T.scatter_add, _T.scatter_add_, torch.index_add, _T.index_add,
    _T.index_add_, torch.index_copy, _T.index_copy, _T.index_copy_, torch.index_put, _T.index_put, _T.index_put_,
    torch.index_fill, _T.index_fill, _T.index_fill_, torch.index_reduce, _T.index_reduce, _T.index_reduce_,
    torch.scatter_reduce, _T.scatter_reduce, _T.scatter_reduce_, torch.masked_scatter, _T.masked_scatter,
    _T.masked_scatter_, torch.repeat_interleave, _T.repeat_interleave, torch.narrow, _T.narrow, torch.select, _T.select,
}  # fmt: skip
_LOOKUPS = {F.embedding, torch.embedding}
ROUTING = _INDEXING | _LOOKUPS
"""Functions that may move rows."""
_RUNNING = {
    torch.cumsum, _T.cumsum, _T.cumsum_, torch.cumprod, _T.cumprod, _T.cumprod_, torch.cummax, _T.cummax,
    torch.cummin, _T.cummin,
}  # fmt: skip


def moved_dimensions(call: Invocation) -> Iterator[tuple[Tensor, Tensor | None, range]]:
    """Yield each tensor of a call whose rows move, the index that says where, and the dimensions that it covers.

    The index of an embedding lookup is None: the function decides which argument holds the ids, and these are data
    nearly always.
    """
    if call.function in _LOOKUPS:
        for table in call.tensors:
            if table.is_floating_point() and table.dim():
                yield table, None, range(1)
        return
    rows, *rest = (*call.args, *call.kwargs.values())
    if isinstance(rows, Tensor):
        for index, dims in _indexed_dimensions(rows.dim(), rest):
            yield rows, index, dims


def counted_dimension(call: Invocation) -> int | None:
    """Return the dimension along which a call counts over the rows of a matrix or more; None if it does not.

    Experts with a capacity number their rows like that, to drop those beyond a limit. A plain list of counts, such as
    the rows of each expert, is not counted over rows.
    """
    if call.function not in _RUNNING or call.tensors[0].dim() < 2 or call.tensors[0].is_floating_point():
        return None
    dims = [x for x in call.scalars if isinstance(x, int) and not isinstance(x, bool)]
    return dims[0] % call.tensors[0].dim() if dims else None


def _indexed_dimensions(dim: int, arguments: list[Any]) -> Iterator[tuple[Tensor, range]]:
    """Yield each tensor that indexes another one with ``dim`` dimensions, and the dimensions that it covers."""
    first = arguments[0] if arguments else None
    if isinstance(first, tuple):  # x[i, j]
        indices, at = first, 0
    else:  # x.index_select(at, index), x[index] or x.masked_select(index)
        indices = [x for x in arguments if isinstance(x, Tensor)][:1]
        ints = [x for x in arguments if isinstance(x, int)]
        at = ints[0] % max(dim, 1) if ints and not isinstance(first, Tensor) else 0
    for index in indices:
        if index is Ellipsis:
            at = dim - 1  # indices that follow count from the end; the last dimension stands for all of these
            continue
        width = _width(index)
        if isinstance(index, Tensor):
            yield index, range(at, min(at + width, dim))
        at += width


def _width(index: Any) -> int:
    """Return how many dimensions an index covers."""
    if index is None:
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1
