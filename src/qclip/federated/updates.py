"""Updates of clients: what one must look like, and their clipped sums."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from qclip import _validate as check
from qclip._validate import Refusal
from qclip.engine import ClippedGradients, Dense
from qclip.engine.gradients import clipping
from qclip.engine.gradients.clipping import sum_dtype
from qclip.engine.gradients.parts import Part
from qclip.engine.groups import Groups, GroupSpec, ValidChoice, partition
from qclip.training.noise import group_dims
from qclip.training.sums import BoundedSum, RawSums

Update = Mapping[str, Tensor]
"""The update of a client by name, or, with one more dimension in front, those of several."""
DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_AT_ONCE: Final = 256
"""The most updates that are summed in float32; their sums are added up in float64."""


@dataclass(frozen=True)
class Layout:
    """The names, shapes and dtypes of an update, and its groups."""

    tensors: Mapping[str, Tensor]
    """Tensors of these shapes and dtypes; without memory, except for a device."""
    groups: Groups
    device: torch.device

    @staticmethod
    def of(like: Update | nn.Module, groups: GroupSpec | Groups) -> "Layout":
        """Return the layout of an update like this one, or of the trainable parameters of a module."""
        if isinstance(like, nn.Module):
            like = {name: parameter for name, parameter in like.named_parameters() if parameter.requires_grad}
        if not isinstance(like, Mapping) or not like:
            remedy = "pass the tensors of an update by name, or a module with trainable parameters"
            raise check.refuse("like", like, "a mapping with at least one tensor", remedy)
        for name, tensor in like.items():
            require_real(f"like[{name!r}]", tensor)
            if not tensor.numel():
                raise check.refuse_shape(f"like[{name!r}]", tuple(tensor.shape), "one with elements", "leave it out")
        devices = {tensor.device for tensor in like.values()}
        if len(devices) > 1:
            raise check.refuse("like", sorted(map(str, devices)), "on one device", "move its tensors to one device")
        tensors = {str(name): torch.empty_like(x, device="meta", requires_grad=False) for name, x in like.items()}
        return Layout(tensors, groups if isinstance(groups, Groups) else partition(tensors, groups), devices.pop())

    @property
    def dims(self) -> tuple[int, ...]:
        """The number of coordinates of each group."""
        return group_dims(self.tensors, self.groups.members, len(self.groups))

    @property
    def described(self) -> dict[str, list[Any]]:
        """Names, shapes and dtypes as plain data."""
        return {name: [list(x.shape), str(x.dtype)] for name, x in self.tensors.items()}

    def one(self, update: Update) -> dict[str, Tensor]:
        """Return the update of one client as a stack of one; refuse one of another layout."""
        self._require_names(update)
        for name, expected in self.tensors.items():
            require_real(f"update[{name!r}]", found := update[name])
            if found.shape != expected.shape:
                remedy = "send the update of the same model"
                raise check.refuse_shape(f"update[{name!r}]", tuple(found.shape), f"{tuple(expected.shape)}", remedy)
        return {name: update[name][None] for name in self.tensors}

    def stack(self, updates: Update) -> dict[str, Tensor]:
        """Return stacked updates in the order of the layout; refuse a stack of another layout."""
        self._require_names(updates)
        lengths = {}
        for name, expected in self.tensors.items():
            require_real(f"updates[{name!r}]", found := updates[name])
            if found.dim() == 0 or found.shape[1:] != expected.shape:
                bound, remedy = f"[clients, *{tuple(expected.shape)}]", "stack the clients' updates along a new dim 0"
                raise check.refuse_shape(f"updates[{name!r}]", tuple(found.shape), bound, remedy)
            lengths[name] = len(found)
        if len(set(lengths.values())) > 1:
            raise check.refuse("updates", lengths, "of as many clients under every name", "stack the same clients")
        return {name: updates[name] for name in self.tensors}

    def _require_names(self, update: Any) -> None:
        if not isinstance(update, Mapping):
            raise check.refuse("update", type(update).__name__, "a mapping from names to tensors", "send one")
        if set(update) != set(self.tensors):
            missing, extra = sorted(set(self.tensors) - set(update)), sorted(map(str, set(update) - set(self.tensors)))
            raise Refusal(
                f"an update has other names than like: missing {missing}, unknown {extra}; send the update of the same "
                "model, and nothing else"
            )

    @torch.no_grad()
    def clipped(self, stack: Mapping[str, Tensor], clip_norms: ValidChoice) -> ClippedGradients:
        """Return the sum of stacked updates, each group of each clipped to its clip norm.

        Guarantees:
            * Each update adds at most the clip norm of a group to the sum of that group, rounding included.
            * An update that is not finite adds nothing to any group, and its norms count as infinite. So does one whose
              norm is too large for float32 (float64 if ``like`` has float64).
            * No update changes what another one adds.

        Args:
            stack: The updates, [M, *shape] by name; M may be 0.
            clip_norms: One clip norm per group, or a function that chooses them given the norms [M, K].
        """
        parts = {}
        for name, x in stack.items():
            dtype = sum_dtype(self.tensors[name])
            rows = x.detach().to(self.device)
            parts[name] = [Part(Dense(rows.to(dtype) if rows.dtype.itemsize > dtype.itemsize else rows))]
        num_clients = len(next(iter(stack.values())))
        is_counted = torch.ones(num_clients, dtype=torch.bool, device=self.device)
        losses = torch.zeros(num_clients, device=self.device)
        return clipping.clip(parts, self.groups, self.tensors, losses, is_counted, clip_norms)

    def nothing(self) -> dict[str, Tensor]:
        """Return a stack of no updates."""
        return {name: x.new_zeros((0, *x.shape), device=self.device) for name, x in self.tensors.items()}


def pieces(stack: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Cut a stack into stacks of at most `MOST_AT_ONCE` updates."""
    num_clients = len(next(iter(stack.values())))
    for k in range(math.ceil(num_clients / MOST_AT_ONCE)):
        rows = slice(k * MOST_AT_ONCE, (k + 1) * MOST_AT_ONCE)
        yield {name: x[rows] for name, x in stack.items()}


def in_float64(raw: RawSums) -> RawSums:
    """Return sums to which thousands more are added: in float32 each would move the rounding of all that follow."""
    counts = None if raw.counts is None else _doubled(raw.counts)
    return replace(raw, gradient=_doubled(raw.gradient), counts=counts)


def _doubled(value: BoundedSum) -> BoundedSum:
    return replace(value, tensors={key: x.double() for key, x in value.tensors.items()})


def require_real(name: str, x: Any) -> None:
    """Refuse what is not a dense tensor of real floating-point numbers."""
    remedy = "pass floating-point tensors, and leave counters out of the update"
    if not isinstance(x, Tensor):
        raise check.refuse(name, type(x).__name__, "a tensor", remedy)
    if x.dtype not in DTYPES:
        raise check.refuse(f"dtype of {name}", str(x.dtype), f"one of {', '.join(map(str, DTYPES))}", remedy)
    if x.layout != torch.strided or x.is_nested or x.is_meta:
        raise check.refuse(name, f"{x.layout} on {x.device}", "a dense tensor with elements", remedy)
