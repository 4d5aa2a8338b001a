"""The settings of a training run: the fields are the command line."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from qclip import _validate as check

if TYPE_CHECKING:
    from qclip.theory import Assumptions

ThresholdName = Literal["private-quantile", "slack", "histogram", "geometric", "constant", "exact", "rolling"]
NOT_PRIVATE = ("exact", "rolling")
CERTIFICATE = ("L", "sigma", "gap", "q")
SECRET = ("seed",)
"""Not written to files that are for showing: whoever knows the seed can subtract the noise."""
FREE_TO_MOVE = ("data_dir", "compile")
"""What may differ when a run is taken up again."""


def _option(metavar: str, default: str = "none") -> Any:
    """How ``--help`` shows an option that is None when it is left out."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True)
class Settings:
    """What to train, how privately and how.

    None means left out: a new run then takes the default, a resumed one what it has.
    """

    data: Annotated[str | None, _option("NAME|PATH.csv", "digits")] = None
    """digits, mnist, fashion-mnist, adult, shakespeare, or the path of a table in a .csv file."""
    data_dir: Annotated[Path | None, _option("DIR")] = None
    """Where the files of the data set lie; the digits need none."""
    target: Annotated[str | None, _option("COLUMN")] = None
    """The column of a .csv file to foretell."""
    classes: Annotated[tuple[str, ...], _option("CLASS...", "read from the file")] = ()
    """The classes of the target of a .csv file, known beforehand."""
    columns: Annotated[tuple[str, ...], _option("NAME=KIND...", "read from the file")] = ()
    """What columns of a .csv file hold: number, text, drop (not used), or the range of a number such as age=0:120."""

    epsilon: Annotated[float | None, _option("FLOAT", "3")] = None
    """The privacy budget: the noise is chosen to meet it."""
    delta: Annotated[float | None, _option("FLOAT", "1/(10 examples)")] = None
    """The probability with which the budget may be exceeded."""
    noise_multiplier: Annotated[float | None, _option("FLOAT")] = None
    """Instead of --epsilon: the noise of gradient and counts together; 0 trains without privacy."""

    epochs: Annotated[int | None, _option("INT", "the task's")] = None
    """How often each example is used, on average."""
    batch_size: Annotated[int | None, _option("INT", "the task's")] = None
    """The expected number of examples of a step."""
    lr: Annotated[float | None, _option("FLOAT", "the task's; 0.01 for adam")] = None
    """The step size, in units of the threshold."""
    plain_steps: tyro.conf.FlagCreatePairsOff[bool] = False
    """Take --lr as it is, not divided by the threshold: it then has to fit the scale of the gradients."""
    optimizer: Annotated[Literal["sgd", "adam"] | None, _option("{sgd,adam}", "sgd")] = None
    """What applies the noisy gradients."""
    threshold: Annotated[
        ThresholdName | None,
        _option(
            "{private-quantile,slack,histogram,geometric,constant,exact,rolling}",
            "private-quantile; constant for tables, unless --p is given",
        ),
    ] = None
    """Where to clip. Exact and rolling quantiles are not private: they need --noise-multiplier."""
    p: Annotated[float | None, _option("FLOAT", "0.7")] = None
    """The fraction of examples to leave unclipped."""
    tau: Annotated[float | None, _option("FLOAT", "for tables the root of the number of columns")] = None
    """Where --threshold constant clips."""
    groups: Annotated[Literal["flat", "per-layer"] | None, _option("{flat,per-layer}", "flat")] = None
    """Which parameters are clipped together."""

    physical_batch_size: Annotated[int | None, _option("INT", "the whole step")] = None
    """The most examples that go through the model at once."""
    compile: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run each step as one compiled graph: faster, after a while of compiling."""
    device: Annotated[str | None, _option("DEVICE", "cuda where there is one, else cpu")] = None
    """Where to train."""
    seed: Annotated[int | None, _option("INT", "drawn anew")] = None
    """For tests only: whoever knows it can subtract the noise."""
    write_raw_loss: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write the training loss to metrics.jsonl: it is not private."""

    L: Annotated[float | None, tyro.conf.arg(name="L", metavar="FLOAT", help_behavior_hint="(default: none)")] = None
    """Smoothness of the objective; with --sigma, --gap and --plain-steps, for the certificate of the run."""
    sigma: Annotated[float | None, _option("FLOAT")] = None
    """Bound on the q-th moment of the gradient noise, for the certificate."""
    gap: Annotated[float | None, _option("FLOAT")] = None
    """f(x0) - inf f, for the certificate."""
    q: Annotated[float | None, _option("FLOAT", "2")] = None
    """The moment that --sigma bounds, in (1, 2]."""

    def assumptions(self) -> "Assumptions | None":
        """What the certificate rests on; None where none is asked for."""
        from qclip.theory import Assumptions

        if self.L is None or self.sigma is None or self.gap is None:
            return None
        return Assumptions(L=self.L, sigma=self.sigma, q=2.0 if self.q is None else self.q, gap=self.gap)

    def check(self) -> None:
        """Refuse values that are out of bounds and settings that contradict each other, before anything is loaded."""
        self._check_numbers()
        self._check_privacy()
        self._check_threshold()
        self._check_certificate()

    def _check_numbers(self) -> None:
        positive = {"epsilon": "it is the privacy budget; 1 to 10 is usual", "lr": "it is the step size"}
        for name, remedy in positive.items():
            if getattr(self, name) is not None:
                check.positive(flag(name), getattr(self, name), remedy)
        for name in ("epochs", "batch_size", "physical_batch_size"):
            if getattr(self, name) is not None:
                check.count(flag(name), getattr(self, name))
        if self.delta is not None:
            check.between("--delta", self.delta, 0, 1, "well below 1/(number of examples), such as 1e-5")
        if self.seed is not None:
            check.count("--seed", self.seed, "pass a whole number", least=0)

    def _check_privacy(self) -> None:
        if self.noise_multiplier is None:
            return
        check.nonnegative("--noise-multiplier", self.noise_multiplier, "0 means no noise")
        if self.epsilon is not None:
            remedy = "give the privacy budget, or the noise itself"
            raise check.refuse("--noise-multiplier", self.noise_multiplier, "left out with --epsilon", remedy)

    def _check_threshold(self) -> None:
        if self.threshold in NOT_PRIVATE and self.noise_multiplier is None:
            remedy = "take another, or add --noise-multiplier (0 for plain QC-SGD) for a run without a guarantee"
            raise check.refuse("--threshold", self.threshold, "private, to meet an epsilon", remedy)
        if self.threshold == "constant":
            if self.p is not None:
                raise check.refuse("--p", self.p, "left out with --threshold constant", "it has no quantile")
            remedy = "say where to clip, or take a quantile"
            if self.tau is None:
                raise check.refuse("--tau", None, "given with --threshold constant", remedy)
            check.positive("--tau", self.tau, remedy)
        elif self.tau is not None:
            remedy = "add --threshold constant, or drop it: quantiles find their own"
            raise check.refuse("--tau", self.tau, "left out without --threshold constant", remedy)
        if self.p is not None:
            check.quantile("--p", self.p)

    def _check_certificate(self) -> None:
        given = [name for name in CERTIFICATE if getattr(self, name) is not None]
        missing = [flag(name) for name in ("L", "sigma", "gap") if name not in given]
        if not given:
            return
        if missing:
            remedy = "a certificate needs --L, --sigma and --gap (and --q below 2 for heavy tails)"
            raise check.refuse(missing[0], None, f"given with {flag(given[0])}", remedy)
        remedy = "the certificate is for plain SGD, clipped flat at a quantile; drop --L, --sigma and --gap otherwise"
        for name, value, only in (("optimizer", self.optimizer, "sgd"), ("groups", self.groups, "flat")):
            if value not in (None, only):
                raise check.refuse(flag(name), value, f"{only} with --L", remedy)
        if self.threshold == "constant":
            raise check.refuse("--threshold", self.threshold, "a quantile with --L", remedy)
        self.assumptions()

    def filled(self, task_defaults: Mapping[str, Any], examples: int, device: str) -> "Settings":
        """The same settings with a default for everything that was left out and has one."""
        given = {key: value for key, value in asdict(self).items() if value is not None}
        common = {"data": "digits", "optimizer": "sgd", "threshold": "private-quantile", "groups": "flat"}
        choices: dict[str, Any] = common | dict(task_defaults) | {"device": device, "delta": 1 / (10 * examples)}
        if self.noise_multiplier is None:
            choices["epsilon"] = 3.0
        # A task may know where to clip; p and the certificate are about a quantile.
        if choices.get("tau") is not None and (self.threshold, self.p, self.L) == (None, None, None):
            choices["threshold"] = "constant"
        constant = (self.threshold or choices["threshold"]) == "constant"
        choices.pop("p" if constant else "tau", None)
        if self.optimizer == "adam":
            choices["lr"] = 0.01
        if self.L is not None:
            choices["q"] = 2.0
        return replace(self, **(choices | given))

    def public(self) -> dict[str, Any]:
        """What may be shown, as JSON has it."""
        values = {key: value for key, value in asdict(self).items() if key not in SECRET}
        return {key: _as_json(value) for key, value in values.items()}

    def command(self) -> str:
        """The command line that has these settings, less what is secret."""
        words = ["qclip", "train"]
        for name, value in self.public().items():
            if value is True:
                words.append(flag(name))
            elif not _left_out(value):
                words.append(flag(name))
                words += map(_word, value if isinstance(value, list) else [value])
        return shlex.join(words)


