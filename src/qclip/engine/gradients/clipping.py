"""Clipping: from what the sites contribute to norms, factors and clipped sums. Nothing here waits for the device."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qclip.engine.gradients.forms import Dense, Squares, keep_examples, square_sums
from qclip.engine.gradients.parts import Parts, accumulator, squared_norms, weighted_sum
from qclip.engine.groups import Groups
from qclip.engine.kernels.products import full, weighted_rows

FEW: Final = 4
"""How many squared norms are added up one by one."""
SMALL: Final = 2**14
"""How many numbers a gradient that joins a bundle may have."""
ROOM: Final = 16
"""How far clipped examples stay below their bound, in the spacings of numbers at 1: for the rounding of norms, factors
and products, which otherwise let every other example add a little more than its bound."""


class Bundle(NamedTuple):
    """Small gradients of one group side by side (biases, layer scales): two operations for all instead of two each."""

    group: int
    rows: Tensor
    """[B, numbers]."""
    lengths: Mapping[str, int]
    """How many numbers each parameter has, in order."""


def bundled(parts: Parts, groups: Groups) -> list[Bundle]:
    """The small gradients that are there as such, by group and precision."""
    found: dict[tuple[int, torch.dtype], dict[str, Tensor]] = {}
    for name, (part, *more) in ((name, each) for name, each in parts.items() if each):
        if not more and part.source is None and isinstance(part.form, Dense):
            rows = full(part.form.grads)
            rows = rows.reshape(len(rows), rows.shape[1:].numel())
            if rows.shape[1] <= SMALL:
                found.setdefault((groups.members[name], rows.dtype), {})[name] = rows
    return [
        Bundle(group, torch.cat(list(rows.values()), 1), {name: x.shape[1] for name, x in rows.items()})
        for (group, _), rows in found.items()
        if len(rows) > 1
    ]


class Norms(NamedTuple):
    """The gradient norms of a batch."""

    keep: Tensor
    """[B]: the examples that count."""
    raw: Sequence[Tensor]
    """Of each group [B], whatever came out."""
    scaled: Sequence[Tensor]
    """Likewise, of what is multiplied by a factor other than 1 and rounded then."""
    by_group: Tensor
    """[B, K]; inf where an example does not count or is not finite."""
    usable: Tensor
    """[B]: the examples that count and are finite."""
    finite: Tensor
    """[B]: those that are finite, whether they count or not: the others spoil a sum even at a factor of 0."""
    room: float
    """What rounding may make of a norm, a factor and their product, relative to them."""


def norm_dtype(parameters: Mapping[str, Tensor]) -> torch.dtype:
    """The precision of norms and limits: that of the widest sum."""
    return max((accumulator(p) for p in parameters.values()), key=lambda dtype: dtype.itemsize)


def group_norms(
    parts: Parts, bundles: Sequence[Bundle], groups: Groups, parameters: Mapping[str, Tensor], keep: Tensor
) -> Norms:
    """The norm of each group, over all contributions to its parameters; ``keep`` says which examples count."""
    dtype = norm_dtype(parameters)
    squares: list[list[Squares]] = [[] for _ in groups.names]
    for bundle in bundles:
        squares[bundle.group].append(Squares.exact(square_sums(bundle.rows)))
    done = {name for bundle in bundles for name in bundle.lengths}
    for name, found in parts.items():
        if found and name not in done:
            squares[groups.members[name]].append(squared_norms(found))
    zero = torch.zeros(len(keep), dtype=dtype, device=keep.device)
    raw = [_total([square.norms for square in each], zero).sqrt() for each in squares]
    scaled = [
        norm if all(square.is_exact for square in each) else _total([square.scaled for square in each], zero).sqrt()
        for norm, each in zip(raw, squares, strict=True)
    ]
    norms = torch.stack(raw, 1)
    finite = norms.isfinite().all(1)
    usable = finite & keep
    room = rounding_room(square.norms.dtype for each in squares for square in each)
    return Norms(keep, raw, scaled, torch.where(usable[:, None], norms, torch.inf), usable, finite, room)


def rounding_room(dtypes: Iterable[torch.dtype]) -> float:
    """Which part of its bound an example must leave, where norms and sums have these precisions."""
    return ROOM * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _total(squares: Sequence[Tensor], zero: Tensor) -> Tensor:
    """A few are added one by one: compiled, that is part of what made them, and a stack would have to be written."""
    squares = [square.to(zero.dtype) for square in squares]
    if len(squares) > FEW:
        return torch.stack(list(squares)).sum(0)
    return reduce(torch.add, squares) if squares else zero


def clip_factors(norms: Norms, limits: Tensor, *, hasty: bool = False) -> list[Tensor]:
    """For each group, what each example's gradients are multiplied by [B], so that none exceeds the limit, [K].

    Hasty ones look at one group only, so that its sum need not wait for the norms of others: they hold where all
    examples are finite.
    """
    counted = norms.keep if hasty else norms.usable
    limits = limits * (1 - norms.room)  # for all: a norm that seems to be within its limit may be beyond it
    factors = []
    for k, (raw, scaled) in enumerate(zip(norms.raw, norms.scaled, strict=True)):
        factor = (limits[k] / scaled).clamp(max=1)
        factor = factor if scaled is raw else torch.where(raw <= limits[k], 1, factor)  # 1 rounds nothing
        factors.append(torch.where(counted, factor, 0))
    return factors


def clipped_sums(
    parts: Parts,
    bundles: Sequence[Bundle],
    factors: Sequence[Tensor],
    groups: Groups,
    parameters: Mapping[str, Tensor],
    mask: Tensor | None,
) -> dict[str, Tensor]:
    """Each parameter's sum over examples times their factors; without a ``mask`` everything must be finite."""
    sums: dict[str, Tensor] = {}
    for bundle in bundles:
        rows = bundle.rows if mask is None else keep_examples(bundle.rows, mask)
        total = weighted_rows(factors[bundle.group], rows)
        pieces = total.split(list(bundle.lengths.values()))
        sums |= {
            name: piece.to(accumulator(parameters[name])).view(parameters[name].shape)
            for name, piece in zip(bundle.lengths, pieces, strict=True)
        }
    for name in parameters:
        if name not in sums:
            sums[name] = weighted_sum(name, parts[name], factors[groups.members[name]], mask, parameters)
    return {name: sums[name] for name in parameters}
