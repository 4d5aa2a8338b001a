"""Sums of the physical batches of a step, before and after noise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from qclip._validate import Floats
from qclip.engine import ClippedGradients
from qclip.engine.batch import to_device_async
from qclip.engine.groups import l2_bound

if TYPE_CHECKING:  # noise can be added where nothing is accounted for
    from qclip.thresholds import Question
    from qclip.thresholds.threshold import Grid

MOST_HELD: Final = 32
"""The most physical batches that are kept for recomputation; beyond that, `BoundedSum` waits for the device."""


class Key(NamedTuple):
    """Names a tensor of a step's sums: the gradient of a parameter, the slack of a group, or the counts."""

    kind: Literal["gradient", "slack", "counts"]
    owner: str | int = ""


class Place(NamedTuple):
    """The place of a part among the elements of a whole tensor, flat."""

    start: int
    whole: int
    """The number of elements of the whole tensor."""


@dataclass(frozen=True)
class BoundedSum:
    """A raw sum over examples, with a bound on the contribution of one example to each group.

    Raw: never show, log or store it. `qclip.training.noise.release` makes it public.

    Guarantees:
        * ``+=`` (in place) and ``+`` (a new sum) add sums over different examples. They raise an AssertionError unless
          the keys, the groups and the bounds agree.
        * The result has the bounds of its terms, because each example is in only one of them.
        * `resolve` recomputes a sum whose check failed, and returns any other sum as it is.

    A sum may be *unresolved*: computed as if all per-example gradients were finite, while the device still runs the
    check. `resolve` waits for the check and recomputes the sum if it failed, with these edge cases:

        * One non-finite physical batch: all physical batches of the sum are recomputed, each once.
        * An unresolved and a resolved sum: the first is resolved before they are added.
        * `MOST_HELD` unresolved physical batches: the sum is resolved at once.
    """

    tensors: Mapping[Any, Tensor]
    members: Mapping[Any, int]
    """The group of each key."""
    group_bounds: tuple[float, ...]
    """The largest norm of one example's contribution to each group."""
    group_dims: tuple[int, ...]
    """The number of coordinates of each group in the whole run, even if ``tensors`` holds only some of them."""
    all_finite: Tensor | None = None
    """Whether all per-example gradients are finite, 0-dim; None if the sum is resolved."""
    recompute: "Callable[[], BoundedSum] | None" = None
    """Recomputes the sum without assuming finite gradients; None if the sum is resolved."""
    num_unresolved: int = 1
    """The number of physical batches that `recompute` runs again."""

    @property
    def l2_bound(self) -> float:
        """The largest norm of one example's contribution to all groups together."""
        return l2_bound(self.group_bounds)

    def __iadd__(self, other: "BoundedSum") -> "BoundedSum":
        return self._joined(other, _add_in_place)

    def __add__(self, other: "BoundedSum") -> "BoundedSum":
        return self._joined(other, _add)

    def resolve(self) -> "BoundedSum":
        """Return the sum over examples with finite gradients; wait for the device if the sum is unresolved."""
        if self.all_finite is None or self.recompute is None:
            return self
        return replace(self, all_finite=None, recompute=None) if bool(self.all_finite) else self.recompute()

    def _joined(self, other: "BoundedSum", add: Callable[[list[Tensor], list[Tensor]], Any]) -> "BoundedSum":
        assert self.group_bounds == other.group_bounds, "cannot add sums that were clipped at different norms"
        assert self.members == other.members, "cannot add sums of different parameters"
        if self.all_finite is None or other.all_finite is None:
            left, right = self.resolve(), other.resolve()
            all_finite = recompute = None
        else:
            left, right = self, other
            all_finite, recompute = self.all_finite & other.all_finite, lambda: _recomputed(self, other)
        tensors = add(list(left.tensors.values()), [right.tensors[key] for key in left.tensors])
        joined = replace(
            left,
            tensors=dict(zip(left.tensors, tensors, strict=True)),
            all_finite=all_finite,
            recompute=recompute,
            num_unresolved=left.num_unresolved + right.num_unresolved,
        )
        return joined.resolve() if joined.num_unresolved >= MOST_HELD else joined


