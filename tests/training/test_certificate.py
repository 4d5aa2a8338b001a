"""A certificate is given where the theorem covers the run, and refused by name everywhere else."""

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from qclip import schedules, theory
from qclip.thresholds import (
    BalancedThreshold,
    Constant,
    ExactQuantile,
    GeometricQuantile,
    HistogramQuantile,
    RollingQuantile,
)
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


def by_hand(training, gammas, reach, **others):
    record, noise = training.history, training.noise_multipliers
    public = {"batch_size": 100, "noise_multiplier": noise.gradient, "dim": 4, "sampling": "poisson"}
    rows = gammas, [r.tau[0] for r in record], [r.clipped[0] for r in record]
    over_runs = theory.weighted_certificate(ASSUMED, *rows, **public, **others)
    errors = {"fraction_noise": [r.clipped_noise[0] for r in record], "fraction_reach": reach}
    return over_runs, (rows, public | errors)


def test_schedules_that_are_fixed_beforehand_are_covered():
    gamma, p = schedules.coupled(2, step_size=0.05, clipped_fraction=0.2)
    training = done(*quadratic(GeometricQuantile(p, initial=3.0), step_size=gamma))
    record, noise = training.history, training.noise_multipliers
    assert [r.clipped[0] for r in record] == pytest.approx([1 - r.noisy_unclipped[0] for r in record])
    assert [r.clipped_noise[0] for r in record] == pytest.approx([noise.counts * 0.5 / 100] * STEPS)
    found = training.certificate(ASSUMED)
    over_runs, (rows, public) = by_hand(training, [gamma(t) for t in range(STEPS)], 0.5)
    assert found.total == pytest.approx(over_runs.total)
    assert found.theorem == "mean clipped fraction, section 16"
    assert found.this_run.total == pytest.approx(theory.one_run_certificate(ASSUMED, *rows, **public).total)
    known = training.certificate(ASSUMED, p_lo=0.3)  # then the bound is on the plain mean
    assert known.theorem == "least unclipped fraction, section 13"
    std = math.hypot(0.05, noise.counts * 0.5 / 100)
    public = {"batch_size": 100, "noise_multiplier": noise.gradient, "dim": 4, "p_lo": 0.3, "fraction_std": std}
    assert known.total == pytest.approx(theory.certificate(ASSUMED, *rows, **public).total)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("threshold", [NEAR, BalancedThreshold(initial=3.0), HistogramQuantile(0.9, initial=3.0)])
def test_normalized_steps_and_momentum_are_covered(threshold, momentum):
    training, (optimizer,) = quadratic(threshold, rescale_to_unit_norm=True)
    optimizer.param_groups[0].update(lr=0.02, momentum=momentum)
    found = done(training, [optimizer]).certificate(ASSUMED)
    gammas = [0.02 / r.tau[0] for r in training.history]
    reach = training.history[-1].clipped_reach[0]
    over_runs, _ = by_hand(training, gammas, reach, momentum=momentum)
    assert found.total == pytest.approx(over_runs.total)
    assert found.theorem == ("momentum, section 19" if momentum else "normalized steps, section 18")
    assert (found.this_run is None) == bool(momentum)
    assert "may stay near sigma^2" in found.mean


def test_a_constant_threshold_is_covered_with_a_known_fraction_only():
    training = done(*quadratic(Constant(3.0)))
    with pytest.raises(ValueError, match=r"did not count its clipped examples at every step.*pass p_lo="):
        training.certificate(ASSUMED)
    assert training.certificate(ASSUMED, p_lo=0.5).total > 0


def test_heavy_tails_are_covered_for_plain_sgd_only():
    heavy = theory.Assumptions(L=1.0, sigma=2.0, q=1.5, gap=2.0)
    found = done(*quadratic()).certificate(heavy, p_lo=0.3)
    assert found.theorem == "least unclipped fraction, section 13"
    training = done(*quadratic(rescale_to_unit_norm=True))
    with pytest.raises(ValueError, match=r"q = 1.5 must be 2, for a certificate of a run with rescale_to_unit_norm"):
        training.certificate(heavy, p_lo=0.3)


