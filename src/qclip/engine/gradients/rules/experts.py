"""Experts: products in which every row meets the matrix of its own expert.

``grouped_mm`` takes rows that are sorted by expert, and where the rows of each expert end. It becomes `expert_product`,
which says the expert of every row, so that its rule can take the rows example by example.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from qclip.engine.gradients.forms import Outer
from qclip.engine.gradients.rules.registry import Gradient, register_rule


def expert_product(rows: Tensor, weights: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    """Return ``rows[s] @ weights[experts[s]]`` for every row, [S, N].

    Args:
        rows: [S, M], sorted by expert.
        weights: [E, M, N].
        experts: The expert of each row, [S]; E for rows that have none.
        ends: Where the rows of each expert end, [E].
    """
    if has_torch_function_variadic(rows, weights, experts, ends):
        return handle_torch_function(expert_product, (rows, weights, experts, ends), rows, weights, experts, ends)
    return torch._grouped_mm(rows, weights, offs=ends)


@register_rule(expert_product)
def by_expert(grad: Tensor, rows: Tensor, weights: Tensor, experts: Tensor, ends: Tensor) -> Mapping[str, Gradient]:
    """A sum of outer products for each expert."""
    return {"weights": lambda: _outer(rows, grad, experts, weights.shape)}


def _outer(left: Tensor, right: Tensor, experts: Tensor, shape: torch.Size) -> Outer:
    """Return the sums of outer products of rows [B, R, M] and [B, R, N], each at its expert [B, R].

    The most rows of an example at one expert are a shape that depends on data, as the rows of experts do anyway.
    """
    batch_size, num_experts = len(left), shape[0]
    ids, order = experts.sort(dim=1)
    counts = torch.zeros(batch_size, num_experts + 1, dtype=ids.dtype, device=ids.device)
    counts.scatter_add_(1, ids, torch.ones_like(ids))
    starts = counts.cumsum(1) - counts
    most = int(counts[:, :num_experts].max()) if ids.numel() else 0
    places = torch.arange(ids.shape[1], device=ids.device) - starts.gather(1, ids)  # among the rows of one expert
    real = ids < num_experts
    example = torch.arange(batch_size, device=ids.device)[:, None].expand_as(ids)[real]

    def padded(x: Tensor) -> Tensor:
        out = x.new_zeros(batch_size, num_experts, most, x.shape[2])
        out[example, ids[real], places[real]] = x[example, order[real]]
        return out

    return Outer(padded(left), padded(right), shape)


def _grouped_mm(
    rows: Tensor, weights: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    if rows.dim() != 2 or weights.dim() != 3 or offs is None or bias is not None or out_dtype is not None:
        raise NotImplementedError("only rows [S, M] times one matrix for each expert, [E, M, N], are known")
    experts = torch.searchsorted(offs, torch.arange(len(rows), dtype=offs.dtype, device=offs.device), right=True)
    return expert_product(rows, weights, experts, offs)


GROUPED: dict[Any, Callable[..., Any]] = {torch._grouped_mm: _grouped_mm}
"""Decompositions of products of experts."""
