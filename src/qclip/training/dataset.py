"""Data sets: their number of examples, and the base data sets below Subset, ConcatDataset and Repeated."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from qclip import _validate as check
from qclip._validate import Refusal
from qclip.training.rows import Repeated

Indices = NDArray[np.intp] | None
"""Indices of items; None for all items, in order."""


def dataset_size(source: Dataset[Any] | DataLoader[Any]) -> int:
    """Return the number of examples of a data set or a DataLoader; refuse one that cannot be sampled by index."""
    dataset = dataset_of(source)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        remedy = "Poisson sampling reads examples by index"
        raise check.refuse("dataset", type(dataset).__name__, "map-style, with __len__ and __getitem__", remedy)
    if isinstance(source, DataLoader):
        batches = source.batch_sampler
        sampler = batches.sampler if type(batches) is BatchSampler else batches
        if type(sampler) not in (RandomSampler, SequentialSampler):
            raise Refusal(
                f"dataset is a DataLoader with {type(sampler).__name__}, which Poisson sampling would replace: leave "
                "the sampler out; to select examples, each once, use torch.utils.data.Subset"
            )
    if len(dataset) == 0:
        raise Refusal("dataset is empty: it must have at least one example; check where it was read from")
    return len(dataset)


def dataset_of(source: Dataset[Any] | DataLoader[Any]) -> Dataset[Any]:
    """Return the data set of a DataLoader, or the data set itself."""
    return source.dataset if isinstance(source, DataLoader) else source


def reads_lists(dataset: Any) -> bool:
    """Return whether a data set has ``__getitems__``, which reads a list of items at once.

    A plain Subset has the method always and passes the list on, so the data set inside it decides.
    """
    if type(dataset) is Subset:
        return reads_lists(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


@dataclass(frozen=True)
class DatasetPart:
    """The items of one base data set, in order, and their positions in the whole data set."""

    base: Dataset[Any]
    indices: Indices
    positions: Indices


def dataset_parts(dataset: Dataset[Any]) -> Iterator[DatasetPart]:
    """Yield the base data sets that a data set is composed of, each with the indices of its items in use.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> numbers = TensorDataset(torch.arange(5))
    >>> [part.indices for part in dataset_parts(Subset(Subset(numbers, [4, 2, 0]), [-1, 0]))]
    [array([0, 4])]
    """
    return _parts_below(dataset, None, None)


def refuse_repeated(dataset: Dataset[Any]) -> None:
    """Refuse a data set that holds an item several times: each copy would contribute, and only one is accounted for."""
    parts_by_base: dict[int, list[DatasetPart]] = {}
    for part in dataset_parts(dataset):
        parts_by_base.setdefault(id(part.base), []).append(part)
    for parts in parts_by_base.values():
        indices = [part.indices for part in parts if part.indices is not None]
        if not indices:
            continue
        items, counts = np.unique(np.concatenate(indices), return_counts=True)
        if counts.max(initial=0) > 1:
            item, count = items[counts > 1][0], counts[counts > 1][0]
            raise Refusal(
                f"dataset has item {item} of {type(parts[0].base).__name__} {count} times: keep each item once, "
                "because the contribution of an example is bounded for one item; put several rows of an example into "
                "one item (rows_per_example=, qclip.Repeated)"
            )


def _parts_below(dataset: Dataset[Any], indices: Indices, positions: Indices) -> Iterator[DatasetPart]:
    if isinstance(dataset, Repeated):
        yield from _parts_below(dataset.dataset, indices, positions)
    elif isinstance(dataset, Subset) and (subset_indices := _integer_indices(dataset)) is not None:
        inner = subset_indices if indices is None else subset_indices[indices]
        yield from _parts_below(dataset.dataset, inner, positions)
    elif isinstance(dataset, ConcatDataset):
        ends = dataset.cumulative_sizes
        indices = np.arange(ends[-1]) if indices is None else indices
        positions = np.arange(len(indices)) if positions is None else positions
        for child, start, end in zip(dataset.datasets, [0, *ends], ends, strict=False):
            is_in_child = (start <= indices) & (indices < end)
            yield from _parts_below(child, indices[is_in_child] - start, positions[is_in_child])
    else:
        yield DatasetPart(dataset, indices, positions)


def _integer_indices(subset: Subset[Any]) -> NDArray[np.intp] | None:
    """Return the indices of a subset, counted from the front; None if they are not integers, such as names."""
    indices = np.asarray(subset.indices)
    if indices.dtype.kind not in "iu":
        return None
    size = len(subset.dataset)  # type: ignore[arg-type]
    return np.where(indices < 0, indices + size, indices)
