"""The public constants of a private run, settled before it starts."""

import logging
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

from qclip import _validate as check
from qclip import accounting

Sampling = Literal["poisson", "uniform"]
log = logging.getLogger("qclip")


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
