"""Sums: what the physical batches of a step add up to, before and after noise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from qclip._validate import Floats
from qclip.engine import ClippedGradients
from qclip.engine.batch import to_device_async
from qclip.engine.groups import l2_bound
from qclip.thresholds import Question
from qclip.thresholds.threshold import Grid

MOST_HELD: Final = 32
"""How many physical batches are kept to be computed again; beyond that the device is waited for."""


class Key(NamedTuple):
    """Names a tensor of a step's sums: the gradient of a parameter, the slack of a group, or the counts."""

    kind: Literal["gradient", "slack", "counts"]
    owner: str | int = ""


@dataclass(frozen=True)
class BoundedSum:
    """A raw sum over examples, in groups, that knows how far one example can move each group.

    Raw: it must not be shown, logged or stored. `release` is the only way out. Sums over different examples with the
    same keys and bounds add up with ``+=`` (in place) or ``+``.

    A sum may be *unresolved*: computed on the assumption that all per-example gradients are finite, with the check
    still on its way through the device. `resolve` waits for the check and computes the sum again where it failed.
    """

    tensors: Mapping[Any, Tensor]
    members: Mapping[Any, int]
    """The group of each key."""
    group_bounds: tuple[float, ...]
    """The largest norm that one example can add to each group."""
    group_dims: tuple[int, ...]
    """The number of coordinates of each group in the whole run, also where ``tensors`` holds only some of them."""
    all_finite: Tensor | None = None
    """Whether all examples were finite, 0-dim, where that is not known yet."""
    recompute: "Callable[[], BoundedSum] | None" = None
    """Computes the same sum without that assumption."""
    num_unresolved: int = 1
    """How many physical batches `recompute` would run again."""

    @property
    def l2_bound(self) -> float:
        """The largest norm that one example can add to all of it."""
        return l2_bound(self.group_bounds)

    def __iadd__(self, other: "BoundedSum") -> "BoundedSum":
        return self._joined(other, _add_in_place)

    def __add__(self, other: "BoundedSum") -> "BoundedSum":
        return self._joined(other, torch._foreach_add)

    def resolve(self) -> "BoundedSum":
        """Return the sum of finite examples; waits for the device where nobody has looked yet."""
        if self.all_finite is None or self.recompute is None:
            return self
        return replace(self, all_finite=None, recompute=None) if bool(self.all_finite) else self.recompute()

    def _joined(self, other: "BoundedSum", add: Callable[[list[Tensor], list[Tensor]], Any]) -> "BoundedSum":
        assert self.group_bounds == other.group_bounds, "sums that were clipped at different norms"
        assert self.members == other.members, "sums of different parameters"
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
    torch._foreach_add_(left, right)
    return left


def _recomputed(left: BoundedSum, right: BoundedSum) -> BoundedSum:
    assert left.recompute is not None
    assert right.recompute is not None
    total = left.recompute()
    total += right.recompute()
    return total


def alone(raw: BoundedSum) -> BoundedSum:
    """Reduce over a single process: there is nothing to add."""
    return raw


@dataclass(frozen=True)
class NoisySum:
    """A released sum: anyone may see it, at the cost that the accountant has charged."""

    tensors: Mapping[Any, Tensor]
    """The noisy sum over the divisor, under the keys of the raw sum."""
    stds: tuple[float, ...]
    """The standard deviation of the noise on the sum of each group, before the division."""
    divisor: float = 1.0


ClipNorms = tuple[float, ...] | Callable[[Tensor], tuple[float, ...]]
"""The clip norm of each group, or how to choose them from the norms of the first physical batch, [B, K]."""


@dataclass(frozen=True)
class Query:
    """Where a step clips and what it adds up: fixed before its examples are seen."""

    clip_norms: ClipNorms
    question: Question
    members: Mapping[Key, int]
    """The group of each tensor of the gradient sum, the slack's included."""
    dims: tuple[int, ...]
    """The number of coordinates of each group, the slack's included."""
    coefficients: Grid = ()
    """The coordinates of the slack in each group."""
    keep_norms: bool = False
    """Whether the threshold sees raw norms: then the step is not private."""