def from_public(values: Mapping[str, Any]) -> Settings:
    """The settings that a summary holds; the seed is not among them, and not needed to go on."""
    known = {field.name for field in fields(Settings)} - set(SECRET)
    unknown = sorted(set(values) - known)
    if unknown:
        remedy = "resume with the version of qclip that wrote it"
        raise check.refuse("summary.json", f"with settings {unknown}", "of this version", remedy)
    read: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    data_dir = read.pop("data_dir", None)
    return Settings(**read, data_dir=None if data_dir is None else Path(data_dir))


def agreed(given: Settings, saved: Settings) -> Settings:
    """The settings of a run that is taken up again; what contradicts them is refused by name."""
    for name, value in asdict(given).items():
        had = getattr(saved, name)
        if _left_out(value) or value == had or name in FREE_TO_MOVE:
            continue
        if name in SECRET:
            remedy = "leave it out: the checkpoint goes on with the random numbers that the run began with"
            raise check.refuse(flag(name), value, "left out with --resume", remedy)
        remedy = "leave it out, or start another run in another --out"
        raise check.refuse(flag(name), value, f"{had!r}, what the run began with, to resume it", remedy)
    return replace(saved, data_dir=given.data_dir or saved.data_dir)


def flag(name: str) -> str:
    """How the command line calls a field.

    >>> flag("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


def _left_out(value: object) -> bool:
    return value is None or value is False or value in ((), [])  # but 0 was given


def _as_json(value: Any) -> Any:
    match value:
        case Path():
            return str(value)
        case tuple():
            return list(value)
        case _:
            return value


def _word(value: object) -> str:
    """A value as one would write it: 3 rather than 3.0, but every digit that counts."""
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)
