"""The ranks of a torch.distributed process group. The only module that imports torch.distributed."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from qclip._validate import Refusal
from qclip.training.ranks import LostRank, Ranks
from qclip.training.shards import Shards
from qclip.training.sums import BoundedSum, RawSums

T = TypeVar("T")

BUCKET: Final = 2**22
"""Elements that are added up in one collective; a larger tensor has one of its own."""
LAST_WORDS: Final = timedelta(seconds=60)
"""How long a rank that has failed waits until the others have heard of it."""
_FIELDS: Final = ("failed", "step", "released", "num_examples", "any_finite")


class GroupRanks(Ranks):
    """The ranks of a process group.

    Args:
        group: The process group; None for the default one.
        device: The device of the model, which the backend of the group must support.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise Refusal(
                "distributed = a process group that this process is not part of; call make_private in its members only"
            )

    def first(self, value: T) -> T:
        """Return the value of rank 0."""
        values = [value]
        self._collective(
            lambda: dist.broadcast_object_list(values, group_src=0, group=self._group, device=self._device)
        )
        return values[0]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        flags = torch.tensor([float(flag)], device=self._device)
        self._collective(lambda: dist.all_reduce(flags, group=self._group))
        return bool(flags)

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse, by name, a fact that is not the same on all ranks; on all of them."""
        everyones: list[Any] = [None] * self.size
        self._collective(lambda: dist.all_gather_object(everyones, dict(facts), group=self._group))
        expected = everyones[0]
        for rank, others in enumerate(everyones):
            for name in [*expected, *others]:
                if (here := expected.get(name)) != (there := others.get(name)):
                    raise Refusal(
                        f"{name} = {_short(here)} on rank 0, but {_short(there)} on rank {rank}: all ranks must make "
                        "the same run, so call make_private with the same arguments, data and parameters on all of "
                        "them (torch.manual_seed before the model is built), or pass distributed=False for runs of "
                        "their own"
                    )

    def add_up(self, raw: RawSums, step: int, released: object) -> RawSums:
        """Return the sums over all ranks: one small collective, then the sums."""
        facts = self._exchange(step, released, num_examples=raw.num_examples, any_finite=raw.any_finite)
        return replace(
            raw,
            gradient=self._summed(raw.gradient),
            counts=None if raw.counts is None else self._summed(raw.counts),
            num_examples=int(facts["num_examples"].sum()),
            any_finite=facts["any_finite"].any(),
        )

    def tell_failure(self, step: int) -> None:
        """Tell the other ranks, which may wait in `add_up`, that this one has failed."""
        table = self._table(failed=1, step=step)
        try:
            work = dist.all_reduce(table, group=self._group, async_op=True)
            if work is not None:
                work.wait(LAST_WORDS)
        except RuntimeError:  # they have left already
            return

    def _exchange(self, step: int, released: object, *, num_examples: int, any_finite: Tensor) -> dict[str, Tensor]:
        """Return what every rank says of its step, a column of [W] for each field; raise if one has failed."""
        digest = int.from_bytes(hashlib.sha256(repr(released).encode()).digest()[:6], "big")  # exact in float64
        table = self._table(step=step, released=digest, num_examples=num_examples, any_finite=any_finite)
        self._collective(lambda: dist.all_reduce(table, group=self._group))
        columns = dict(zip(_FIELDS, table.cpu().unbind(1), strict=True))
        if bool(columns["failed"].any()):
            rank = int(columns["failed"].argmax())
            raise LostRank(f"rank {rank} failed in step {step}, and its own message says why; nothing was released")
        for name, words in (("step", "is at another step"), ("released", "has released other values")):
            if bool((columns[name] != columns[name][0]).any()):
                rank = int((columns[name] != columns[name][0]).int().argmax())
                raise LostRank(
                    f"rank {rank} {words} than rank 0: the ranks no longer have the same run; resume all of them from "
                    "the last checkpoint, on devices of one kind"
                )
        return columns

    def _table(self, **fields: Any) -> Tensor:
        """Return zeros [W, fields] with this rank's values in its row: the sum over ranks has all rows."""
        table = torch.zeros(self.size, len(_FIELDS), dtype=torch.float64, device=self._device)
        for name, value in fields.items():
            table[self.rank, _FIELDS.index(name)] = value
        return table

    def _summed(self, value: BoundedSum) -> BoundedSum:
        """Add a sum up over the ranks; a large tensor in place."""
        assert value.all_finite is None, "a sum that is not resolved may have to be computed again"
        tensors = dict(value.tensors)
        for keys in _buckets(tensors):
            flat = (
                tensors[keys[0]].reshape(-1)
                if len(keys) == 1
                else torch.cat([tensors[key].reshape(-1) for key in keys])
            )
            self._collective(lambda flat=flat: dist.all_reduce(flat, group=self._group))
            sizes = [tensors[key].numel() for key in keys]
            for key, piece in zip(keys, flat.split(sizes), strict=True):
                tensors[key] = piece.view(tensors[key].shape)
        return replace(value, tensors=tensors)

    def _collective(self, call: Any) -> None:
        try:
            call()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise LostRank(
                f"another rank has ended or cannot be reached; its own message says why ({reason})"
            ) from error


