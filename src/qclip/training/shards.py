"""Shards: the parameters as the optimizers hold them, where that is not how the engine needs them.

The engine needs whole parameters. This module has the usual case, in which the optimizers hold them, too;
`fully_sharded` has those of `fully_shard`, in which each rank holds a part of every parameter.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qclip.engine.capture.checks import distributed_by
from qclip.engine.sharding import Sharding
from qclip.training.ranks import Ranks
from qclip.training.sums import Place


class Shards(Sharding):
    """A model whose parameters are whole wherever they are.

    Args:
        parameters: The trainable parameters, by name.
        ranks: The processes that share the run.
    """

    hold_parts: bool = False
    """Whether each rank has a part of every parameter."""
    sums_are_parts: bool = False
    """Whether the sums of a step are parts of sums over all ranks, by `qclip.engine.sharding.Sharding.summed`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self.parameters = dict(parameters)
        """The parameters that optimizers hold, by name."""
        self._ranks = ranks

    def require_all(self, num_ranks: int) -> None:
        """Refuse a run on fewer ranks than the parameters are sharded over."""

    def gather(self) -> None:
        """Make the parameters of the model ready for a forward pass, at their current values."""

    def follow(self, optimizer: Optimizer) -> None:
        """Let go of the whole parameters after every step of the optimizer: they are out of date then."""

    def tell_failure(self, step: int) -> None:
        """Tell the other ranks that this one has failed."""
        self._ranks.tell_failure(step)

    def recover(self) -> None:
        """Put the model in order after a forward or backward pass that failed."""

    def part(self, name: str, released: Tensor) -> Tensor:
        """Return a released gradient as the gradient of this rank's part of a parameter."""
        return released

    def places(self) -> dict[str, Place]:
        """Return where this rank's sums lie in the whole gradients, by name; empty if they are whole."""
        return {}

    def resident(self, engine_parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters in the shapes of the sums, readable between steps."""
        return dict(engine_parameters)

    def replicated(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameters and buffers that must be the same on all ranks."""
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def collect(self, name: str, resident: Tensor) -> Tensor:
        """Return a whole tensor, given the parts of the ranks in the shape of `resident`; on all ranks."""
        return resident

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return a tensor of a checkpoint, whole or in parts, in the shape of `resident`."""
        return whole

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor to read a sharded one into, whole or sharded."""
        return torch.empty(shape, dtype=dtype, device=device)

    def model_state(self, model: nn.Module, *, whole: bool = True) -> dict[str, Any]:
        """Return the state of the model, in whole tensors or in the parts of the ranks; on all ranks."""
        return model.state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a `model_state`."""
        model.load_state_dict(state)

    def optimizer_state(self, optimizer: Optimizer, *, whole: bool = True) -> dict[str, Any]:
        """Return the state of an optimizer, in whole tensors or in the parts of the ranks; on all ranks."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load an `optimizer_state`."""
        optimizer.load_state_dict(dict(state))


def is_sharded(model: nn.Module) -> bool:
    """Return whether parts of the model were made by `fully_shard`."""
    return any(distributed_by(type(module)) == "fully_shard" for module in model.modules())
