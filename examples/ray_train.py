"""Private training with Ray Train: TorchTrainer starts the workers, qclip trains one model on all of them.

    python examples/ray_train.py --workers 2

TorchTrainer initialises the process group before it calls `train`, so `make_private` needs no argument for it. Ray's
own `prepare_data_loader` is not used: every worker has the data, draws each logical batch whole and takes its share.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray.train
import torch
import tyro
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qclip


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    workers: int = 2
    gpu: bool = False
    """Whether each worker has a GPU."""
    epochs: int = 15
    batch_size: int = 256
    epsilon: float = 3.0
    delta: float = 1e-5
    out: Path = Path("out/ray")
    """Folder for Ray's records and the model; on several machines, one that all of them share."""
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def digits() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return training data and held-out data: 64 grey values in [0, 1] and a label; every sixth is held out."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    x, held_out = x.float() / 16, torch.arange(len(x)) % 6 == 0
    return TensorDataset(x[~held_out], y[~held_out]), x[held_out], y[held_out]


def train(config: dict[str, Any]) -> None:
    """Train on one worker; report the model, its held-out accuracy and epsilon: released values all."""
    settings = Settings(**config)
    torch.manual_seed(0)  # the same initial weights on all workers
    device = ray.train.torch.get_device()
    data, x_test, y_test = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(device)
    training = qclip.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        data,
        loss=nn.CrossEntropyLoss(),
        step_size="auto",
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        epsilon=settings.epsilon,
        delta=settings.delta,
        seed=settings.seed,
    )
    for _ in range(settings.epochs):
        for x, y in training.loader:
            training.step(x, y)
    with torch.no_grad():
        accuracy = (model(x_test.to(device)).argmax(1).cpu() == y_test).float().mean().item()
    with TemporaryDirectory() as folder:
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(model.state_dict(), Path(folder) / "model.pt")
        metrics = {"accuracy": accuracy, "epsilon": training.epsilon()}
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main(settings: Settings) -> tuple[float, float]:
    """Train on all workers and return the held-out accuracy and the epsilon spent."""
    trainer = TorchTrainer(
        train,
        train_loop_config=asdict(settings),
        scaling_config=ScalingConfig(num_workers=settings.workers, use_gpu=settings.gpu),
        run_config=RunConfig(storage_path=str(settings.out.resolve())),
    )
    metrics = trainer.fit().metrics
    accuracy, epsilon = metrics["accuracy"], metrics["epsilon"]
    print(f"held-out accuracy {accuracy:.3f} at epsilon {epsilon:.2f} (delta {settings.delta:g})")
    return accuracy, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
