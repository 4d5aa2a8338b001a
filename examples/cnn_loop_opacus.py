"""The run of `cnn_loop.py` in Opacus, for comparison.

    python examples/cnn_loop_opacus.py --max-grad-norm 1

Here the clip norm must be chosen. Needs ``pip install opacus``.
"""

import warnings
from dataclasses import dataclass

import torch
import tyro
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Settings:
    """The settings of the run; `lr` and `max_grad_norm` must be tuned together."""

    epochs: int = 15
    batch_size: int = 256
    epsilon: float = 3.0
    delta: float = 1e-5
    lr: float = 0.1
    max_grad_norm: float = 1.5


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return training data and held-out data: 8 x 8 images in [-1, 1] and labels; every sixth is held out."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x = (x.float() / 8 - 1).view(-1, 1, 8, 8)
    held_out = torch.arange(len(x)) % 6 == 0
    return TensorDataset(x[~held_out], y[~held_out]), x[held_out], y[held_out]


def cnn() -> nn.Module:
    """Return the CNN of `cnn_loop.py` without in-place activations, which the hooks do not support."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def main(settings: Settings) -> tuple[float, float]:
    """Train and return the held-out accuracy and the epsilon spent."""
    warnings.simplefilter("ignore")  # warnings of Opacus about its hooks, harmless here
    torch.manual_seed(0)
    train, x_test, y_test = digits()
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(train, batch_size=settings.batch_size, shuffle=True),
        epochs=settings.epochs,
        target_epsilon=settings.epsilon,
        target_delta=settings.delta,
        max_grad_norm=settings.max_grad_norm,
    )
    for _ in range(settings.epochs):
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    epsilon = engine.get_epsilon(settings.delta)
    print(f"held-out accuracy {accuracy:.3f} at epsilon {epsilon:.2f} (delta {settings.delta:g})")
    return accuracy, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
