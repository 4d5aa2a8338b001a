"""The private training of a task, in an ordinary loop."""

from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from qclip.apps.data import Task
from qclip.schedules import Schedule
from qclip.thresholds import Threshold
from qclip.training.make import make_private
from qclip.training.run import PrivateTraining


def train_privately(
    task: Task,
    model: nn.Module,
    *,
    threshold: Threshold[Any],
    step_size: Schedule | float | Literal["auto"],
    batch_size: int,
    epochs: int,
    seed: int,
    data: TensorDataset | None = None,
    **options: Any,
) -> PrivateTraining:
    """Train the model by plain SGD with rescaled steps, and return the finished run.

    Args:
        task: The task.
        model: A model of the task, on its device.
        threshold: The threshold.
        step_size: The learning rate, in units of the threshold.
        batch_size: Expected examples per step.
        epochs: Length of the run.
        seed: Seed of sampling and noise, for reproducibility; leave it out for sensitive data.
        data: The training examples on the model's device, where that is not the CPU.
        **options: Budget and further arguments of `make_private`.
    """
    training = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),  # step_size sets the rate
        task.train if data is None else data,
        loss=task.loss,
        batch_size=batch_size,
        epochs=epochs,
        threshold=threshold,
        step_size=step_size,
        rescale_to_unit_norm=True,
        seed=seed,
        **options,
    )
    for _ in range(epochs):
        for batch in training.loader:
            training.step(*batch)
    return training
