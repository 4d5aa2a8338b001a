"""Metrics of all held-out examples, beside scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from qclip.apps.data.metrics import auc, average_precision, calibration, evaluation, fit, ranking, rarer

RNG = np.random.default_rng(0)


def draw(size, decimals):
    """Scores with ties, where they are rounded, and labels that depend on them."""
    scores = RNG.normal(size=size).round(decimals)
    return scores, RNG.random(size) < 1 / (1 + np.exp(1 - 2 * scores))


@pytest.mark.parametrize("decimals", [0, 1, 9])
@pytest.mark.parametrize("size", [5, 40, 3000])
def test_ranking_metrics_are_those_of_scikit_learn(size, decimals):
    scores, positive = draw(size, decimals)
    positive[:2] = [True, False]
    assert auc(scores, positive) == pytest.approx(sk.roc_auc_score(positive, scores), abs=1e-12)
    assert average_precision(scores, positive) == pytest.approx(sk.average_precision_score(positive, scores), abs=1e-12)


def outputs_and_targets(size=400, classes=2):
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(size, classes, generator=generator)
    targets = (outputs + torch.randn(size, classes, generator=generator)).argmax(1)
    targets[: size // 2] = 0  # the other classes are rarer
    return outputs, targets


def test_the_rarer_class_is_the_positive_one_wherever_it_stands():
    outputs, targets = outputs_and_targets()
    assert rarer(targets) == 1
    assert rarer(1 - targets) == 0
    assert rarer(torch.tensor([0, 1])) == 1
    assert ranking(outputs, targets) == pytest.approx(ranking(outputs.flip(1), 1 - targets))
    positive = (targets == 1).numpy()
    margin = (outputs[:, 1] - outputs[:, 0]).numpy()
    assert ranking(outputs, targets)["average_precision"] == pytest.approx(sk.average_precision_score(positive, margin))


def test_one_class_alone_has_no_ranking():
    assert ranking(torch.randn(5, 2), torch.zeros(5, dtype=torch.long)) == {}


@pytest.mark.parametrize("classes", [2, 4])
def test_the_evaluation_is_that_of_scikit_learn(classes):
    outputs, targets = outputs_and_targets(classes=classes)
    names = [f"class {k}" for k in range(classes)]
    found = evaluation(outputs, targets, names)
    assert found.confusion == sk.confusion_matrix(targets, outputs.argmax(1)).tolist()
    shares = np.bincount(targets) / len(targets)
    constant = np.tile(shares, (len(targets), 1))
    assert found.guess["loss"] == pytest.approx(sk.log_loss(targets, constant, labels=range(classes)))
    assert found.guess["accuracy"] == shares.max()
    assert sum(count for *_, count in found.calibration) == len(targets)
    if classes == 2:
        assert found.positive == "class 1"
        assert found.guess["average_precision"] == pytest.approx(shares.min())
        share, mean = calibration_curve(targets == 1, outputs.softmax(1)[:, 1], n_bins=10, strategy="quantile")
        expected = np.stack([mean, share], 1)
        assert np.allclose(np.array(found.calibration)[:, :2], expected, atol=1e-6)


def test_calibration_keeps_the_ends():
    assert calibration(np.array([0.0, 1.0]), np.array([False, True])) == [[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]


def test_the_fit_of_numbers_is_that_of_scikit_learn():
    targets = torch.randn(50, 1)
    outputs = targets + torch.randn(50, 1) / 2
    found = fit(outputs, targets)
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(targets, outputs))
    assert found["r2"] == pytest.approx(sk.r2_score(targets, outputs))
    assert fit(torch.ones(3, 1), torch.ones(3, 1)) == {"rmse": 0.0, "r2": 0.0}  # nothing to explain
