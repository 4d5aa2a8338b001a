"""Groups of parameters that are clipped together, each at its own clip norm."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from qclip import _validate as check

GroupSpec = str | Mapping[str, str | Sequence[str]]
"""``"flat"``, ``"per-layer"``, or ``{group name: glob pattern or patterns of parameter names}``."""

ClipNorm = float | Sequence[float] | Mapping[str, float]
"""One clip norm for every group, or one per group in order, or one per group by name."""

ValidChoice = tuple[float, ...] | Callable[[Tensor], ClipNorm]
"""Validated clip norms, or a function that chooses them given the norms [B, K] of the counted examples."""


@dataclass(frozen=True)
class Groups:
    """A partition of the trainable parameters, in a fixed order."""

    names: tuple[str, ...]
    members: Mapping[str, int]
    """The index of the group of each parameter, by name."""

    def __len__(self) -> int:
        return len(self.names)

    def memory_phases(self) -> dict[str, int]:
        """Return the phase of each parameter: consecutive parameters, cut wherever no group continues across the cut.

        >>> Groups(("a", "b", "c"), {"u": 0, "v": 1, "w": 0, "x": 2}).memory_phases()
        {'u': 0, 'v': 0, 'w': 0, 'x': 1}
        """
        last = {group: name for name, group in self.members.items()}
        phases: dict[str, int] = {}
        open_groups: set[int] = set()
        phase = 0
        for name, group in self.members.items():
            phases[name] = phase
            open_groups.add(group)
            if all(last[k] in phases for k in open_groups):
                open_groups.clear()
                phase += 1
        return phases

    def clip_norms(self, clip_norm: ClipNorm) -> tuple[float, ...]:
        """Return one positive, finite clip norm per group.

        Raises:
            Refusal: ``clip_norm`` has other names or another length than the groups, or a value is not a clip norm.
        """
        if isinstance(clip_norm, Mapping):
            if set(clip_norm) != set(self.names):
                remedy = f"these names appear on one side only: {sorted(set(self.names) ^ set(clip_norm))}"
                raise check.refuse("clip_norm", sorted(clip_norm), f"one clip norm for each of {self.names}", remedy)
            values = [clip_norm[name] for name in self.names]
        elif isinstance(clip_norm, Sequence) and not isinstance(clip_norm, str):
            values = list(clip_norm)
            if len(values) != len(self):
                bound, remedy = f"{len(self)} values, one per group", f"the groups are {', '.join(self.names)}"
                raise check.refuse("clip_norm", f"{len(values)} values", bound, remedy)
        else:
            values = [clip_norm] * len(self)
        remedy = "it is the largest norm a clipped gradient may have"
        return tuple(check.norm("clip_norm", value, remedy) for value in values)

    def chosen(self, clip_norms: ValidChoice, norms: Tensor) -> tuple[float, ...]:
        """Return one clip norm per group: as validated, or chosen from the norms [B, K] of the counted examples."""
        return self.clip_norms(clip_norms(norms)) if callable(clip_norms) else clip_norms


def l2_bound(group_bounds: Iterable[float]) -> float:
    """Return the largest norm over all groups together: the most that one example can add to a released vector."""
    return math.hypot(*group_bounds)


def partition(parameters: Iterable[str], groups: GroupSpec) -> Groups:
    """Partition parameter names into groups.

    Args:
        parameters: The names, in order.
        groups: ``"flat"``, ``"per-layer"``, or glob patterns by group name. The first group with a matching pattern
            takes a parameter, so a last ``"*"`` collects the rest.

    Raises:
        Refusal: A parameter has no group, or a group has no parameter.

    >>> partition(["a.weight", "a.bias", "head.weight"], {"head": "head.*", "rest": "*"}).names
    ('head', 'rest')
    """
    parameters = list(parameters)
    if isinstance(groups, Mapping):
        return _by_patterns(parameters, groups)
    if check.choice("groups", groups, ("flat", "per-layer")) == "flat":
        return Groups(("all",), dict.fromkeys(parameters, 0))
    layers = {name: name.rpartition(".")[0] or name for name in parameters}
    names = tuple(dict.fromkeys(layers.values()))
    index = {layer: k for k, layer in enumerate(names)}
    return Groups(names, {name: index[layer] for name, layer in layers.items()})


def _by_patterns(parameters: list[str], groups: Mapping[str, str | Sequence[str]]) -> Groups:
    patterns = {name: [glob] if isinstance(glob, str) else list(glob) for name, glob in groups.items()}
    members = {}
    for parameter in parameters:
        for k, globs in enumerate(patterns.values()):
            if any(fnmatchcase(parameter, glob) for glob in globs):
                members[parameter] = k
                break
        else:
            bound = f"patterns that cover every parameter; {parameter!r} has no group"
            raise check.refuse("groups", dict(groups), bound, 'add a group for it, or end with {"rest": "*"}')
    for k, name in enumerate(patterns):
        if k not in members.values():
            remedy = "check its pattern against the names in model.named_parameters()"
            raise check.refuse(
                "groups", dict(groups), f"groups that are not empty; {name!r} takes no parameter", remedy
            )
    return Groups(tuple(patterns), members)
