"""Held-out metrics that need all examples at once: ranking, confusion, calibration, and the best constant guess.

Held-out examples are not protected by the guarantee, and neither is what is computed from them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from qclip._validate import Floats
from qclip.apps.run_summary import Evaluation

BINS = 10
"""The number of bins of predicted probabilities, with equally many examples in each."""


def auc(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """Return the probability that a positive example has the higher score of two, one of each kind; ties count half.

    >>> auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    num_positive = int(positive.sum())
    num_pairs = num_positive * (len(positive) - num_positive)
    return float((rankdata(scores)[positive].sum() - num_positive * (num_positive + 1) / 2) / num_pairs)


def average_precision(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """Return the mean precision over the positive examples, each at its own score as the cut.

    >>> round(average_precision(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True])), 4)
    0.8333
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order])
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # examples of one score are taken together
    precision, found = hits[ends] / (ends + 1), hits[ends]
    return float((precision * np.diff(found, prepend=0)).sum() / positive.sum())


def rarer(targets: Tensor, num_classes: int = 2) -> int:
    """Return the class with the fewest examples, of equal ones the last."""
    counts = torch.bincount(targets, minlength=num_classes)
    return num_classes - 1 - int(counts.flip(0).argmin())


def ranking(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the metrics of two classes that need all examples: AUC, and average precision of the rarer class.

    Args:
        outputs: Scores, [N, 2].
        targets: Classes, [N]. Without examples of both there are no metrics.
    """
    positive_class = rarer(targets)
    positive = (targets == positive_class).numpy()
    if not positive.any() or positive.all():
        return {}
    scores = (outputs[:, positive_class] - outputs[:, 1 - positive_class]).double().numpy()
    return {"auc": auc(scores, positive), "average_precision": average_precision(scores, positive)}


def fit(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the root mean squared error of predicted numbers, and R squared, which is 0 for the mean; both [N, 1]."""
    errors = (outputs - targets).double().square().mean()
    spread = targets.double().var(correction=0)
    return {"rmse": float(errors.sqrt()), "r2": float(1 - errors / spread) if spread > 0 else 0.0}


def evaluation(outputs: Tensor, targets: Tensor, classes: Sequence[str]) -> Evaluation:
    """Return the details of a classifier's held-out result.

    Args:
        outputs: Scores, [N, C].
        targets: Classes, [N].
        classes: The names of the C classes.
    """
    num_classes = len(classes)
    predicted = outputs.argmax(1)
    confusion = torch.bincount(targets * num_classes + predicted, minlength=num_classes**2).view(num_classes, -1)
    shares = torch.bincount(targets, minlength=num_classes).double() / len(targets)
    guess = {"accuracy": float(shares.max()), "loss": float(-torch.special.xlogy(shares, shares).sum())}
    if num_classes == 2:
        guess |= {"auc": 0.5, "average_precision": float(shares.min())}
    probabilities = outputs.double().softmax(1)
    if num_classes == 2:
        positive_class = rarer(targets)
        of, certain, happened = classes[positive_class], probabilities[:, positive_class], targets == positive_class
    else:
        of, certain, happened = "", probabilities.amax(1), predicted == targets
    return Evaluation(guess, list(classes), confusion.tolist(), of, calibration(certain.numpy(), happened.numpy()))


def calibration(probabilities: Floats, happened: NDArray[np.bool_]) -> list[list[float]]:
    """Return, for each bin of predictions that has any, their mean, the share that came true, and their number.

    >>> calibration(np.repeat([0.25, 0.75], 20), np.repeat([False, True, True, True], 10))
    [[0.25, 0.5, 20.0], [0.75, 1.0, 20.0]]
    """
    edges = np.quantile(probabilities, np.arange(1, BINS) / BINS)
    bins = np.searchsorted(edges, probabilities)  # equal predictions are in one bin
    inside = [bins == k for k in range(BINS)]
    return [
        [float(probabilities[where].mean()), float(happened[where].mean()), float(where.sum())]
        for where in inside
        if where.any()
    ]
