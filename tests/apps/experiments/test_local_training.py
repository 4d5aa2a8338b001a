"""A cohort that trains at once gets the updates of clients that train one after the other."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qclip.apps.data import models
from qclip.apps.data.task import classification_losses
from qclip.apps.experiments.federated_tasks import squared_error
from qclip.apps.experiments.local_training import LocalSteps, draw_batches, local_updates, update_norms
from qclip.tables.models import perceptron

SIZES = (1, 3, 10, 11, 24, 100)
"""Clients with a part of a batch, whole ones, one example more than that, as many as are used, and more."""
LOCAL = LocalSteps(steps=4, batch_size=6, learning_rate=0.2)


def classifier():
    return perceptron(5, 8, 3, layers=2), torch.randn(150, 5), torch.randint(3, (150,)), classification_losses


def autoencoder():
    inputs = torch.randn(150, 5)
    return models.autoencoder(5, 8, 2), inputs, inputs, squared_error


def next_character():
    return models.next_character(7, 4), torch.randint(7, (150, 4)), torch.randint(7, (150,)), classification_losses


def split(sizes=SIZES):
    return np.split(np.random.default_rng(0).permutation(sum(sizes)), np.cumsum(sizes)[:-1])


def one_client(model, start, inputs, targets, rows, loss):
    """The slow twin: ordinary steps of torch's SGD on the client's own batches, without padding."""
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=LOCAL.learning_rate)
    for batch in rows.split(LOCAL.batch_size):
        optimizer.zero_grad()
        loss(model(inputs[batch]), targets[batch]).mean().backward()
        optimizer.step()
    return {name: value.detach() - start[name] for name, value in model.named_parameters()}


@pytest.mark.parametrize("make", [classifier, autoencoder, next_character])
def test_a_cohort_at_once_is_its_clients_one_by_one(make):
    torch.manual_seed(0)
    model, inputs, targets, loss = make()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    batches = draw_batches(split(), LOCAL, np.random.default_rng(1))
    updates = local_updates(model, start, inputs, targets, batches, loss=loss, learning_rate=LOCAL.learning_rate)
    norms = update_norms(updates)
    for k in range(len(SIZES)):
        rows = batches.rows[k].flatten()[batches.real[k].flatten() > 0]
        expected = one_client(model, start, inputs, targets, rows, loss)
        for name, update in expected.items():
            torch.testing.assert_close(updates[name][k], update, rtol=1e-4, atol=1e-6)
        flat = torch.cat([update.flatten() for update in expected.values()])
        assert norms[k].item() == pytest.approx(flat.norm().item(), rel=1e-4)
        assert norms[k] > 0


def test_batches_hold_each_example_of_their_client_at_most_once():
    clients = split()
    batches = draw_batches(clients, LOCAL, np.random.default_rng(1))
    assert batches.rows.shape == batches.real.shape == (len(SIZES), 4, 6)
    for own, rows, real in zip(clients, batches.rows.flatten(1), batches.real.flatten(1), strict=True):
        used = rows[real > 0].tolist()
        assert len(used) == len(set(used)) == min(len(own), 24)
        assert set(used) <= set(own.tolist())


def test_padding_does_not_train():
    """The example that stands in the padding would change what it is no part of."""
    torch.manual_seed(0)
    model, inputs, targets, loss = classifier()
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    clients = [np.array([5, 6]), np.array([7, 8, 9])]
    batches = draw_batches(clients, LOCAL, np.random.default_rng(1))
    run = {"loss": loss, "learning_rate": 0.1}
    before = local_updates(model, start, inputs, targets, batches, **run)
    inputs = inputs.clone()
    inputs[0] = 1e6
    after = local_updates(model, start, inputs, targets, batches, **run)
    assert all(torch.equal(before[name], after[name]) for name in start)


def test_nobody_joins():
    model, inputs, targets, loss = classifier()
    batches = draw_batches([], LOCAL, np.random.default_rng(1))
    start = {name: value.detach() for name, value in model.named_parameters()}
    updates = local_updates(model, start, inputs, targets, batches, loss=loss, learning_rate=0.1)
    assert all(update.shape == (0, *start[name].shape) for name, update in updates.items())
    assert update_norms(updates).shape == (0,)


def test_the_losses_are_those_of_torch():
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(squared_error(x, y).sum(), F.mse_loss(x, y, reduction="sum") / 2)
