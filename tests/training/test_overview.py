"""What a run prints of itself: its plan, what is done and what is spent; public and released values only."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import qclip


def make(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(torch.randn(60, 4), torch.randint(3, (60,)))
    settings = {"batch_size": 12, "epochs": 2, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp", "seed": 0}
    return qclip.make_private(model, optimizer, data, loss=nn.CrossEntropyLoss(), **settings | changes)


def test_before_the_first_step():
    assert repr(make(threshold=qclip.Constant(0.5))).splitlines() == [
        "PrivateTraining of Sequential, 67 trainable parameters",
        "  plan       10 steps of 12 expected examples of 60",
        "  noise      1 times the sensitivity, of gradient and counts together",
        "  threshold  Constant(tau=0.5)",
        "  done       0 steps",
        "  epsilon    0 spent, at delta = 0.001",
    ]


def test_on_the_way_and_at_the_end():
    training = make(epsilon=5.0, noise_multiplier=None)
    for batch in training.loader:
        training.step(*batch)
    lines = repr(training).splitlines()
    assert lines[4] == "  done       5 steps"
    spent = float(lines[5].split()[1])
    assert lines[5] == f"  epsilon    {spent:g} of 5 spent, at delta = 0.001"
    assert training.epsilon() <= spent <= training.epsilon_curve(5) + 0.001
    assert lines[6] == f"  tau        {training.history[-1].tau[0]:.4g}"
    for batch in training.loader:
        training.step(*batch)
    assert "  done       10 steps, the whole plan" in repr(training)
    assert "  epsilon    5 of 5 spent" in repr(training)


def test_groups_show_their_range():
    training = make(groups="per-layer")
    training.step(*next(iter(training.loader)))
    low, high = sorted(training.history[-1].tau)
    assert repr(training).endswith(f"  tau        {low:.4g} to {high:.4g}")
    assert "in each of 2 groups" in repr(training)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_multiplier": 0}, "infinite: without noise there is no privacy"),
        ({"threshold": qclip.ExactQuantile(0.5)}, "infinite: ExactQuantile reads raw gradient norms"),
    ],
)
def test_no_privacy_is_said_to_be_none(changes, words):
    training = make(**changes)
    assert f"  epsilon    {words}" in repr(training)
    training.step(*next(iter(training.loader)))
    assert f"  epsilon    {words}" in repr(training)


def test_a_lost_threshold_is_mentioned(monkeypatch):
    training = make()
    monkeypatch.setattr(type(training), "lost_threshold", "the threshold is lost since step 3")
    assert repr(training).endswith("  lost       the threshold is lost since step 3")


def test_notebooks_show_a_table():
    shown = make()._repr_html_()
    assert "<caption>PrivateTraining of Sequential, 67 trainable parameters</caption>" in shown
    assert shown.count("<tr>") == 5
