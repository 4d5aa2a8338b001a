import pytest

from qclip import accounting
from qclip.thresholds import BalancedThreshold, Conditions, PrivateQuantile
from qclip.training.plan import plan_private, plan_training

NOISE = {"noise_multiplier": 2.0, "delta": 1e-5}


def option(plan, name):
    return next(each for each in plan.options if each.name == name)


def test_the_split_is_that_of_a_run():
    plan = plan_private(plan_training(10_000, 100, steps=50, **NOISE))
    gradient, counts = accounting.split(2.0, 0.01)
    paid, free = option(plan, "PrivateQuantile"), option(plan, "SlackQuantile")
    assert (paid.code, paid.gradient_noise) == ("PrivateQuantile(0.7)", gradient)
    assert paid.count_noise == pytest.approx(0.5 * counts)  # one count of sensitivity one half
    assert (free.gradient_noise, free.count_noise) == (2.0, None)


def test_counts_of_groups_are_noisier_by_the_root_of_their_number():
    one, nine = (plan_private(plan_training(10_000, 1000, steps=50, **NOISE), num_groups=number) for number in (1, 9))
    assert option(nine, "PrivateQuantile").count_noise == pytest.approx(3 * option(one, "PrivateQuantile").count_noise)


def test_more_is_paid_where_the_noise_asks_for_it():
    plan = plan_private(plan_training(10_000, 64, steps=50, **NOISE), num_groups=200)
    chosen = option(plan, "PrivateQuantile")
    assert chosen.code == "PrivateQuantile(0.7, noise_share=0.05)"
    conditions = Conditions(64, 50, 2.0, (1,) * 200)
    PrivateQuantile(0.7, noise_share=0.05).check(conditions)
    with pytest.raises(ValueError, match="noise"):
        PrivateQuantile(0.7, noise_share=0.02).check(conditions)


def test_free_counts_need_batches_that_are_large_for_the_noise():
    small, large, huge = (
        option(plan_private(plan_training(10_000, size, steps=50, **NOISE)), "SlackQuantile")
        for size in (32, 400, 1000)
    )
    assert (small.feasible, large.feasible, huge.feasible) == (False, True, True)
    assert "batch size 32" in small.refusal
    assert (large.code, huge.code) == ("SlackQuantile(0.7)", "SlackQuantile(0.7, outer_radius=0.98)")


def test_epsilon_by_epoch_is_exact_and_ends_with_the_run():
    training = plan_training(1000, 100, epochs=4, **NOISE)
    plan = plan_private(training)
    assert [(row.epochs, row.steps) for row in plan.spent] == [(1, 10), (2, 20), (3, 30), (4, 40)]
    for row in plan.spent:
        exact = accounting.epsilon(noise_multiplier=2.0, sample_rate=0.1, steps=row.steps, delta=1e-5)
        assert exact <= row.epsilon <= exact * (1 + 1e-6)


def test_epsilon_is_that_of_the_accountant_of_the_run():
    training = plan_training(1000, 100, epochs=1, **NOISE, accountant="rdp")
    (row,) = plan_private(training).spent
    facts = {"noise_multiplier": 2.0, "sample_rate": 0.1, "steps": row.steps, "delta": 1e-5}
    assert row.epsilon == pytest.approx(accounting.epsilon(**facts, accountant="rdp"))
    assert row.epsilon > 1.1 * accounting.epsilon(**facts)


@pytest.mark.parametrize(
    ("length", "rows"),
    [({"steps": 3}, [3]), ({"steps": 15}, [10, 15]), ({"epochs": 25}, [*range(30, 250, 30), 250])],
    ids=["short", "uneven", "long"],
)
def test_the_table_is_small_and_ends_with_the_run(length, rows):
    plan = plan_private(plan_training(1000, 100, **length, **NOISE))
    assert [row.steps for row in plan.spent] == rows


def refuse(self, conditions):
    raise ValueError(f"batch_size = {conditions.batch_size} must be larger")


def test_a_threshold_that_refuses_is_passed_over(monkeypatch):
    training = plan_training(10_000, 1000, steps=5, **NOISE)
    first = plan_private(training).recommended
    monkeypatch.setattr(BalancedThreshold, "check", refuse)
    plan = plan_private(training)
    assert first.name == plan.options[0].name == "BalancedThreshold"
    assert plan.options[0].refusal == "batch_size = 1000 must be larger"
    assert plan.recommended.name == plan.options[1].name == "PrivateQuantile"
    assert plan.as_json()["thresholds"][0]["feasible"] is False


def test_none_is_recommended_where_none_works():
    plan = plan_private(plan_training(1000, 10, steps=5, noise_multiplier=100.0, delta=1e-5))
    assert plan.recommended is None
    assert plan.as_json()["recommended"] is None
    assert plan.relative_noise == pytest.approx(10)


def test_the_noise_of_the_mean_gradient():
    training = plan_training(10_000, 100, steps=50, **NOISE)
    plan = plan_private(training, dim=2500)
    assert plan.relative_noise == pytest.approx(50 * plan.recommended.gradient_noise / 100)


@pytest.mark.parametrize(("name", "value"), [("p", 1.0), ("num_groups", 0), ("dim", 0)])
def test_bad_values_are_refused(name, value):
    with pytest.raises(ValueError, match="must be"):
        plan_private(plan_training(1000, 100, steps=5, **NOISE), **{name: value})
