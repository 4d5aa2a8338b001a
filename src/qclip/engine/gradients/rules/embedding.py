"""Lookups in tables by id: embedding, embedding_bag, indexing."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.gradients.forms import Rows
from qclip.engine.gradients.rules.registry import Gradient, register_rule
from qclip.engine.kernels.products import as_float32

FREQUENCY = "scale_grad_by_freq=True divides by how often an id occurs in the batch, which mixes examples; turn it off"


def lookup(ids: Tensor, grad: Tensor, shape: torch.Size) -> Rows:
    """Return the form of a lookup, from ids [B, *] and grad [B, *, *row]."""
    batch_size = ids.shape[0]
    return Rows(ids.reshape(batch_size, -1), grad.reshape(batch_size, -1, *shape[1:]), shape)


@register_rule(torch.embedding)
def embedding(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Mapping[str, Gradient]:
    """``weight[indices]``; the padding row has no gradient."""
    if scale_grad_by_freq:
        raise NotImplementedError(FREQUENCY)
    if padding_idx >= 0:
        grad = torch.where((indices == padding_idx).unsqueeze(-1), 0, grad)
    return {"weight": lambda: lookup(indices, grad, weight.shape)}


@register_rule(torch.index_select, torch.Tensor.index_select)
def index_select(grad: Tensor, input: Tensor, dim: int, index: Tensor) -> Mapping[str, Gradient]:
    """``input[index]`` along the first dimension."""
    return {"input": lambda: lookup(index, grad, input.shape)} if dim in (0, -input.dim()) else {}


@register_rule(torch.Tensor.__getitem__)
def getitem(grad: Tensor, input: Tensor, index: object) -> Mapping[str, Gradient]:
    """``table[ids]``; other kinds of index are left to the fallback."""
    if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32):
        return {"input": lambda: lookup(index.remainder(input.shape[0]), grad, input.shape)}
    return {}


@register_rule(F.embedding_bag)
def embedding_bag(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Mapping[str, Gradient]:
    """Sum or average rows, one bag per example; ``grad`` is [B, 1, d]."""
    if scale_grad_by_freq:
        raise NotImplementedError(FREQUENCY)
    if mode == "max":
        return {}
    if offsets is None:
        ids = input.flatten(1)
        shares = torch.ones_like(ids, dtype=as_float32(grad).dtype)
        scales = None if per_sample_weights is None else per_sample_weights.flatten(1)
    else:
        where, shares = _bags(offsets.flatten()[: grad.shape[0]], input.numel(), as_float32(grad).dtype)
        ids = input.flatten()[where]
        scales = None if per_sample_weights is None else per_sample_weights.flatten()[where]
    if padding_idx is not None:
        shares = shares * (ids != padding_idx % weight.shape[0])
    if mode == "mean":
        shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
    if scales is not None:
        shares = shares * scales
    return {"weight": lambda: Rows(ids, as_float32(grad) * shares.unsqueeze(-1), weight.shape)}


def _bags(starts: Tensor, total: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the positions of each bag's ids in the flat list, [B, longest], and 1 for real ids, 0 for padding.

    The longest bag is the only shape in all rules that depends on data; the flat list that came in does too.
    """
    ends = torch.cat([starts[1:], starts.new_tensor([total])])
    longest = int((ends - starts).max())
    where = starts[:, None] + torch.arange(longest, device=starts.device)
    return where.clamp(max=max(total - 1, 0)), (where < ends[:, None]).to(dtype)
