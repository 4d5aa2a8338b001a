"""QC-SGD without privacy: clip at an exact quantile of the batch's gradient norms, against heavy tails.

    python examples/nonprivate_qcsgd.py --steps 2000

Linear regression under noise with a heavy tail on one side. At a fixed quantile the clipped gradients stay biased, and
the error stalls. The coupled schedule moves the quantile towards 1 as the step size falls, and the bias vanishes. There
is no added noise and no guarantee: epsilon is infinite.
"""

from dataclasses import dataclass

import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qclip

DIM = 5


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    examples: int = 4000
    steps: int = 600
    batch_size: int = 64
    step_size: float = 0.2
    clipped_fraction: float = 0.5
    """Quantile at the first step; at every step for the fixed quantile."""


def regression(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs [count, DIM], targets [count, 1] with Pareto noise (mean 0, tail exponent 2.2), and weights."""
    draw = torch.Generator().manual_seed(0)
    x, weights = torch.randn(count, DIM, generator=draw), torch.ones(DIM, 1)
    pareto = torch.rand(count, 1, generator=draw).pow(-1 / 2.2)
    return x, x @ weights + pareto - 2.2 / 1.2, weights


def excess_risk(model: nn.Linear, weights: Tensor) -> float:
    """Return the excess of the expected squared error on fresh data over the least possible."""
    with torch.no_grad():
        return ((model.weight - weights.T).square().sum() + model.bias.square().sum()).item()


def train(
    threshold: qclip.ExactQuantile, step_size: qclip.schedules.Schedule | float, settings: Settings
) -> tuple[float, float]:
    """Train one run and return its excess risk and its epsilon."""
    x, y, weights = regression(settings.examples)
    model = nn.Linear(DIM, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    training = qclip.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=settings.step_size),
        TensorDataset(x, y),
        loss=nn.MSELoss(),
        batch_size=settings.batch_size,
        steps=settings.steps,
        noise_multiplier=0,
        threshold=threshold,
        step_size=step_size,
        seed=0,
    )
    for batch in training.loader:
        training.step(*batch)
    return excess_risk(model, weights), training.epsilon()


def main(settings: Settings) -> tuple[float, float]:
    """Train twice and return the excess risk at a fixed quantile and under the coupled schedule."""
    gamma, p = qclip.schedules.coupled(2, settings.step_size, settings.clipped_fraction)
    fixed, _ = train(qclip.ExactQuantile(1 - settings.clipped_fraction), settings.step_size, settings)
    coupled, epsilon = train(qclip.ExactQuantile(p), gamma, settings)
    print(f"excess risk on fresh data: {fixed:.4f} at a fixed quantile, {coupled:.4f} under the coupled schedule")
    print(f"epsilon {epsilon}: an exact quantile is not private, and there is no noise")
    return fixed, coupled


if __name__ == "__main__":
    main(tyro.cli(Settings))
