"""The summary of a run, summary.json: its one definition, for whoever writes it and whoever reads it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from qclip import _validate as check


@dataclass(frozen=True)
class Certificate:
    """What the run is known to have achieved: a bound, in its terms."""

    total: float
    optimisation: float
    variance: float
    bias: float
    confidence: float
    """In the noisy fractions."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run is, how far it came, and what it achieved. Released and held-out values only."""

    epsilon: float | None
    """Spent; None where it is infinite."""
    delta: float
    private: bool
    accuracy: float | None
    """Held-out, where it is among the metrics."""
    held_out: dict[str, float]
    """The last held-out score."""
    finished: bool
    steps: int
    """Done."""
    num_steps: int
    """Of the plan."""
    seconds: float
    task: str
    description: str
    examples: int
    batch_size: int
    """Expected."""
    sample_rate: float
    noise_multiplier: float
    """Of gradient and counts together."""
    gradient_noise_multiplier: float
    threshold: dict[str, Any]
    """Its name and its settings."""
    lost_threshold: str
    """Since when it has lost its quantile, and what to do; empty where it has not."""
    groups: list[str]
    parameters: int
    """Trainable."""
    settings: dict[str, Any]
    """As the command line has them, less the seed."""
    seeded: bool
    """Whether it began with a seed that someone knows."""
    command: str
    versions: dict[str, str]
    certificate: Certificate | None
    certificate_refused: str | None
    """Why there is none, where one was asked for."""

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """What was written; refused by name where a part is missing, unknown or of another kind."""
        values = _checked(cls, found)
        if values["certificate"] is not None:
            values["certificate"] = Certificate(**_checked(Certificate, values["certificate"], "certificate."))
        return cls(**values)


def _checked(kind: type, found: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values of the fields of a dataclass."""
    hints = get_type_hints(kind)
    remedy = "put back the file as the run wrote it, or use the version of qclip that wrote it"
    names = [field.name for field in fields(kind)]
    for name in [*names, *found]:
        if name not in found or name not in names:
            raise check.refuse("summary.json", f"with{'' if name in found else 'out'} {where}{name}", "a run's", remedy)
        if not _fits(found[name], hints[name]):
            raise check.refuse(f"{where}{name} in summary.json", found[name], "of the kind that a run writes", remedy)
    return dict(found)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of a JSON file can be of this type: its outermost layer."""
    if get_origin(hint) is UnionType:
        return any(_fits(value, each) for each in get_args(hint))
    if hint is NoneType or hint is None:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, dict if hint is Certificate else get_origin(hint) or hint)
