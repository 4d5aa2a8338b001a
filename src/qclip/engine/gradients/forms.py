"""Forms of per-example gradients: rules return them, and norms and clipped sums are computed from them.

The gradients of B examples are rarely needed as B full tensors. A few forms cover every layer:

- `Outer`: a sum of outer products over positions, as in linear layers (convolutions, with their windows not yet
  unfolded: `qclip.engine.gradients.convolutions`);
- `Rows`: a few rows of a large table, as in embeddings;
- `Dense`: the B gradients themselves.

All arithmetic is in float32 (float64 for float64), whatever the precision of the tensors. Where a sum is computed in
another order than its norm, rounding could make the norm too small for the sum. Such norms have a rounding margin: a
few units of rounding, relative to the summed lengths of the summands. It matters only where the summands nearly cancel.
Native 16-bit elements are rounded once more when they are multiplied by a clip factor, which is not negligible with
many positions: scaled gradients have a bound of their own (`Squares`), and gradients with factor 1 keep their norm.

Shapes: B batch size, G groups of channels, T positions, M x N the two sides of a weight, S entries of a table.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from qclip.engine.kernels.gram import gram_squares, kernel_is_faster, squares_from_matrices
from qclip.engine.kernels.products import (
    ROUNDINGS,
    aligned,
    as_float32,
    chunk,
    is_native,
    keep_examples,
    lengths,
    native_weighted_sum,
    outer_lengths,
    product,
    relative_error_bound,
    rough_product,
    round_up,
    rounding,
    scale_examples,
    scale_natively,
    scaling_error,
    square_sums,
    weighted_rows,
)


class Squares(NamedTuple):
    """The squared norms of B gradients."""

    norms: Tensor
    """[B]: squared norms of the gradients as a sum adds them with factor 1."""
    scaled: Tensor
    """[B]: the same with other factors, divided by their squares; the same tensor where factors round nothing."""

    @staticmethod
    def exact(squares: Tensor) -> "Squares":
        """Return squared norms [B] of gradients that clip factors do not round."""
        return Squares(squares, squares)

    @property
    def is_exact(self) -> bool:
        """Whether clip factors round nothing."""
        return self.scaled is self.norms

    @staticmethod
    def cat(chunks: "Sequence[Squares]") -> "Squares":
        """Concatenate the squared norms of chunks of a batch."""
        norms = torch.cat([squares.norms for squares in chunks])
        if all(squares.is_exact for squares in chunks):
            return Squares.exact(norms)
        return Squares(norms, torch.cat([squares.scaled for squares in chunks]))


class GradientForm(ABC):
    """The gradients of B examples for one parameter."""

    @abstractmethod
    def squared_norms(self) -> Squares:
        """Return the squared norm of each example's gradient."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum of the gradients times the factors [B], in the parameter's shape."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the gradients themselves, [B, *shape]."""

    @abstractmethod
    def masked(self, is_kept: Tensor) -> "GradientForm":
        """Return the form with zeros in the examples where ``is_kept`` [B] is false, even where they hold NaN."""


class Dimensions(NamedTuple):
    """The sizes of a sum of outer products."""

    batch_size: int
    """B."""
    positions: int
    """T."""
    sides: tuple[int, int]
    """M and N of one group of channels."""
    elements: int
    """The number of elements of one example's gradient."""
    unfolded: int = 0
    """The number of elements per example that `Products.outer` writes."""


