"""Tasks: data, a fresh model, a loss, held-out metrics, and settings that work."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from qclip.engine.proof.prover import in_evaluation
from qclip.tables.examples import batch_of

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs and targets that returns one loss per example, [B]."""
Measure = Callable[[Tensor, Tensor], dict[str, Tensor]]
"""A function of outputs and targets that returns each metric for each example, [B]."""

HELD_OUT_EVERY = 6
"""Data sets without a test set hold out the examples 0, 6, 12, ... in the order of the file."""


@dataclass(frozen=True)
class Defaults:
    """The size of a run that works at epsilon = 3; threshold and learning rate find themselves."""

    batch_size: int
    epochs: int


@dataclass(frozen=True)
class Task:
    """A task of ``qclip train``: data, a fresh model, a loss, held-out metrics, and settings that work.

    The data are prepared by constants that were fixed beforehand, never by statistics of the data.
    """

    name: str
    train: Dataset[tuple[Tensor, ...]]
    """Pairs (input, target), map-style."""
    held_out: Dataset[tuple[Tensor, ...]]
    build_model: Callable[[], nn.Module]
    """Builds a fresh model, initialised from torch's global generator."""
    loss: Loss
    """A criterion for `qclip.make_private`."""
    score: Callable[[nn.Module], dict[str, float]]
    """Returns the held-out metrics of a model, on the model's device."""
    defaults: Defaults
    description: str
    """One line: the number of examples, their content, the classes."""
    unit: str = "an example"
    """The unit of privacy, in words: what one more or one less of changes little."""
    details: tuple[str, ...] = ()
    """What else a user should know: how a file was read, what each column became, the model."""
    schema: dict[str, Any] | None = None
    """The schema of a table, as plain data."""


def classification_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each example, [B]: of its class, or the mean over its positions.

    >>> classification_losses(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)).exp()
    tensor([4., 4.])

    Args:
        outputs: Scores, [B, classes] or [B, positions, classes].
        targets: Classes, [B] or [B, positions].
    """
    losses = F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none")
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


def classification(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the accuracy and the loss of each example, [B], averaged over its positions."""
    hits = (outputs.argmax(-1) == targets).float()
    accuracy = hits if hits.dim() == 1 else hits.flatten(1).mean(1)
    return {"accuracy": accuracy, "loss": classification_losses(outputs, targets)}


def scorer(
    held_out: TensorDataset,
    measure: Measure,
    *,
    chunk: int = 1000,
    finish: Callable[[dict[str, float]], dict[str, float]] = dict,
) -> Callable[[nn.Module], dict[str, float]]:
    """Return a function that averages each metric over the held-out examples, ``chunk`` of them at a time.

    It runs the model in evaluation mode and restores the mode of each module. ``finish`` makes metrics of the averages.
    """

    def score(model: nn.Module) -> dict[str, float]:
        with in_evaluation(model):
            return finish(_means(model, held_out, measure, chunk))

    return score


@torch.no_grad()
def _means(model: nn.Module, held_out: TensorDataset, measure: Measure, chunk: int) -> dict[str, float]:
    first = next(model.parameters(), None)
    device = held_out.tensors[0].device if first is None else first.device
    sums: dict[str, float] = {}
    for start in range(0, len(held_out), chunk):
        x, y = batch_of(held_out, slice(start, start + chunk))
        for name, values in measure(model(x.to(device)), y.to(device)).items():
            sums[name] = sums.get(name, 0.0) + values.double().sum().item()
    return {name: value / len(held_out) for name, value in sums.items()}


def classifier(
    name: str,
    train: TensorDataset,
    held_out: TensorDataset,
    build_model: Callable[[], nn.Module],
    defaults: Defaults,
    description: str,
    *,
    chunk: int = 1000,
) -> Task:
    """Return a classification task, scored on ``chunk`` held-out examples at a time."""
    score = scorer(held_out, classification, chunk=chunk)
    return Task(name, train, held_out, build_model, classification_losses, score, defaults, description)


def hold_out(inputs: Tensor, targets: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Return the training examples and the held-out ones: every sixth, beginning with the first.

    >>> train, held_out = hold_out(torch.arange(8.0), torch.zeros(8))
    >>> held_out.tensors[0]
    tensor([0., 6.])
    """
    held = torch.arange(len(inputs)) % HELD_OUT_EVERY == 0
    return TensorDataset(inputs[~held], targets[~held]), TensorDataset(inputs[held], targets[held])