def _buckets(tensors: Mapping[Any, Tensor]) -> Iterator[Sequence[Any]]:
    """Yield the keys of tensors that are added up together: of one dtype, and up to `BUCKET` elements."""
    for dtype in dict.fromkeys(x.dtype for x in tensors.values()):
        bucket: list[Any] = []
        size = 0
        for key, x in tensors.items():
            if x.dtype != dtype:
                continue
            if bucket and size + x.numel() > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(key)
            size += x.numel()
        yield bucket


def ranks_of(distributed: Any, device: torch.device) -> Ranks:
    """Return the ranks of a process group, of the default group (True), or of this process if it is the only one."""
    group = None if distributed is True or distributed is None else distributed
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise Refusal(
            f"distributed = {distributed!r} must be a process group of torch.distributed, True or False; leave it out "
            "to use the default group where one is initialised"
        )
    return GroupRanks(group, device) if dist.get_world_size(group) > 1 else Ranks()


class FullShards(Shards):
    """The parameters of a model of `fully_shard` (FSDP2), whole on every rank between optimizer steps.

    Each rank keeps its part for the optimizer. The whole parameters are gathered after every optimizer step and stay
    until the next, so that the engine, its proofs and compiled steps see a plain model.

    Args:
        model: The model; from now on FSDP2 neither frees whole parameters by itself nor synchronises gradients.

    Raises:
        qclip.Refusal: If the parameters are sharded over a mesh of more than one dimension.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for part in self._parts:
            part.reshard()
        super().__init__({name: p for name, p in model.named_parameters() if p.requires_grad})
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise Refusal(f"{name!r} is not sharded, but others are; call fully_shard on the whole model, too")
            if parameter.device_mesh.ndim != 1:
                raise Refusal(
                    f"{name!r} is sharded over a mesh of {parameter.device_mesh.ndim} dimensions; take a mesh of one "
                    "dimension, which has all ranks of the run"
                )
        for part in self._parts:
            part.set_requires_gradient_sync(False, recurse=False)
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
        self.gather()

    def require_all(self, num_ranks: int) -> None:
        """Refuse a run on fewer ranks than the parameters are sharded over."""
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor) and parameter.device_mesh.size() != num_ranks:
                raise Refusal(
                    f"{name!r} is sharded over {parameter.device_mesh.size()} ranks, but the run has {num_ranks}: "
                    "leave distributed= out, and shard over all ranks of the run"
                )

    def gather(self) -> None:
        """Make the parameters of the model whole, at their current values, until the next optimizer step."""
        for part in self._parts:
            part.unshard()

    def scatter(self) -> None:
        """Leave each rank its part of the parameters."""
        for part in self._parts:
            part.reshard()

    def follow(self, optimizer: Optimizer) -> None:
        """Let go of the whole parameters after every step of the optimizer: they are out of date then."""
        optimizer.register_step_post_hook(lambda *_: self.scatter())

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor that belongs to this rank's part of a parameter; nothing is sent."""
        return _part(whole, self.parameters[name])

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state of the model in whole tensors; on all ranks."""
        self.scatter()
        state = {name: _whole(x) for name, x in model.state_dict().items()}
        self.gather()
        return state

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a `model_state`."""
        self.scatter()
        model.load_state_dict({name: _part(state[name], like) for name, like in model.state_dict().items()})
        self.gather()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer in whole tensors; on all ranks."""
        return pytree.tree_map_only(Tensor, _whole, optimizer.state_dict())

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


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor cut as another is; as it is where that one is whole."""
    if not isinstance(like, DTensor):
        return whole
    everywhere = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return everywhere.redistribute(like.device_mesh, like.placements)


@contextmanager
def joined(device: str | None) -> Iterator[GroupRanks]:
    """Join the group that the launcher's variables describe (RANK, WORLD_SIZE, ...), and leave it on exit.

    Args:
        device: "cpu", "cuda", or None for a GPU where there is one; with GPUs, each local rank takes its own.
    """
    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield GroupRanks(None, torch.device("cuda" if on_gpu else "cpu"))
    finally:
        dist.destroy_process_group()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
