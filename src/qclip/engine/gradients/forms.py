"""Forms of a per-example gradient: what a rule returns, and what norms and clipped sums are computed from.

A gradient of B examples is rarely needed as B full tensors. A few forms cover every layer:

- `Outer`: a sum of outer products over positions, as in linear layers (and, with its windows not yet cut out, in
  convolutions: `qclip.engine.gradients.convolutions`);
- `Rows`: a few rows of a large table, as in embeddings;
- `Dense`: the B gradients themselves.

All arithmetic is in float32 (float64 for float64), whatever the precision of the tensors. Where a sum is computed in
another order than its norm, rounding could make the norm too small for it: such norms are taken from above, by a few
units of rounding of the summands' sizes. That matters only where the summands nearly cancel. Native 16-bit numbers are
rounded once more when they are multiplied by a clip factor, which is no longer negligible where there are many of them:
what is scaled has a bound of its own (`Squares`), and what is not keeps its norm.

Shapes: B examples, G groups of channels, T positions, M x N the two sides of a weight.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qclip.engine.kernels.gram import gram_squares, squares_from_matrices, wins
from qclip.engine.kernels.products import (
    ROUNDINGS,
    aligned,
    doubt,
    full,
    is_native,
    native_weighted_sum,
    product,
    rough_product,
    rounding,
    weighted_rows,
)

CHUNK_BYTES: Final = 2**26
"""How much memory a product that is thrown away at once may take on a CPU."""
CHUNK_SHARE: Final = 128
"""Which part of a GPU's memory it may take there: in a compiled step every chunk is more to compile."""
STRETCH: Final = 256
"""How many squares are added up at once."""


def keep_examples(x: Tensor, keep: Tensor) -> Tensor:
    """Zero in the examples that are not kept, even where they hold NaN."""
    return torch.where(keep.view(-1, *[1] * (x.dim() - 1)), x, 0)


def scale_examples(x: Tensor, factors: Tensor) -> Tensor:
    """Each example times its factor."""
    x = full(x)
    return x * factors.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


def square_sums(x: Tensor) -> Tensor:
    """The sum of squares of each example, [B]."""
    return lengths(x.flatten(1)).square() if x.dim() > 1 else full(x).square()


class Squares(NamedTuple):
    """The squared norms of B gradients."""

    norms: Tensor
    """[B]: of what is added up at a factor of 1."""
    scaled: Tensor
    """[B]: of what is added up at other factors, divided by them; the same tensor where these round nothing."""

    @staticmethod
    def exact(squares: Tensor) -> "Squares":
        """Where factors round nothing."""
        return Squares(squares, squares)

    @property
    def is_exact(self) -> bool:
        """Whether factors round nothing."""
        return self.scaled is self.norms

    @staticmethod
    def cat(found: "Sequence[Squares]") -> "Squares":
        """Of all their examples."""
        norms = torch.cat([each.norms for each in found])
        if all(each.is_exact for each in found):
            return Squares.exact(norms)
        return Squares(norms, torch.cat([each.scaled for each in found]))


class Form(ABC):
    """The gradients of B examples for one parameter."""

    @abstractmethod
    def squared_norms(self) -> Squares:
        """Of each example."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> Tensor:
        """The sum of the gradients times the factors, of the parameter's shape."""

    @abstractmethod
    def dense(self) -> Tensor:
        """[B, *shape]."""

    @abstractmethod
    def masked(self, keep: Tensor) -> "Form":
        """Zero for the examples that are not kept, even where they hold NaN."""


