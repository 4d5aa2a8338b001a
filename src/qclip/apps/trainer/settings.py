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

ThresholdName = Literal[
    "balanced", "private-quantile", "slack", "histogram", "geometric", "constant", "exact", "rolling"
]
NOT_PRIVATE = ("exact", "rolling")
CERTIFICATE = ("L", "sigma", "gap", "q")
SECRET = ("seed",)
"""Not written to files meant for sharing: the seed would let a reader subtract the noise."""
FREE_TO_MOVE = ("data_dir", "compile")
"""Settings that may differ when a run is resumed."""


def _option(metavar: str, default: str = "none") -> Any:
    """Describe, for ``--help``, an option that is None when it is left out."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True)
class Settings:
    """The data, the privacy, the training and the certificate of a run.

    None means left out: a new run takes the default, a resumed one keeps its setting.
    """

    data: Annotated[str | None, _option("NAME|PATH", "digits")] = None
    """digits, mnist, fashion-mnist, cifar10, adult, shakespeare, sst2 (sst2-lora, sst2-head), or the path of a table
    (.csv, .tsv, .txt, also .gz, or .parquet)."""
    data_dir: Annotated[Path | None, _option("DIR")] = None
    """Folder of the data set's files; digits need none."""
    target: Annotated[str | None, _option("COLUMN")] = None
    """The column of a table to predict."""
    classes: Annotated[tuple[str, ...], _option("CLASS...", "read from the file")] = ()
    """The classes of the target of a table, known beforehand."""
    columns: Annotated[tuple[str, ...], _option("NAME=KIND...", "read from the file")] = ()
    """The kinds of columns of a table: number, text, words (free text), date (or date:dmy, date:mdy), drop (not used),
    or a number's range such as age=0:120."""
    separator: Annotated[str | None, _option("CHAR", "recognised")] = None
    """The character between the values of a table, or its name: tab, comma, semicolon, bar."""
    encoding: Annotated[str | None, _option("NAME", "recognised")] = None
    """The encoding of a table, such as utf-8, cp1252 or utf-16."""
    decimal: Annotated[Literal[".", ","] | None, _option("{.,','}", "recognised")] = None
    """The decimal mark of a table."""
    missing: Annotated[tuple[str, ...], _option("TEXT...")] = ()
    """Spellings of a missing value of a table, besides an empty one, NA, N/A, NaN, NULL and ?."""
    unit: Annotated[str | None, _option("COLUMN", "a row")] = None
    """The column of a table that names the unit of privacy, such as patient_id: epsilon is for all rows of one."""
    rows_per_unit: Annotated[int | None, _option("INT", "4")] = None
    """The most rows of a unit that count."""
    model: Annotated[Literal["linear", "mlp"] | None, _option("{linear,mlp}", "linear")] = None
    """The model of a table: linear, or a perceptron with one hidden layer."""
    class_weights: Annotated[tuple[str, ...], _option("CLASS=WEIGHT...|balanced")] = ()
    """Weights of the classes in the loss, or balanced with --class-shares; they are never counted in the data."""
    class_shares: Annotated[tuple[str, ...], _option("CLASS=SHARE...")] = ()
    """Shares of the classes, from public sources, for --class-weights balanced."""

    epsilon: Annotated[float | None, _option("FLOAT", "3")] = None
    """Privacy budget, which the noise is calibrated to meet."""
    delta: Annotated[float | None, _option("FLOAT", "1/(10 examples)")] = None
    """Delta of the privacy budget."""
    noise_multiplier: Annotated[float | None, _option("FLOAT")] = None
    """Instead of --epsilon: noise multiplier of gradient and counts together; 0 trains without privacy."""

    epochs: Annotated[int | None, _option("INT", "the task's")] = None
    """Length of the run: how often each example is used, on average."""
    batch_size: Annotated[int | None, _option("INT", "the task's")] = None
    """Expected batch size."""
    lr: Annotated[float | None, _option("FLOAT", "found by the run; 0.01 for adam")] = None
    """Learning rate, in units of the threshold. Left out, SGD finds it from the released gradients."""
    plain_steps: tyro.conf.FlagCreatePairsOff[bool] = False
    """Use --lr without dividing it by the threshold; it must then fit the scale of the gradients."""
    optimizer: Annotated[Literal["sgd", "adam"] | None, _option("{sgd,adam}", "sgd")] = None
    """The optimizer of the noisy gradients."""
    threshold: Annotated[
        ThresholdName | None,
        _option(
            "{balanced,private-quantile,slack,histogram,geometric,constant,exact,rolling}",
            "balanced; private-quantile with --p",
        ),
    ] = None
    """The threshold to clip at: a balance of noise and bias, a quantile, or a constant. Exact and rolling quantiles are
    not private: they need --noise-multiplier."""
    p: Annotated[float | None, _option("FLOAT", "0.7 for quantiles")] = None
    """Fraction of examples that a quantile leaves unclipped."""
    tau: Annotated[float | None, _option("FLOAT")] = None
    """The value of --threshold constant."""
    groups: Annotated[Literal["flat", "per-layer"] | None, _option("{flat,per-layer}", "flat")] = None
    """Groups of parameters that are clipped together."""

    physical_batch_size: Annotated[int | None, _option("INT", "the whole step")] = None
    """Physical batch size: the most examples that go through the model at once."""
    compile: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compile each step into one graph: faster steps, after some time to compile."""
    device: Annotated[str | None, _option("DEVICE", "cuda where there is one, else cpu")] = None
    """Device to train on."""
    seed: Annotated[int | None, _option("INT", "drawn anew")] = None
    """Seed, for tests only: anyone who knows it can subtract the noise."""
    write_raw_loss: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write the training loss to metrics.jsonl; it is not private."""

    L: Annotated[float | None, tyro.conf.arg(name="L", metavar="FLOAT", help_behavior_hint="(default: none)")] = None
    """Smoothness of the objective; with --sigma, --gap and --lr, for the certificate of the run."""
    sigma: Annotated[float | None, _option("FLOAT")] = None
    """Bound on the q-th moment of the gradient noise, for the certificate."""
    gap: Annotated[float | None, _option("FLOAT")] = None
    """f(x0) - inf f, for the certificate."""
    q: Annotated[float | None, _option("FLOAT", "2")] = None
    """The moment that --sigma bounds, in (1, 2]."""

    def assumptions(self) -> "Assumptions | None":
        """Return the assumptions of the certificate; None where no certificate was requested."""
        from qclip.theory import Assumptions

        if self.L is None or self.sigma is None or self.gap is None:
            return None
        return Assumptions(L=self.L, sigma=self.sigma, q=2.0 if self.q is None else self.q, gap=self.gap)

    def check(self) -> None:
        """Refuse values that are out of bounds and settings that contradict each other, before data are loaded.

        Raises:
            Refusal: Names the option, its value and the remedy.
        """
        self._check_numbers()
        self._check_privacy()
        self._check_threshold()
        self._check_certificate()

    def _check_numbers(self) -> None:
        if self.plain_steps and self.lr is None:
            raise check.Refusal("--plain-steps needs --lr; only rates in units of the threshold are found by the run")
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
            remedy = "give the privacy budget, or the noise multiplier"
            raise check.refuse("--noise-multiplier", self.noise_multiplier, "left out with --epsilon", remedy)

    def _check_threshold(self) -> None:
        if self.threshold in NOT_PRIVATE and self.noise_multiplier is None:
            raise check.Refusal(
                f"--threshold = {self.threshold!r} is not private and meets no epsilon; take another, or add "
                "--noise-multiplier (0 for plain QC-SGD) for a run without a guarantee"
            )
        if self.threshold == "constant":
            if self.p is not None:
                raise check.refuse("--p", self.p, "left out with --threshold constant", "it has no quantile")
            if self.tau is None:
                raise check.Refusal("--threshold constant needs --tau; add it, or take a quantile")
            check.positive("--tau", self.tau, "it is the largest norm of a clipped gradient")
        elif self.tau is not None:
            remedy = "add --threshold constant, or drop it: quantiles are estimated"
            raise check.refuse("--tau", self.tau, "left out without --threshold constant", remedy)
        if self.p is not None:
            check.quantile("--p", self.p)
            if self.threshold == "balanced":
                remedy = "it has no quantile; take --threshold private-quantile for one"
                raise check.refuse("--p", self.p, "left out with --threshold balanced", remedy)

    def _check_certificate(self) -> None:
        given = [name for name in CERTIFICATE if getattr(self, name) is not None]
        missing = [flag(name) for name in ("L", "sigma", "gap") if name not in given]
        if not given:
            return
        if missing:
            raise check.Refusal(
                f"{flag(given[0])} was given without {missing[0]}; a certificate needs --L, --sigma and --gap (and --q "
                "below 2 for heavy tails)"
            )
        remedy = "the certificate is for SGD, clipped flat at a threshold that counts; else drop --L, --sigma and --gap"
        for name, value, only in (("optimizer", self.optimizer, "sgd"), ("groups", self.groups, "flat")):
            if value not in (None, only):
                raise check.refuse(flag(name), value, f"{only} with --L", remedy)
        if self.threshold == "constant":
            raise check.refuse("--threshold", self.threshold, "one that counts its clipped examples with --L", remedy)
        self.assumptions()

    def filled(self, task_defaults: Mapping[str, Any], examples: int, device: str) -> "Settings":
        """Return the settings with defaults for those that were left out.

        Args:
            task_defaults: The defaults of the task.
            examples: Size of the data set.
            device: The default device.
        """
        given = {key: value for key, value in asdict(self).items() if value is not None}
        threshold = "balanced" if self.p is None else "private-quantile"
        common = {"data": "digits", "optimizer": "sgd", "threshold": threshold, "groups": "flat"}
        choices: dict[str, Any] = common | dict(task_defaults) | {"device": device, "delta": 1 / (10 * examples)}
        if self.noise_multiplier is None:
            choices["epsilon"] = 3.0
        if (self.threshold or threshold) not in ("balanced", "constant"):
            choices["p"] = 0.7
        if self.optimizer == "adam":
            choices["lr"] = 0.01
        if self.L is not None:
            choices["q"] = 2.0
        return replace(self, **(choices | given))

    def public(self) -> dict[str, Any]:
        """Return the settings that may be shared, as JSON values."""
        values = {key: value for key, value in asdict(self).items() if key not in SECRET}
        return {key: _as_json(value) for key, value in values.items()}

    def command(self) -> str:
        """Return the command line of these settings, without the secret ones."""
        words = ["qclip", "train"]
        for name, value in self.public().items():
            if value is True:
                words.append(flag(name))
            elif not _left_out(value):
                words.append(flag(name))
                words += map(_word, value if isinstance(value, list) else [value])
        return shlex.join(words)


