"""Neighbours of a data set: one example less, or another one in its place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from qclip._validate import Refusal


@dataclass(frozen=True)
class Neighbour:
    """A data set that differs in one example."""

    name: str
    index: int
    """The example that differs."""
    change: Callable[[Any], Any] | None = None
    """The new example, given the old one; None if the example is gone."""

    @property
    def distance(self) -> int:
        """By how many times one example's bound a sum may move: 1 if the example is gone, 2 if it is another."""
        return 1 if self.change is None else 2

    def of(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return the data set with the changed example; an example that is gone is left to the sampler."""
        if self.change is None:
            return dataset
        if type(dataset) is TensorDataset:
            old = tuple(x[self.index] for x in dataset.tensors)
            tensors = [x.clone() for x in dataset.tensors]
            for x, new in zip(tensors, self.change(old), strict=True):
                x[self.index] = new
            return TensorDataset(*tensors)
        return Changed(dataset, self.index, self.change)


class Changed(Dataset[Any]):
    """A data set with one item changed; everything else is that of the data set below."""

    def __init__(self, dataset: Any, index: int, change: Callable[[Any], Any]) -> None:
        self._dataset, self._index, self._change = dataset, index, change

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        item = self._dataset[index]
        return self._change(item) if index == self._index else item


def without(index: int) -> Neighbour:
    """Return the data set without an example: it is never drawn."""
    return Neighbour(f"example {index} gone", index)


def replaced(index: int, example: Any) -> Neighbour:
    """Return the data set with another example in place of one."""
    return Neighbour(f"example {index} replaced", index, lambda _: example)


def enlarged(index: int, factor: float = 1000.0) -> Neighbour:
    """Return the data set with the floating-point numbers of an example ``factor`` times as large."""
    return Neighbour(f"example {index} times {factor:g}", index, lambda old: scaled(old, factor))


def scaled(example: Any, factor: float) -> Any:
    """Return a nest of tensors and numbers with all floating-point values multiplied.

    >>> scaled({"x": 0.5, "ids": [3]}, 1000)
    {'x': 500.0, 'ids': [3]}
    """
    if isinstance(example, Tensor):
        return example * factor if example.is_floating_point() else example
    if isinstance(example, float):
        return example * factor
    if isinstance(example, dict):
        return {key: scaled(value, factor) for key, value in example.items()}
    if isinstance(example, (tuple, list)):
        values = [scaled(value, factor) for value in example]
        return type(example)(*values) if hasattr(example, "_fields") else type(example)(values)
    return example


def require_index(index: int, size: int) -> None:
    """Refuse the index of no example."""
    if not 0 <= index < size:
        raise Refusal(f"neighbour of example {index}: the data set has examples 0 to {size - 1}")
