"""Layouts: which part of a tensor belongs to which example.

Every layout has one view of a tensor in common: ``[B, *what the function would see if it were called on one
example]``. Rules and fallbacks only ever see that view, so a time-first or flattened model needs no code of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """One dimension holds the examples, such as the first ``[B, T, d]`` or the second ``[T, B, d]``."""

    axis: int

    def holds(self, x: Tensor, batch_size: int) -> bool:
        """Whether the tensor has the dimension."""
        return x.dim() > self.axis and x.shape[self.axis] == batch_size

    def by_example(self, x: Tensor, batch_size: int) -> Tensor:
        """[B, *shape of one example, with its dimension of length 1]."""
        return x.movedim(self.axis, 0).unsqueeze(self.axis + 1)


@dataclass(frozen=True)
class Flat:
    """The first dimension holds several rows of every example: example by example, or (``interleaved``) row by row."""

    rows: int
    """How many rows each example has."""
    interleaved: bool = False

    def holds(self, x: Tensor, batch_size: int) -> bool:
        """Whether the tensor has that many rows."""
        return x.dim() > 0 and x.shape[0] == batch_size * self.rows

    def by_example(self, x: Tensor, batch_size: int) -> Tensor:
        """[B, rows, ...]."""
        if self.interleaved:
            return x.unflatten(0, (self.rows, batch_size)).movedim(1, 0)
        return x.unflatten(0, (batch_size, self.rows))


@dataclass(frozen=True)
class Single:
    """A batch of one example, which owns everything."""

    def holds(self, x: Tensor, batch_size: int) -> bool:
        """Always."""
        return True

    def by_example(self, x: Tensor, batch_size: int) -> Tensor:
        """[1, *shape]."""
        return x.unsqueeze(0)


Layout = Axis | Flat | Single


def relative(lengths: Iterable[int], batch_size: int) -> tuple[Any, ...]:
    """Lengths with the batch's taken out, so that batches of other sizes that do the same look the same.

    A length that has nothing to do with the batch and equals it by chance makes two batches look different, not alike.

    >>> relative((32, 64, 10), 32), relative((30, 64, 10), 30)
    ((('batch', 1), ('batch', 2), 10), (('batch', 1), 64, 10))
    """
    if batch_size == 1:  # every length is a multiple; one example is a kind of its own
        return ("one", *lengths)
    return tuple(("batch", k // batch_size) if k and k % batch_size == 0 else k for k in lengths)


def candidates(shape: torch.Size, batch_size: int) -> Iterator[Layout]:
    """Every layout that the sizes admit, the most usual first. Sizes decide nothing: see `qclip.engine.proof.proof`."""
    if batch_size == 1:
        yield Single()
        return
    for axis, length in enumerate(shape):
        if length == batch_size:
            yield Axis(axis)
    if shape and shape[0] > batch_size and shape[0] % batch_size == 0:
        yield Flat(shape[0] // batch_size)
        yield Flat(shape[0] // batch_size, interleaved=True)
