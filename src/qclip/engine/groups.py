"""Groups: which parameters are clipped together, each group at its own threshold."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qclip import _validate as check

GroupSpec = str | Mapping[str, str | Sequence[str]]
"""``"flat"``, ``"per-layer"``, or ``{group name: glob pattern or patterns of parameter names}``."""

ClipNorm = float | Sequence[float] | Mapping[str, float]
"""One threshold for every group, or one per group in order, or one per group by name."""


@dataclass(frozen=True)
class Groups:
    """A partition of the trainable parameters, in a fixed order."""

    names: tuple[str, ...]
    members: Mapping[str, int]
    """Parameter name to the index of its group."""

    def __len__(self) -> int:
        return len(self.names)

    def stretches(self) -> dict[str, int]:
        """For each parameter, the stretch of parameters that it lies in: no group goes on from one to the next.

        >>> Groups(("a", "b", "c"), {"u": 0, "v": 1, "w": 0, "x": 2}).stretches()
        {'u': 0, 'v': 0, 'w': 0, 'x': 1}
        """
        last = {group: name for name, group in self.members.items()}
        found: dict[str, int] = {}
        begun: set[int] = set()
        stretch = 0
        for name, group in self.members.items():
            found[name] = stretch
            begun.add(group)
            if all(last[each] in found for each in begun):
                begun.clear()
                stretch += 1
        return found

    def thresholds(self, clip_norm: ClipNorm) -> tuple[float, ...]:
        """One positive, finite threshold per group."""
        if isinstance(clip_norm, Mapping):
            if set(clip_norm) != set(self.names):
                missing = sorted(set(self.names) ^ set(clip_norm))
                raise check.refuse(
                    "clip_norm",
                    sorted(clip_norm),
                    f"one threshold for each of {self.names}",
                    f"these names appear on one side only: {missing}",
                )
            values = [clip_norm[name] for name in self.names]
        elif isinstance(clip_norm, Sequence) and not isinstance(clip_norm, str):
            values = list(clip_norm)
            if len(values) != len(self):
                raise check.refuse(
                    "clip_norm",
                    f"{len(values)} values",
                    f"{len(self)} values, one per group",
                    f"the groups are {', '.join(self.names)}",
                )
        else:
            values = [clip_norm] * len(self)
        remedy = "it is the largest norm a clipped gradient may have"
        return tuple(check.norm("clip_norm", value, remedy) for value in values)


def l2_bound(thresholds: Iterable[float]) -> float:
    """The largest norm of all groups together: what one example can add to the released vector."""
    return math.hypot(*thresholds)


def partition(parameters: Iterable[str], groups: GroupSpec) -> Groups:
    """Sort parameter names into groups; every parameter belongs to exactly one.

    With patterns the first group that matches takes the parameter, so a last ``"*"`` collects the rest.

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
            raise check.refuse(
                "groups",
                dict(groups),
                f"patterns that cover every parameter; {parameter!r} has no group",
                'add a group for it, or end with {"rest": "*"}',
            )
    for k, name in enumerate(patterns):
        if k not in members.values():
            raise check.refuse(
                "groups",
                dict(groups),
                f"groups that are not empty; {name!r} takes no parameter",
                "check its pattern against the names in model.named_parameters()",
            )
    return Groups(tuple(patterns), members)
