"""A small CNN learns handwritten digits privately, in an ordinary training loop.

    python examples/cnn_loop.py --epsilon 3

Three lines differ from a plain loop: `make_private`, its loader, and its loss. `cnn_loop_opacus.py` is the same run in
Opacus.
"""

from dataclasses import dataclass

import torch
import tyro
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qclip


@dataclass(frozen=True)
class Settings:
    """The settings of the run; only `lr` needs tuning."""

    epochs: int = 15
    batch_size: int = 256
    epsilon: float = 3.0
    delta: float = 1e-5
    lr: float = 0.2
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return training data and held-out data: 8 x 8 images in [-1, 1] and labels; every sixth is held out."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x = (x.float() / 8 - 1).view(-1, 1, 8, 8)
    held_out = torch.arange(len(x)) % 6 == 0
    return TensorDataset(x[~held_out], y[~held_out]), x[held_out], y[held_out]


def cnn() -> nn.Module:
    """Return a CNN with group norm, since batch norm would mix examples."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def main(settings: Settings) -> tuple[float, float]:
    """Train and return the held-out accuracy and the epsilon spent."""
    torch.manual_seed(0)
    train, x_test, y_test = digits()
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    training = qclip.make_private(
        model,
        optimizer,
        train,
        loss=nn.CrossEntropyLoss(),
        rescale_to_unit_norm=True,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        epsilon=settings.epsilon,
        delta=settings.delta,
        seed=settings.seed,
    )
    for _ in range(settings.epochs):
        for x, y in training.loader:
            loss = training.loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    epsilon, tau = training.epsilon(), training.history[-1].tau[0]
    print(
        f"held-out accuracy {accuracy:.3f} at epsilon {epsilon:.2f} (delta {settings.delta:g}); tau ended at {tau:.2f}"
    )
    return accuracy, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
