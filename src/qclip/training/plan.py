"""Plans: the public constants of a private run, and what a privacy budget means for it before it starts."""

import logging
import math
import warnings
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, get_args

from qclip import _validate as check
from qclip import accounting
from qclip.thresholds import Conditions, HistogramQuantile, PrivateQuantile, SlackQuantile, Threshold
from qclip.thresholds.threshold import refusal

Sampling = Literal["poisson", "uniform"]
log = logging.getLogger("qclip")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
"""What to pay for the counts, as growth of the gradient's noise: the least that is enough."""
MOST_ROWS = 10


@dataclass(frozen=True)
class TrainingPlan:
    """The public constants of a run: given before it starts, never measured on the way."""

    dataset_size: int
    """As it is public: the number of examples, or what was given instead."""
    batch_size: int
    num_steps: int
    steps_per_pass: int
    noise_multiplier: float
    """Of gradient and counts together."""
    delta: float
    accountant: accounting.Accountant = "pld"
    sampling: Sampling = "poisson"
    epsilon: float | None = None
    """The budget, where one was given."""

    @property
    def sample_rate(self) -> float:
        """The probability with which an example joins a step."""
        return self.batch_size / self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        """The steps in which each example is drawn once on average (rounded up)."""
        return accounting.steps_per_epoch(self.sample_rate)

    def steps_of_pass(self, done: int) -> range:
        """Return the rest of the current epoch, or of the plan when it was given in steps; refused at its end."""
        self.require_budget(done)
        return range(done, min((done // self.steps_per_pass + 1) * self.steps_per_pass, self.num_steps))

    def require_budget(self, step: int) -> None:
        """Refuse a step beyond the plan."""
        if step >= self.num_steps:
            remedy = "plan more epochs or steps from the start: the noise was chosen for these"
            raise check.refuse("step", step, f"< num_steps = {self.num_steps}: the budget is spent", remedy)


def plan_training(
    dataset_size: int,
    batch_size: int,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    accountant: accounting.Accountant = "pld",
    sampling: Sampling = "poisson",
    private: bool = True,
) -> TrainingPlan:
    """Settle the constants of a run from what was given: one of epochs and steps, one of epsilon and noise multiplier.

    ``private`` says whether the threshold is: without that no noise meets an epsilon.

    >>> plan = plan_training(1000, 64, epochs=2, noise_multiplier=1.0, delta=1e-5)
    >>> plan.num_steps, plan.sample_rate
    (32, 0.064)
    """
    dataset_size = check.count("dataset_size", dataset_size, "it is the number of examples, as far as it is public")
    batch_size = check.count("batch_size", batch_size, "it is the expected number of examples of a step")
    if batch_size > dataset_size:
        raise check.refuse("batch_size", batch_size, f"<= dataset_size = {dataset_size}", "take a smaller batch")
    if (epochs is None) == (steps is None):
        remedy = "say how long to train in one way"
        raise check.refuse("epochs, steps", (epochs, steps), "one given and one left out", remedy)
    if (epsilon is None) == (noise_multiplier is None):
        remedy = "give the privacy budget, or the noise itself"
        raise check.refuse(
            "epsilon, noise_multiplier", (epsilon, noise_multiplier), "one given and one left out", remedy
        )
    if epochs is not None:
        steps_per_pass = accounting.steps_per_epoch(batch_size / dataset_size)
        num_steps = check.count("epochs", epochs) * steps_per_pass
    else:
        num_steps = steps_per_pass = check.count("steps", steps)
    if delta is None:
        delta = 1 / (10 * dataset_size)
        if noise_multiplier != 0:
            log.warning("delta = %.3g: 1 / (10 dataset_size), since it was left out", delta)
    delta = check.between("delta", delta, 0, 1, "well below 1/dataset_size, such as 1e-5")
    check.choice("accountant", accountant, get_args(accounting.Accountant))
    check.choice("sampling", sampling, get_args(Sampling))
    if sampling == "uniform" and noise_multiplier != 0:
        remedy = 'take sampling="poisson", or noise_multiplier=0 for training without privacy'
        raise check.refuse("sampling", sampling, '"poisson" with noise: that is what is accounted for', remedy)
    if epsilon is not None:
        _refuse_empty_promises(delta, dataset_size, private)
        noise_multiplier = accounting.noise_multiplier(
            epsilon=epsilon, delta=delta, sample_rate=batch_size / dataset_size, steps=num_steps, accountant=accountant
        )
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    return TrainingPlan(
        dataset_size,
        batch_size,
        num_steps,
        steps_per_pass,
        z,
        delta,
        accountant,
        sampling,
        None if epsilon is None else float(epsilon),
    )


def _refuse_empty_promises(delta: float, dataset_size: int, private: bool) -> None:
    if not private:
        remedy = "take PrivateQuantile or Constant, or noise_multiplier= for a run without a guarantee"
        raise check.refuse("threshold", "non-private", "private, to meet an epsilon", remedy)
    if delta >= 1 / dataset_size:
        warnings.warn(
            f"delta = {delta:g} is not below 1/dataset_size = {1 / dataset_size:.3g}: publishing an example outright "
            "would satisfy it; 1/(10 dataset_size) is usual",
            stacklevel=4,
        )


@dataclass(frozen=True)
class Option:
    """A threshold under the conditions of the run: what it would cost and learn, or why it cannot work."""

    name: str
    code: str
    """How to make it."""
    refusal: str
    """Why it cannot work; empty where it can."""
    gradient_noise: float
    """The noise multiplier that is left to the gradient: larger than the total where counts are paid for."""
    count_noise: float | None
    """The standard deviation of the noise on a count, in examples; None where nothing is counted."""

    @property
    def feasible(self) -> bool:
        """Whether it can work."""
        return not self.refusal


@dataclass(frozen=True)
class Spent:
    """The epsilon spent by then."""

    epochs: float
    steps: int
    epsilon: float


@dataclass(frozen=True)
class PrivatePlan:
    """The public constants of a run, the thresholds to choose from, and what is spent when."""

    training: TrainingPlan
    p: float
    dim: int
    """Trainable parameters in all."""
    options: tuple[Option, ...]
    spent: tuple[Spent, ...]

    @property
    def recommended(self) -> Option | None:
        """The first threshold that can work."""
        return next((option for option in self.options if option.feasible), None)

    @property
    def relative_noise(self) -> float:
        """The length of the noise on the mean gradient, in thresholds: the mean itself is at most 1 long."""
        z = self.recommended.gradient_noise if self.recommended else self.training.noise_multiplier
        return math.sqrt(self.dim) * z / self.training.batch_size

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        plan, recommended = self.training, self.recommended
        return {
            "examples": plan.dataset_size,
            "batch_size": plan.batch_size,
            "sample_rate": plan.sample_rate,
            "steps": plan.num_steps,
            "steps_per_epoch": plan.steps_per_epoch,
            "noise_multiplier": plan.noise_multiplier,
            "epsilon": self.spent[-1].epsilon,
            "delta": plan.delta,
            "p": self.p,
            "relative_noise": self.relative_noise,
            "thresholds": [self._option_json(option) for option in self.options],
            "recommended": recommended.code if recommended else None,
            "spent": [asdict(row) for row in self.spent],
        }

    def _option_json(self, option: Option) -> dict[str, Any]:
        noise = option.count_noise
        fraction = None if noise is None else noise / self.training.batch_size
        return asdict(option) | {"feasible": option.feasible, "count_noise_fraction": fraction}


def plan_private(training: TrainingPlan, *, p: float = 0.7, num_groups: int = 1, dim: int = 1) -> PrivatePlan:
    """Which thresholds can work in this run, at which noise, and what is spent at the end of each epoch.

    The groups are taken to have ``dim / num_groups`` parameters each.

    >>> plan = plan_private(plan_training(60_000, 256, epochs=2, noise_multiplier=1.0, delta=1e-5))
    >>> plan.recommended.code, round(plan.recommended.gradient_noise, 2)
    ('PrivateQuantile(0.7)', 1.01)
    >>> [row.steps for row in plan.spent]
    [235, 470]
    """
    p = check.quantile("p", p)
    num_groups = check.count("groups", num_groups, "it is the number of groups of parameters")
    dim = check.count("dim", dim, "it is the number of trainable parameters")
    dims = (max(1, dim // num_groups),) * num_groups
    conditions = Conditions(training.batch_size, training.num_steps, training.noise_multiplier, dims)
    options = tuple(_option(settings, conditions) for settings in _candidates(p, conditions))
    return PrivatePlan(training, p, dim, options, _spent(training))


def _candidates(p: float, conditions: Conditions) -> tuple[list[Threshold[Any]], ...]:
    """The thresholds that find their own way, the best first, each with the settings to try in turn."""
    # Where the batch is large for the noise, a free count nearer to tau is less biased and not yet too noisy.
    near = [SlackQuantile(p, outer_radius=0.98)] if conditions.batch_size >= 256 * conditions.noise_multiplier else []
    return (
        [PrivateQuantile(p, noise_share=share) for share in SHARES],
        [*near, SlackQuantile(p)],
        [HistogramQuantile(p, noise_share=share) for share in SHARES],
    )


def _option(settings: list[Threshold[Any]], conditions: Conditions) -> Option:
    """The first settings that can work, or why not even the last can."""
    threshold = next((each for each in settings if not refusal(each, conditions)), settings[-1])
    split = accounting.split(conditions.noise_multiplier, threshold.noise_share)
    asked = threshold.ask(threshold.start(len(conditions.dims)), 0).count
    noise = None if asked is None else split.counts * asked.l2_bound
    return Option(type(threshold).__name__, _code(threshold), refusal(threshold, conditions), split.gradient, noise)


def _code(threshold: Threshold[Any]) -> str:
    """Return the constructor call, omitting defaults."""
    assert is_dataclass(threshold)
    given = [(field, getattr(threshold, field.name)) for field in fields(threshold)]
    told = [
        f"{value:g}" if field.name == "p" else f"{field.name}={value:g}"
        for field, value in given
        if value != field.default
    ]
    return f"{type(threshold).__name__}({', '.join(told)})"


def _spent(plan: TrainingPlan) -> tuple[Spent, ...]:
    """At the ends of epochs, ten at most, and of the run."""
    length, steps = plan.steps_per_epoch, plan.num_steps
    every = math.ceil(steps / length / MOST_ROWS)
    ends = [*range(every * length, steps, every * length), steps]
    spent = accounting.spending(plan.noise_multiplier, plan.sample_rate, plan.delta, plan.accountant)
    return tuple(Spent(done / length, done, spent(done)) for done in ends)
