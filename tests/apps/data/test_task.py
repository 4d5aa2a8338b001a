"""Scores are means over the held-out examples, whatever the chunks, and leave the model as it was."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from qclip.apps.data.task import classification, classification_losses, hold_out, scorer


class Fixed(nn.Module):
    """Scores that are its inputs, and notes of how it was called."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Dropout(0.5)
        self.seen = []

    def forward(self, x):
        self.seen.append((len(x), self.training, self.inner.training, torch.is_grad_enabled()))
        return x


def known():
    """Five examples of which three are right, with probabilities 1/2 or 1/4 for the true class."""
    half, quarter = [math.log(3.0), 0, 0, 0], [0.0, 0, 0, 0]
    scores = torch.tensor([half, half, quarter, quarter, half])
    return TensorDataset(scores, torch.tensor([0, 0, 0, 1, 2]))


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_scores_are_means_whatever_the_chunks(chunk):
    score = scorer(known(), classification, chunk=chunk)(Fixed())
    assert score["accuracy"] == pytest.approx(3 / 5)
    losses = [math.log(2), math.log(2), math.log(4), math.log(4), math.log(6)]
    assert score["loss"] == pytest.approx(sum(losses) / 5, rel=1e-6)


def test_a_model_is_scored_in_evaluation_mode_and_put_back_module_by_module():
    model = Fixed()
    model.inner.eval()  # frozen by its owner
    scorer(known(), classification, chunk=3)(model)
    assert model.seen == [(3, False, False, False), (2, False, False, False)]
    assert model.training
    assert not model.inner.training


def test_a_model_that_fails_is_put_back_too():
    model = Fixed()
    bad = TensorDataset(torch.zeros(2, 4), torch.tensor([0, 7]))
    with pytest.raises(IndexError):
        scorer(bad, classification)(model)
    assert model.training


def test_positions_are_averaged_within_each_example():
    outputs, targets = torch.randn(3, 5, 4, generator=torch.manual_seed(0)), torch.arange(15).reshape(3, 5) % 4
    each = [nn.functional.cross_entropy(outputs[k], targets[k]) for k in range(3)]
    assert torch.allclose(classification_losses(outputs, targets), torch.stack(each))
    hits = (outputs.argmax(2) == targets).float().mean(1)
    assert torch.equal(classification(outputs, targets)["accuracy"], hits)


def test_every_sixth_example_is_held_out_and_no_other():
    train, held_out = hold_out(torch.arange(20), torch.arange(20))
    assert held_out.tensors[0].tolist() == [0, 6, 12, 18]
    assert sorted(train.tensors[0].tolist() + held_out.tensors[1].tolist()) == list(range(20))
