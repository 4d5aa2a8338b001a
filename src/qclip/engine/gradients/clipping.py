"""Clipping: norms, clip factors and clipped sums of the contributions. Nothing but `clip` waits for the device.

Shapes: B batch size, K groups, N elements.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qclip.engine.gradients import derivations
from qclip.engine.gradients.forms import Dense, Outer, Products, Rows, Squares, joint_squared_norms
from qclip.engine.gradients.parts import Part, Parts
from qclip.engine.groups import Groups, ValidChoice
from qclip.engine.kernels.products import as_float32, keep_examples, square_sums, weighted_rows
from qclip.engine.result import ClippedGradients

FEW: Final = 4
"""Up to this number, squared norms are added one by one."""
SMALL: Final = 2**14
"""The most elements of a gradient that joins a bundle."""
MARGIN: Final = 16
"""The rounding margin of clipped gradients below their bound, in units of machine epsilon. Without it, the rounding of
norms, factors and products lets every other example add slightly more than its bound."""


class Bundle(NamedTuple):
    """Small gradients of one group side by side (biases, layer scales): two operations for all instead of two each."""

    group: int
    rows: Tensor
    """[B, N]."""
    lengths: Mapping[str, int]
    """The number of elements of each parameter, in order."""


def clip(
    parts: Parts,
    groups: Groups,
    parameters: Mapping[str, Tensor],
    losses: Tensor,
    is_counted: Tensor,
    clip_norms: ValidChoice,
    *,
    keep: Callable[[str, Tensor], Tensor] = lambda _, total: total,
) -> ClippedGradients:
    """Clip and sum prepared contributions, and look once whether all of them are finite.

    Args:
        parts: The contributions to every parameter.
        groups: The partition of the parameters.
        parameters: The parameters by name, for the shapes and dtypes of the sums.
        losses: One loss per example, [B].
        is_counted: Which examples count, [B].
        clip_norms: One clip norm per group as a tuple, or a function that chooses them.
        keep: Returns what is kept of a sum (`clipped_sums`).

    Returns:
        The clipped sums, the norms and the losses.
    """
    bundles = bundled(parts, groups)
    norms = group_norms(parts, bundles, groups, parameters, is_counted)
    chosen = groups.chosen(clip_norms, norms.by_group[is_counted])
    # Where all is finite, nothing has to be masked out.
    is_usable = None if bool(norms.is_usable.all()) else norms.is_usable
    factors = clip_factors(norms, torch.tensor(chosen, dtype=norms.by_group.dtype, device=is_counted.device))
    sums = clipped_sums(parts, bundles, factors, groups, parameters, is_usable, keep)
    return ClippedGradients.of(sums, norms.by_group, chosen, losses.detach(), is_counted)


def bundled(parts: Parts, groups: Groups) -> list[Bundle]:
    """Bundle the small dense gradients, by group and precision."""
    small: dict[tuple[int, torch.dtype], dict[str, Tensor]] = {}
    for name, contributions in parts.items():
        part = contributions[0] if len(contributions) == 1 else None
        if part is not None and part.source is None and isinstance(part.form, Dense):
            rows = as_float32(part.form.grads)
            rows = rows.reshape(len(rows), rows.shape[1:].numel())
            if rows.shape[1] <= SMALL:
                small.setdefault((groups.members[name], rows.dtype), {})[name] = rows
    return [
        Bundle(group, torch.cat(list(rows.values()), 1), {name: x.shape[1] for name, x in rows.items()})
        for (group, _), rows in small.items()
        if len(rows) > 1
    ]


class Norms(NamedTuple):
    """The gradient norms of a batch."""

    is_counted: Tensor
    """[B]: the examples that the mask counts."""
    raw: Sequence[Tensor]
    """[B] for each group: the norms, finite or not."""
    scaled: Sequence[Tensor]
    """[B] for each group: bounds on the norms of gradients that are rounded after scaling, relative to the factor."""
    by_group: Tensor
    """[B, K]; inf where an example is not counted or not finite."""
    is_usable: Tensor
    """[B]: the examples that are counted and finite."""
    is_finite: Tensor
    """[B]: the examples that are finite, counted or not; others make a sum NaN even with a factor of 0."""
    rounding_margin: float
    """A bound on the relative error of a norm, a factor and their product."""


def sum_dtype(parameter: Tensor) -> torch.dtype:
    """Return the precision of a parameter's sum: float32 whatever its own precision, but float64 for float64."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def norm_dtype(parameters: Mapping[str, Tensor]) -> torch.dtype:
    """Return the precision of norms and clip norms: that of the most precise sum."""
    return max(map(sum_dtype, parameters.values()), key=lambda dtype: dtype.itemsize)


def group_norms(
    parts: Parts, bundles: Sequence[Bundle], groups: Groups, parameters: Mapping[str, Tensor], is_counted: Tensor
) -> Norms:
    """Compute the norm of each group, over all contributions to its parameters.

    Args:
        parts: The contributions by parameter.
        bundles: The small gradients among them (`bundled`).
        groups: The partition of the parameters.
        parameters: The trainable parameters by name.
        is_counted: [B].
    """
    squares: list[list[Squares]] = [[] for _ in groups.names]
    for bundle in bundles:
        squares[bundle.group].append(Squares.exact(square_sums(bundle.rows)))
    done = {name for bundle in bundles for name in bundle.lengths}
    for name, contributions in parts.items():
        if contributions and name not in done:
            squares[groups.members[name]].append(squared_norms(contributions))
    zero = torch.zeros(len(is_counted), dtype=norm_dtype(parameters), device=is_counted.device)
    raw = [_total([square.norms for square in group], zero).sqrt() for group in squares]
    scaled = [
        norm if all(square.is_exact for square in group) else _total([square.scaled for square in group], zero).sqrt()
        for norm, group in zip(raw, squares, strict=True)
    ]
    norms = torch.stack(raw, 1)
    is_finite = norms.isfinite().all(1)
    is_usable = is_finite & is_counted
    by_group = torch.where(is_usable[:, None], norms, torch.inf)
    margin = rounding_margin(square.norms.dtype for group in squares for square in group)
    return Norms(is_counted, raw, scaled, by_group, is_usable, is_finite, margin)


