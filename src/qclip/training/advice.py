"""Advice: the batch size and the length that make the most of a budget, and what a change of plan does to its noise.

Plans are compared by the bound for rescaled steps (docs/private-training.md, "Batch size and number of steps"). Up to a
factor that is the same for all plans it is ``sqrt((M^2 + 1/B + S) / T)``, with S the squared norm of the noise on the
mean gradient and M the norm of the clipped mean gradient itself, both in units of the threshold.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from qclip import _validate as check
from qclip import accounting
from qclip.training.plan import PrivatePlan, TrainingPlan, plan_training

MEAN_NORM = 0.1
"""M. It is at most 1, but examples pull in different directions: with the 0.7-quantile, M^2 was measured as 0.005 to
0.01 at the start and 0.001 or less later, on digits and on Fashion-MNIST, and as 0.002 to 0.003 on a table."""
EPOCHS = (1, 2, 5, 10, 20, 40)
"""The lengths to choose from."""
FEWEST_STEPS = 400
"""Fewer are recommended only where no more are possible: the bound allows them, but networks ask for small steps."""
SMALLEST_BATCH, SMALLEST_SHARE, LARGEST_SHARE = 256, 1 / 16, 1 / 4
"""Batch sizes to choose from: from the first, or that share of a small data set, up to a quarter of the data set."""
FEWEST_EXAMPLES = 64
NEAR_BEST = 1.05
"""A bound is good enough at this times the least one."""
DROWNED = 100.0
"""The S above which the noise drowns the gradient: its norm is 10 times that of the longest mean gradient."""
MORE_SIGNAL = "train fewer parameters (LoRA, or the head alone), or take more examples or a larger epsilon"


@dataclass(frozen=True)
class Outlook:
    """The noise of a plan, and what the plan lets the bound and the step size be."""

    dataset_size: int
    batch_size: int
    num_steps: int
    params: int
    """The number of trainable parameters, d."""
    noise_multiplier: float
    """That of the gradient, z."""

    @property
    def epochs(self) -> float:
        """The number of passes over the data, which is what the run costs."""
        return self.num_steps * self.batch_size / self.dataset_size

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise on each coordinate of the mean gradient, in units of the threshold."""
        return self.noise_multiplier / self.batch_size

    @property
    def squared_noise(self) -> float:
        """S, the squared norm of the noise on the mean gradient, in units of the threshold squared."""
        return self.params * self.noise_std**2

    @property
    def bound(self) -> float:
        """The bound at the best step size, up to a factor that is the same for all plans."""
        return math.sqrt(self._squared_step / self.num_steps)

    @property
    def step_size(self) -> float:
        """The best step size of the bound, up to a factor that is the same for all plans."""
        return 1 / math.sqrt(self._squared_step * self.num_steps)

    @property
    def _squared_step(self) -> float:
        """The expected squared norm of a noisy mean gradient: its mean, its sampling and its noise."""
        return MEAN_NORM**2 + 1 / self.batch_size + self.squared_noise


@dataclass(frozen=True)
class Change:
    """A change of a plan, and how it moves bound, step size and cost: as factors on those of the plan."""

    name: str
    outlook: Outlook
    bound: float
    step_size: float
    cost: float

    def as_json(self) -> dict[str, Any]:
        """Return the change as plain data for JSON."""
        new = self.outlook
        return {
            "change": self.name,
            "batch_size": new.batch_size,
            "steps": new.num_steps,
            "epochs": new.epochs,
            "params": new.params,
            "gradient_noise": new.noise_multiplier,
            "noise_std": new.noise_std,
            "S": new.squared_noise,
            "bound_factor": self.bound,
            "step_size_factor": self.step_size,
            "cost_factor": self.cost,
        }


def recommend(
    dataset_size: int,
    params: int,
    *,
    epsilon: float,
    delta: float | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
) -> TrainingPlan:
    """Choose what was left out of batch size and length: the cheapest run whose bound is close to the best.

    The best is taken over runs of up to 40 epochs, with at least 400 steps and batches of up to a quarter of the data
    where these are free. Of the runs whose bound is at most 1.05 times as large, those with the fewest epochs are
    taken, and of these the one with the least bound.

    >>> plan = recommend(60_000, 26_010, epsilon=3, delta=1e-6)
    >>> plan.batch_size, plan.num_steps
    (1024, 2360)

    Args:
        dataset_size: The number of examples, or a public stand-in.
        params: The number of trainable parameters.
        epsilon: The privacy budget.
        delta: By default ``1 / (10 * dataset_size)``.
        batch_size: The expected number of examples of a step; chosen when left out.
        epochs: The length of the run; chosen when ``steps`` is left out, too.
        steps: The length of the run in steps.

    Raises:
        qclip.Refusal: For arguments that are out of bounds, and where noise would drown the gradient.
    """
    remedy = "for fewer, give the batch size and the length"
    dataset_size = check.count("dataset_size", dataset_size, remedy, least=FEWEST_EXAMPLES)
    params = check.count("params", params, "it is the number of trainable parameters")
    epsilon = check.positive("epsilon", epsilon, "it is the privacy budget; 1 to 10 is usual")
    delta = check.between("delta", 1 / (10 * dataset_size) if delta is None else delta, 0, 1, "1e-5 is usual")
    sizes, lengths = _batch_sizes(dataset_size, batch_size), _lengths(epochs, steps)
    noise = partial(accounting.central_limit_noise, epsilon, delta)
    runs = [_run(dataset_size, size, length, params, noise) for size in sizes for length in lengths]
    run = _cheapest_near_best(runs)
    length = run.length
    plan = plan_training(
        dataset_size, run.outlook.batch_size, epochs=length.epochs, steps=length.steps, epsilon=epsilon, delta=delta
    )
    outlook = replace(run.outlook, noise_multiplier=plan.noise_multiplier)
    if outlook.squared_noise > DROWNED:
        raise check.Refusal(
            f"epsilon = {epsilon:g} is too small for {params:,} parameters and {dataset_size:,} examples: in the best "
            f"plan found, {outlook.num_steps:,} steps with batches of {outlook.batch_size:,}, the noise is "
            f"{math.sqrt(outlook.squared_noise):.3g} times as long as the longest mean gradient; {MORE_SIGNAL}, or "
            "give the batch size and the length yourself"
        )
    return plan


