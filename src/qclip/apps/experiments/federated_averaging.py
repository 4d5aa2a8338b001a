"""Federated averaging in one process, with what it did not release: the norms of the clients' updates."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from qclip._validate import Floats
from qclip.apps.experiments.federated_tasks import FederatedTask
from qclip.apps.experiments.local_training import draw_batches, local_updates, update_norms
from qclip.federated import Aggregator
from qclip.thresholds import Threshold
from qclip.training.lost_threshold import LostThreshold

SCORED = 2000
"""Examples on which the loss is measured."""


@dataclass(frozen=True)
class FederatedRun:
    """A finished run."""

    clip_norms: Floats
    """The clip norm of each round, [rounds]."""
    raw_norms: tuple[Floats, ...]
    """The norms of the updates of each round's cohort, before clipping."""
    first_loss: float
    """The mean loss of up to 2000 examples before the first round, and after the last one."""
    last_loss: float
    epsilon: float

    def quantiles(self, p: float) -> Floats:
        """Return the lower p-quantile of the norms of each round, [rounds]; nan where nobody joined."""
        return np.array([np.quantile(x, p, method="inverted_cdf") if len(x) else np.nan for x in self.raw_norms])

    def unclipped(self, clip_norms: Floats) -> Floats:
        """Return the fraction of each round's clients that these clip norms would have left unclipped, [rounds]."""
        each = zip(self.raw_norms, clip_norms, strict=True)
        return np.array([np.mean(norms <= tau) if len(norms) else np.nan for norms, tau in each])


def federated_averaging(
    task: FederatedTask, threshold: Threshold[Any], *, rounds: int, noise_multiplier: float, seed: int
) -> FederatedRun:
    """Train a fresh model: in each round a cohort trains locally, and the aggregator's mean update is added.

    Runs with one seed have the same initial model, cohorts and local batches, whatever their thresholds.

    Args:
        task: The clients.
        threshold: Where to clip.
        rounds: The number of rounds.
        noise_multiplier: The noise of sum and counts together; 0 for none.
        seed: The seed of everything.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.build_model()
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    aggregator = Aggregator(
        parameters,
        num_clients=len(task.clients),
        cohort_size=task.cohort_size,
        rounds=rounds,
        noise_multiplier=noise_multiplier,
        delta=0.1 / len(task.clients),
        threshold=threshold,
        seed=seed,
    )
    rng = np.random.default_rng(seed)
    scored = torch.from_numpy(np.random.default_rng(0).permutation(len(task.inputs))[:SCORED])

    def loss() -> float:
        with torch.no_grad():
            outputs: Tensor = functional_call(model, parameters, (task.inputs[scored],))
            return task.loss(outputs, task.targets[scored]).mean().item()

    first_loss, raw_norms = loss(), []
    for _ in range(rounds):
        batches = draw_batches([task.clients[k] for k in aggregator.sample()], task.local, rng)
        updates = local_updates(
            model,
            parameters,
            task.inputs,
            task.targets,
            batches,
            loss=task.loss,
            learning_rate=task.local.learning_rate,
        )
        raw_norms.append(update_norms(updates).numpy())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LostThreshold)  # that is what is measured
            mean = aggregator.aggregate_stacked(updates)
        for name, value in parameters.items():
            value.add_(mean[name])
    clip_norms = np.array([record.tau[0] for record in aggregator.history])
    return FederatedRun(clip_norms, tuple(raw_norms), first_loss, loss(), aggregator.epsilon())
