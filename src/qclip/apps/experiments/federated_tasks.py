"""Federated tasks: data sets that are split over clients, each with a small model and its local training."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from qclip.apps.data import Task, files, models
from qclip.apps.data.adult import adult_files, adult_table, encoded
from qclip.apps.data.images import digits, fashion_mnist, mnist
from qclip.apps.data.task import classification_losses
from qclip.apps.data.text import OTHER, speeches, speeches_file, windows
from qclip.apps.experiments.local_training import LocalSteps, Loss
from qclip.tables.models import linear, perceptron

SKEW = 0.3
"""Concentration of the Dirichlet distribution that shares out each class over the clients: small values skew more."""
CONTEXT = 16
"""The number of characters from which the next one is predicted."""
SEED = 0
"""The seed of the splits: a data set is always dealt out in the same way."""


@dataclass(frozen=True)
class FederatedTask:
    """The data of many clients, and what each client does with its own."""

    name: str
    inputs: Tensor
    """The inputs of all clients, [N, ...]."""
    targets: Tensor
    """[N, ...]."""
    clients: Sequence[NDArray[np.int64]]
    """The rows of each client: at least one, and none of another client's."""
    build_model: Callable[[], nn.Module]
    """Builds a fresh model, initialised from torch's global generator."""
    loss: Loss
    local: LocalSteps
    cohort_size: int
    """The expected number of clients of a round."""


def federated_tasks(data_dir: Path | None) -> list[FederatedTask]:
    """Return the six tasks of the figure; without a folder, scikit-learn's digits as classifier and as autoencoder.

    Raises:
        Refusal: A file is missing or broken.
    """
    if data_dir is None:
        return image_tasks("Digits", digits(), num_clients=100, cohort_size=50, learning_rate=0.2)
    images = {"MNIST": mnist(data_dir), "Fashion-MNIST": fashion_mnist(data_dir)}
    sizes = {"num_clients": 1000, "cohort_size": 100}
    pairs = [image_tasks(name, task, **sizes, learning_rate=0.05) for name, task in images.items()]
    return [shakespeare_task(data_dir), adult_task(data_dir), *(task for pair in pairs for task in pair)]


def shakespeare_task(data_dir: Path) -> FederatedTask:
    """Return the prediction of a character from the 16 before it. A client is a speaker of one play."""
    path = speeches_file(data_dir)
    pieces = speeches(files.read_text(path), path)
    ids = windows(pieces, CONTEXT + 1)
    ends = np.cumsum([len(piece) // (CONTEXT + 1) for piece in pieces])
    return FederatedTask(
        "Shakespeare, next character",
        ids[:, :-1],
        ids[:, -1],
        [rows for rows in np.split(np.arange(len(ids)), ends[:-1]) if len(rows)],
        partial(models.next_character, OTHER + 1, CONTEXT),
        classification_losses,
        LocalSteps(steps=8, batch_size=16, learning_rate=0.3),
        cohort_size=100,
    )


def adult_task(data_dir: Path) -> FederatedTask:
    """Return the prediction of incomes by logistic regression. A client is the people of one occupation and age."""
    table = adult_table(adult_files(data_dir)[0])
    inputs, targets = encoded(table).tensors
    return FederatedTask(
        "Adult, income",
        inputs,
        targets,
        rows_by(list(zip(table["occupation"].texts(), table["age"].texts(), strict=True))),
        partial(linear, inputs.shape[1], 2),
        classification_losses,
        LocalSteps(steps=5, batch_size=10, learning_rate=0.1),
        cohort_size=100,
    )


def image_tasks(
    name: str, task: Task, *, num_clients: int, cohort_size: int, learning_rate: float
) -> list[FederatedTask]:
    """Return a classifier and an autoencoder of the same images, on the same clients, whose classes are skewed.

    Args:
        name: The name of the images.
        task: The images. Those of 28 x 28 pixels are averaged to 14 x 14.
        num_clients: The number of clients to deal them out to.
        cohort_size: The expected number of clients of a round.
        learning_rate: That of the classifier.
    """
    assert isinstance(task.train, TensorDataset)
    images, labels = task.train.tensors
    pixels = (F.avg_pool2d(images, 2) if images.dim() == 4 else images).flatten(1)
    size = pixels.shape[1]
    clients = label_skew(labels.numpy(), num_clients, SKEW, np.random.default_rng(SEED))
    classifier = FederatedTask(
        f"{name}, classifier",
        pixels,
        labels,
        clients,
        partial(perceptron, size, 32, 10, layers=4),
        classification_losses,
        LocalSteps(steps=5, batch_size=10, learning_rate=learning_rate),
        cohort_size,
    )
    autoencoder = FederatedTask(
        f"{name}, autoencoder",
        pixels,
        pixels,
        clients,
        partial(models.autoencoder, size, 64, 16),
        squared_error,
        LocalSteps(steps=5, batch_size=10, learning_rate=2 / size),
        cohort_size,
    )
    return [classifier, autoencoder]


def rows_by(keys: Sequence[Hashable]) -> list[NDArray[np.int64]]:
    """Return the rows of each key, in the order of its first row.

    >>> [rows.tolist() for rows in rows_by(["b", "a", "b"])]
    [[0, 2], [1]]
    """
    rows: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return [np.array(each) for each in rows.values()]


def label_skew(
    labels: NDArray[np.int64], num_clients: int, concentration: float, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Deal the examples of each class out over the clients, in shares that a Dirichlet distribution draws.

    Clients have classes in different proportions and differ in their numbers of examples; those without any are left
    out.

    Args:
        labels: The class of each example, [N].
        num_clients: The number of clients.
        concentration: Parameter of the symmetric Dirichlet distribution.
        rng: Generator of shares and orders.
    """
    owner = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(rng.dirichlet(np.full(num_clients, concentration)))[:-1]
        owner[members] = np.searchsorted(ends, (np.arange(len(members)) + 0.5) / len(members))
    return [rows for k in range(num_clients) if len(rows := np.flatnonzero(owner == k))]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared distance of each output from its target, [B]."""
    return (outputs - targets).flatten(1).square().sum(1) / 2
