"""One loss per example from a criterion: exact, from its own row alone, or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qclip.training.losses import per_example

B = 6


def draw(shape, *, unit=False, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.sigmoid() if unit else values


def labels(shape, classes=4):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(9))


SIGNS = draw((B, 3), seed=3).sign()
CASES = {
    "cross entropy": (nn.CrossEntropyLoss(), draw((B, 4)), labels((B,))),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), draw((B, 4)), labels((B,))),
    "probabilities": (nn.CrossEntropyLoss(), draw((B, 4)), draw((B, 4), seed=1).softmax(1)),
    "probabilities over positions": (nn.CrossEntropyLoss(), draw((B, 4, 5)), draw((B, 4, 5), seed=1).softmax(1)),
    "nll": (nn.NLLLoss(), draw((B, 4)).log_softmax(1), labels((B,))),
    "mse": (nn.MSELoss(), draw((B, 3, 2)), draw((B, 3, 2), seed=1)),
    "l1": (nn.L1Loss(), draw((B,)), draw((B,), seed=1)),
    "smooth l1": (nn.SmoothL1Loss(), draw((B, 3)), draw((B, 3), seed=1)),
    "huber": (nn.HuberLoss(), draw((B, 3)), draw((B, 3), seed=1)),
    "bce": (nn.BCELoss(), draw((B, 3), unit=True), draw((B, 3), unit=True, seed=1)),
    "bce with logits": (nn.BCEWithLogitsLoss(pos_weight=draw(3, unit=True)), draw((B, 3)), draw((B, 3), unit=True)),
    "kl": (nn.KLDivLoss(), draw((B, 4)).log_softmax(1), draw((B, 4), seed=1).softmax(1)),
    "poisson": (nn.PoissonNLLLoss(), draw((B, 2)), draw((B, 2), unit=True)),
    "soft margin": (nn.SoftMarginLoss(), draw((B, 3)), SIGNS),
    "multi margin": (nn.MultiMarginLoss(weight=draw(4, unit=True)), draw((B, 4)), labels((B,))),
    "multi-label margin": (nn.MultiLabelMarginLoss(), draw((B, 4)), torch.tensor([[1, 3, -1, 0]] * B)),
    "multi-label soft margin": (nn.MultiLabelSoftMarginLoss(), draw((B, 4)), draw((B, 4)).gt(0).float()),
}
rows = pytest.mark.parametrize(("criterion", "outputs", "targets"), CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _quiet():
    import warnings

    with warnings.catch_warnings():  # KLDivLoss says at every call that its mean is not the mathematical one
        warnings.filterwarnings("ignore", "reduction: 'mean' divides")
        yield


@rows
def test_the_mean_of_the_losses_is_the_criterion(criterion, outputs, targets):
    losses = per_example(criterion)(outputs, targets)
    assert losses.shape == (B,)
    torch.testing.assert_close(losses.mean(), criterion(outputs, targets))
    assert criterion.reduction == "mean"


@rows
def test_a_loss_is_that_of_the_example_alone(criterion, outputs, targets):
    losses = per_example(criterion)(outputs, targets)
    alone = torch.stack([criterion(outputs[i : i + 1], targets[i : i + 1]) for i in range(B)])
    torch.testing.assert_close(losses, alone)


@rows
def test_a_sum_is_the_sum_of_the_example_alone(criterion, outputs, targets):
    import copy

    summed = copy.copy(criterion)
    summed.reduction = "sum"
    losses = per_example(summed)(outputs, targets)
    alone = torch.stack([summed(outputs[i : i + 1], targets[i : i + 1]) for i in range(B)])
    torch.testing.assert_close(losses, alone)


def test_batchmean_divides_by_the_batch_only():
    criterion, outputs, targets = (
        nn.KLDivLoss(reduction="batchmean"),
        draw((B, 4)).log_softmax(1),
        draw((B, 4)).softmax(1),
    )
    torch.testing.assert_close(per_example(criterion)(outputs, targets).mean(), criterion(outputs, targets))


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_weights_and_ignored_labels_are_exact_without_a_mean(reduction):
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]), ignore_index=0, reduction=reduction)
    outputs, targets = draw((B, 4)), labels((B,))
    expected = F.cross_entropy(outputs, targets, weight=criterion.weight, ignore_index=0, reduction="none")
    torch.testing.assert_close(per_example(criterion)(outputs, targets), expected)


def test_a_sum_over_ignored_positions_is_exact():
    outputs, targets = draw((B, 4, 5)), labels((B, 5))
    targets[0, 2:] = -100
    losses = per_example(nn.CrossEntropyLoss(reduction="sum"))(outputs, targets)
    torch.testing.assert_close(losses, F.cross_entropy(outputs, targets, reduction="none").sum(1))


def test_a_function_is_taken_as_it_is():
    def criterion(outputs, targets):
        return (outputs - targets).square().sum(1)

    assert per_example(criterion) is criterion
    mse = nn.MSELoss(reduction="none")
    assert per_example(mse) is mse


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (
            nn.CrossEntropyLoss(weight=torch.ones(4)),
            r"CrossEntropyLoss\(weight=\.\.\.\) with a mean .* reduction=\"none\"",
        ),
        (nn.NLLLoss(weight=torch.ones(4)), r"NLLLoss\(weight=\.\.\.\) with a mean .* reduction=\"none\""),
        (nn.CrossEntropyLoss(ignore_index=0), r"CrossEntropyLoss\(ignore_index=0\) with a mean .* reduction=\"sum\""),
        (nn.CTCLoss(), r"loss = CTCLoss has reduction=\"mean\".* per_example_loss="),
        (nn.CosineEmbeddingLoss(), r"loss = CosineEmbeddingLoss has reduction"),
        (nn.GaussianNLLLoss(), r"loss = GaussianNLLLoss has reduction"),
        (type("Mine", (nn.MSELoss,), {})(), r"loss = Mine has .* reduction=\"none\""),
        (type("Odd", (), {"reduction": "median"})(), r"loss.reduction = 'median'"),
    ],
)
def test_what_is_not_exact_is_refused(criterion, message):
    with pytest.raises(ValueError, match=message):
        per_example(criterion)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_a_mean_over_several_labels_is_refused(kind):
    with pytest.raises(ValueError, match=r"targets are labels of shape \(6, 5\), .* reduction=\"sum\""):
        per_example(kind())(draw((B, 4, 5)), labels((B, 5)))


def test_broadcasting_is_refused():
    with pytest.raises(
        ValueError, match=r"outputs.shape = \(6, 1\) must be targets.shape = \(6,\); .* would mix examples"
    ):
        per_example(nn.MSELoss())(draw((B, 1)), draw((B,)))