class Products(GradientForm):
    """A form that is a sum of outer products over positions; there are several ways to compute its norms."""

    @property
    @abstractmethod
    def dims(self) -> Dimensions:
        """The sizes."""

    @property
    @abstractmethod
    def sample(self) -> Tensor:
        """One of the tensors, for device and precision."""

    @property
    def sums_gradients(self) -> bool:
        """Whether a clipped sum forms every gradient again, instead of one product over all examples."""
        return False

    @property
    def in_kernels(self) -> bool:
        """Whether Triton kernels form the gradients and reduce them to norms or a sum in one pass."""
        return False

    @abstractmethod
    def gram_norms(self) -> Squares:
        """Compute norms from T x T Gram matrices of the positions; no gradient is formed."""

    @abstractmethod
    def direct_norms(self) -> Squares:
        """Compute norms from the gradients, formed chunk by chunk and not kept."""

    @abstractmethod
    def outer(self) -> "Outer":
        """Return the same gradients with the outer products written out."""

    def kept(self) -> "Dense":
        """Return the gradients themselves, in the precision they are computed in."""
        return Dense(self.dense())

    def squared_norms(self) -> Squares:
        """Compute norms by the cheaper of the two ways that keep nothing."""
        m, n = self.dims.sides
        return self.gram_norms() if self.dims.positions * (m + n) <= m * n else self.direct_norms()


@dataclass(frozen=True)
class Dense(GradientForm):
    """The gradients of all examples, [B, *shape of the parameter]."""

    grads: Tensor
    squares: Tensor | None = None
    """Their squared norms [B], if known already."""

    def squared_norms(self) -> Squares:
        """Return the squared norms; factors round nothing."""
        return Squares.exact(square_sums(self.grads) if self.squares is None else self.squares)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum of the gradients times the factors [B], in the parameter's shape."""
        if is_native(self.grads):
            return native_weighted_sum(factors, self.grads)
        grads = as_float32(self.grads)
        rows = grads.reshape(len(grads), grads.shape[1:].numel())
        return weighted_rows(factors, rows).view(grads.shape[1:])

    def dense(self) -> Tensor:
        """Return the gradients, [B, *shape]."""
        return as_float32(self.grads)

    def masked(self, is_kept: Tensor) -> "Dense":
        """Return the form with zeros in the other examples."""
        return Dense(keep_examples(self.grads, is_kept))


