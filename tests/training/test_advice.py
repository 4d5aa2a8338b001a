"""Advice: a recommended plan is close to the best, cheap, and honest about what it costs to leave it."""

import math
from dataclasses import replace

import pytest
import torch

import qclip
from qclip import accounting
from qclip.training.advice import DROWNED, EPOCHS, MEAN_NORM, NEAR_BEST, Outlook, recommend, what_if
from qclip.training.plan import plan_private, plan_training


def outlook_of(plan, params):
    return Outlook(plan.dataset_size, plan.batch_size, plan.num_steps, params, plan.noise_multiplier)


def test_noise_of_a_plan():
    outlook = Outlook(dataset_size=1000, batch_size=50, num_steps=200, params=10_000, noise_multiplier=2.0)
    assert outlook.epochs == 10
    assert outlook.noise_std == pytest.approx(0.04)
    assert outlook.squared_noise == pytest.approx(16)


@pytest.mark.parametrize("params", [1, 10_000])
def test_the_bound_is_least_at_the_step_size(params):
    outlook = Outlook(dataset_size=1000, batch_size=50, num_steps=200, params=params, noise_multiplier=2.0)
    gap, smoothness = 3.0, 0.7
    power = MEAN_NORM**2 + 1 / 50 + params * 0.04**2

    def bound(step_size):
        return gap / (step_size * 200) + step_size * smoothness * power / 2

    best = outlook.step_size * math.sqrt(2 * gap / smoothness)
    assert bound(best) == pytest.approx(outlook.bound * math.sqrt(2 * gap * smoothness))
    assert bound(best) < min(bound(0.99 * best), bound(1.01 * best))