def what_if(plan: PrivatePlan) -> tuple[Change, ...]:
    """Return how noise, bound, step size and cost move with batch size, steps, budget and parameters.

    The first row is the plan itself. The noise of the others is about 1 % larger than an exact search would find.

    >>> from qclip.training.plan import plan_private
    >>> plan = plan_private(plan_training(1000, 100, steps=100, epsilon=0.5, delta=1e-4), dim=50)
    >>> for change in what_if(plan)[:3]:
    ...     print(f"{change.name}: S {change.outlook.squared_noise:.2f}, bound x {change.bound:.2f}")
    this plan: S 0.22, bound x 1.00
    batch x 2, same epochs: S 0.11, bound x 1.02
    batch x 2, same steps: S 0.22, bound x 0.98

    Args:
        plan: A plan with a budget, ``training.epsilon``.
    """
    training = plan.training
    epsilon, N, B, T = training.epsilon, training.dataset_size, training.batch_size, training.num_steps
    assert epsilon is not None
    # What the counts of the threshold cost is the same share everywhere.
    growth = plan.gradient_noise / training.noise_multiplier
    base = Outlook(N, B, T, plan.dim, plan.gradient_noise)

    def changed(batch_size: int = B, num_steps: int = T, epsilon: float = epsilon) -> Outlook:
        z = accounting.quick_noise_multiplier(epsilon, training.delta, batch_size / N, num_steps)
        return replace(base, batch_size=batch_size, num_steps=num_steps, noise_multiplier=growth * z)

    rows = {"this plan": base}
    if 2 * B <= N:
        rows["batch x 2, same epochs"] = changed(batch_size=2 * B, num_steps=math.ceil(T / 2))
        rows["batch x 2, same steps"] = changed(batch_size=2 * B)
    if B >= 2:
        rows["batch / 2, same epochs"] = changed(batch_size=B // 2, num_steps=2 * T)
        rows["batch / 2, same steps"] = changed(batch_size=B // 2)
    rows["steps x 2"] = changed(num_steps=2 * T)
    if T >= 2:
        rows["steps / 2"] = changed(num_steps=T // 2)
    rows["epsilon x 2"] = changed(epsilon=2 * epsilon)
    rows["epsilon / 2"] = changed(epsilon=epsilon / 2)
    if plan.dim >= 10:
        rows["params / 10"] = replace(base, params=plan.dim // 10)
    return tuple(
        Change(name, new, new.bound / base.bound, new.step_size / base.step_size, new.epochs / base.epochs)
        for name, new in rows.items()
    )


class _Length(NamedTuple):
    """In epochs or in steps, as `plan_training` takes it."""

    epochs: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class _Run:
    length: _Length
    outlook: Outlook

    @property
    def cost(self) -> float:
        """The epochs, before they are rounded up to steps: rounding must not decide between batch sizes."""
        return self.outlook.epochs if self.length.epochs is None else self.length.epochs


def _run(N: int, batch_size: int, length: _Length, params: int, noise: Callable[[float, int], float]) -> _Run:
    rate, num_steps = accounting.sampling(batch_size / N, length.steps, None, None, length.epochs)
    return _Run(length, Outlook(N, batch_size, num_steps, params, noise(rate, num_steps)))


def _batch_sizes(dataset_size: int, given: int | None) -> list[int]:
    if given is not None:
        size = check.count("batch_size", given, "it is the expected number of examples of a step")
        if size > dataset_size:
            raise check.refuse("batch_size", size, f"<= dataset_size = {dataset_size}", "take a smaller batch")
        return [size]
    low = math.log2(min(SMALLEST_BATCH, SMALLEST_SHARE * dataset_size))
    high = math.log2(LARGEST_SHARE * dataset_size)
    return [2**power for power in range(math.floor(low), math.floor(high) + 1)]


def _lengths(epochs: int | None, steps: int | None) -> list[_Length]:
    if epochs is not None and steps is not None:
        raise check.Refusal(f"epochs = {epochs!r} and steps = {steps!r} give the length twice; pass one of them")
    if steps is not None:
        return [_Length(steps=check.count("steps", steps, "it is the length of the run"))]
    if epochs is not None:
        return [_Length(epochs=check.count("epochs", epochs, "it is the length of the run"))]
    return [_Length(epochs=number) for number in EPOCHS]


def _cheapest_near_best(runs: list[_Run]) -> _Run:
    runs = [run for run in runs if run.outlook.num_steps >= FEWEST_STEPS] or runs
    most = max(EPOCHS[-1], min(run.cost for run in runs))  # a given length may cost more
    affordable = [run for run in runs if run.cost <= most]
    good = NEAR_BEST * min(run.outlook.bound for run in affordable)
    cost = min(run.cost for run in affordable if run.outlook.bound <= good)
    return min((run for run in affordable if run.cost == cost), key=lambda run: run.outlook.bound)
