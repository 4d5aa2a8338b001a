"""The workload of a step: a fresh model of a case and one batch, on a device and in a precision."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qclip.apps.bench.cases import Batch, BenchCase
from qclip.apps.bench.precision import Precision

Step = Callable[[], None]
"""One training step, the unit of measurement."""
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0


@dataclass(frozen=True, eq=False)
class Workload:
    """The model and the batch of a step."""

    case: BenchCase
    precision: Precision
    device: torch.device
    model: nn.Module
    batch: Batch

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return one loss per example, [B]; ``model`` may be a wrapper around the workload's own."""
        inputs, targets = batch
        with self.precision.autocast(self.device):
            return self.case.losses(model(inputs), targets)

    def place(self, batch: Batch) -> Batch:
        """Move a batch to the device and convert it."""
        inputs, targets = batch
        return self.precision.place(inputs, self.device), self.precision.place(targets, self.device)

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of every step."""
        return torch.optim.SGD(self.model.parameters(), 1e-3)

    def drop_gradients(self) -> None:
        """Drop the gradients of the last step."""
        for parameter in self.model.parameters():
            parameter.grad = None


def workload(case: BenchCase, precision: Precision, device: torch.device) -> Workload:
    """Return a model with the case's initial weights, the same every time, and its batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = precision.model(case.model(), device)
    inputs, targets = case.examples(case.batch)
    batch = precision.place(inputs, device), precision.place(targets, device)
    return Workload(case, precision, device, model, batch)
