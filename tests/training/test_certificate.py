"""A certificate is given where the theorem covers the run, and refused by name everywhere else."""

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from qclip import schedules, theory
from qclip.thresholds import ExactQuantile, GeometricQuantile, RollingQuantile
from qclip.training.make import make_private

STEPS = 4
ASSUMED = theory.Assumptions(L=1.0, sigma=2.0, q=2.0, gap=2.0)
NEAR = GeometricQuantile(0.9, initial=3.0)


def quadratic(threshold=NEAR, *, noise_multiplier=0.5, dtype=torch.float32, optimizers=1, **settings):
    """Private SGD on ``E ||x - a||^2 / 2``, with L = 1: the training and its optimizers."""
    points = torch.randn(400, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = nn.Linear(3, 1, dtype=dtype)

    def loss(model, batch):
        return ((model.weight - batch[0]).square().sum(1) + model.bias**2) / 2

    each = [model.parameters()] if optimizers == 1 else [[model.weight], [model.bias]]
    made = [torch.optim.SGD(parameters, lr=0.05) for parameters in each]
    training = make_private(
        model, made, TensorDataset(points), per_example_loss=loss, batch_size=100, steps=STEPS, delta=1e-4, seed=0,
        threshold=threshold, noise_multiplier=noise_multiplier, **settings,
    )  # fmt: skip
    return training, made


def done(training, made, between=lambda step: None, after=lambda step: None):
    """The run in an ordinary loop, with something else between ``backward`` and ``step``, or after it."""
    for step, batch in enumerate(training.loader):
        training.loss(batch).backward()
        between(step)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        after(step)
    return training


def test_schedules_that_are_fixed_beforehand_are_covered():
    gamma, p = schedules.coupled(2, step_size=0.05, clipped_fraction=0.2)
    training = done(*quadratic(GeometricQuantile(p, initial=3.0), step_size=gamma))
    record, noise = training.history, training.noise_multipliers
    by_hand = theory.certificate(
        ASSUMED, [gamma(t) for t in range(STEPS)], [r.tau[0] for r in record],
        [1 - r.noisy_unclipped[0] for r in record], batch_size=100, noise_multiplier=noise.gradient, dim=4,
        fraction_std=math.hypot(0.05, noise.counts * 0.5 / 100),
    )  # fmt: skip
    assert training.certificate(ASSUMED) == by_hand


@pytest.mark.parametrize("settings", [{}, {"step_size": 0.05}, {"optimizers": 2}], ids=["rate", "number", "two"])
def test_a_constant_step_size_is_covered(settings):
    assert done(*quadratic(**settings)).certificate(ASSUMED).total > 0


def test_a_quantile_of_the_whole_data_is_covered():
    training = done(*quadratic(ExactQuantile(0.9, over="dataset"), noise_multiplier=0))
    assert training.certificate(ASSUMED).total > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rescale_to_unit_norm": True}, "rescale_to_unit_norm = True must be False, .* fixed before the run"),
        ({"step_size": lambda t: 0.05}, "step_size = .*lambda.* must be a number or a schedule of qclip.schedules"),
        ({"threshold": GeometricQuantile(lambda t: 0.9, initial=3.0)}, "p = .*lambda.* must be a number or a schedule"),
        (
            {"threshold": ExactQuantile(0.9), "noise_multiplier": 0},
            r"threshold = 'ExactQuantile' must be one that is fixed before .*over=\"dataset\"",
        ),
        ({"threshold": RollingQuantile(0.9), "noise_multiplier": 0}, "threshold = 'RollingQuantile' must be one that"),
        ({"dtype": torch.bfloat16}, "parameters = 'torch.bfloat16' must be float32 or float64"),
    ],
    ids=["normalized", "step size", "p", "of the batch", "of the first batch", "16 bits"],
)
def test_a_run_that_the_theorem_is_not_about_is_refused(settings, message):
    training = done(*quadratic(**settings))
    with pytest.raises(ValueError, match=message):
        training.certificate(ASSUMED)


@pytest.mark.parametrize("kind", ["reacts", "does not", "by hand"])
def test_learning_rates_that_changed_on_the_way_are_refused(kind):
    """Nothing in the record tells a scheduler that reacts to the run from one that does not."""
    training, (optimizer,) = quadratic()
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    steady = StepLR(optimizer, 2)

    def change(step):
        if kind == "reacts":
            plateau.step(1.0)
        elif kind == "does not":
            steady.step()
        elif step == STEPS - 2:
            optimizer.param_groups[0]["lr"] = 0.04

    done(training, [optimizer], after=change)
    with pytest.raises(ValueError, match=r"learning rate = .*0\.05.* must be the same at every step; .*step_size="):
        training.certificate(ASSUMED)


def test_a_learning_rate_other_than_the_recorded_one_is_refused():
    training, (optimizer,) = quadratic(step_size=schedules.constant(0.05))

    def change(step):
        if step == 1:  # the next release sets it back: the record does not show it
            optimizer.param_groups[0]["lr"] = 0.5

    done(training, [optimizer], between=change)
    with pytest.raises(
        ValueError, match=r"optimizer was SGD with lr 0\.5 at step 1, but a certificate needs plain SGD"
    ):
        training.certificate(ASSUMED)


@pytest.mark.parametrize(("setting", "value"), [("momentum", 0.9), ("weight_decay", 0.1), ("maximize", True)])
def test_settings_that_were_changed_for_one_step_are_refused(setting, value, tmp_path):
    training, (optimizer,) = quadratic()

    def change(step):
        optimizer.param_groups[0][setting] = value if step == 2 else type(value)()

    done(training, [optimizer], between=change)
    again, _ = quadratic()
    training.save(tmp_path / "run.pt")
    again.load(tmp_path / "run.pt")
    for run in (training, again):
        with pytest.raises(ValueError, match=rf"optimizer was SGD with {setting} {value} at step 2, but a certificate"):
            run.certificate(ASSUMED)


@pytest.mark.parametrize("step", [1, STEPS - 1])
@pytest.mark.parametrize("which", [slice(None), slice(1)], ids=["all", "part"])
def test_a_gradient_that_was_not_applied_is_refused(step, which, tmp_path):
    training, made = quadratic(optimizers=2)

    def throw_away(now):
        if now == step:
            for optimizer in made[which]:
                optimizer.zero_grad()

    done(training, made, between=throw_away)
    again, _ = quadratic(optimizers=2)
    training.save(tmp_path / "run.pt")
    again.load(tmp_path / "run.pt")
    for run in (training, again):
        with pytest.raises(ValueError, match=f"optimizer was not applied to all parameters at step {step}, but"):
            run.certificate(ASSUMED)


def test_a_release_that_was_interrupted_before_its_gradient_was_written_is_refused(monkeypatch):
    training, (optimizer,) = quadratic()

    def interrupted(grads):
        raise KeyboardInterrupt

    batch = next(iter(training.loader))
    with monkeypatch.context() as patch:
        patch.setattr(training._guard, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.step(batch)
    assert len(training.history) == 1
    done(training, [optimizer])
    with pytest.raises(ValueError, match="optimizer was not applied to all parameters at step 0, but"):
        training.certificate(ASSUMED)
