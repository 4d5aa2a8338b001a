"""Private training with Hugging Face Accelerate, which chooses the device and the precision; qclip takes the step.

    python examples/accelerate_loop.py --mixed-precision no
    accelerate launch --num-processes 2 examples/accelerate_loop.py      # on two GPUs: the same run; --cpu without any

`accelerator.prepare` gets the model. `make_private` gets the optimizer and the data unwrapped: qclip samples and guards
the step itself. `accelerator.backward(loss)` is not needed, and works too. For mixed precision take bfloat16, which has
the range of float32: the GradScaler of float16 is refused, and without one small gradients vanish in float16.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from accelerate import Accelerator
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
    mixed_precision: Literal["no", "bf16"] = "bf16"
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return training data and held-out data: 64 grey values in [0, 1] and a label; every sixth is held out."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x, held_out = x.float() / 16, torch.arange(len(x)) % 6 == 0
    return TensorDataset(x[~held_out], y[~held_out]), x[held_out], y[held_out]


def main(settings: Settings) -> tuple[float, float]:
    """Train and return the held-out accuracy and the epsilon spent."""
    torch.manual_seed(0)
    train, x_test, y_test = digits()
    accelerator = Accelerator(mixed_precision=settings.mixed_precision)
    model = accelerator.prepare(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)))
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
        delta=settings.delta,
        seed=settings.seed,
    )
    for _ in range(settings.epochs):
        for batch in training.loader:
            x, y = (tensor.to(accelerator.device) for tensor in batch)
            training.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        accuracy = (model(x_test.to(accelerator.device)).argmax(1).cpu() == y_test).float().mean().item()
    epsilon = training.epsilon()
    accelerator.print(f"held-out accuracy {accuracy:.3f} at epsilon {epsilon:.2f} (delta {settings.delta:g})")
    return accuracy, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
