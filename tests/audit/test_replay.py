"""Replay on users' trainings: right ones pass, and what one example moves without paying for it is found and named."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import qclip
from qclip import audit

Z = 0.8


def data(size=120):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))


def training_on(dataset, model=None, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    settings = {"loss": nn.CrossEntropyLoss(), "batch_size": 60, "steps": 3, "noise_multiplier": Z, "delta": 1e-4}
    return qclip.make_private(model, optimizer, dataset, **(settings | changes)), model, optimizer


def plain(dataset, **changes):
    training, _, _ = training_on(dataset, **changes)
    for x, y in training.loader:
        training.step(x, y)


THRESHOLDS = [qclip.BalancedThreshold(), qclip.Constant(0.05), qclip.PrivateQuantile(0.5), qclip.HistogramQuantile(0.5)]


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda t: type(t).__name__)
def test_nothing_is_found_in_a_right_training_and_the_cost_is_used(threshold):
    found = audit.replay(lambda dataset: plain(dataset, threshold=threshold), data(), examples=1)
    assert found.holds, str(found)
    assert 0.3 < found.most_moved <= 1 + 1e-4
    assert len(found.neighbours) == 3
    assert found.steps == 3


def test_groups_physical_batches_and_the_ordinary_loop():
    def train(dataset):
        training, model, optimizer = training_on(dataset, groups="per-layer", physical_batch_size=25)
        for x, y in training.loader:
            training.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return training.epsilon()

    assert audit.replay(train, data(), examples=1).holds


def test_a_model_with_dropout_is_compared_by_replacement():
    def train(dataset):
        plain(dataset, model=None)

    def with_dropout(dataset):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        training, _, _ = training_on(dataset, model)
        for x, y in training.loader:
            training.step(x, y)

    assert audit.replay(train, data(), examples=1).skipped == ()
    found = audit.replay(with_dropout, data(), examples=1)
    assert found.holds, str(found)
    assert len(found.skipped) == 1


def standardised(items):
    x = torch.stack([x for x, _ in items])
    return (x - x.mean(0)) / (x.std(0) + 1e-3), torch.stack([y for _, y in items])


def test_a_data_set_standardised_by_its_own_mean_is_found():
    class Standardised(Dataset):
        def __init__(self, below):
            x = torch.stack([below[i][0] for i in range(len(below))])
            self.below, self.mean = below, x.mean(0)

        def __len__(self):
            return len(self.below)

        def __getitem__(self, index):
            x, y = self.below[index]
            return x - self.mean, y

    neighbours = [audit.enlarged(5)]
    found = audit.replay(lambda dataset: plain(Standardised(dataset)), data(), neighbours)
    assert not found.holds
    assert "raw sum" in found.findings[0].what
    assert found.findings[0].moved > 2


def test_a_batch_standardised_in_the_collate_function_is_refused_or_found(monkeypatch):
    """Today's proofs refuse it; without them, replay finds it."""
    from qclip.training import batch_proof

    train = lambda dataset: plain(DataLoader(dataset, collate_fn=standardised))  # noqa: E731
    with pytest.raises(qclip.Refusal):
        audit.replay(train, data())
    monkeypatch.setattr(batch_proof.FetchProof, "require_independent", lambda *args, **kwargs: None)
    found = audit.replay(train, data(), examples=1)
    assert not found.holds


def test_a_raw_value_kept_in_a_buffer_is_found():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            return self.linear(x)

    def train(dataset):
        torch.manual_seed(0)
        training, model, _ = training_on(dataset, Counting())
        for x, y in training.loader:
            training.step(x, y)
        model.seen += x.sum()

    found = audit.replay(train, data(), [audit.enlarged(i) for i in range(8)])
    assert any("buffer seen" in finding.what for finding in found.findings)


def test_a_learning_rate_that_follows_the_raw_loss_is_found():
    def train(dataset):
        training, _, optimizer = training_on(dataset)
        for x, y in training.loader:
            loss = training.step(x, y)
            optimizer.param_groups[0]["lr"] = 0.1 * float(loss)

    found = audit.replay(train, data(), examples=2)
    assert not found.holds
    assert any("parameter" in finding.what or "record" in finding.what for finding in found.findings)


def test_stopping_by_the_raw_loss_is_found():
    def train(dataset):
        training, _, _ = training_on(dataset, nn.Linear(4, 3))
        for x, y in training.loader:
            if float(training.step(x, y)) > 5:
                break

    found = audit.replay(train, data(), [audit.enlarged(i, 1e4) for i in range(6)])
    assert any("other releases" in finding.what for finding in found.findings)


def test_raw_losses_that_are_returned_are_found():
    def train(dataset):
        training, _, _ = training_on(dataset)
        return [float(training.step(x, y)) for x, y in training.loader]

    found = audit.replay(train, data(), examples=1)
    assert {finding.what for finding in found.findings} == {"what train returned differs"}


def test_a_list_of_dicts_is_a_data_set_too():
    items = [{"x": x, "y": y} for x, y in data()]

    def train(dataset):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        loss = lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")  # noqa: E731
        training, _, _ = training_on(dataset, model, loss=None, per_example_loss=loss)
        for batch in training.loader:
            training.step(batch)

    assert audit.replay(train, items, examples=1).holds


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(qclip.Refusal, match="no private run"):
        audit.replay(lambda dataset: None, data())
    with pytest.raises(qclip.Refusal, match="promises nothing"):
        audit.replay(lambda dataset: plain(dataset, noise_multiplier=0), data())
    with pytest.raises(qclip.Refusal, match="second private run"):
        audit.replay(lambda dataset: (plain(dataset), plain(dataset)), data())
    with pytest.raises(qclip.Refusal, match="released nothing"):
        audit.replay(lambda dataset: training_on(dataset) and None, data())
    with pytest.raises(qclip.Refusal, match="examples 0 to 119"):
        audit.replay(plain, data(), [audit.without(120)])


def test_a_training_that_is_not_the_same_twice_is_refused():
    entropy = np.random.default_rng()

    def train(dataset):
        training, model, _ = training_on(dataset)
        with torch.no_grad():
            model[0].weight += float(entropy.random())
        for x, y in training.loader:
            training.step(x, y)

    with pytest.raises(qclip.Refusal, match="not the same twice"):
        audit.replay(train, data())


def test_counts_without_noise_are_found(monkeypatch):
    from qclip import accounting

    split = accounting.split
    monkeypatch.setattr(accounting, "split", lambda z, share: split(z, share)._replace(counts=0.0))
    found = audit.replay(lambda dataset: plain(dataset, threshold=qclip.PrivateQuantile(0.5, initial=3.0)), data())
    assert any("cost more" in finding.what for finding in found.findings)
    assert any("all releases of a step" in finding.what for finding in found.findings)


def test_the_account_of_a_run_is_checked(monkeypatch):
    """Releases that cost more than the accountant is told, and an epsilon that is too small for them."""
    from qclip import accounting
    from qclip.training import run

    split = accounting.split
    monkeypatch.setattr(accounting, "split", lambda z, share: split(z, share)._replace(gradient=z))
    found = audit.replay(plain, data(), examples=1)
    assert any("cost more" in finding.what for finding in found.findings)
    monkeypatch.setattr(accounting, "split", split)
    monkeypatch.setattr(run.PrivateTraining, "epsilon", lambda self, delta=None: 0.1)
    found = audit.replay(plain, data(), examples=1)
    assert any("is reported" in finding.what for finding in found.findings)
    assert "findings on" in str(found)
