"""A small residual network learns CIFAR-10 privately: batch norm is replaced, and large batches go in pieces.

    python examples/cifar10_resnet.py --data-dir data --epsilon 8

What changes in a script for CIFAR-10: `qclip.fix` replaces batch norm, which mixes examples, by group norm;
`make_private` gives the loader and the loss; `physical_batch_size` bounds the memory, and `training.updated` says when
a step is complete. The data are the binary version of CIFAR-10 (data_batch_1.bin ... test_batch.bin in the folder
cifar-10-batches-bin), or a folder cifar10 as `qclip train cifar10` reads it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.data import Subset
from tqdm import tqdm

import qclip
from qclip.apps.data import load


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    data_dir: Path = Path("data")
    epochs: int = 20
    batch_size: int = 1024
    physical_batch_size: int = 128
    epsilon: float = 8.0
    lr: float = 1.0
    width: int = 32
    limit: int | None = None
    """Train on the first images only."""
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


class Block(nn.Module):
    """Two convolutions with a shortcut, as residual networks have them: with batch norm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of the next stage."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


def resnet(width: int) -> nn.Module:
    """Return a network of three blocks for images of 32 x 32 pixels."""
    blocks = Block(3, width, 2), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def main(settings: Settings) -> tuple[float, float]:
    """Train and return the held-out accuracy and the epsilon spent."""
    torch.manual_seed(0)
    task = load("cifar10", data_dir=settings.data_dir)
    train = task.train if settings.limit is None else Subset(task.train, range(settings.limit))
    model = qclip.fix(resnet(settings.width))  # it says what it did
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    training = qclip.make_private(
        model,
        optimizer,
        train,
        loss=nn.CrossEntropyLoss(),
        rescale_to_unit_norm=True,
        batch_size=settings.batch_size,
        physical_batch_size=settings.physical_batch_size,
        epochs=settings.epochs,
        epsilon=settings.epsilon,
        seed=settings.seed,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.num_steps)
    with tqdm(total=training.num_steps, disable=None) as bar:
        for _ in range(settings.epochs):
            for x, y in training.loader:
                loss = training.loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if training.updated:
                    schedule.step()
                    bar.update()
    model.eval()
    with torch.no_grad():
        right = [model(x).argmax(1) == y for x, y in zip(*(t.split(500) for t in task.held_out.tensors), strict=True)]
    accuracy, epsilon = torch.cat(right).float().mean().item(), training.epsilon()
    print(f"held-out accuracy {accuracy:.3f} at epsilon {epsilon:.2f}")
    return accuracy, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
