"""Layouts: which rows of a tensor belong to which example.

All layouts share one view of a tensor: ``[B, *shape of the function's argument for one example]``. Rules and fallbacks
only see that view, so a time-first or flattened model needs no code of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """One dimension is the batch, such as the first of ``[B, T, d]`` or the second of ``[T, B, d]``."""

    axis: int

    def holds(self, x: Tensor, batch_size: int) -> bool:
        """Return whether the tensor has the batch dimension."""
        return x.dim() > self.axis and x.shape[self.axis] == batch_size

    def by_example(self, x: Tensor, batch_size: int) -> Tensor:
        """Return the view [B, *shape of one example, with a batch dimension of length 1]."""
        return x.movedim(self.axis, 0).unsqueeze(self.axis + 1)


@dataclass(frozen=True)
class Flat:
    """The first dimension holds several rows of every example: example by example, or row by row (``interleaved``)."""

    rows: int
    """The number of rows of each example."""
    interleaved: bool = False

    def holds(self, x: Tensor, batch_size: int) -> bool:
        """Return whether the tensor has this many rows per example."""
        return x.dim() > 0 and x.shape[0] == batch_size * self.rows

    def by_example(self, x: Tensor, batch_size: int) -> Tensor:
        """Return the view [B, rows, ...]."""
        if self.interleaved:
            return x.unflatten(0, (self.rows, batch_size)).movedim(1, 0)
        return x.unflatten(0, (batch_size, self.rows))


@dataclass(frozen=True)
class Single:
    """A batch of one example, which owns everything."""

    def holds(self, x: Tensor, batch_size: int) -> bool:
        """Return True: every tensor belongs to the one example."""
        return True

    def by_example(self, x: Tensor, batch_size: int) -> Tensor:
        """Return the view [1, *shape]."""
        return x.unsqueeze(0)


@dataclass(frozen=True)
class Routed:
    """The first dimension holds several rows of every example, moved to where data decided."""

    rows: int
    """The number of rows of each example."""
    order: Tensor = field(compare=False)
    """Indices that put the rows back, example by example; others at every pass."""

    def holds(self, x: Tensor, batch_size: int) -> bool:
        """Return whether the tensor has this many rows per example."""
        return x.dim() > 0 and x.shape[0] == batch_size * self.rows

    def by_example(self, x: Tensor, batch_size: int) -> Tensor:
        """Return a copy [B, rows, ...]."""
        return x[self.order].unflatten(0, (batch_size, self.rows))


Layout = Axis | Flat | Single | Routed


def placed(layout: Layout, length: int, order: Tensor | None, batch_size: int) -> Layout:
    """Return a layout of another pass for a tensor whose rows an order puts back; without one they are in place."""
    if isinstance(layout, Single) or (order is None and not isinstance(layout, Routed)):
        return layout
    return Flat(length // batch_size) if order is None else Routed(length // batch_size, order)


def is_interleaved(layout: Layout) -> bool:
    """Return whether rows of other examples lie between those of one."""
    return isinstance(layout, Flat) and layout.interleaved


def relative(lengths: Iterable[int], batch_size: int) -> tuple[Any, ...]:
    """Replace multiples of the batch size among the lengths, so that equal passes of other batch sizes look equal.

    A length that is a multiple by chance makes two batches look different, never equal.

    >>> relative((32, 64, 10), 32), relative((30, 64, 10), 30)
    ((('batch', 1), ('batch', 2), 10), (('batch', 1), 64, 10))
    """
    if batch_size == 1:  # every length is a multiple of 1: one example is a kind of its own
        return ("one", *lengths)
    return tuple(("batch", k // batch_size) if k and k % batch_size == 0 else k for k in lengths)


def candidates(shape: torch.Size, batch_size: int, order: Tensor | None = None) -> Iterator[Layout]:
    """Yield every layout that the sizes admit, the most usual first; `qclip.engine.proof.proof` decides among them.

    Args:
        shape: The shape of the output of a site.
        batch_size: B.
        order: Where data have moved rows: the indices that put them back.
    """
    if batch_size == 1:
        yield Single()
        return
    if order is not None:
        yield Routed(len(order) // batch_size, order)
        return
    for axis, length in enumerate(shape):
        if length == batch_size:
            yield Axis(axis)
    if shape and shape[0] > batch_size and shape[0] % batch_size == 0:
        yield Flat(shape[0] // batch_size)
        yield Flat(shape[0] // batch_size, interleaved=True)