class Products(Form):
    """Forms that are sums of outer products over positions, whose norms can be had in several ways."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many numbers one example's gradient has."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """One of its tensors, to know device and precision by."""

    @property
    @abstractmethod
    def examples(self) -> int:
        """B."""

    @property
    @abstractmethod
    def positions(self) -> int:
        """T."""

    @property
    @abstractmethod
    def sides(self) -> tuple[int, int]:
        """M and N."""

    @property
    @abstractmethod
    def spelled_out(self) -> int:
        """How many numbers per example `outer` has to write."""

    @property
    def sums_gradients(self) -> bool:
        """Whether a clipped sum forms every gradient anew, instead of one product over all examples."""
        return False

    @property
    def in_kernels(self) -> bool:
        """Whether kernels of a GPU form the gradients and take their norms or sum in one go."""
        return False

    @abstractmethod
    def gram_norms(self) -> Squares:
        """From the T x T products of the positions with one another; never forms a gradient."""

    @abstractmethod
    def direct_norms(self) -> Squares:
        """From the gradients, formed a few at a time and thrown away."""

    @abstractmethod
    def outer(self) -> "Outer":
        """The same gradients, spelled out."""

    def kept(self) -> "Dense":
        """The gradients themselves, in the precision they are computed in."""
        return Dense(self.dense())


@dataclass(frozen=True)
class Dense(Form):
    """The gradients of all examples, one tensor of the parameter's shape each: [B, *shape]."""

    grads: Tensor
    squares: Tensor | None = None
    """Their squared norms [B], where they are known already."""

    def squared_norms(self) -> Squares:
        """Of each example; factors are not rounded."""
        return Squares.exact(square_sums(self.grads) if self.squares is None else self.squares)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """The sum of the gradients times the factors, of the parameter's shape."""
        if is_native(self.grads):
            return native_weighted_sum(factors, self.grads)
        grads = full(self.grads)
        rows = grads.reshape(len(grads), grads.shape[1:].numel())
        return weighted_rows(factors, rows).view(grads.shape[1:])

    def dense(self) -> Tensor:
        """[B, *shape]."""
        return full(self.grads)

    def masked(self, keep: Tensor) -> "Dense":
        """Zero for the examples that are not kept."""
        return Dense(keep_examples(self.grads, keep))


@dataclass(frozen=True)
class Outer(Products):
    """Sums of outer products: example b's gradient is ``left[b].mT @ right[b]``, as [G, M, N], seen in ``shape``."""

    left: Tensor
    """[B, G, T, M]; for a matrix, M may be more than its side, by zeros."""
    right: Tensor
    """[B, G, T, N]; likewise."""
    shape: torch.Size
    """The parameter's own shape, G M N numbers."""

    @property
    def positions(self) -> int:
        """T."""
        return self.left.shape[2]

    @property
    def sides(self) -> tuple[int, int]:
        """M and N."""
        return self.left.shape[3], self.right.shape[3]

    @property
    def size(self) -> int:
        """G M N."""
        return self.shape.numel()

    @property
    def like(self) -> Tensor:
        """One of its tensors."""
        return self.left

    @property
    def examples(self) -> int:
        """B."""
        return len(self.left)

    @property
    def spelled_out(self) -> int:
        """Nothing to write."""
        return 0

    @property
    def rounding(self) -> float:
        """How much a factor can change the summands by being rounded together with them, relative to their sizes."""
        return max(rounding(x) if is_native(x) else 0.0 for x in (self.left, self.right))

    def sizes(self) -> Tensor:
        """[B]: the sum of the lengths of the outer products, which no rounding error exceeds by much."""
        return (lengths(self.left) * lengths(self.right)).sum((1, 2))

    def squared_norms(self) -> Squares:
        """By the cheaper of the two ways that keep nothing."""
        m, n = self.sides
        if self.positions == 1:
            squares = (lengths(self.left) * lengths(self.right)).square().sum((1, 2))
            return self._bounds(squares, self.sizes(), 0.0) if self.rounding else Squares.exact(squares)
        return self.gram_norms() if self.positions * (m + n) <= m * n else self.direct_norms()

    def gram_norms(self) -> Squares:
        """From the T x T products of the positions with one another; never forms a gradient."""
        if wins(self.left[:, 0], self.right[:, 0]):  # and writes no products
            return self._gram_norms(self.left, self.right)
        step = chunk(self.left.shape[1] * self.positions**2, self.left)
        pairs = zip(self.left.split(step), self.right.split(step), strict=True)
        return Squares.cat([self._gram_norms(left, right) for left, right in pairs])

    def direct_norms(self) -> Squares:
        """From the gradients, formed a few at a time and thrown away."""
        step = chunk(self.shape.numel(), self.left)
        pairs = zip(self.left.split(step), self.right.split(step), strict=True)
        squares = torch.cat([square_sums(product(aligned(left).mT, aligned(right))) for left, right in pairs])
        return self._bounds(squares, self.sizes(), doubt(self.left))

    def _gram_norms(self, left: Tensor, right: Tensor) -> Squares:
        """Of some examples."""
        squares, sizes = _gram(left, right)
        # Products of products round relative to the squared sizes: a norm far below them is not resolved.
        squares = squares.clamp(min=0) + ROUNDINGS * rounding(sizes) * sizes.square()
        rough = doubt(left)
        return self._bounds(squares, sizes, rough if rough > ROUNDINGS * rounding(sizes) else 0.0)

    def _bounds(self, squares: Tensor, sizes: Tensor, rough: float) -> Squares:
        """With room for summands of these sizes that are off by this much, and by more when they are scaled."""
        norms = from_above(squares, sizes, rough) if rough else squares
        return Squares(norms, from_above(norms, sizes, self.rounding)) if self.rounding else Squares.exact(norms)

    def outer(self) -> "Outer":
        """Itself."""
        return self

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """The sum of the gradients times the factors, by one product per group of channels."""
        left, right = self.left, self.right
        if left.numel() <= right.numel():
            left = _scaled(left, factors)
        else:
            right = _scaled(right, factors)
        left, right = (aligned(x).transpose(0, 1).flatten(1, 2) for x in (left, right))  # [G, B T, .]
        return self._cut(product(left.mT, right)).reshape(self.shape)

    def dense(self) -> Tensor:
        """[B, *shape]."""
        return self._cut(product(self.left.mT, self.right)).reshape(-1, *self.shape)

    def _cut(self, found: Tensor) -> Tensor:
        """[..., M, N] without what was added for alignment."""
        m, n = self.shape if len(self.shape) == 2 and self.left.shape[1] == 1 else self.sides
        return found[..., :m, :n]

    def kept(self) -> Dense:
        """The gradients themselves, in the precision they are computed in."""
        found = rough_product(aligned(self.left).mT, aligned(self.right))
        return Dense(self._cut(found).reshape(-1, *self.shape))

    def masked(self, keep: Tensor) -> "Outer":
        """Zero for the examples that are not kept."""
        return Outer(keep_examples(self.left, keep), keep_examples(self.right, keep), self.shape)

    @property
    def mT(self) -> "Outer":
        """The same gradients for the transposed parameter; needs one group and two sides."""
        return Outer(self.right, self.left, torch.Size(reversed(self.shape)))


