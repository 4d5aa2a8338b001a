"""Tasks: data, a fresh model, a loss, held-out metrics, and settings that work."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from qclip.apps.data import metrics
from qclip.apps.run_summary import Evaluation
from qclip.engine.proof.prover import in_evaluation
from qclip.tables import Schema, models
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
    evaluate: Callable[[nn.Module], Evaluation] | None = None
    """Returns the details of a model's held-out result; None where there are none."""
    schema: Schema | None = None
    """What the columns of a table became; None for other data."""
    architecture: models.Kind = "linear"
    """The kind of model, where there is a schema."""
    unit: str = "any one example"
    """What the guarantee protects, in words."""
    public: tuple[str, ...] = ("the number of examples",)
    """Facts that were read from the data and count as public, in words."""
    details: tuple[str, ...] = ()
    """What else to say of the data: how a file was read, what each column became, the model."""


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
    whole: Callable[[Tensor, Tensor], dict[str, float]] | None = None,
    chunk: int = 1000,
) -> Callable[[nn.Module], dict[str, float]]:
    """Return a function that averages each metric over the held-out examples, ``chunk`` of them at a time.

    It runs the model in evaluation mode and restores the mode of each module.

    Args:
        held_out: The held-out examples.
        measure: Returns metrics that are means over examples.
        whole: Returns further metrics, of the outputs and targets of all examples.
        chunk: The number of examples that go through the model at once.
    """

    def score(model: nn.Module) -> dict[str, float]:
        sums: dict[str, float] = {}
        kept = []
        for outputs, targets in _outputs(model, held_out, chunk):
            for name, values in measure(outputs, targets).items():
                sums[name] = sums.get(name, 0.0) + values.double().sum().item()
            if whole is not None:
                kept.append((outputs.cpu(), targets.cpu()))
        means = {name: value / len(held_out) for name, value in sums.items()}
        return means if whole is None else means | whole(*_joined(kept))

    return score


def evaluator(
    held_out: TensorDataset, evaluation: Callable[[Tensor, Tensor], Evaluation], *, chunk: int = 1000
) -> Callable[[nn.Module], Evaluation]:
    """Return a function that evaluates the outputs and targets of all held-out examples."""

    def evaluate(model: nn.Module) -> Evaluation:
        return evaluation(*_joined([(x.cpu(), y.cpu()) for x, y in _outputs(model, held_out, chunk)]))

    return evaluate


def _outputs(model: nn.Module, held_out: TensorDataset, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs and targets of the held-out examples, in evaluation mode, on the device of the model."""
    first = next(model.parameters(), None)
    device = held_out.tensors[0].device if first is None else first.device
    for start in range(0, len(held_out), chunk):
        x, y = batch_of(held_out, slice(start, start + chunk))
        with torch.no_grad(), in_evaluation(model):
            outputs = model(x.to(device))
        yield outputs, y.to(device)


def _joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outputs, targets = zip(*pairs, strict=True)
    return torch.cat(outputs), torch.cat(targets)


def classifier(
    name: str,
    train: TensorDataset,
    held_out: TensorDataset,
    build_model: Callable[[], nn.Module],
    defaults: Defaults,
    description: str,
    *,
    classes: Sequence[str] = (),
    chunk: int = 1000,
) -> Task:
    """Return a classification task, scored on ``chunk`` held-out examples at a time; with names of its classes."""
    whole = metrics.ranking if len(classes) == 2 else None
    score = scorer(held_out, classification, whole=whole, chunk=chunk)
    evaluate = evaluator(held_out, partial(metrics.evaluation, classes=classes), chunk=chunk) if classes else None
    return Task(name, train, held_out, build_model, classification_losses, score, defaults, description, evaluate)


def hold_out(inputs: Tensor, targets: Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Return the training examples and the held-out ones: every sixth, beginning with the first.

    >>> train, held_out = hold_out(torch.arange(8.0), torch.zeros(8))
    >>> held_out.tensors[0]
    tensor([0., 6.])
    """
    held = torch.arange(len(inputs)) % HELD_OUT_EVERY == 0
    return TensorDataset(inputs[~held], targets[~held]), TensorDataset(inputs[held], targets[held])
