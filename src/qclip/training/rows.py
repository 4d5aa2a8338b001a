"""Examples of several rows: K augmentations of an example, or K records of a user, clipped together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from qclip import _validate as check


class Repeated(Dataset[Any]):
    """A data set that reads each example ``rows`` times: with random transforms, its augmentations.

    An item holds the rows of one example, stacked along a new first dimension. Train on it with
    ``make_private(..., rows_per_example=rows)``: the losses of the rows are averaged before clipping.

    Args:
        dataset: A map-style data set.
        rows: The number of rows of an example.

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


def split(batch: Any, num_examples: int, rows: int) -> Any:
    """Return the batch with every tensor as [num_examples, rows, ...].

    Args:
        batch: Tensors of one of three shapes: [num_examples, rows, ...]; flat, [num_examples * rows, ...], with the
            rows of an example next to each other; or [num_examples], where the rows of an example share a value.
        num_examples: The number of examples of the batch.
        rows: The number of rows of an example.

    Raises:
        qclip.Refusal: For a tensor of any other shape.
    """

    def split_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        if leaf.dim() > 1 and leaf.shape[:2] == (num_examples, rows):
            return leaf
        if leaf.shape[0] == num_examples * rows:
            return leaf.unflatten(0, (num_examples, rows))
        if leaf.shape == (num_examples,):
            return leaf[:, None].expand(num_examples, rows)
        shapes = f"[{num_examples}, {rows}, ...], [{num_examples * rows}, ...] or [{num_examples}]"
        remedy = "stack the rows of one example in each item of the data set"
        raise check.refuse("shape of the batch", tuple(leaf.shape), f"{shapes} with rows_per_example = {rows}", remedy)

    return pytree.tree_map(split_leaf, batch)


def mean_over_rows(evaluate: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Return a function from a batch of [num_examples, rows, ...] to the mean loss of each example, [num_examples].

    Args:
        evaluate: Returns the losses of a flat batch, from [num_examples * rows, ...] to [num_examples * rows].
    """

    def per_example(batch: Any) -> Tensor:
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1]
        num_examples, rows = leaves[0].shape[:2]
        flat = pytree.tree_map(lambda x: x.flatten(0, 1) if isinstance(x, Tensor) and x.dim() > 1 else x, batch)
        losses = evaluate(flat)
        if losses.shape != (num_examples * rows,):
            remedy = "return one loss per row; they are averaged over the rows of each example"
            raise check.refuse("shape of the losses", tuple(losses.shape), f"[{num_examples * rows}]", remedy)
        return losses.unflatten(0, (num_examples, rows)).mean(1)

    return per_example