def _add_in_place(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    for dtype in {x.dtype for x in left}:  # mixed precisions would be added tensor by tensor
        pairs = [(x, y) for x, y in zip(left, right, strict=True) if x.dtype == dtype]
        torch._foreach_add_([x for x, _ in pairs], [y for _, y in pairs])
    return left


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return _add_in_place([x.clone() for x in left], right)


def _recomputed(left: BoundedSum, right: BoundedSum) -> BoundedSum:
    assert left.recompute is not None
    assert right.recompute is not None
    total = left.recompute()
    total += right.recompute()
    return total


@dataclass(frozen=True)
class NoisySum:
    """A released sum: public, at the cost that the accountant charges."""

    tensors: Mapping[Any, Tensor]
    """The noisy sum divided by ``divisor``, under the keys of the raw sum."""
    stds: tuple[float, ...]
    """The standard deviation of the noise of each group, before the division."""
    divisor: float = 1.0


ClipNorms = tuple[float, ...] | Callable[[Tensor], tuple[float, ...]]
"""The clip norm of each group, or a function that chooses them from the norms of the first physical batch, [B, K]."""


@dataclass(frozen=True)
class Query:
    """The clip norms and the sums of a step, fixed before its examples are read."""

    clip_norms: ClipNorms
    question: "Question"
    members: Mapping[Key, int]
    """The group of each tensor of the gradient sum, including the slack."""
    dims: tuple[int, ...]
    """The number of coordinates of each group, including the slack."""
    coefficients: "Grid" = ()
    """The slack coordinate of each radius, by group (`qclip.thresholds.threshold.Slack`)."""
    keep_norms: bool = False
    """Whether the threshold sees raw norms, which makes the step non-private."""


@dataclass(frozen=True)
class RawSums:
    """The two sums of a step and facts about its examples. All of it is raw."""

    gradient: BoundedSum
    """The clipped gradients, and the slack of each group."""
    counts: BoundedSum | None
    """The counts that the threshold pays for; None if there are none."""
    num_examples: int
    any_finite: Tensor
    """Whether at least one per-example gradient is finite, 0-dim."""
    norms: tuple[Floats, ...] = ()
    """The gradient norms of each physical batch, [B, K]; only for non-private thresholds."""

    def __iadd__(self, other: "RawSums") -> "RawSums":
        gradient, counts = self.gradient, self.counts
        gradient += other.gradient
        if counts is not None and other.counts is not None:
            counts += other.counts
        num_examples = self.num_examples + other.num_examples
        return RawSums(gradient, counts, num_examples, self.any_finite | other.any_finite, self.norms + other.norms)

    @property
    def hopeless(self) -> bool:
        """Whether the step has examples, none of them with a finite gradient."""
        return self.num_examples > 0 and not bool(self.any_finite)

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """The clip norm of each group."""
        return self.gradient.group_bounds

    def reduced(self, reduce: "Callable[[RawSums], RawSums] | None" = None) -> "RawSums":
        """Return the sums over all ranks, resolved and ready for release."""
        own = replace(self, gradient=self.gradient.resolve())
        total = own if reduce is None else reduce(own)
        # Noise is added to float32, as to the gradients of nearly every model.
        tensors = {key: x.float() if key.kind == "slack" else x for key, x in total.gradient.tensors.items()}
        return replace(total, gradient=replace(total.gradient, tensors=tensors))


def raw_sums(clipped: ClippedGradients, num_examples: int, query: Query, *, keep: bool = True) -> RawSums:
    """Return the sums of one physical batch.

    Args:
        clipped: The clipped gradients of the physical batch.
        num_examples: The number of its examples, without padding.
        query: The counts and the slack to compute.
        keep: Whether the sums must outlive the next physical batch, because others are added to them. Then memory that
            the next one overwrites is copied.

    Returns:
        The gradient sum, with its slack, and the counts.
    """
    counts = None
    if (count := query.question.count) is not None:
        cumulative = clipped.count_under(count.radii).float()
        bins = cumulative.diff(dim=1, prepend=torch.zeros_like(cumulative[:, :1])) - count.centre * num_examples
        dims = (sum(map(len, count.radii)),)
        counts = BoundedSum({Key("counts"): bins}, {Key("counts"): 0}, (count.l2_bound,), dims)
    return RawSums(
        _gradient_sum(clipped, query, copied=clipped.is_view and keep),
        counts,
        num_examples,
        (clipped.norms.isfinite() & clipped.mask).any(),
        (clipped.group_norms[clipped.mask].cpu().numpy(),) if query.keep_norms else (),
    )


def _gradient_sum(clipped: ClippedGradients, query: Query, *, copied: bool) -> BoundedSum:
    """Return the clipped gradients and the slack, in tensors that may be added to in place."""
    tensors = {Key("gradient", name): x.clone() if copied else x for name, x in clipped.sums.items()}
    if query.question.slack is not None:
        # Exact in float64: the sum does not depend on how the step is cut into physical batches.
        within = clipped.count_under(query.question.slack.radii).double()
        rows = within * _coefficients(query.coefficients, within.device)
        tensors |= {Key("slack", k): row for k, row in enumerate(rows)}
    reclip = clipped.recompute

    def recompute() -> BoundedSum:
        assert reclip is not None
        finite = reclip()
        return _gradient_sum(finite, query, copied=finite.is_view)

    recompute_or_none = None if reclip is None else recompute
    return BoundedSum(tensors, query.members, clipped.clip_norms, query.dims, clipped.all_finite, recompute_or_none)


@lru_cache(maxsize=4)
def _coefficients(rows: "Grid", device: torch.device) -> Tensor:
    """Return the coefficients on the device, rounded to float32; the physical batches of a step share them."""
    return to_device_async(torch.tensor(rows, dtype=torch.float32).double(), device)


@dataclass(eq=False)
class LogicalStep:
    """A logical step with the sums of its physical batches so far."""

    query: Query
    raw: RawSums | None = None
    num_batches: int = 0

    @property
    def clip_norms(self) -> ClipNorms:
        """The clip norms of the next physical batch: those of the first one."""
        return self.query.clip_norms if self.raw is None else self.raw.clip_norms

    def add(self, clipped: ClippedGradients, num_examples: int, *, last: bool = False) -> RawSums:
        """Add a physical batch, the last one or not; return the sums so far."""
        if self.raw is None:
            self.raw = raw_sums(clipped, num_examples, self.query, keep=not last)
        else:
            self.raw += raw_sums(clipped, num_examples, self.query, keep=False)
        self.num_batches += 1
        return self.raw
