"""Private training in a Lightning module, by manual optimisation.

    python examples/lightning_loop.py
    python examples/lightning_loop.py --devices 2      # on two GPUs or processes: the same run

`make_private` is called in `configure_optimizers`, when Lightning has moved the model to its device; the module uses
its loader. The torch optimizer is stepped without Lightning's wrapper (``use_pl_optimizer=False``), which would pass a
closure that a private optimizer refuses.
"""

from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
import tyro
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qclip


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    epochs: int = 15
    batch_size: int = 256
    physical_batch_size: int = 128
    epsilon: float = 3.0
    delta: float = 1e-5
    lr: float = 0.2
    devices: int = 1
    """Number of GPUs, or of processes on a CPU."""
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return training data and held-out data: 64 grey values in [0, 1] and a label; every sixth is held out."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x, held_out = x.float() / 16, torch.arange(len(x)) % 6 == 0
    return TensorDataset(x[~held_out], y[~held_out]), x[held_out], y[held_out]


class PrivateClassifier(pl.LightningModule):
    """A classifier that takes private steps only."""

    def __init__(self, train: TensorDataset, settings: Settings) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.train_data, self.settings = train, settings
        self.private: qclip.PrivateTraining | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the private run."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.settings.lr, momentum=0.9)
        self.private = qclip.make_private(
            self.model,
            optimizer,
            self.train_data,
            loss=nn.CrossEntropyLoss(),
            rescale_to_unit_norm=True,
            batch_size=self.settings.batch_size,
            physical_batch_size=self.settings.physical_batch_size,
            epochs=self.settings.epochs,
            epsilon=self.settings.epsilon,
            delta=self.settings.delta,
            seed=self.settings.seed,
        )
        return optimizer

    def train_dataloader(self) -> Any:
        """Return the private loader: one pass is one epoch, and Lightning may prefetch."""
        return self.private.loader

    def training_step(self, batch: list[Tensor], batch_index: int) -> None:
        """Process one physical batch; the parameters move at the last one of a logical batch."""
        x, y = batch
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.private.loss(self.model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if self.private.updated:
            self.log("tau", self.private.history[-1].tau[0], prog_bar=True)  # released, so it may be logged


def main(settings: Settings) -> tuple[float, float]:
    """Train and return the held-out accuracy and the epsilon spent."""
    torch.manual_seed(0)
    train, x_test, y_test = digits()
    module = PrivateClassifier(train, settings)
    trainer = pl.Trainer(
        max_epochs=settings.epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, devices=settings.devices, strategy="ddp" if settings.devices > 1 else "auto",
    )  # fmt: skip
    trainer.fit(module)
    with torch.no_grad():
        accuracy = (module.model(x_test).argmax(1) == y_test).float().mean().item()
    epsilon = module.private.epsilon()
    if trainer.is_global_zero:
        print(f"held-out accuracy {accuracy:.3f} at epsilon {epsilon:.2f} (delta {settings.delta:g})")
    return accuracy, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
