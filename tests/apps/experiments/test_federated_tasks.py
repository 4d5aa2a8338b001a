"""The federated tasks: how data sets are split over clients."""

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from apps.data.samples import real_data, write_adult, write_idx, write_speeches
from qclip.apps.experiments.federated_tasks import federated_tasks, label_skew


def assert_split(task):
    """Every row belongs to at most one client, and every client has one; the model fits the loss."""
    rows = np.concatenate(task.clients)
    assert len(set(rows.tolist())) == len(rows) <= len(task.inputs)
    assert all(len(own) for own in task.clients)
    assert task.cohort_size <= len(task.clients)
    losses = task.loss(task.build_model()(task.inputs[rows[:7]]), task.targets[rows[:7]])
    assert losses.shape == (7,)
    assert losses.isfinite().all()


def test_digits_stand_in_for_the_data_sets():
    classifier, autoencoder = federated_tasks(None)
    for task in (classifier, autoencoder):
        assert_split(task)
        assert sum(map(len, task.clients)) == len(task.inputs) == 1497
    assert torch.equal(autoencoder.inputs, autoencoder.targets)
    again, _ = federated_tasks(None)
    assert all(np.array_equal(one, other) for one, other in zip(classifier.clients, again.clients, strict=True))


def test_label_skew_deals_out_every_example_unevenly():
    labels = np.arange(6000) % 10
    clients = label_skew(labels, 100, 0.3, np.random.default_rng(0))
    assert sorted(np.concatenate(clients).tolist()) == list(range(6000))
    sizes = np.array([len(own) for own in clients])
    assert sizes.max() > 2 * np.median(sizes)
    # The most frequent class of a client has a third of its examples on average; of 60 dealt evenly it has a sixth.
    share = np.mean([np.bincount(labels[own]).max() / len(own) for own in clients])
    assert share > 0.3
    even = label_skew(labels, 100, 1e4, np.random.default_rng(0))
    assert np.mean([np.bincount(labels[own]).max() / len(own) for own in even]) < 0.2


def test_the_six_tasks_are_split_by_speaker_by_occupation_and_by_class(tmp_path):
    write_idx(tmp_path / "mnist", train=3000)
    write_idx(tmp_path / "fashion_mnist", train=3000)
    write_adult(tmp_path / "adult", rows=60)
    write_speeches(tmp_path / "shakespeare")
    tasks = {task.name: task for task in federated_tasks(tmp_path)}
    assert list(tasks) == [
        "Shakespeare, next character",
        "Adult, income",
        "MNIST, classifier",
        "MNIST, autoencoder",
        "Fashion-MNIST, classifier",
        "Fashion-MNIST, autoencoder",
    ]
    assert len(tasks["Shakespeare, next character"].clients) == 2
    assert len(tasks["Adult, income"].clients) == 60  # every row has another age
    for name, task in tasks.items():
        if "MNIST" in name:
            assert_split(task)
            assert task.inputs.shape == (3000, 196)


def test_a_missing_data_set_is_named(tmp_path):
    with pytest.raises(ValueError, match="t10k-images"):
        federated_tasks(tmp_path)


@pytest.mark.slow
def test_the_real_data_have_many_clients():
    tasks = federated_tasks(real_data("shakespeare"))
    assert [len(task.clients) for task in tasks][:2] == [1343, 913]
    for task in tasks:
        assert_split(task)
