"""A private generative adversarial network for points on a ring, which only the discriminator sees.

    python examples/gan.py --epsilon 5

The discriminator is trained privately. The generator learns from the discriminator alone, so neither it nor its samples
cost any further privacy.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qclip

NOISE_DIM = 4


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    examples: int = 4000
    steps: int = 300
    batch_size: int = 400
    epsilon: float = 5.0
    delta: float = 1e-5
    lr: float = 1e-2
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def ring(count: int, generator: torch.Generator) -> Tensor:
    """Return points at distance 1 ± 0.1 from the origin, [count, 2]."""
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    radius = 1 + 0.1 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def network(inputs: int, outputs: int) -> nn.Module:
    """Return a small perceptron."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def energy_distance(x: Tensor, y: Tensor) -> float:
    """Return the energy distance of two samples; 0 for equal distributions."""
    return (2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()).item()


def main(settings: Settings) -> tuple[float, float, float]:
    """Train and return the energy distance to held-out points before and after, and the epsilon spent."""
    torch.manual_seed(0)
    points = ring(settings.examples + 1000, torch.Generator().manual_seed(1))
    train, held_out = TensorDataset(points[:-1000]), points[-1000:]
    generator, discriminator = network(NOISE_DIM, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=settings.lr / 2, betas=(0.5, 0.9))
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=settings.lr, betas=(0.5, 0.9))

    def draw(count: int) -> Tensor:
        return generator(torch.randn(count, NOISE_DIM))

    def discriminator_loss(discriminator: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return one loss per example, [B]: each real point is paired with a fake of its own."""
        (real,) = batch
        fake = draw(len(real)).detach()
        return (F.softplus(-discriminator(real)) + F.softplus(discriminator(fake))).squeeze(1)

    training = qclip.make_private(
        discriminator,
        optimizer,
        train,
        per_example_loss=discriminator_loss,
        threshold=qclip.PrivateQuantile(0.5),
        batch_size=settings.batch_size,
        steps=settings.steps,
        epsilon=settings.epsilon,
        delta=settings.delta,
        seed=settings.seed,
    )

    with torch.no_grad():
        before = energy_distance(draw(1000), held_out)
    for batch in training.loader:
        training.step(batch)
        if training.updated:
            loss = F.softplus(-discriminator(draw(settings.batch_size))).mean()
            loss.backward(inputs=list(generator.parameters()))  # the discriminator gets no gradient from here
            generator_optimizer.step()
            generator_optimizer.zero_grad()
    with torch.no_grad():
        after = energy_distance(draw(1000), held_out)
    epsilon = training.epsilon()
    print(f"energy distance to held-out points {after:.3f} (before {before:.3f}) at epsilon {epsilon:.2f}")
    return before, after, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
