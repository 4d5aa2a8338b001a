"""Ranks: the processes that share a run. This module has the single process; `process_group` has torch.distributed's.

With W ranks, every rank draws the whole logical batch, which is a pure function of the seed and the step, and takes
every W-th example. Sums, counts and facts about the examples are added up once per logical step. All ranks then draw
the same noise and apply the same release, so a run on W ranks is the run on one, up to the rounding of sums.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qclip._validate import Refusal
from qclip.training.sums import RawSums

T = TypeVar("T")


class LostRank(Refusal):
    """Another rank has failed, has left, or is not at the same step."""


class Ranks:
    """A single process, on which nothing has to be exchanged.

    Guarantees, also of the subclass for several processes:
        * `share` cuts a logical batch into disjoint shares, one for each rank, whose sizes differ by at most 1.
        * `add_up`, `add`, `first` and `any` return the same values, bit for bit, on all ranks.
        * If a rank calls `tell_failure`, `add_up` and `any` raise on all others.
    """

    rank: int = 0
    size: int = 1

    def share(self, indices: NDArray[Any]) -> NDArray[Any]:
        """Return this rank's share of the examples of a step."""
        return indices[self.rank :: self.size]

    def largest_share(self, num_examples: int) -> int:
        """Return the number of examples of the largest share: all ranks know it without asking."""
        return -(-num_examples // self.size)

    def first(self, value: T) -> T:
        """Return the value of rank 0."""
        return value

    def everyones(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return flag

    def add(self, values: Tensor) -> Tensor:
        """Return the sum of a small tensor over all ranks."""
        return values

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse, by name, a fact that is not the same on all ranks."""

    def add_up(self, raw: RawSums, step: int, released: object, *, only_slack: bool = False) -> RawSums:
        """Return the sums over all ranks.

        Args:
            raw: The sums of this rank, resolved.
            step: The number of the step, to see that all ranks are at the same one.
            released: The release of the step before, to see that all ranks have the same one.
            only_slack: Whether the gradients of the parameters are sums over all ranks already.
        """
        return raw

    def tell_failure(self, step: int) -> None:
        """Tell the other ranks, which may wait in `add_up` or `any`, that this one has failed."""

    def abort(self) -> None:
        """Break the connection to the other ranks, which may wait in a collective that this one does not know."""

    def as_lost(self, error: BaseException) -> BaseException:
        """Return a `LostRank` for an error that another rank has caused, and other errors as they are."""
        return error


def seed_sequence(seed: int | None, ranks: Ranks) -> np.random.SeedSequence:
    """Return the seed of a run: the one given, or fresh entropy, that of rank 0."""
    return np.random.SeedSequence(ranks.first(np.random.SeedSequence(seed).entropy))


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of the bits of each tensor, the same on any device and for any number of threads."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    bits = [x.detach().reshape(-1).view(integers[x.element_size()]) for x in tensors.values()]
    sums = torch.stack([x.sum(dtype=torch.int64) for x in bits]).tolist() if bits else []
    return dict(zip(tensors, sums, strict=True))
