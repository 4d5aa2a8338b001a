"""What a data set is made of: which items of which data sets lie below Subset, ConcatDataset and Repeated."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset

from qclip.rows import Repeated

Places = NDArray[np.intp] | None
"""Indices; None for all, in order."""


@dataclass(frozen=True)
class Part:
    """Items of one data set, in order, and where they stand in the whole."""

    base: Dataset[Any]
    indices: Places
    positions: Places


def parts(dataset: Dataset[Any]) -> Iterator[Part]:
    """The data sets that this one is put together from, each with the items of it that are used.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> numbers = TensorDataset(torch.arange(5))
    >>> [part.indices for part in parts(Subset(Subset(numbers, [4, 2, 0]), [-1, 0]))]
    [array([0, 4])]
    """
    return _below(dataset, None, None)


def _below(dataset: Dataset[Any], used: Places, positions: Places) -> Iterator[Part]:
    if isinstance(dataset, Repeated):
        yield from _below(dataset.dataset, used, positions)
    elif isinstance(dataset, Subset) and (chosen := _whole_numbers(dataset)) is not None:
        yield from _below(dataset.dataset, _at(chosen, used), positions)
    elif isinstance(dataset, ConcatDataset):
        ends = dataset.cumulative_sizes
        used = np.arange(ends[-1]) if used is None else used
        positions = np.arange(len(used)) if positions is None else positions
        for child, start, end in zip(dataset.datasets, [0, *ends], ends, strict=False):
            inside = (start <= used) & (used < end)
            yield from _below(child, used[inside] - start, positions[inside])
    else:
        yield Part(dataset, used, positions)


def _whole_numbers(subset: Subset[Any]) -> NDArray[np.intp] | None:
    """The indices of a subset, counted from the front; None where they are something else, such as names."""
    given = np.asarray(subset.indices)
    if given.dtype.kind not in "iu":
        return None
    size = len(subset.dataset)  # type: ignore[arg-type]
    return np.where(given < 0, given + size, given)


def _at(values: NDArray[np.intp], places: Places) -> NDArray[np.intp]:
    return values if places is None else values[places]
