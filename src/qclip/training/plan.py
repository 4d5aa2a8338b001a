"""Plans: the public constants of a private run, and the thresholds that its privacy budget allows."""

import logging
import math
import warnings
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, get_args

from qclip import _validate as check
from qclip import accounting
from qclip._validate import Refusal
from qclip.thresholds import BalancedThreshold, Conditions, HistogramQuantile, PrivateQuantile, SlackQuantile, Threshold
from qclip.thresholds.threshold import refusal

Sampling = Literal["poisson", "uniform"]
log = logging.getLogger("qclip")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
"""The noise shares to try for the counts, as growth of the gradient's noise, the smallest first."""
MOST_ROWS = 10
"""The most rows of epsilon against epochs."""


@dataclass(frozen=True)
class TrainingPlan:
    """The public constants of a run: set before it starts, never measured on the data."""

    dataset_size: int
    """The public size: the number of examples, or the ``dataset_size`` of `make_private`."""
    batch_size: int
    num_steps: int
    steps_per_pass: int
    noise_multiplier: float
    """The noise multiplier of gradient and counts together."""
    delta: float
    accountant: accounting.Accountant = "pld"
    sampling: Sampling = "poisson"
    epsilon: float | None = None
    """The privacy budget; None if the noise multiplier was given instead."""

    @property
    def sample_rate(self) -> float:
        """The probability with which an example joins a step."""
        return self.batch_size / self.dataset_size

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in which an example is drawn once on average, rounded up."""
        return accounting.steps_per_epoch(self.sample_rate)

    def steps_of_pass(self, done: int) -> range:
        """Return the steps that are left of the current epoch, or of a plan in steps; refuse if the plan is done."""
        self.require_budget(done)
        return range(done, min((done // self.steps_per_pass + 1) * self.steps_per_pass, self.num_steps))

    def require_budget(self, step: int) -> None:
        """Refuse a step beyond the plan."""
        if step >= self.num_steps:
            remedy = "plan more epochs or steps from the start: the noise was chosen for this many"
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
    """Compute the public constants of a run.

    Args:
        dataset_size: The number of examples, or a public stand-in.
        batch_size: The expected number of examples of a step.
        epochs: The length of the run. Exactly one of ``epochs`` and ``steps``.
        steps: The length of the run in logical steps.
        epsilon: The privacy budget. Exactly one of ``epsilon`` and ``noise_multiplier``.
        delta: By default ``1 / (10 * dataset_size)``.
        noise_multiplier: The noise multiplier of gradient and counts together; 0 for no noise.
        accountant: "pld" (tight) or "rdp".
        sampling: "poisson", or "uniform" without noise.
        private: Whether the threshold is private. With a non-private one no noise meets an epsilon.

    Raises:
        qclip.Refusal: For arguments that are out of bounds or contradict each other.

    >>> plan = plan_training(1000, 64, epochs=2, noise_multiplier=1.0, delta=1e-5)
    >>> plan.num_steps, plan.sample_rate
    (32, 0.064)
    """
    dataset_size = check.count("dataset_size", dataset_size, "it is the public number of examples")
    batch_size = check.count("batch_size", batch_size, "it is the expected number of examples of a step")
    if batch_size > dataset_size:
        raise check.refuse("batch_size", batch_size, f"<= dataset_size = {dataset_size}", "take a smaller batch")
    if (epochs is None) == (steps is None):
        raise Refusal(
            f"exactly one of epochs and steps must be given, not epochs = {epochs!r} and steps = {steps!r}: they are "
            "two ways to give the length of the run"
        )
    if (epsilon is None) == (noise_multiplier is None):
        raise Refusal(
            f"exactly one of epsilon and noise_multiplier must be given, not epsilon = {epsilon!r} and "
            f"noise_multiplier = {noise_multiplier!r}: pass the privacy budget, or the noise itself"
        )
    if epochs is not None:
        steps_per_pass = accounting.steps_per_epoch(batch_size / dataset_size)
        num_steps = check.count("epochs", epochs) * steps_per_pass
    else:
        num_steps = steps_per_pass = check.count("steps", steps)
    if delta is None:
        delta = 1 / (10 * dataset_size)
        if noise_multiplier != 0:
            log.warning("delta = %.3g: 1 / (10 dataset_size), because delta was left out", delta)
    delta = check.between("delta", delta, 0, 1, "take it well below 1/dataset_size, such as 1e-5")
    check.choice("accountant", accountant, get_args(accounting.Accountant))
    check.choice("sampling", sampling, get_args(Sampling))
    if sampling == "uniform" and noise_multiplier != 0:
        remedy = 'take sampling="poisson", or noise_multiplier=0 for training without privacy'
        raise check.refuse("sampling", sampling, '"poisson" with noise, which the accountant assumes', remedy)
    if epsilon is not None:
        _check_promise(delta, dataset_size, private)
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


def _check_promise(delta: float, dataset_size: int, private: bool) -> None:
    if not private:
        raise Refusal(
            "a non-private threshold cannot meet an epsilon: take PrivateQuantile or Constant, or pass "
            "noise_multiplier= instead of epsilon= for a run without a guarantee"
        )
    if delta >= 1 / dataset_size:
        warnings.warn(
            f"delta = {delta:g} is not below 1/dataset_size = {1 / dataset_size:.3g}: publishing one example outright "
            "would satisfy it; 1/(10 dataset_size) is usual",
            stacklevel=4,
        )


@dataclass(frozen=True)
class Option:
    """A threshold under the conditions of the run: its cost and its noise, or the reason why it cannot work."""

    name: str
    code: str
    """The constructor call."""
    refusal: str
    """The reason why it cannot work; empty if it can."""
    gradient_noise: float
    """The noise multiplier of the gradient: larger than that of the run if counts are paid for."""
    count_noise: float | None
    """The standard deviation of the noise of a count, in examples; None if nothing is counted."""

    @property
    def feasible(self) -> bool:
        """Whether the threshold can work in the run."""
        return not self.refusal


@dataclass(frozen=True)
class Spent:
    """The epsilon spent after some epochs."""

    epochs: float
    steps: int
    epsilon: float


@dataclass(frozen=True)
class PrivatePlan:
    """The public constants of a run, the thresholds to choose from, and the epsilon spent over time."""

    training: TrainingPlan
    p: float
    dim: int
    """The number of trainable parameters."""
    options: tuple[Option, ...]
    spent: tuple[Spent, ...]

    @property
    def recommended(self) -> Option | None:
        """The first threshold that can work; None if none can."""
        return next((option for option in self.options if option.feasible), None)

    @property
    def gradient_noise(self) -> float:
        """The noise multiplier of the gradient: that of the recommended threshold, if there is one."""
        return self.recommended.gradient_noise if self.recommended else self.training.noise_multiplier

    @property
    def relative_noise(self) -> float:
        """The norm of the noise on the mean gradient, in units of the clip norm; the mean itself is at most 1."""
        return math.sqrt(self.dim) * self.gradient_noise / self.training.batch_size

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON."""
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
    """Return the thresholds that can work in a run, their noise, and the epsilon spent at the ends of epochs.

    Args:
        training: The public constants of the run.
        p: The quantile, the fraction of examples to leave unclipped.
        num_groups: The number of groups; each is taken to have ``dim / num_groups`` parameters.
        dim: The number of trainable parameters.

    >>> plan = plan_private(plan_training(60_000, 256, epochs=2, noise_multiplier=1.0, delta=1e-5))
    >>> plan.recommended.code, round(plan.recommended.gradient_noise, 2)
    ('BalancedThreshold()', 1.1)
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
    """Return the adaptive thresholds, the best first, each as the settings to try in turn."""
    # If the batch is large for the noise, a free count nearer to tau is less biased and not yet too noisy.
    near = [SlackQuantile(p, outer_radius=0.98)] if conditions.batch_size >= 256 * conditions.noise_multiplier else []
    return (
        [BalancedThreshold()],
        [PrivateQuantile(p, noise_share=share) for share in SHARES],
        [*near, SlackQuantile(p)],
        [HistogramQuantile(p, noise_share=share) for share in SHARES],
    )


def _option(settings: list[Threshold[Any]], conditions: Conditions) -> Option:
    """Return the first settings that can work, or the last with the reason why they cannot."""
    threshold = next((candidate for candidate in settings if not refusal(candidate, conditions)), settings[-1])
    split = accounting.split(conditions.noise_multiplier, threshold.share(conditions))
    count = threshold.ask(threshold.start(len(conditions.dims)), 0).count
    noise = None if count is None else split.counts * count.l2_bound
    return Option(type(threshold).__name__, _code(threshold), refusal(threshold, conditions), split.gradient, noise)


def _code(threshold: Threshold[Any]) -> str:
    """Return the constructor call, omitting defaults."""
    assert is_dataclass(threshold)
    settings = [(field, getattr(threshold, field.name)) for field in fields(threshold)]
    arguments = [
        f"{value:g}" if field.name == "p" else f"{field.name}={value:g}"
        for field, value in settings
        if value != field.default
    ]
    return f"{type(threshold).__name__}({', '.join(arguments)})"


def _spent(plan: TrainingPlan) -> tuple[Spent, ...]:
    """Return the epsilon spent at the ends of at most `MOST_ROWS` epochs, the last of them the end of the run."""
    steps_per_epoch, num_steps = plan.steps_per_epoch, plan.num_steps
    interval = math.ceil(num_steps / steps_per_epoch / MOST_ROWS) * steps_per_epoch
    ends = [*range(interval, num_steps, interval), num_steps]
    epsilon_after = accounting.spending(plan.noise_multiplier, plan.sample_rate, plan.delta, plan.accountant)
    return tuple(Spent(steps / steps_per_epoch, steps, epsilon_after(steps)) for steps in ends)