def test_the_mean_gradient_is_as_short_as_assumed():
    """At the start of a run on digits, where it is longest."""
    inputs, labels = map(torch.tensor, pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    losses = torch.nn.CrossEntropyLoss(reduction="none")
    norms = qclip.clipped_gradients(model, losses, inputs, labels, 1.0).norms
    threshold = norms.flatten().quantile(0.7).item()
    sums = qclip.clipped_gradients(model, losses, inputs, labels, threshold).sums.values()
    squared = sum(float(total.square().sum()) for total in sums) / (len(inputs) * threshold) ** 2
    assert MEAN_NORM**2 / 3 < squared < 3 * MEAN_NORM**2


SETTINGS_THAT_WORK = {
    "digits": (1_497, 4_810, (64, 256), (10, 50)),
    "fashion-mnist": (60_000, 26_010, (512, 2048), (20, 50)),
    "cifar-10": (50_000, 550_570, (1024, 4096), (20, 50)),
    "a table": (30_000, 40, (256, 1024), (20, 50)),
    "sst-2, all weights": (67_000, 22_700_000, (1024, 4096), (5, 50)),
}


@pytest.mark.parametrize("name", SETTINGS_THAT_WORK)
def test_known_tasks_get_settings_that_are_known_to_work(name):
    size, params, (low, high), (short, long) = SETTINGS_THAT_WORK[name]
    plan = recommend(size, params, epsilon=1.0, delta=1 / (10 * size))
    assert low <= plan.batch_size <= high
    assert short <= outlook_of(plan, params).epochs <= long
    assert plan.num_steps >= 400


def test_no_other_plan_is_much_better_and_none_as_good_is_cheaper():
    """By the accountant, where the search used the central limit theorem."""
    size, params, epsilon, delta = 4_000, 2_000, 1.0, 1e-5
    chosen = outlook_of(recommend(size, params, epsilon=epsilon, delta=delta), params)
    others = [
        Outlook(size, batch, steps, params, accounting.quick_noise_multiplier(epsilon, delta, batch / size, steps))
        for batch in (32, 64, 128, 256)
        for epochs in EPOCHS
        if (steps := epochs * math.ceil(size / batch)) >= 400
    ]
    best = min(others, key=lambda other: other.bound)
    assert len(others) >= 3
    assert chosen.bound < (NEAR_BEST + 0.03) * best.bound
    cheaper = [other for other in others if other.epochs < 0.9 * chosen.epochs]
    assert cheaper
    assert all(other.bound > (NEAR_BEST - 0.03) * best.bound for other in cheaper)


def test_what_is_given_is_kept():
    given = {"epsilon": 0.5, "delta": 1e-4}
    batch = recommend(1500, 5000, batch_size=100, **given)
    assert batch.batch_size == 100
    assert batch.num_steps % batch.steps_per_epoch == 0
    steps = recommend(1500, 5000, steps=450, **given)
    assert steps.num_steps == steps.steps_per_pass == 450
    short, long = (recommend(1500, 5000, epochs=epochs, **given) for epochs in (3, 60))
    assert (short.num_steps, long.num_steps) == (3 * short.steps_per_epoch, 60 * long.steps_per_epoch)
    both = recommend(1500, 5000, batch_size=100, steps=10, **given)
    assert (both.batch_size, both.num_steps) == (100, 10)


def test_many_given_steps_are_made_affordable_by_small_batches():
    few, many = (recommend(1500, 500, steps=steps, epsilon=0.5, delta=1e-4) for steps in (400, 2000))
    assert outlook_of(few, 500).epochs <= EPOCHS[-1]
    assert many.batch_size == 64  # the smallest there is, although it takes more epochs than that


def test_fewer_parameters_make_longer_runs_worthwhile():
    few, many = (recommend(1500, params, epsilon=0.5, delta=1e-4) for params in (10, 10_000))
    assert few.num_steps > many.num_steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_size": 10}, "dataset_size = 10 must be >= 64"),
        ({"params": 0}, "params = 0 must be >= 1"),
        ({"epsilon": -1.0}, "epsilon = -1.0 must be > 0"),
        ({"delta": 1.0}, "delta = 1.0 must be in"),
        ({"batch_size": 2000}, "batch_size = 2000 must be <= dataset_size = 1500"),
        ({"batch_size": 0}, "batch_size = 0 must be >= 1"),
        ({"epochs": 3, "steps": 100}, "epochs = 3 and steps = 100 give the length twice"),
        ({"epochs": 0}, "epochs = 0 must be >= 1"),
        ({"steps": 1.5}, "steps = 1.5 must be a whole number"),
        ({"params": 10**9}, r"epsilon = 0.5 is too small .* times as long .* train fewer parameters"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_planned_is_refused(changes, message):
    arguments = {"dataset_size": 1500, "params": 100, "epsilon": 0.5, "delta": 1e-4} | changes
    with pytest.raises(qclip.Refusal, match=message):
        recommend(**arguments)


def test_drowned_means_what_the_refusal_says():
    arguments = {"epsilon": 0.5, "delta": 1e-4, "batch_size": 64, "steps": 400}
    noise = outlook_of(recommend(1500, 100, **arguments), 100).squared_noise / 100
    recommend(1500, int(0.99 * DROWNED / noise), **arguments)
    with pytest.raises(qclip.Refusal, match=r"noise is 10(\.\d)? times as long"):
        recommend(1500, int(1.01 * DROWNED / noise), **arguments)


@pytest.fixture(scope="module")
def changes():
    plan = plan_private(plan_training(1000, 100, steps=100, epsilon=0.5, delta=1e-4), dim=50)
    return plan, {change.name: change for change in what_if(plan)}


def test_what_if_starts_from_the_plan(changes):
    plan, rows = changes
    this = rows["this plan"]
    assert next(iter(rows)) == "this plan"
    assert this.outlook == Outlook(1000, 100, 100, 50, plan.recommended.gradient_noise)
    assert math.sqrt(this.outlook.squared_noise) == pytest.approx(plan.relative_noise)
    assert (this.bound, this.step_size, this.cost) == (1, 1, 1)


@pytest.mark.parametrize(
    ("name", "batch", "steps", "epsilon", "cost"),
    [
        ("batch x 2, same epochs", 200, 50, 0.5, 1),
        ("batch x 2, same steps", 200, 100, 0.5, 2),
        ("batch / 2, same epochs", 50, 200, 0.5, 1),
        ("batch / 2, same steps", 50, 100, 0.5, 0.5),
        ("steps x 2", 100, 200, 0.5, 2),
        ("steps / 2", 100, 50, 0.5, 0.5),
        ("epsilon x 2", 100, 100, 1.0, 1),
        ("epsilon / 2", 100, 100, 0.25, 1),
    ],
)
def test_the_noise_of_a_change_is_that_of_its_plan(changes, name, batch, steps, epsilon, cost):
    _, rows = changes
    row = rows[name]
    exact = plan_private(plan_training(1000, batch, steps=steps, epsilon=epsilon, delta=1e-4), dim=50)
    new = row.outlook
    assert (new.batch_size, new.num_steps, new.params) == (batch, steps, 50)
    assert 1 <= new.noise_multiplier / exact.recommended.gradient_noise < 1.02
    assert row.cost == pytest.approx(cost)
    assert row.bound == pytest.approx(new.bound / rows["this plan"].outlook.bound)
    assert row.step_size == pytest.approx(new.step_size / rows["this plan"].outlook.step_size)


def test_fewer_parameters_leave_the_noise_of_each_alone(changes):
    _, rows = changes
    assert rows["params / 10"].outlook == replace(rows["this plan"].outlook, params=5)


def test_changes_that_are_not_possible_are_left_out():
    plan = plan_private(plan_training(10, 10, steps=1, epsilon=0.5, delta=1e-3))
    assert [change.name for change in what_if(plan)] == [
        "this plan", "batch / 2, same epochs", "batch / 2, same steps", "steps x 2", "epsilon x 2", "epsilon / 2",
    ]  # fmt: skip
