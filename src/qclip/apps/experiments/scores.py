"""The held-out scores of a model."""

import torch
from scipy.stats import rankdata
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from qclip.apps.data import Task
from qclip.engine.proof.prover import in_evaluation

CHUNK = 1000
"""Examples that go through the model at once."""


def held_out_scores(task: Task, model: nn.Module) -> dict[str, float]:
    """Return the held-out metrics of the task; for two classes also the area under the ROC curve, "auc"."""
    scores = task.score(model)
    assert isinstance(task.held_out, TensorDataset)
    inputs, targets = task.held_out.tensors
    if targets.dim() != 1 or targets.is_floating_point() or int(targets.max()) != 1:
        return scores
    device = next(model.parameters()).device
    with in_evaluation(model), torch.no_grad():
        outputs = torch.cat([model(part.to(device)).cpu() for part in inputs.split(CHUNK)])
    return scores | {"auc": auc(outputs[:, 1] - outputs[:, 0], targets)}


def auc(scores: Tensor, targets: Tensor) -> float:
    """Return the probability that a positive has a higher score than a negative, ties counting half.

    >>> auc(torch.tensor([0.1, 0.7, 0.4, 0.4]), torch.tensor([0, 1, 1, 0]))
    0.875
    """
    positive = targets.cpu().numpy() == 1
    count, others = int(positive.sum()), int((~positive).sum())
    ranks = rankdata(scores.double().numpy())[positive]
    return float((ranks.sum() - count * (count + 1) / 2) / (count * others))
