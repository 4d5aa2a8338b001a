"""An average of the parameters, a learning-rate schedule, and a run that is interrupted and resumed.

    python examples/ema_scheduler_resume.py --out out/resume --stop-after 40
    python examples/ema_scheduler_resume.py --out out/resume

The second call resumes from the checkpoint of the first: the parameters, the threshold, the sampling and the noise are
those of an uninterrupted run. Average and schedule move once per logical step, where `training.updated` is true.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import qclip


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    out: Path = Path("out/resume")
    """Folder of the checkpoint."""
    steps: int = 100
    stop_after: int | None = None
    """Stop when this many logical steps are done."""
    save_every: int = 20
    batch_size: int = 256
    physical_batch_size: int = 128
    epsilon: float = 3.0
    delta: float = 1e-5
    lr: float = 2.0
    decay: float = 0.95
    """Decay of the average, which covers about 1 / (1 - decay) steps."""
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return training data and held-out data: 64 grey values in [0, 1] and a label; every sixth is held out."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x, held_out = x.float() / 16, torch.arange(len(x)) % 6 == 0
    return TensorDataset(x[~held_out], y[~held_out]), x[held_out], y[held_out]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy on held-out data."""
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main(settings: Settings) -> tuple[AveragedModel, float, float]:
    """Train or resume; return the average, its held-out accuracy, and the epsilon spent."""
    torch.manual_seed(0)
    train, x_test, y_test = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=settings.steps)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.decay)).eval()
    training = qclip.make_private(
        model,
        optimizer,
        train,
        loss=nn.CrossEntropyLoss(),
        rescale_to_unit_norm=True,
        batch_size=settings.batch_size,
        physical_batch_size=settings.physical_batch_size,
        steps=settings.steps,
        epsilon=settings.epsilon,
        delta=settings.delta,
        seed=settings.seed,
    )
    checkpoint = settings.out / "checkpoint.pt"
    others = {"average": average, "scheduler": scheduler}
    if checkpoint.exists():
        training.load(checkpoint, **others)
        print(f"going on after step {len(training.history)}")
    settings.out.mkdir(parents=True, exist_ok=True)

    done, stop = len(training.history), settings.stop_after or settings.steps
    for batch in training.loader if done < stop else ():
        training.step(*batch)
        if not training.updated:
            continue
        average.update_parameters(model)
        scheduler.step()
        done = len(training.history)
        if done % settings.save_every == 0 or done == stop:
            training.save(checkpoint, **others)
        if done == stop:
            break

    last, averaged = accuracy(model.eval(), x_test, y_test), accuracy(average, x_test, y_test)
    epsilon = training.epsilon()
    print(f"held-out accuracy {averaged:.3f} (last parameters {last:.3f}) after step {done}")
    print(f"epsilon {epsilon:.2f} (delta {settings.delta:g})")
    return average, averaged, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
