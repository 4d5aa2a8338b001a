"""What ``import qclip`` offers: the public names and nothing else, one error class, and old names that still work."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import qclip

REFUSED = {
    "a threshold": lambda: qclip.PrivateQuantile(1.5),
    "a schedule": lambda: qclip.schedules.polynomial(-1.0, 0.5),
    "a bound": lambda: qclip.theory.Assumptions(L=-1.0, sigma=1.0, q=2.0, gap=1.0),
    "a budget": lambda: qclip.accounting.epsilon(noise_multiplier=-1.0, sample_rate=0.1, steps=1, delta=1e-5),
    "a problem": lambda: qclip.problems.Pareto(0.5),
    "a model": lambda: qclip.clipped_gradients(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), squared, torch.randn(4, 2), torch.zeros(4, 2), 1.0
    ),
    "a run": lambda: training(batch_size=-1),
    "the spelling of a choice": lambda: training(groups="per_layer"),
}


def squared(outputs, targets):
    return (outputs - targets).square().sum(1)


def training(**changes):
    model = nn.Linear(2, 2)
    settings = {"loss": nn.MSELoss(), "batch_size": 4, "steps": 2, "noise_multiplier": 1.0, "delta": 1e-3} | changes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return qclip.make_private(model, optimizer, TensorDataset(torch.zeros(20, 2), torch.zeros(20, 2)), **settings)


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(qclip) == sorted(qclip.__all__)
    code = "import qclip; print(*dir(qclip))"  # before anything is loaded, too
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(qclip.__all__)


@pytest.mark.parametrize("name", qclip.__all__)
def test_every_public_name_is_there(name):
    assert getattr(qclip, name) is not None


def test_a_spelling_that_is_close_is_named():
    with pytest.raises(qclip.Refusal, match=r"groups = 'per_layer' must be one of .*did you mean 'per-layer'"):
        training(groups="per_layer")


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        qclip.nothing  # noqa: B018


@pytest.mark.parametrize("what", REFUSED)
def test_there_is_one_error_for_what_is_refused(what):
    with pytest.raises(qclip.Refusal) as caught:
        REFUSED[what]()
    assert isinstance(caught.value, ValueError)
    assert str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("normalize", "rescale_to_unit_norm", True),
        ("data_independent", "data_independent_buffers", ["weight_u"]),
    ],
)
def test_old_names_of_arguments_work_with_a_warning(old, new, value):
    with pytest.warns(FutureWarning, match=f"{old}= is now called {new}=") as caught:
        by_old = training(**{old: value}, seed=0)
    assert caught[0].filename == __file__
    by_new = training(**{new: value}, seed=0)
    assert by_old.state_dict()["rescale_to_unit_norm"] == by_new.state_dict()["rescale_to_unit_norm"]
    assert by_old._engine.data_independent_buffers == by_new._engine.data_independent_buffers


def test_the_old_name_of_an_argument_of_the_engine_works_too():
    model = nn.Linear(2, 2)
    batch = torch.randn(4, 2), torch.zeros(4, 2)
    with pytest.warns(FutureWarning, match="data_independent= is now called data_independent_buffers="):
        old = qclip.clipped_gradients(model, squared, *batch, 1.0, data_independent=["calls"])
    new = qclip.clipped_gradients(model, squared, *batch, 1.0, data_independent_buffers=["calls"])
    assert torch.equal(old.sums["weight"], new.sums["weight"])
