"""The parameters of a model of `fully_shard` (FSDP2), of which each rank holds a part.

There are two ways to give the engine whole parameters:

* `GatheredShards`: they are gathered after every optimizer step and stay until the next. Compiled steps need it.
* `BlockShards`: FSDP2's own hooks gather each block for its forward and its backward pass. Clipped sums are added up
  over the ranks as they are made, and each rank keeps its part of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from qclip._validate import Refusal
from qclip.engine.sharding import Reads
from qclip.training.process_group import DTensor, FSDPModule, Partial, Replicate, Shard, empty_dtensor
from qclip.training.ranks import Ranks
from qclip.training.shards import Shards
from qclip.training.sums import Place


class GatheredShards(Shards):
    """Parameters that are whole on every rank between optimizer steps.

    Each rank keeps its part for the optimizer. The engine, its proofs and compiled steps see a plain model.

    Args:
        model: The model; from now on FSDP2 neither frees whole parameters by itself nor synchronises gradients.
        ranks: The processes that share the run.

    Raises:
        qclip.Refusal: If a parameter is not sharded, or sharded over a mesh of more than one dimension.
    """

    hold_parts = True

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._blocks = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._free()
        super().__init__({name: p for name, p in model.named_parameters() if p.requires_grad}, ranks)
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise Refusal(f"{name!r} is not sharded, but others are; call fully_shard on the whole model, too")
            if parameter.device_mesh.ndim != 1:
                raise Refusal(
                    f"{name!r} is sharded over a mesh of {parameter.device_mesh.ndim} dimensions; take a mesh of one "
                    "dimension, which has all ranks of the run"
                )
        for block in self._blocks:
            block.set_requires_gradient_sync(False, recurse=False)
        self._begin(model)

    def _begin(self, model: nn.Module) -> None:
        for block in self._blocks:
            block.set_reshard_after_forward(False, recurse=False)
            block.set_reshard_after_backward(False, recurse=False)
        self.gather()

    def require_all(self, num_ranks: int) -> None:
        """Refuse a run on fewer ranks than the parameters are sharded over."""
        for name, parameter in self._sharded().items():
            if parameter.device_mesh.size() != num_ranks:
                raise Refusal(
                    f"{name!r} is sharded over {parameter.device_mesh.size()} ranks, but the run has {num_ranks}: "
                    "leave distributed= out, and shard over all ranks of the run"
                )

    def gather(self) -> None:
        """Make the parameters of the model whole, at their current values, until the next optimizer step."""
        for block in self._blocks:
            block.unshard()

    def follow(self, optimizer: Optimizer) -> None:
        """Let go of the whole parameters after every step of the optimizer: they are out of date then."""
        optimizer.register_step_post_hook(lambda *_: self._free())

    def recover(self) -> None:
        """Put the model in order after a forward or backward pass that failed."""
        reset = getattr(self._blocks[0], "reset_iter_state", None)  # from torch 2.12 on
        if reset is not None:
            reset()
        self._free()

    def part(self, name: str, released: Tensor) -> Tensor:
        """Return the part of a released gradient that belongs to this rank's part of a parameter; nothing is sent."""
        return _part(released, self.parameters[name])

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return a whole tensor, which may have been read in parts."""
        return whole.full_tensor() if isinstance(whole, DTensor) else whole

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor sharded along its first dimension."""
        mesh = next(iter(self._sharded().values())).device_mesh
        return empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])

    def model_state(self, model: nn.Module, *, whole: bool = True) -> dict[str, Any]:
        """Return the state of the model, in whole tensors (empty except on rank 0) or in parts; on all ranks."""
        self._free()
        state = dict(model.state_dict())
        state = {name: self._collected(x) for name, x in state.items()} if whole else state
        self.gather()
        return state

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a `model_state`."""
        self._free()
        model.load_state_dict({name: _part(state[name], like) for name, like in model.state_dict().items()})
        self.gather()

    def optimizer_state(self, optimizer: Optimizer, *, whole: bool = True) -> dict[str, Any]:
        """Return the state of an optimizer, in whole tensors (empty except on rank 0) or in parts; on all ranks."""
        state = optimizer.state_dict()
        return pytree.tree_map_only(Tensor, self._collected, state) if whole else state

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load an `optimizer_state`."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parts = {
            index: {
                name: _part(x, parameters[index]) if isinstance(x, Tensor) and x.shape == parameters[index].shape else x
                for name, x in values.items()
            }
            for index, values in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": parts})

    def _free(self) -> None:
        """Leave each rank its part of the parameters."""
        for block in self._blocks:
            block.reshard()

    def _sharded(self) -> dict[str, DTensor]:
        return {name: x for name, x in self.parameters.items() if isinstance(x, DTensor)}

    def _collected(self, x: Any) -> Any:
        """Return a whole tensor on the CPU of rank 0, and an empty one elsewhere, so that one at a time is whole."""
        if not isinstance(x, DTensor):
            return x
        whole = x.full_tensor()
        return whole.cpu() if self._ranks.rank == 0 else whole.new_empty(0)


class BlockShards(GatheredShards):
    """Parameters that FSDP2's own hooks gather, each block for its forward and its backward pass.

    * Proofs, and gradients that are computed from values of parameters, need more than one block. Then all ranks gather
      all blocks for one physical batch, whichever rank needs it.
    * All ranks run as many forward passes, because each of them is a collective.

    It reads private attributes of FSDP2, which has no other way to name the whole parameter of a part.

    Args:
        model: The model; from now on FSDP2 does not synchronise gradients.
        ranks: The processes that share the run.

    Raises:
        qclip.Refusal: As `GatheredShards`, or if a parameter is not sharded along its first dimension.
    """

    sums_are_parts = True
    runs_alone = False

    def _begin(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            if parameter.placements != (Shard(0),):
                raise Refusal(
                    f"{name!r} is sharded as {parameter.placements[0]}; leave shard_placement_fn out, or pass "
                    "compile=True, which gathers whole parameters"
                )
        super().gather()  # it makes the whole parameters, which then exist for good, with or without values
        self._groups = [group for block in self._blocks for group in _groups(block)]
        handles = [handle for group in self._groups for handle in group.fsdp_params]
        self._whole = {id(handle.sharded_param): handle.unsharded_param for handle in handles}
        self._parts = {id(handle.unsharded_param): handle.sharded_param for handle in handles}
        self._is_awaited = False
        """Whether the other ranks wait in `require_all_well`, or will, to hear of this one."""
        self._free()

    def named_parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        """Yield the whole parameters, which have values in a forward pass, whether they have them now or not."""
        return ((name, self._whole.get(id(x), x)) for name, x in model.named_parameters())

    def readable(self, x: Tensor) -> Tensor:
        """Return this rank's part of a parameter, or the tensor itself if it is none."""
        return _local(self._parts[id(x)]) if id(x) in self._parts else x

    @contextmanager
    def whole(self, model: nn.Module, needed: Callable[[], bool]) -> Iterator[Reads | None]:
        """Gather all blocks inside, if any rank needs them."""
        self._is_awaited = False
        if not self._ranks.any(needed()):
            yield Reads(self.named_parameters(model), allowed=False)
            return
        before = [(group, group.post_forward_mesh_info, group.reshard_after_backward) for group in self._groups]
        for group in self._groups:
            group.post_forward_mesh_info, group.reshard_after_backward = None, False
        try:
            super().gather()
            self._is_awaited = True
            yield Reads(self.named_parameters(model), allowed=True)
        finally:
            for group, mesh_info, reshard in before:
                group.post_forward_mesh_info, group.reshard_after_backward = mesh_info, reshard
            self._free()

    def require_all_well(self) -> None:
        """Raise if another rank has failed inside `whole`."""
        if self._is_awaited:
            self._is_awaited = False
            self._ranks.any(False)

    def summed(self, name: str, total: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks."""
        like = self.parameters[name]
        assert isinstance(like, DTensor)
        own = DTensor.from_local(total, like.device_mesh, [Partial()], run_check=False)
        return own.redistribute(like.device_mesh, like.placements).to_local()

    def gather(self) -> None:
        """Leave it to FSDP2's hooks."""

    def tell_failure(self, step: int) -> None:
        """Tell the other ranks that this one has failed.

        They may wait to hear of it, in `require_all_well`, or for this rank's part of a block or a sum.
        """
        if self._is_awaited:
            super().tell_failure(step)
        else:
            self._ranks.abort()

    def part(self, name: str, released: Tensor) -> Tensor:
        """Return a released part as the gradient of this rank's part of a parameter."""
        return _from_part(released, self.parameters[name])

    def places(self) -> dict[str, Place]:
        """Return where this rank's sums lie in the whole gradients, by name."""
        return {name: self._place(x) for name, x in self._sharded().items()}

    def resident(self, engine_parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of the parameters."""
        return {name: _local(x) for name, x in self._sharded().items()}

    def replicated(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the buffers: of a parameter each rank has another part."""
        return dict(model.named_buffers())

    def collect(self, name: str, resident: Tensor) -> Tensor:
        """Return a whole tensor, given the parts of the ranks; on all ranks."""
        return _from_part(resident, self.parameters[name]).full_tensor()

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        part = _part(whole, self.parameters[name])
        assert isinstance(part, DTensor)
        return part.to_local()

    def _place(self, x: DTensor) -> Place:
        rows = -(-len(x) // x.device_mesh.size())  # as torch.chunk cuts
        row_elements = x.numel() // max(len(x), 1)
        start = min(rows * x.device_mesh.get_local_rank(), len(x)) * row_elements
        return Place(start, x.numel())


def sharded(model: nn.Module, ranks: Ranks, *, compiled: bool) -> GatheredShards:
    """Return the shards of a model of `fully_shard`."""
    return GatheredShards(model, ranks) if compiled else BlockShards(model, ranks)


def _groups(block: FSDPModule) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers for a block; before torch 2.12, a block has one or none."""
    state = block._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def _local(x: DTensor) -> Tensor:
    """Return this rank's part: always the same tensor, unlike `to_local`, which returns a view."""
    return x._local_tensor


def _from_part(part: Tensor, like: Tensor) -> DTensor:
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor, whole or cut otherwise, cut as another is; as it is where that one is whole."""
    if not isinstance(like, DTensor):
        return whole
    if not isinstance(whole, DTensor):
        whole = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return whole.redistribute(like.device_mesh, like.placements)
