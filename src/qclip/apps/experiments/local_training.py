"""Local training of a cohort: a few SGD steps of each client from one model, all clients at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Parameters = Mapping[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs and targets that returns one loss per example, [B]."""


@dataclass(frozen=True)
class LocalSteps:
    """The local training of each client: up to ``steps`` steps of plain SGD, on batches of examples not used before."""

    steps: int
    batch_size: int
    learning_rate: float


@dataclass(frozen=True)
class CohortBatches:
    """The rows of each client's batches.

    Clients with fewer examples than the others are padded by the row 0, with a weight of 0.
    """

    rows: Tensor
    """Indices of examples, [clients, steps, batch]."""
    real: Tensor
    """1 where the index counts and 0 where it is padding, [clients, steps, batch]."""


def draw_batches(clients: Sequence[NDArray[np.int64]], local: LocalSteps, rng: np.random.Generator) -> CohortBatches:
    """Draw the batches of one round: examples of each client in a random order, cut off after the last step.

    A client with few examples has a smaller last batch, and takes fewer steps.

    Args:
        clients: The rows of each client of the cohort.
        local: The local training.
        rng: Generator of the orders.
    """
    most = local.steps * local.batch_size
    rows = np.zeros((len(clients), most), dtype=np.int64)
    real = np.zeros((len(clients), most), dtype=np.float32)
    for k, own in enumerate(clients):
        drawn = rng.permutation(own)[:most]
        rows[k, : len(drawn)], real[k, : len(drawn)] = drawn, 1
    shape = (len(clients), local.steps, local.batch_size)
    return CohortBatches(torch.from_numpy(rows).view(shape), torch.from_numpy(real).view(shape))


def local_updates(
    model: nn.Module,
    start: Parameters,
    inputs: Tensor,
    targets: Tensor,
    batches: CohortBatches,
    *,
    loss: Loss,
    learning_rate: float,
) -> dict[str, Tensor]:
    """Train all clients of a cohort from the same parameters, and return what each one would add to them.

    A step follows the mean loss over the batch's real examples; a batch of padding alone moves nothing.

    Args:
        model: The model; its own parameters are not used.
        start: The parameters that each client begins with, by name.
        inputs: The inputs of all clients together, [N, ...].
        targets: Their targets, [N, ...].
        batches: The rows of each client.
        loss: The loss of each example.
        learning_rate: The step size.

    Returns:
        The update of each parameter, [clients, ...].
    """

    def mean_loss(parameters: Parameters, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        losses = loss(functional_call(model, dict(parameters), (x,)), y)
        return (losses * real).sum() / real.sum().clamp(min=1)

    gradients = vmap(grad(mean_loss))
    count = len(batches.rows)
    stacked = {name: value.detach().expand(count, *value.shape).clone() for name, value in start.items()}
    for rows, real in zip(batches.rows.unbind(1), batches.real.unbind(1), strict=True):
        if real.any():
            steps = gradients(stacked, inputs[rows], targets[rows], real)
            for name, value in stacked.items():
                value.sub_(steps[name], alpha=learning_rate)
    return {name: value.sub_(start[name].detach()) for name, value in stacked.items()}


def update_norms(updates: Parameters) -> Tensor:
    """Return the Euclidean norm of each client's update over all parameters, [clients], in float64."""
    squares = [value.double().flatten(1).square().sum(1) for value in updates.values()]
    return torch.stack(squares).sum(0).sqrt()
