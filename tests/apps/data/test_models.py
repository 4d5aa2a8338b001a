"""The models are those that are documented."""

import torch

from qclip.apps.data import models
from qclip.tables.models import perceptron


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_cnns_are_those_of_tramer_and_boneh():
    small, large = models.mnist_cnn(), models.cifar_cnn()
    assert (count(small), count(large)) == (26_010, 550_570)
    assert small(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert large(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_a_fresh_model_follows_the_global_generator():
    torch.manual_seed(0)
    first, second = perceptron(3, 4, 2), perceptron(3, 4, 2)
    torch.manual_seed(0)
    again = perceptron(3, 4, 2)
    assert torch.equal(first[0].weight, again[0].weight)
    assert not torch.equal(first[0].weight, second[0].weight)


def test_a_transformer_sees_the_past_alone():
    torch.manual_seed(0)
    model = models.CausalTransformer(11, 8, width=16, layers=2, heads=2)
    ids = torch.arange(16).reshape(2, 8) % 11
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(ids), model(changed)
    assert before.shape == (2, 8, 11)
    assert torch.allclose(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
