"""How a batch is made: items of a data set by their indices, and a collate function."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, Subset, default_collate


@dataclass(frozen=True)
class Fetch:
    """What a DataLoader does with a list of indices, in two steps that can be repeated."""

    dataset: Any
    collate: Any

    @staticmethod
    def of(source: Dataset[Any] | DataLoader[Any]) -> "Fetch":
        """As this data set, or this DataLoader, is read."""
        if isinstance(source, DataLoader):
            return Fetch(source.dataset, source.collate_fn)
        return Fetch(source, default_collate)

    @property
    def one_by_one(self) -> bool:
        """Whether it is known to treat each example by itself: torch's own way, which stacks them."""
        return self.collate is default_collate and not reads_lists(self.dataset)

    @property
    def name(self) -> str:
        """For messages."""
        if self.collate is default_collate:
            return f"{type(self.dataset).__name__}.__getitems__"
        return getattr(self.collate, "__qualname__", type(self.collate).__name__)

    def items(self, indices: Sequence[int]) -> list[Any]:
        """What the collate function is given for each of them; of a data set that reads lists, the index."""
        return list(indices) if reads_lists(self.dataset) else [self.dataset[index] for index in indices]

    def batch(self, items: Sequence[Any]) -> Any:
        """The items collated; a collate function may write into copies of them."""
        if reads_lists(self.dataset):
            return self.collate(self.dataset.__getitems__(list(items)))
        return self.collate(copy.deepcopy(list(items)))


def reads_lists(dataset: Any) -> bool:
    """Whether a data set is asked for a list of items at once; a Subset asks the one inside."""
    if type(dataset) is Subset:
        return reads_lists(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))