@dataclass(frozen=True)
class Outer(Products):
    """Sums of outer products: example b's gradient is ``left[b].mT @ right[b]``, [G, M, N], viewed as ``shape``."""

    left: Tensor
    """[B, G, T, M]; for a matrix, M may be padded with zeros."""
    right: Tensor
    """[B, G, T, N]; likewise."""
    shape: torch.Size
    """The parameter's shape, of G M N elements."""

    @cached_property
    def dims(self) -> Dimensions:
        """The sizes; nothing is left to write out."""
        (batch_size, _, positions, m), n = self.left.shape, self.right.shape[3]
        return Dimensions(batch_size, positions, (m, n), self.shape.numel())

    @property
    def sample(self) -> Tensor:
        """The left side."""
        return self.left

    @cached_property
    def scaling_error(self) -> float:
        """The relative error of a scaled summand; 0 if factors round nothing."""
        return scaling_error(self.left, self.right)

    def sizes(self) -> Tensor:
        """Return the summed lengths of the outer products [B], which no rounding error exceeds by much."""
        return outer_lengths(self.left, self.right).sum((1, 2))

    def squared_norms(self) -> Squares:
        """Compute norms by the cheapest way that keeps nothing: with one position, from the lengths of both sides."""
        if self.dims.positions != 1:
            return super().squared_norms()
        squares = outer_lengths(self.left, self.right).square().sum((1, 2))
        return self._bounds(squares, self.sizes(), 0.0) if self.scaling_error else Squares.exact(squares)

    def gram_norms(self) -> Squares:
        """Compute norms from T x T Gram matrices of the positions; no gradient is formed."""
        if kernel_is_faster(self.left[:, 0], self.right[:, 0]):  # which writes no Gram matrices
            return self._gram_norms(self.left, self.right)
        step = chunk(self.left.shape[1] * self.dims.positions**2, self.left)
        pairs = zip(self.left.split(step), self.right.split(step), strict=True)
        return Squares.cat([self._gram_norms(left, right) for left, right in pairs])

    def direct_norms(self) -> Squares:
        """Compute norms from the gradients, formed chunk by chunk and not kept."""
        step = chunk(self.shape.numel(), self.left)
        pairs = zip(self.left.split(step), self.right.split(step), strict=True)
        squares = torch.cat([square_sums(product(aligned(left).mT, aligned(right))) for left, right in pairs])
        return self._bounds(squares, self.sizes(), relative_error_bound(self.left))

    def _gram_norms(self, left: Tensor, right: Tensor) -> Squares:
        """Compute the norms of one chunk."""
        squares, sizes = _gram(left, right)
        # Products of products round relative to the squared sizes: a norm far below them is not resolved.
        squares = squares.clamp(min=0) + ROUNDINGS * rounding(sizes) * sizes.square()
        error = relative_error_bound(left)
        return self._bounds(squares, sizes, error if error > ROUNDINGS * rounding(sizes) else 0.0)

    def _bounds(self, squares: Tensor, sizes: Tensor, relative_error: float) -> Squares:
        """Add the rounding margins for errors of the summands, and for the rounding of scaled ones."""
        norms = round_up(squares, sizes, relative_error) if relative_error else squares
        if not self.scaling_error:
            return Squares.exact(norms)
        return Squares(norms, round_up(norms, sizes, self.scaling_error))

    def outer(self) -> "Outer":
        """Return the form itself."""
        return self

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum of the gradients times the factors [B], by one product per group of channels."""
        left, right = self.left, self.right
        if left.numel() <= right.numel():
            left = scale_natively(left, factors)
        else:
            right = scale_natively(right, factors)
        left, right = (aligned(x).transpose(0, 1).flatten(1, 2) for x in (left, right))  # [G, B T, .]
        return self._unpadded(product(left.mT, right)).reshape(self.shape)

    def dense(self) -> Tensor:
        """Return the gradients, [B, *shape]."""
        return self._unpadded(product(self.left.mT, self.right)).reshape(-1, *self.shape)

    def _unpadded(self, grads: Tensor) -> Tensor:
        """Return [..., M, N] without the rows and columns that were added for alignment."""
        m, n = self.shape if len(self.shape) == 2 and self.left.shape[1] == 1 else self.dims.sides
        return grads[..., :m, :n]

    def kept(self) -> Dense:
        """Return the gradients themselves, in the precision they are computed in."""
        grads = rough_product(aligned(self.left).mT, aligned(self.right))
        return Dense(self._unpadded(grads).reshape(-1, *self.shape))

    def masked(self, is_kept: Tensor) -> "Outer":
        """Return the form with zeros in the other examples."""
        return Outer(keep_examples(self.left, is_kept), keep_examples(self.right, is_kept), self.shape)

    @property
    def mT(self) -> "Outer":
        """The same gradients for the transposed parameter, which must be a matrix with one group."""
        return Outer(self.right, self.left, torch.Size(reversed(self.shape)))


@dataclass(frozen=True)
class Rows(GradientForm):
    """A few rows of a table: example b's gradient has ``grads[b, s]`` added to row ``ids[b, s]``, for every s."""

    ids: Tensor
    """[B, S]."""
    grads: Tensor
    """[B, S, *row]."""
    shape: torch.Size
    """The table's shape, [number of rows, *row]."""

    def squared_norms(self) -> Squares:
        """Compute norms by sorting the entries and adding those that share a row; no S x S matrix, no one-hot."""
        batch_size, entries = self.ids.shape
        if entries == 0:
            return Squares.exact(torch.zeros(batch_size, dtype=as_float32(self.grads).dtype, device=self.grads.device))
        ids, order = self.ids.sort(dim=1)
        first = torch.arange(batch_size, device=ids.device)[:, None] * entries
        segments = torch.zeros_like(ids)
        segments[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
        rows = as_float32(self.grads).reshape(batch_size * entries, self.shape[1:].numel())
        summed = torch.zeros_like(rows).index_add(0, (segments + first).flatten(), rows[(order + first).flatten()])
        squares = square_sums(summed.view(batch_size, entries * rows.shape[1]))
        return Squares.exact(round_up(squares, self.sizes(), ROUNDINGS * rounding(squares)))

    def sizes(self) -> Tensor:
        """Return the summed lengths of the rows [B], repeated rows one by one."""
        return lengths(self.grads.reshape(*self.ids.shape, self.shape[1:].numel())).sum(1)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum of the gradients times the factors [B], in the table's shape."""
        rows = scale_examples(self.grads, factors).flatten(0, 1)
        return torch.zeros(self.shape, dtype=rows.dtype, device=rows.device).index_add(0, self.ids.flatten(), rows)

    def dense(self) -> Tensor:
        """Return the gradients, [B, *shape]."""
        batch_size, rows = self.ids.shape[0], as_float32(self.grads).flatten(0, 1)
        table = torch.zeros(batch_size * self.shape[0], *self.shape[1:], dtype=rows.dtype, device=rows.device)
        keys = self.ids + torch.arange(batch_size, device=self.ids.device)[:, None] * self.shape[0]
        return table.index_add(0, keys.flatten(), rows).view(batch_size, *self.shape)

    def masked(self, is_kept: Tensor) -> "Rows":
        """Return the form with zeros in the other examples."""
        return Rows(self.ids, keep_examples(self.grads, is_kept), self.shape)


def joint_squared_norms(outer: Outer, table: Rows) -> Squares:
    """Return the squared norms of the sum of both, as for the tied weight of embedding and head.

    Args:
        outer: Outer products of a matrix (G = 1).
        table: Rows of the same matrix.
    """
    left, right = outer.left.squeeze(1), outer.right.squeeze(1)
    # The cross term: row s of the table meets position t of the product as left[t, id_s] (right[t] . grad_s).
    picked = as_float32(left.gather(2, table.ids[:, None, :].expand(-1, left.shape[1], -1)))
    cross = (picked * product(right, table.grads.mT)).sum((1, 2))
    sizes = outer.sizes() * table.sizes()
    error, (own, scaled), rows = relative_error_bound(outer.left), outer.squared_norms(), table.squared_norms().norms
    norms = own + rows + 2 * (cross + error * sizes)
    if not outer.scaling_error:
        return Squares.exact(norms)
    return Squares(norms, scaled + rows + 2 * (cross + (error + outer.scaling_error) * sizes))


def join(forms: Sequence[GradientForm]) -> list[GradientForm]:
    """Join several gradients of one parameter into one form, or into one `Outer` and one `Rows`."""
    outers = [form.outer() for form in forms if isinstance(form, Products)]
    tables = [form for form in forms if isinstance(form, Rows)]
    if len(outers) + len(tables) < len(forms) or (tables and not all(map(_is_matrix, outers))):
        total = forms[0].dense()
        for form in forms[1:]:
            total = total + form.dense()
        return [Dense(total)]
    return [*([join_outers(outers)] if outers else []), *([join_rows(tables)] if tables else [])]


def _is_matrix(outer: Outer) -> bool:
    return len(outer.shape) == 2 and outer.left.shape[1] == 1


def join_outers(forms: Sequence[Outer]) -> Outer:
    """Join the uses of one weight into one sum over more positions."""
    if len(forms) == 1:
        return forms[0]
    lefts, rights = [as_float32(form.left) for form in forms], [as_float32(form.right) for form in forms]
    return Outer(torch.cat(lefts, 2), torch.cat(rights, 2), forms[0].shape)


def join_rows(forms: Sequence[Rows]) -> Rows:
    """Join the lookups of one table into one with more entries."""
    if len(forms) == 1:
        return forms[0]
    ids, grads = [form.ids for form in forms], [as_float32(form.grads) for form in forms]
    return Rows(torch.cat(ids, 1), torch.cat(grads, 1), forms[0].shape)


def _gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared norms [B], without a rounding margin, and the summed lengths of the outer products [B]."""
    groups = left.shape[:2]
    lefts, rights = left.flatten(0, 1), right.flatten(0, 1)
    compute = gram_squares if kernel_is_faster(lefts, rights) else squares_from_matrices
    squares, sizes = (x.view(groups).sum(1) for x in compute(lefts, rights))
    return squares, sizes
