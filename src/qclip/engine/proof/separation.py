"""Separation: no example may change another example's losses, values or gradients."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip._validate import Refusal
from qclip.engine import batch as batches
from qclip.engine.gradients.sites import Site

T = TypeVar("T")


class Mixing(Refusal):
    """Examples are not independent of each other."""


def require_separation(
    observe: Callable[[Any], T],
    difference: Callable[[T, Tensor], str | None],
    batch: Any,
    batch_size: int,
    losses: Tensor,
) -> None:
    """Replace some examples by copies of others, in several rounds, and refuse if the others change.

    Args:
        observe: Runs a batch and returns what to compare.
        difference: Given an observation and the examples that were kept [B], returns where they changed, or None.
        batch: The batch.
        batch_size: B.
        losses: Any tensor of the losses' precision and device.

    Raises:
        Mixing: An example changed when others were replaced.
    """
    for subset in separating_subsets(batch_size, losses):
        is_kept = subset != 0
        where = difference(observe(batches.select(batch, replacement(is_kept), batch_size)), is_kept)
        if where is not None:
            raise mixing(where)


def mixing(where: str) -> Mixing:
    """Return the refusal of a model that mixes examples there."""
    return Mixing(
        f"examples mix: replacing some of them changed others, {where}. Per-example clipping needs a model in "
        "which they do not: replace batch statistics (BatchNorm by GroupNorm, with qclip.fix(model)), attention or "
        "contrast across the batch; inputs that are not one row per example must not have the batch's length as first "
        "dimension"
    )


def require_rows_in_bags(sites: Sequence[Site], batch: Any) -> None:
    """Refuse a batch with the ids of all examples in one list, cut by offsets: it is not examples that mix there."""
    given = {x.data_ptr() for x in batches.tensor_leaves(batch) if x.dim() == 1}
    for site in sites:
        vectors = [x for x, _ in site.call.versions if x.dim() == 1 and not x.is_floating_point()]
        if (
            site.call.function is F.embedding_bag
            and len(vectors) > 1
            and given.issuperset(map(Tensor.data_ptr, vectors))
        ):
            raise Refusal(
                f"{site}: its ids have no row per example, but are one list, cut by offsets; pad the ids to [B, n] "
                "instead (with padding_idx, or with per_sample_weights of 0), and leave the offsets out"
            )


def separating_subsets(batch_size: int, losses: Tensor) -> list[Tensor]:
    """Return halves of the batch as loss weights [B], such that for any two examples a half has only the first.

    Every example is in half of the subsets, each in another choice of them. No choice contains another, so any two
    examples are separated in both directions; no smaller number of subsets would do.
    """
    if batch_size == 1:
        return [torch.ones_like(losses).detach()]
    count = next(k for k in itertools.count(2) if math.comb(k, k // 2) >= batch_size)
    choices = list(itertools.islice(itertools.combinations(range(count), count // 2), batch_size))
    weights = torch.zeros(batch_size, count, dtype=losses.dtype).scatter_(1, torch.tensor(choices), 1)
    return list(weights.to(losses.device).T)


def replacement(is_kept: Tensor) -> Tensor:
    """Return indices [B] that replace the other examples by copies of those that are kept."""
    index = torch.arange(len(is_kept), device=is_kept.device)
    index[~is_kept] = index[is_kept].repeat(len(is_kept))[: int((~is_kept).sum())]
    return index
