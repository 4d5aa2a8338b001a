"""Batches: nests of tuples, lists and dicts of tensors. Tensors with one row per example have it in front."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from qclip import _validate as check


def tensor_leaves(batch: Any) -> list[Tensor]:
    """Return every tensor of the batch."""
    if isinstance(batch, Tensor):
        return [batch]
    if type(batch) in (tuple, list) and all(isinstance(leaf, Tensor) for leaf in batch):  # the usual case, and fast
        return list(batch)
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def size(batch: Any, mask: Tensor | None = None) -> int:
    """Return the number of examples: the mask's length, or the first dimension that the batch's tensors share.

    Tensors without dimensions or of length 1, such as ``[1, T]`` position ids, are shared by all examples. They count
    only if there is nothing else.

    Raises:
        Refusal: The mask is not as long as any tensor, or the batch has no tensor with a dimension.
    """
    lengths = [leaf.shape[0] for leaf in tensor_leaves(batch) if leaf.dim()]
    if mask is not None:
        if lengths and len(mask) not in lengths:
            bound = f"as long as the batch, one of {sorted(set(lengths))}"
            raise check.refuse("mask", f"{len(mask)} flags", bound, "one flag per example")
        return len(mask)
    if not lengths:
        bound = "a batch with at least one tensor whose first dimension is the batch"
        raise check.refuse("inputs", "no tensors", bound, "pass tensors, or tuples and dicts of tensors")
    return next((length for length in lengths if length != 1), 1)


def size_of_pair(inputs: Any, targets: Any, mask: Tensor | None = None) -> int:
    """Return the number of examples of inputs and targets: the targets decide, because they are rarely shared."""
    if mask is not None:
        return size((inputs, targets), mask)
    return size(targets if any(leaf.dim() for leaf in tensor_leaves(targets)) else inputs)


def is_example_wise(leaf: Any, batch_size: int) -> bool:
    """Return whether a leaf of the batch has one row per example."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch_size


def shared_tensors(batch: Any, batch_size: int) -> list[Tensor]:
    """Return the tensors of the batch that do not have one row per example."""
    return [x for x in tensor_leaves(batch) if not is_example_wise(x, batch_size)]


def select(batch: Any, index: Tensor | slice, batch_size: int) -> Any:
    """Return the batch of the chosen examples; shared tensors stay as they are."""
    return map_examples(batch, lambda leaf: leaf[index], batch_size)


def map_examples(batch: Any, function: Callable[[Tensor], Tensor], batch_size: int) -> Any:
    """Apply a function to every tensor with one row per example."""
    return pytree.tree_map(lambda leaf: function(leaf) if is_example_wise(leaf, batch_size) else leaf, batch)


def contiguous(batch: Any) -> Any:
    """Return the batch with contiguous tensors, copied where they were not."""
    if all(x.is_contiguous() for x in tensor_leaves(batch)):
        return batch
    return pytree.tree_map_only(Tensor, Tensor.contiguous, batch)


def full_mask(batch_size: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Return the mask [B] as booleans on the device; all true without a mask."""
    if mask is None:
        return torch.ones(batch_size, dtype=torch.bool, device=device)
    if mask.dim() != 1:
        bound = "one flag per example, of shape [batch]"
        raise check.refuse("mask", tuple(mask.shape), bound, "drop the other dimensions")
    return mask.to(device=device, dtype=torch.bool)


def to_device_async(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for the device.

    A tensor in pageable memory is copied to pinned memory first, from where a GPU fetches it when its turn comes. A
    copy from pageable memory would wait until the GPU has finished all earlier work.
    """
    if device.type == "cuda" and x.device.type == "cpu" and x.layout == torch.strided and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