@pytest.mark.parametrize("settings", [{}, {"step_size": 0.05}, {"optimizers": 2}], ids=["rate", "number", "two"])
def test_a_constant_step_size_is_covered(settings):
    assert done(*quadratic(**settings)).certificate(ASSUMED).total > 0


def test_a_quantile_of_the_whole_data_is_covered():
    training = done(*quadratic(ExactQuantile(0.9, over="dataset"), noise_multiplier=0))
    assert training.certificate(ASSUMED).total > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rescale_to_unit_norm": True, "step_size": "auto"}, "found from the gradient of that step itself"),
        (
            {"threshold": ExactQuantile(0.9), "noise_multiplier": 0},
            r"threshold = 'ExactQuantile' must be one that is fixed before .*over=\"dataset\"",
        ),
        ({"threshold": RollingQuantile(0.9), "noise_multiplier": 0}, "threshold = 'RollingQuantile' must be one that"),
        ({"dtype": torch.bfloat16}, "parameters = 'torch.bfloat16' must be float32 or float64"),
    ],
    ids=["found by the run", "of the batch", "of the first batch", "16 bits"],
)
def test_a_run_that_the_theorem_is_not_about_is_refused(settings, message):
    training = done(*quadratic(**settings))
    with pytest.raises(ValueError, match=message):
        training.certificate(ASSUMED)


@pytest.mark.parametrize("kind", ["reacts", "does not", "by hand", "function"])
def test_learning_rates_that_changed_on_the_way_are_covered_by_the_theorem_that_allows_it(kind):
    """They follow from earlier steps, which the weighted certificate allows and that of the plain mean does not."""
    training, (optimizer,) = quadratic(step_size=(lambda t: 0.05 / (1 + t)) if kind == "function" else None)
    plateau = ReduceLROnPlateau(optimizer, patience=0)
    steady = StepLR(optimizer, 2)

    def change(step):
        if kind == "reacts":
            plateau.step(1.0)
        elif kind == "does not":
            steady.step()
        elif kind == "by hand" and step == STEPS - 2:
            optimizer.param_groups[0]["lr"] = 0.04

    done(training, [optimizer], after=change)
    assert len({r.step_size for r in training.history}) > 1
    for p_lo in (None, 0.3):
        assert training.certificate(ASSUMED, p_lo=p_lo).theorem == "mean clipped fraction, section 16"


def test_momentum_needs_one_learning_rate():
    training, (optimizer,) = quadratic(step_size=schedules.polynomial(0.05, -0.5))
    optimizer.param_groups[0]["momentum"] = 0.5
    done(training, [optimizer])
    with pytest.raises(ValueError, match=r"learning rate = .* must be the same at every step with momentum"):
        training.certificate(ASSUMED)


def test_a_learning_rate_other_than_the_recorded_one_is_refused():
    training, (optimizer,) = quadratic(step_size=schedules.constant(0.05))

    def change(step):
        if step == 1:  # the next release sets it back: the record does not show it
            optimizer.param_groups[0]["lr"] = 0.5

    done(training, [optimizer], between=change)
    with pytest.raises(ValueError, match=r"optimizer was SGD with lr 0\.5 at step 1, but a certificate needs SGD"):
        training.certificate(ASSUMED)


@pytest.mark.parametrize(
    ("setting", "value"), [("momentum", 0.9), ("weight_decay", 0.1), ("dampening", 0.1), ("maximize", True)]
)
def test_settings_that_were_changed_for_one_step_are_refused(setting, value, tmp_path):
    training, (optimizer,) = quadratic()

    def change(step):
        optimizer.param_groups[0][setting] = value if step == 2 else type(value)()

    done(training, [optimizer], between=change)
    again, _ = quadratic()
    training.save(tmp_path / "run.pt")
    again.load(tmp_path / "run.pt")
    for run in (training, again):
        with pytest.raises(
            ValueError, match=rf"optimizer was SGD with {setting} {value}( after 0)? at step 2, but a certificate"
        ):
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
