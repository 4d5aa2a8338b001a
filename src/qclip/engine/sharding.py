"""Sharding: how the engine reaches parameters of which each process may hold a part. Here, each process holds them all.

`qclip.training.fully_sharded` has those of `fully_shard`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from qclip._validate import Refusal

_aten = torch.ops.aten
_SHAPES_ONLY = {
    _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided,
}  # fmt: skip


class Reads(TorchDispatchMode):
    """A context that watches for operations on the values of parameters, or of views of them. It can be entered again.

    Sharded parameters have no values between a forward and a backward pass. Most rules do without: the gradient of a
    linear layer is made of its input and its output's gradient. Others do not, such as those that run a function again.

    Args:
        named_parameters: The parameters, by name.
        allowed: Whether the parameters have values. Otherwise an operation on them raises before it reads freed memory.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], *, allowed: bool) -> None:
        super().__init__()
        self.allowed = allowed
        self.found = False
        """Whether there was such an operation."""
        self._names = {_storage(x): name for name, x in named_parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (self.found and self.allowed) and not func.is_view and func.overloadpacket not in _SHAPES_ONLY:
            leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            read = [self._names[key] for x in leaves if (key := _storage(x)) in self._names]
            self.found |= bool(read)
            if read and not self.allowed:
                raise Refusal(
                    f"the values of {read[0]!r} are needed for its gradients ({func}), but were not in the proof, and "
                    "each rank has a part of them only; pass compile=True, which gathers whole parameters"
                )
        return func(*args, **kwargs)


class Sharding:
    """Parameters that are whole, at all times and on every process."""

    runs_alone: bool = True
    """Whether a process may run the model as often as it likes, without the others."""

    def named_parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        """Yield the parameters as the forward pass uses them, by name: the same objects in every step."""
        return model.named_parameters()

    def readable(self, x: Tensor) -> Tensor:
        """Return a tensor that shows, between forward passes too, whether a parameter or buffer has changed."""
        return x

    @contextmanager
    def whole(self, model: nn.Module, needed: Callable[[], bool]) -> Iterator[Reads | None]:
        """Make the values of all parameters readable inside, if any process needs them. All processes enter together.

        Args:
            model: The model.
            needed: Returns whether this process reads values other than in a forward and a backward pass.

        Yields:
            A watch for what comes after the backward pass; None where values are always readable.
        """
        yield None

    def require_all_well(self) -> None:
        """Raise if another process has failed inside `whole`: it will not take part in `summed`."""

    def summed(self, name: str, total: Tensor) -> Tensor:
        """Return what this process keeps of a parameter's clipped sum.

        Where processes keep parts, it is the part of the sum over all of them, and all call it for the same parameters
        in the same order.
        """
        return total


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