def rounding_margin(dtypes: Iterable[torch.dtype]) -> float:
    """Return the fraction of its bound that a clipped gradient must leave, with norms and sums in these precisions."""
    return MARGIN * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _total(squares: Sequence[Tensor], zero: Tensor) -> Tensor:
    """Sum squared norms. The compiler fuses a few additions with their summands; a stack would have to be written."""
    squares = [square.to(zero.dtype) for square in squares]
    if len(squares) > FEW:
        return torch.stack(list(squares)).sum(0)
    return reduce(torch.add, squares) if squares else zero


def squared_norms(contributions: Sequence[Part]) -> Squares:
    """Return the squared norms [B] of the sum of all contributions to one parameter."""
    if len(contributions) == 2:
        outer, table = (part.form for part in contributions)
        assert isinstance(outer, Outer)
        assert isinstance(table, Rows)
        return joint_squared_norms(outer, table)
    form, method = contributions[0].materialised(), contributions[0].method
    if isinstance(form, Products) and method is not None:
        return form.gram_norms() if method == "gram" else form.direct_norms()
    return form.squared_norms()


def clip_factors(norms: Norms, clip_norms: Tensor, *, assume_finite: bool = False) -> list[Tensor]:
    """Return the factors that clip each example's gradient to its group's clip norm.

    Guarantees, for every example and group:

    - The scaled gradient, as it is rounded and added to the sum, is at most as long as the clip norm.
    - The factor is in [0, 1]; it is exactly 1 where the norm is below the clip norm less the rounding margin.

    Edge cases:

    - norm 0: the factor is 1.
    - masked example: the factor is 0, whatever its gradient holds.
    - norm inf or NaN in any group: the factor is 0 in every group. With ``assume_finite`` it may be NaN, and the sums
      are invalid.
    - empty batch: empty factors.

    Args:
        norms: The norms of the batch.
        clip_norms: [K].
        assume_finite: Look at one group at a time, so that its sum need not wait for the norms of other groups. The
            factors are valid only if all examples are finite.

    Returns:
        The factors [B] of each group.
    """
    is_kept = norms.is_counted if assume_finite else norms.is_usable
    limits = clip_norms * (1 - norms.rounding_margin)  # for all: a norm that seems within the limit may be beyond it
    factors = []
    for k, (raw, scaled) in enumerate(zip(norms.raw, norms.scaled, strict=True)):
        factor = (limits[k] / scaled).clamp(max=1)
        factor = factor if scaled is raw else torch.where(raw <= limits[k], 1, factor)  # 1 rounds nothing
        factors.append(torch.where(is_kept, factor, 0))
    return factors


def clipped_sums(
    parts: Parts,
    bundles: Sequence[Bundle],
    factors: Sequence[Tensor],
    groups: Groups,
    parameters: Mapping[str, Tensor],
    mask: Tensor | None,
    keep: Callable[[str, Tensor], Tensor] = lambda _, total: total,
) -> dict[str, Tensor]:
    """Return each parameter's sum over examples of gradient times factor.

    Args:
        parts: The contributions by parameter.
        bundles: The small gradients among them (`bundled`).
        factors: The clip factors [B] of each group.
        groups: The partition of the parameters.
        parameters: The trainable parameters by name.
        mask: [B]; other examples are left out, even if they hold NaN. Without a mask all examples must be finite.
        keep: Returns what is kept of a sum, as soon as it is known; called in the order of the parameters.
    """
    small: dict[str, Tensor] = {}
    for bundle in bundles:
        rows = bundle.rows if mask is None else keep_examples(bundle.rows, mask)
        total = weighted_rows(factors[bundle.group], rows)
        pieces = total.split(list(bundle.lengths.values()))
        small |= {
            name: piece.to(sum_dtype(parameters[name])).view(parameters[name].shape)
            for name, piece in zip(bundle.lengths, pieces, strict=True)
        }

    def total(name: str) -> Tensor:
        if name in small:
            return small.pop(name)
        return weighted_sum(name, parts[name], factors[groups.members[name]], mask, parameters)

    return {name: keep(name, total(name)) for name in parameters}


def weighted_sum(
    name: str, contributions: Sequence[Part], factors: Tensor, mask: Tensor | None, parameters: Mapping[str, Tensor]
) -> Tensor:
    """Return one parameter's sum over examples of gradient times factor [B], as `clipped_sums` does for all."""
    parameter = parameters[name]
    total = None
    for part in contributions:
        form = part.materialised() if mask is None else part.materialised().masked(mask)
        value = form.weighted_sum(factors)
        if part.source is not None:
            value = derivations.to_parameters(part.source, value, parameters, batched=False)[name]
        value = value.to(sum_dtype(parameter)).view(parameter.shape)
        total = value if total is None else total + value
    return torch.zeros_like(parameter, dtype=sum_dtype(parameter)) if total is None else total