@dataclass(frozen=True)
class RawSums:
    """The two sums of a step, and what else is known of its examples. Nothing in it is private."""

    gradient: BoundedSum
    """Clipped gradients, with the slack appended to each group."""
    counts: BoundedSum | None
    """What the threshold pays for, if anything."""
    num_examples: int
    any_finite: Tensor
    """Whether the gradient of at least one of them is finite, 0-dim."""
    norms: tuple[Floats, ...] = ()
    """[B, K] of each physical batch; only for thresholds that are not private."""

    def __iadd__(self, other: "RawSums") -> "RawSums":
        gradient, counts = self.gradient, self.counts
        gradient += other.gradient
        if counts is not None and other.counts is not None:
            counts += other.counts
        examples = self.num_examples + other.num_examples
        return RawSums(gradient, counts, examples, self.any_finite | other.any_finite, self.norms + other.norms)

    @property
    def hopeless(self) -> bool:
        """Whether there were examples and the gradient of none of them was finite."""
        return self.num_examples > 0 and not bool(self.any_finite)

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """What every example was clipped at, by group."""
        return self.gradient.group_bounds

    def reduced(self, reduce: Callable[[BoundedSum], BoundedSum] = alone) -> "RawSums":
        """Return the sums over all who hold examples of the step, resolved and ready to be released."""
        gradient = reduce(self.gradient.resolve())
        # Noise is added to float32, as to the gradients of nearly every model.
        tensors = {key: x.float() if key.kind == "slack" else x for key, x in gradient.tensors.items()}
        counts = None if self.counts is None else reduce(self.counts)
        return replace(self, gradient=replace(gradient, tensors=tensors), counts=counts)


def raw_sums(clipped: ClippedGradients, num_examples: int, query: Query, *, last: bool = False) -> RawSums:
    """Return the sums of one physical batch.

    Args:
        clipped: Its clipped gradients.
        num_examples: How many of its examples count.
        query: What to add up.
        last: Whether no other physical batch follows: then memory that the next one overwrites need not be copied.
    """
    counts = query.question.count
    if counts is not None:
        cumulative = clipped.count_under(counts.radii).float()
        bins = cumulative.diff(dim=1, prepend=torch.zeros_like(cumulative[:, :1])) - counts.centre * num_examples
        dims = (sum(map(len, counts.radii)),)
        counts = BoundedSum({Key("counts"): bins}, {Key("counts"): 0}, (counts.l2_bound,), dims)
    return RawSums(
        _gradient_sum(clipped, query, copied=clipped.is_view and not last),
        counts,
        num_examples,
        (clipped.norms.isfinite() & clipped.mask).any(),
        (clipped.group_norms[clipped.mask].cpu().numpy(),) if query.keep_norms else (),
    )


def _gradient_sum(clipped: ClippedGradients, query: Query, *, copied: bool) -> BoundedSum:
    """Return the clipped gradients with the slack, in tensors that other sums may be added to."""
    tensors = {Key("gradient", name): x.clone() if copied else x for name, x in clipped.sums.items()}
    if query.question.slack is not None:
        # Exact in float64, so that the sum does not depend on how the step is cut.
        within = clipped.count_under(query.question.slack.radii).double()
        coefficients = torch.tensor(query.coefficients, dtype=torch.float32).double()
        rows = within * to_device_async(coefficients, within.device)
        tensors |= {Key("slack", k): row for k, row in enumerate(rows)}
    again = clipped.recompute

    def recompute() -> BoundedSum:
        assert again is not None
        clean = again()
        return _gradient_sum(clean, query, copied=clean.is_view)

    recompute_or_none = None if again is None else recompute
    return BoundedSum(tensors, query.members, clipped.clip_norms, query.dims, clipped.all_finite, recompute_or_none)
