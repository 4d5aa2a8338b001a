"""Data sets: how many examples they have, and which items of which data sets lie below Subset and ConcatDataset."""

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
from qclip.training.rows import Repeated

Places = NDArray[np.intp] | None
"""Indices; None for all, in order."""


def dataset_size(source: Dataset[Any] | DataLoader[Any]) -> int:
    """How many examples a data set or a DataLoader has; what cannot be sampled by index is refused."""
    dataset = dataset_of(source)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        remedy = "Poisson sampling asks for any example by its index"
        raise check.refuse("dataset", type(dataset).__name__, "map-style, with __len__ and __getitem__", remedy)
    if isinstance(source, DataLoader):
        batches = source.batch_sampler
        sampler = batches.sampler if type(batches) is BatchSampler else batches
        if type(sampler) not in (RandomSampler, SequentialSampler):
            remedy = "Poisson sampling takes its place; choose examples, each once, by torch.utils.data.Subset"
            raise check.refuse("dataset", f"a DataLoader with {type(sampler).__name__}", "without a sampler", remedy)
    if len(dataset) == 0:
        raise check.refuse("dataset", "empty", "of at least one example", "check where it was read from")
    return len(dataset)


def dataset_of(source: Dataset[Any] | DataLoader[Any]) -> Dataset[Any]:
    """The data set itself."""
    return source.dataset if isinstance(source, DataLoader) else source


def reads_lists(dataset: Any) -> bool:
    """Whether a data set is asked for a list of items at once; a Subset asks the one inside."""
    if type(dataset) is Subset:
        return reads_lists(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


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


def refuse_repeated(dataset: Dataset[Any]) -> None:
    """Refuse a data set that has an item several times: it counts as often, and is protected as one."""
    used: dict[int, list[Part]] = {}
    for part in parts(dataset):
        used.setdefault(id(part.base), []).append(part)
    for same in used.values():
        indices = [part.indices for part in same if part.indices is not None]
        if not indices:
            continue
        items, times = np.unique(np.concatenate(indices), return_counts=True)
        if times.max(initial=0) > 1:
            item, often = items[times > 1][0], times[times > 1][0]
            remedy = (
                "leave the others out: what one example adds is bounded once for each item; several rows of an example "
                "go into one item (rows_per_example=, qclip.Repeated)"
            )
            value = f"item {item} of {type(same[0].base).__name__}, {often} times"
            raise check.refuse("dataset", value, "one in which each item comes once", remedy)


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