def from_public(values: Mapping[str, Any]) -> Settings:
    """Return the settings of a summary; the seed is not among them, and not needed to resume."""
    known = {field.name for field in fields(Settings)} - set(SECRET)
    unknown = sorted(set(values) - known)
    if unknown:
        raise check.Refusal(
            f"summary.json has settings {unknown} unknown to this version; resume with the version that wrote it"
        )
    read: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    data_dir = read.pop("data_dir", None)
    return Settings(**read, data_dir=None if data_dir is None else Path(data_dir))


def agreed(given: Settings, saved: Settings) -> Settings:
    """Return the settings of a resumed run; a given setting that contradicts a saved one is refused by name."""
    for name, value in asdict(given).items():
        before = getattr(saved, name)
        if _left_out(value) or value == before or name in FREE_TO_MOVE:
            continue
        if name in SECRET:
            remedy = "the checkpoint continues the run's own random numbers"
            raise check.refuse(flag(name), value, "left out with --resume", remedy)
        remedy = "leave it out, or start another run in another --out"
        raise check.refuse(flag(name), value, f"{before!r}, the value that the run began with, to resume it", remedy)
    return replace(saved, data_dir=given.data_dir or saved.data_dir)


def flag(name: str) -> str:
    """Return the command-line option of a field.

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
    """Format a value as one would write it: 3 rather than 3.0, but with every digit that counts."""
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)
