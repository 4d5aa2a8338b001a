"""The constants of a run: settled once, said aloud, refused where they contradict each other."""

import pytest

from qclip import accounting
from qclip.training.plan import plan_training

GIVEN = {"dataset_size": 1000, "batch_size": 64, "epochs": 2, "noise_multiplier": 1.0, "delta": 1e-5}


def test_epochs_and_steps():
    plan = plan_training(**GIVEN)
    assert (plan.num_steps, plan.steps_per_pass, plan.steps_per_epoch) == (32, 16, 16)
    plan = plan_training(**GIVEN | {"epochs": None, "steps": 50})
    assert (plan.num_steps, plan.steps_per_pass, plan.steps_per_epoch) == (50, 50, 16)


def test_an_epsilon_is_met():
    plan = plan_training(**GIVEN | {"noise_multiplier": None, "epsilon": 2.0})
    spent = accounting.epsilon(
        noise_multiplier=plan.noise_multiplier, sample_rate=plan.sample_rate, steps=plan.num_steps, delta=plan.delta
    )
    assert 1.98 < spent <= 2.0


def test_the_default_delta_is_said_aloud(caplog):
    plan = plan_training(**GIVEN | {"delta": None})
    assert plan.delta == 1e-4
    assert "delta = 0.0001: 1 / (10 dataset_size)" in caplog.text


def test_no_noise_needs_no_delta(caplog):
    plan_training(**GIVEN | {"delta": None, "noise_multiplier": 0})
    assert not caplog.text


def test_a_delta_that_guarantees_nothing_warns(monkeypatch):
    monkeypatch.setattr(accounting, "noise_multiplier", lambda **_: 1.0)
    with pytest.warns(UserWarning, match=r"delta = 0.001 is not below 1/dataset_size = 0.001"):
        plan_training(**GIVEN | {"noise_multiplier": None, "epsilon": 1.0, "delta": 1e-3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 1001}, r"batch_size = 1001 must be <= dataset_size = 1000"),
        ({"batch_size": 0}, "batch_size = 0 must be >= 1"),
        ({"batch_size": 1.5}, "batch_size = 1.5 must be a whole number"),
        ({"steps": 5}, "one of epochs and steps must be given, not epochs = 2 and steps = 5"),
        ({"epochs": None}, "one of epochs and steps must be given, not epochs = None and steps = None"),
        ({"epochs": 0}, "epochs = 0 must be >= 1"),
        ({"epsilon": 1.0}, "must be given, not epsilon = 1.0 and noise_multiplier = 1.0: pass"),
        ({"noise_multiplier": None}, "must be given, not epsilon = None and noise_multiplier = None: pass"),
        ({"noise_multiplier": -1}, "noise_multiplier = -1 must be >= 0"),
        ({"noise_multiplier": None, "epsilon": 0}, "epsilon = 0 must be > 0"),
        ({"delta": 0}, r"delta = 0 must be in \(0, 1\)"),
        ({"delta": 1}, r"delta = 1 must be in \(0, 1\)"),
        (
            {"noise_multiplier": None, "epsilon": 1, "private": False},
            "non-private threshold cannot meet an epsilon: take",
        ),
    ],
)
def test_contradictions_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        plan_training(**GIVEN | change)
