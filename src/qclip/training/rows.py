"""Examples of several rows: K augmentations of an example, or K records of a user, clipped as one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from qclip import _validate as check


class Repeated(Dataset[Any]):
    """Each example ``rows`` times, asked for anew each time: with random transforms, its augmentations.

    An item has the rows of one example, stacked in front.

    >>> from torch.utils.data import TensorDataset
    >>> x, y = Repeated(TensorDataset(torch.arange(4.0), torch.arange(4)), 3)[1]
    >>> x, y
    (tensor([1., 1., 1.]), tensor([1, 1, 1]))
    """

    def __init__(self, dataset: Dataset[Any], rows: int) -> None:
        self.dataset, self._rows = dataset, check.count("rows", rows)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return torch.utils.data.default_collate([self.dataset[index] for _ in range(self._rows)])


def split(batch: Any, examples: int, rows: int) -> Any:
    """The batch with every tensor as [examples, rows, ...].

    It may come so, or flat as [examples * rows, ...] with the rows of an example beside each other, or as [examples]
    where all its rows share a value.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        if leaf.dim() > 1 and leaf.shape[:2] == (examples, rows):
            return leaf
        if leaf.shape[0] == examples * rows:
            return leaf.unflatten(0, (examples, rows))
        if leaf.shape == (examples,):
            return leaf[:, None].expand(examples, rows)
        bound = f"[{examples}, {rows}, ...], [{examples * rows}, ...] or [{examples}] with rows_per_example = {rows}"
        raise check.refuse("shape of the batch", tuple(leaf.shape), bound, "let an item hold the rows of one example")

    return pytree.tree_map(one, batch)


def mean_over_rows(evaluate: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """From a batch of [examples, rows, ...] to the mean loss of each example; ``evaluate`` sees the rows flat."""

    def per_example(batch: Any) -> Tensor:
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1]
        examples, rows = leaves[0].shape[:2]
        flat = pytree.tree_map(lambda x: x.flatten(0, 1) if isinstance(x, Tensor) and x.dim() > 1 else x, batch)
        losses = evaluate(flat)
        if losses.shape != (examples * rows,):
            remedy = "return one loss per row; they are averaged over each example's rows"
            raise check.refuse("losses", tuple(losses.shape), f"[{examples * rows}]", remedy)
        return losses.unflatten(0, (examples, rows)).mean(1)

    return per_example
