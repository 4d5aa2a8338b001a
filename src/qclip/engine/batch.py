"""A batch: any nest of tuples, lists and dicts of tensors; those with one row per example have it in front."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from qclip import _validate as check


def tensors(batch: Any) -> list[Tensor]:
    """Every tensor of the batch."""
    if isinstance(batch, Tensor):
        return [batch]
    if type(batch) in (tuple, list) and all(isinstance(leaf, Tensor) for leaf in batch):  # as nearly always, and fast
        return list(batch)
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def size(batch: Any, mask: Tensor | None = None) -> int:
    """The number of examples: the mask's length, or the first dimension that the tensors of the batch share.

    Tensors without dimensions or of length 1, such as ``[1, T]`` position ids, are shared by all examples and do not
    count unless nothing else is there.
    """
    lengths = [leaf.shape[0] for leaf in tensors(batch) if leaf.dim()]
    if mask is not None:
        if lengths and len(mask) not in lengths:
            raise check.refuse(
                "mask",
                f"{len(mask)} flags",
                f"as long as the batch, one of {sorted(set(lengths))}",
                "one flag per example",
            )
        return len(mask)
    if not lengths:
        raise check.refuse(
            "inputs",
            "no tensors",
            "a batch with at least one tensor whose first dimension is the batch",
            "pass tensors, or tuples and dicts of tensors",
        )
    return next((length for length in lengths if length != 1), 1)


def size_of_pair(inputs: Any, targets: Any, mask: Tensor | None = None) -> int:
    """The number of examples of inputs and targets: the targets decide, because they are rarely shared."""
    if mask is not None:
        return size((inputs, targets), mask)
    return size(targets if any(leaf.dim() for leaf in tensors(targets)) else inputs)


def is_example_wise(leaf: Any, batch_size: int) -> bool:
    """Whether a leaf of the batch has one row per example."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch_size


def shared_tensors(batch: Any, batch_size: int) -> list[Tensor]:
    """Return the tensors of the batch that do not have one row per example."""
    return [x for x in tensors(batch) if not is_example_wise(x, batch_size)]


def select(batch: Any, index: Tensor | slice, batch_size: int) -> Any:
    """The batch of the chosen examples; shared tensors stay as they are."""
    return map_examples(batch, lambda leaf: leaf[index], batch_size)


def map_examples(batch: Any, function: Callable[[Tensor], Tensor], batch_size: int) -> Any:
    """Apply a function to every example-wise tensor."""
    return pytree.tree_map(lambda leaf: function(leaf) if is_example_wise(leaf, batch_size) else leaf, batch)


def contiguous(batch: Any) -> Any:
    """The batch with every tensor in the order of its dimensions; copied where it was not."""
    if all(x.is_contiguous() for x in tensors(batch)):
        return batch
    return pytree.tree_map_only(Tensor, Tensor.contiguous, batch)


def full_mask(batch_size: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """The mask as booleans on the device; all true when there is none."""
    if mask is None:
        return torch.ones(batch_size, dtype=torch.bool, device=device)
    if mask.dim() != 1:
        raise check.refuse(
            "mask", tuple(mask.shape), "one flag per example, of shape [batch]", "drop the other dimensions"
        )
    return mask.to(device=device, dtype=torch.bool)


def to_device_async(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for the device.

    A tensor in pageable memory is copied to pinned memory first: a GPU fetches it from there when its turn has come,
    while a copy from pageable memory waits until all earlier work of the GPU is done.
    """
    if device.type == "cuda" and x.device.type == "cpu" and x.layout == torch.strided and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
