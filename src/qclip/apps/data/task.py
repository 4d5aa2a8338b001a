"""What a task is: data, a fresh model, a loss, how well a model does, and settings that work."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from qclip.engine.proof.prover import in_evaluation

Loss = Callable[[Tensor, Tensor], Tensor]
"""``f(outputs, targets)`` with one loss per example, [B]."""
Measure = Callable[[Tensor, Tensor], dict[str, Tensor]]
"""From outputs and targets to the value of each metric for each example, [B]."""

HELD_OUT_EVERY = 6
"""Data sets without a test set of their own hold out the examples 0, 6, 12, ... in the order of the file."""


@dataclass(frozen=True)
class Defaults:
    """Settings for SGD that work at epsilon = 3."""

    batch_size: int
    epochs: int
    learning_rate: float
    """In units of the threshold (`make_private(rescale_to_unit_norm=True)`)."""
    tau: float | None = None
    """Where to clip, from what is public; when None, at the 0.7-quantile of the gradient norms."""


@dataclass(frozen=True)
class Task:
    """What ``qclip train`` trains: data, a fresh model, a loss, how well it does, and settings that work.

    The data are prepared by constants that were fixed beforehand, never by what was measured on them.
    """

    name: str
    train: Dataset[tuple[Tensor, ...]]
    """Pairs (input, target), map-style."""
    held_out: Dataset[tuple[Tensor, ...]]
    build_model: Callable[[], nn.Module]
    """A fresh model, initialised from torch's global generator."""
    loss: Loss
    """A criterion for `qclip.make_private`."""
    score: Callable[[nn.Module], dict[str, float]]
    """The held-out metrics of a model, on whatever device it is."""
    defaults: Defaults
    description: str
    """One line: how many examples, what they are, which classes."""


def classification_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of each example, [B]: of its class, or the mean over its positions.

    outputs: [B, classes] or [B, positions, classes]; targets: [B] or [B, positions].

    >>> classification_losses(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)).exp()
    tensor([4., 4.])
    """
    losses = F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def classification(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Accuracy and loss of each example, over its positions where it has several."""
    hits = (outputs.argmax(-1) == targets).float()
    accuracy = hits if hits.dim() == 1 else hits.flatten(1).mean(1)
    return {"accuracy": accuracy, "loss": classification_losses(outputs, targets)}


def scorer(held_out: TensorDataset, measure: Measure, *, chunk: int = 1000) -> Callable[[nn.Module], dict[str, float]]:
    """A function that gives the mean of each metric over the held-out examples, ``chunk`` of them at a time.

    The model is put in evaluation mode, and each of its modules back into the mode that it was in.
    """

    def score(model: nn.Module) -> dict[str, float]:
        with in_evaluation(model):
            return _means(model, held_out, measure, chunk)

    return score


@torch.no_grad()
def _means(model: nn.Module, held_out: TensorDataset, measure: Measure, chunk: int) -> dict[str, float]:
    inputs, targets = held_out.tensors
    first = next(model.parameters(), None)
    device = inputs.device if first is None else first.device
    sums: dict[str, float] = {}
    for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        for name, values in measure(model(x.to(device)), y.to(device)).items():
            sums[name] = sums.get(name, 0.0) + values.double().sum().item()
    return {name: value / len(held_out) for name, value in sums.items()}


def hold_out(inputs: Tensor, targets: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """The training examples, and the held-out ones: every sixth, beginning with the first.

    >>> train, held_out = hold_out(torch.arange(8.0), torch.zeros(8))
    >>> held_out.tensors[0]
    tensor([0., 6.])
    """
    held = torch.arange(len(inputs)) % HELD_OUT_EVERY == 0
    return TensorDataset(inputs[~held], targets[~held]), TensorDataset(inputs[held], targets[held])
