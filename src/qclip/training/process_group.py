"""The ranks of a torch.distributed process group.

The only module that imports torch.distributed: `fully_sharded` takes what it needs from here.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from qclip._validate import Refusal
from qclip.training.ranks import LostRank, Ranks
from qclip.training.sums import BoundedSum, RawSums

__all__ = [
    "DTensor", "FSDPModule", "GroupRanks", "Partial", "Replicate", "Shard", "dcp", "empty_dtensor", "joined",
    "ranks_of",
]  # fmt: skip

T = TypeVar("T")

BUCKET: Final = 2**22
"""Elements that are added up in one collective; a larger tensor has one of its own."""
LAST_WORDS: Final = timedelta(seconds=60)
"""How long a rank that has failed waits until the others have heard of it."""
_FIELDS: Final = ("failed", "flag", "step", "released", "num_examples", "any_finite")


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
        """Return whether the flag is set on any rank; raise if one has failed."""
        return bool(self._columns(flag=flag)["flag"].any())

    def add(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        total = values.clone()
        self._collective(lambda: dist.all_reduce(total, group=self._group))
        return total

    def everyones(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        values: list[Any] = [None] * self.size
        self._collective(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse, by name, a fact that is not the same on all ranks; on all of them."""
        everyones = self.everyones(dict(facts))
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

    def add_up(self, raw: RawSums, step: int, released: object, *, only_slack: bool = False) -> RawSums:
        """Return the sums over all ranks: one small collective, then the sums."""
        facts = self._exchange(step, released, num_examples=raw.num_examples, any_finite=raw.any_finite)
        return replace(
            raw,
            gradient=self._summed(raw.gradient, lambda key: not only_slack or key.kind == "slack"),
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

    def abort(self) -> None:
        """Break the connection to the other ranks, which may wait in a collective that this one does not know."""
        end = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        end(self._group)

    def as_lost(self, error: BaseException) -> BaseException:
        """Return a `LostRank` for an error of the backend, and other errors as they are."""
        from_backend = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        return _lost_rank(error) if from_backend else error

    def _columns(self, **fields: Any) -> dict[str, Tensor]:
        """Return what every rank says of itself, a column of [W] for each field; raise if one has failed."""
        table = self._table(**fields)
        self._collective(lambda: dist.all_reduce(table, group=self._group))
        columns = dict(zip(_FIELDS, table.cpu().unbind(1), strict=True))
        if bool(columns["failed"].any()):
            rank = int(columns["failed"].argmax())
            step = int(columns["step"][rank])
            raise LostRank(f"rank {rank} failed in step {step}, and its own message says why; nothing was released")
        return columns

    def _exchange(self, step: int, released: object, *, num_examples: int, any_finite: Tensor) -> dict[str, Tensor]:
        """Return what every rank says of its step; raise if one has failed, or is not at the same step."""
        digest = int.from_bytes(hashlib.sha256(repr(released).encode()).digest()[:6], "big")  # exact in float64
        columns = self._columns(step=step, released=digest, num_examples=num_examples, any_finite=any_finite)
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

    def _summed(self, value: BoundedSum, is_local: Callable[[Any], bool] = lambda _: True) -> BoundedSum:
        """Add a sum up over the ranks, where it is still that of this rank; a large tensor in place."""
        assert value.all_finite is None, "a sum that is not resolved may have to be computed again"
        tensors = dict(value.tensors)
        for keys in _buckets({key: x for key, x in tensors.items() if is_local(key)}):
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
            raise _lost_rank(error) from error


def _lost_rank(error: BaseException) -> LostRank:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return LostRank(f"another rank has ended or cannot be reached; its own message says why ({reason})")


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
