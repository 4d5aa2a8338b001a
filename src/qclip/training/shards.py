"""Shards: the parameters as the optimizers hold them, where that is not how the engine needs them.

The engine needs whole parameters. This module has the usual case, in which the optimizers hold them, too;
`process_group` has those of `fully_shard`, in which each rank holds a part of every parameter.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from qclip.engine.capture.checks import distributed_by


class Shards:
    """A model whose parameters are whole wherever they are.

    Args:
        parameters: The trainable parameters, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        """The parameters that optimizers hold, by name."""

    def require_all(self, num_ranks: int) -> None:
        """Refuse a run on fewer ranks than the parameters are sharded over."""

    def gather(self) -> None:
        """Make the parameters of the model whole, at their current values, until the next optimizer step."""

    def follow(self, optimizer: Optimizer) -> None:
        """Let go of the whole parameters after every step of the optimizer: they are out of date then."""

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor, such as a gradient, that belongs to this rank's part of a parameter."""
        return whole

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state of the model in whole tensors."""
        return model.state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a `model_state`."""
        model.load_state_dict(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer in whole tensors."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load an `optimizer_state`."""
        optimizer.load_state_dict(dict(state))


def is_sharded(model: nn.Module) -> bool:
    """Return whether parts of the model were made by `fully_shard`."""
    return any(distributed_by(type(module)) == "fully_shard" for module in model.modules())