@dataclass(frozen=True)
class Rows(Form):
    """A few rows of a table: example b's gradient has ``grads[b, s]`` added to row ``ids[b, s]``, for every s."""

    ids: Tensor
    """[B, S]."""
    grads: Tensor
    """[B, S, *row]."""
    shape: torch.Size
    """The table's shape, [number of rows, *row]."""

    def squared_norms(self) -> Squares:
        """By sorting the entries and adding up those that share a row; no S x S, no one-hot."""
        count, entries = self.ids.shape
        if entries == 0:
            return Squares.exact(torch.zeros(count, dtype=full(self.grads).dtype, device=self.grads.device))
        ids, order = self.ids.sort(dim=1)
        first = torch.arange(count, device=ids.device)[:, None] * entries
        segments = torch.zeros_like(ids)
        segments[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
        rows = full(self.grads).reshape(count * entries, self.shape[1:].numel())
        summed = torch.zeros_like(rows).index_add(0, (segments + first).flatten(), rows[(order + first).flatten()])
        squares = square_sums(summed.view(count, entries * rows.shape[1]))
        return Squares.exact(from_above(squares, self.sizes(), ROUNDINGS * rounding(squares)))

    def sizes(self) -> Tensor:
        """[B]: the sum of the lengths of the rows, repeated ones one by one."""
        return lengths(self.grads.reshape(*self.ids.shape, self.shape[1:].numel())).sum(1)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """The sum of the gradients times the factors."""
        rows = scale_examples(self.grads, factors).flatten(0, 1)
        return torch.zeros(self.shape, dtype=rows.dtype, device=rows.device).index_add(0, self.ids.flatten(), rows)

    def dense(self) -> Tensor:
        """[B, *shape]."""
        count, rows = self.ids.shape[0], full(self.grads).flatten(0, 1)
        table = torch.zeros(count * self.shape[0], *self.shape[1:], dtype=rows.dtype, device=rows.device)
        keys = self.ids + torch.arange(count, device=self.ids.device)[:, None] * self.shape[0]
        return table.index_add(0, keys.flatten(), rows).view(count, *self.shape)

    def masked(self, keep: Tensor) -> "Rows":
        """Zero for the examples that are not kept."""
        return Rows(self.ids, keep_examples(self.grads, keep), self.shape)


def joint_squared_norms(outer: Outer, table: Rows) -> Squares:
    """Of a sum of both, as for the weight of a tied embedding and head, cross term included."""
    left, right = outer.left.squeeze(1), outer.right.squeeze(1)
    # Row s of the table meets position t of the product as left[t, id_s] (right[t] . grad_s).
    picked = full(left.gather(2, table.ids[:, None, :].expand(-1, left.shape[1], -1)))
    cross = (picked * product(right, table.grads.mT)).sum((1, 2))
    sizes = outer.sizes() * table.sizes()
    rough, (own, scaled), rows = doubt(outer.left), outer.squared_norms(), table.squared_norms().norms
    norms = own + rows + 2 * (cross + rough * sizes)
    if not outer.rounding:
        return Squares.exact(norms)
    return Squares(norms, scaled + rows + 2 * (cross + (rough + outer.rounding) * sizes))


def join(forms: Sequence[Form]) -> list[Form]:
    """Several gradients of one parameter as one form, or as one sum of outer products and one table that meet in it."""
    outers = [form.outer() for form in forms if isinstance(form, Products)]
    tables = [form for form in forms if isinstance(form, Rows)]
    if len(outers) + len(tables) < len(forms) or (tables and not all(map(_is_matrix, outers))):
        total = forms[0].dense()
        for form in forms[1:]:
            total = total + form.dense()
        return [Dense(total)]
    joined: list[Form] = []
    if outers:
        joined.append(join_outers(outers))
    if tables:
        joined.append(join_rows(tables))
    return joined


def _is_matrix(outer: Outer) -> bool:
    return len(outer.shape) == 2 and outer.left.shape[1] == 1


def join_outers(forms: Sequence[Outer]) -> Outer:
    """A weight used several times is one sum over more positions."""
    if len(forms) == 1:
        return forms[0]
    left, right = (
        torch.cat([full(side) for side in sides], 2) for sides in zip(*[(f.left, f.right) for f in forms], strict=True)
    )
    return Outer(left, right, forms[0].shape)


def join_rows(forms: Sequence[Rows]) -> Rows:
    """A table looked up several times is one table with more entries."""
    if len(forms) == 1:
        return forms[0]
    return Rows(torch.cat([f.ids for f in forms], 1), torch.cat([full(f.grads) for f in forms], 1), forms[0].shape)


def chunk(numbers_each: int, like: Tensor) -> int:
    """How many examples with so many numbers fit the memory for throw-away products of such tensors."""
    available = CHUNK_BYTES
    if like.is_cuda:
        available = torch.cuda.get_device_properties(like.device).total_memory // CHUNK_SHARE
    return max(1, available // (4 * max(1, numbers_each)))


def lengths(x: Tensor) -> Tensor:
    """The length of every row.

    Of long ones it is the length of the lengths of their parts: a CPU adds the squares of a row up one after the other,
    in a few sums, which leaves a row of 10 million float32 numbers up to a hundredth too short.
    """
    x = full(x)
    while (count := x.shape[-1]) > STRETCH:
        whole = count - count % STRETCH
        found = torch.linalg.vector_norm(x[..., :whole].unflatten(-1, (whole // STRETCH, STRETCH)), dim=-1)
        rest = torch.linalg.vector_norm(x[..., whole:], dim=-1, keepdim=True)
        x = torch.cat([found, rest], -1) if whole < count else found
    return torch.linalg.vector_norm(x, dim=-1)


def from_above(squares: Tensor, sizes: Tensor, doubt: float) -> Tensor:
    """Squared norms with room for summands of these sizes that are off by this much of them."""
    return (squares.sqrt() + doubt * sizes).square()


def _scaled(x: Tensor, factors: Tensor) -> Tensor:
    """Each example times its factor; native 16-bit numbers stay what they are, rounded."""
    scaled = scale_examples(x, factors)
    return scaled.to(x.dtype) if is_native(x) else scaled


def _gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms [B], as they come out, and the sums of the lengths of the outer products."""
    groups = left.shape[:2]
    lefts, rights = left.flatten(0, 1), right.flatten(0, 1)
    found = gram_squares(lefts, rights) if wins(lefts, rights) else squares_from_matrices(lefts, rights)
    squares, sizes = (x.view(groups).sum(1) for x in found)
    return squares, sizes
