"""The summary of a run, summary.json: its one definition, for writers and readers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from qclip import _validate as check


@dataclass(frozen=True)
class Certificate:
    """The certificate of a finished run: a bound over runs with its terms, and the bound on this run."""

    total: float
    optimisation: float
    variance: float
    bias: float
    this_run: float | None
    """The bound on this run alone; None where no theorem has one."""
    confidence: float
    """The probability with which ``this_run``, and margins on noisy fractions, hold."""
    theorem: str
    """The theorem, by the section of docs/theory.md."""
    mean: str
    """What is bounded, in words."""


@dataclass(frozen=True)
class Evaluation:
    """The details of a held-out result, beside its metrics. Held-out examples are not protected."""

    guess: dict[str, float]
    """The metrics of the best constant guess: the shares of the classes, or the mean."""
    classes: list[str]
    """The names of the classes; empty for a number."""
    confusion: list[list[int]]
    """The number of examples of each class (row) that were predicted as each class (column)."""
    positive: str
    """The rarer of two classes, to which probabilities and average precision refer; else empty."""
    calibration: list[list[float]]
    """For each bin of predicted probabilities: their mean, the share that came true, their number."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The settings, progress and results of a run. Released and held-out values only."""

    epsilon: float | None
    """Epsilon spent; None where it is infinite."""
    delta: float
    private: bool
    accuracy: float | None
    """Held-out accuracy; None where it is not among the metrics."""
    held_out: dict[str, float]
    """The last held-out score."""
    evaluation: Evaluation | None
    """The details of the last held-out score; None before it, or where the task has none."""
    finished: bool
    steps: int
    """Steps done."""
    num_steps: int
    """Steps planned."""
    seconds: float
    task: str
    description: str
    unit: str
    """What the guarantee protects: "one example", or what else is added or removed at a time."""
    public: list[str]
    """What was read from the data and counts as public, in words."""
    details: list[str]
    """How a table was read, what each column became, the model; empty for other data."""
    examples: int
    batch_size: int
    """Expected batch size."""
    sampling: str
    sample_rate: float
    accountant: str
    noise_multiplier: float
    """Noise multiplier of gradient and counts together."""
    gradient_noise_multiplier: float
    threshold: dict[str, Any]
    """Name and settings of the threshold."""
    lost_threshold: str
    """The step since which the threshold is lost, the reason and the remedy; empty where it is not."""
    groups: list[str]
    parameters: int
    """Trainable parameters."""
    settings: dict[str, Any]
    """The settings of the command line, without the seed."""
    seeded: bool
    """Whether the run began with a given seed."""
    command: str
    versions: dict[str, str]
    date: str
    """When the summary was written, UTC."""
    certificate: Certificate | None
    certificate_refused: str | None
    """Why there is no certificate, by what the run lacks; None where nobody asks, as in a run that goes on."""

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the summary from JSON values; missing, unknown and ill-typed fields are refused by name."""
        values = _checked(cls, content)
        if values["certificate"] is not None:
            values["certificate"] = Certificate(**_checked(Certificate, values["certificate"], "certificate."))
        if values["evaluation"] is not None:
            values["evaluation"] = Evaluation(**_checked(Evaluation, values["evaluation"], "evaluation."))
        return cls(**values)


def _checked(kind: type, content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of the fields of a dataclass, or refuse them."""
    hints = get_type_hints(kind)
    remedy = "restore the file as the run wrote it, or use the version of qclip that wrote it"
    names = [field.name for field in fields(kind)]
    for name in [*names, *content]:
        if name not in content:
            raise check.Refusal(f"summary.json has no {prefix}{name}; {remedy}")
        if name not in names:
            raise check.Refusal(f"summary.json has an unknown field {prefix}{name}; {remedy}")
        if not _fits(content[name], hints[name]):
            raise check.Refusal(f"{prefix}{name} = {content[name]!r} in summary.json has the wrong type; {remedy}")
    return dict(content)


def _fits(value: object, hint: Any) -> bool:
    """Return whether a JSON value matches the outermost layer of a type."""
    if get_origin(hint) is UnionType:
        return any(_fits(value, each) for each in get_args(hint))
    if hint is NoneType or hint is None:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, dict if is_dataclass(hint) else get_origin(hint) or hint)
