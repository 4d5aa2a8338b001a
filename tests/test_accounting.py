"""Epsilon against dp-accounting asked directly and the Gaussian mechanism's closed form; noise that meets a target."""

import math
from types import SimpleNamespace

import dp_accounting
import pytest
from dp_accounting import pld, rdp
from scipy.optimize import brentq, root_scalar
from scipy.special import log_ndtr
from scipy.stats import norm

from qclip import accounting
from qclip.training.plan import plan_training


def asked_directly(kind, z, rate, steps, delta):
    accountant = kind(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
    return accountant.compose(step, steps).get_epsilon(delta)


def gaussian_delta(epsilon, z):
    """The exact delta of one Gaussian release at this epsilon (Balle and Wang, 2018)."""
    return norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)


CASES = [(1.0, 0.01, 1000, 1e-5), (4.0, 0.1, 500, 1e-6), (0.8, 0.005, 300, 1e-4)]


@pytest.mark.smoke
@pytest.mark.parametrize(("z", "rate", "steps", "delta"), CASES)
def test_epsilon_is_what_dp_accounting_says(z, rate, steps, delta):
    epsilon = accounting.epsilon(noise_multiplier=z, sample_rate=rate, steps=steps, delta=delta)
    assert epsilon == pytest.approx(asked_directly(pld.PLDAccountant, z, rate, steps, delta), rel=1e-3)
    assert epsilon < asked_directly(rdp.RdpAccountant, z, rate, steps, delta)


def test_reference_value():
    epsilon = accounting.epsilon(noise_multiplier=1, sample_rate=0.01, steps=1000, delta=1e-5)
    assert epsilon == pytest.approx(1.828, abs=5e-4)


@pytest.mark.smoke
@pytest.mark.parametrize(("z", "steps"), [(2.0, 1), (5.0, 1), (10.0, 16)])
def test_without_subsampling_it_is_the_gaussian_mechanism(z, steps):
    exact = root_scalar(lambda e: gaussian_delta(e, z / math.sqrt(steps)) - 1e-5, bracket=(1e-3, 100)).root
    epsilon = accounting.epsilon(noise_multiplier=z, sample_rate=1, steps=steps, delta=1e-5)
    assert exact <= epsilon <= exact * 1.001 + 1e-3


def exact_epsilon(z, delta):
    """Of one Gaussian release, where delta is too small for differences of probabilities."""

    def excess(epsilon):
        upper, lower = log_ndtr(0.5 / z - epsilon * z), epsilon + log_ndtr(-0.5 / z - epsilon * z)
        return upper + math.log1p(-math.exp(lower - upper)) - math.log(delta)

    return brentq(excess, 1e-6, 1e4, xtol=1e-13)


TINY = [1e-8, 1e-9, 1e-10, 1e-12, 1e-14, 1e-15, 1e-20]


@pytest.mark.parametrize(("z", "steps"), [(3.0, 100), (1.7, 30), (50.0, 1000), (16.4, 3000), (170.0, 10_000)])
def test_no_delta_is_too_small_for_an_upper_bound(z, steps):
    """A composition by FFT is off by rounding, some 1e-16 of delta for each step: where that counts, it is allowed for.

    Neither bound is loose: that by Renyi divergences is within a tenth.
    """
    public = {"noise_multiplier": z, "sample_rate": 1, "steps": steps}
    curves = {delta: accounting.spending(z, 1, delta) for delta in TINY}
    for delta in TINY:
        exact = exact_epsilon(z / math.sqrt(steps), delta)
        for found in (accounting.epsilon(**public, delta=delta), curves[delta](steps)):
            assert exact <= found <= 1.1 * exact
        assert delta <= accounting.delta(**public, epsilon=exact)


@pytest.mark.parametrize(("target", "delta", "steps"), [(4, 1e-14, 3000), (10, 1e-12, 30_000), (2, 1e-12, 100_000)])
def test_noise_for_a_tiny_delta_is_enough(target, delta, steps):
    z = accounting.noise_multiplier(epsilon=target, delta=delta, sample_rate=1, steps=steps)
    assert exact_epsilon(z / math.sqrt(steps), delta) <= target


def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise_and_delta():
    base = {"noise_multiplier": 2.0, "sample_rate": 0.01, "steps": 200, "delta": 1e-5}
    reference = accounting.epsilon(**base)
    for change in ({"steps": 400}, {"sample_rate": 0.02}, {"noise_multiplier": 1.5}, {"delta": 1e-7}):
        assert accounting.epsilon(**base | change) > reference


def test_nothing_done_costs_nothing():
    assert accounting.epsilon(noise_multiplier=0, sample_rate=0.1, steps=0, delta=1e-5) == 0
    assert accounting.noise_multiplier(epsilon=1, sample_rate=0.1, steps=0, delta=1e-5) == 0


def test_no_noise_costs_everything():
    assert accounting.epsilon(noise_multiplier=0, sample_rate=0.1, steps=1, delta=1e-5) == math.inf


@pytest.mark.parametrize(
    ("target", "rate", "steps", "delta"),
    [(1.0, 0.02, 2000, 1e-6), (0.5, 0.01, 1000, 1e-5), (0.01, 0.01, 100, 1e-5), (3.0, 1.0, 20, 1e-5)],
)
def test_calibrated_noise_meets_the_target_and_wastes_little(target, rate, steps, delta):
    run = {"sample_rate": rate, "steps": steps, "delta": delta}
    z = accounting.noise_multiplier(epsilon=target, **run)
    assert accounting.epsilon(noise_multiplier=z, **run) <= target
    assert accounting.epsilon(noise_multiplier=z / 1.002, **run) > target


@pytest.mark.parametrize(
    ("target", "rate", "steps"), [(1.0, 0.03, 1000), (1.0, 0.002, 500), (0.5, 0.2, 200), (1.0, 0.001, 50_000)]
)
def test_quick_noise_is_enough_and_the_central_limit_is_near(target, rate, steps):
    exact = accounting.noise_multiplier(epsilon=target, sample_rate=rate, steps=steps, delta=1e-5)
    quick = accounting.quick_noise_multiplier(target, 1e-5, rate, steps)
    assert accounting.epsilon(noise_multiplier=quick, sample_rate=rate, steps=steps, delta=1e-5) <= target
    assert quick <= 1.02 * exact
    near = 0.9 if rate * steps >= 20 else 0.66
    assert near * exact < accounting.central_limit_noise(target, 1e-5, rate, steps) < exact


def test_the_central_limit_is_exact_for_gaussian_releases():
    """In the limit of much noise, where exp(1/z^2) - 1 is 1/z^2."""
    z = accounting.central_limit_noise(1.0, 1e-5, 1.0, 10_000)
    assert gaussian_delta(1.0, z / 100) == pytest.approx(1e-5, rel=0.01)


def test_calibrated_noise_of_one_full_release_is_the_closed_form():
    z = accounting.noise_multiplier(epsilon=3, delta=1e-5, sample_rate=1, steps=1)
    exact = root_scalar(lambda z: gaussian_delta(3, z) - 1e-5, bracket=(0.1, 10)).root
    assert exact <= z <= 1.002 * exact


GOOD = {"noise_multiplier": 1.0, "epsilon": 1.0, "sample_rate": 0.01, "steps": 10, "delta": 1e-5}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("noise_multiplier", -1, r"noise_multiplier = -1 must be >= 0; 0 means no noise"),
        ("noise_multiplier", math.nan, r"noise_multiplier = nan must be finite"),
        ("sample_rate", 0, r"sample_rate = 0 must be in \(0, 1\]; it is batch size / dataset size"),
        ("sample_rate", 1.5, r"sample_rate = 1.5 must be in \(0, 1\]"),
        ("steps", -1, r"steps = -1 must be >= 0; it is the number of optimizer steps"),
        ("steps", 2.5, r"steps = 2.5 must be a whole number"),
        ("delta", 0, r"delta = 0 must be in \(0, 1\); well below 1/\(dataset size\)"),
        ("delta", 1, r"delta = 1 must be in \(0, 1\)"),
        ("epsilon", 0, r"epsilon = 0 must be > 0; it is the privacy budget"),
        ("epsilon", math.inf, r"epsilon = inf must be finite"),
    ],
)
def test_bad_arguments_are_refused(name, value, message):
    for function, unused in ((accounting.epsilon, "epsilon"), (accounting.noise_multiplier, "noise_multiplier")):
        if name != unused:
            arguments = {key: given for key, given in (GOOD | {name: value}).items() if key != unused}
            with pytest.raises(ValueError, match=message):
                function(**arguments)


def test_a_budget_below_what_delta_can_resolve_is_refused(monkeypatch):
    # No amount of noise helps when the accountant cannot report less: the search must end and say so.
    monkeypatch.setattr(accounting, "_composed", lambda *_: SimpleNamespace(get_epsilon=lambda delta: 0.1))
    with pytest.raises(ValueError, match=r"epsilon = 0\.01 cannot be met by any noise; raise epsilon"):
        accounting.noise_multiplier(epsilon=0.01, delta=1e-5, sample_rate=0.1, steps=10)


@pytest.mark.parametrize("share", [1e-6, 0.01, 0.5, 3.0])
@pytest.mark.parametrize("z", [0.3, 1.0, 7.123, 1e4])
def test_a_split_merges_to_the_whole_and_never_below(z, share):
    gradient, counts = accounting.split(z, share)
    assert z <= accounting.merge(gradient, counts) <= z * (1 + 1e-12)
    assert gradient == pytest.approx(z * (1 + share))


def test_one_percent_of_the_noise_is_the_figure_of_the_theory():
    assert accounting.split(1.0, 0.01).counts == pytest.approx(7.12, abs=5e-3)


def test_ends_of_a_split():
    assert accounting.split(2.0, 0) == (2.0, math.inf)
    assert accounting.split(0.0, 0.01) == (0.0, 0.0)
    assert accounting.merge(2.0, math.inf) == 2.0
    assert accounting.merge(0.0, 1.0) == 0.0
    assert accounting.merge(math.inf, math.inf) == math.inf
    with pytest.raises(ValueError, match=r"share = -0.1 must be >= 0"):
        accounting.split(1.0, -0.1)


def test_merged_gaussians_cost_what_the_two_cost_together():
    """Without sampling dp-accounting composes the two by itself."""
    gradient, counts = accounting.split(2.0, 0.05)
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for z in (gradient, counts):
        accountant.compose(dp_accounting.GaussianDpEvent(z))
    merged = accounting.epsilon(noise_multiplier=2.0, sample_rate=1.0, steps=1, delta=1e-5)
    assert merged == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


# The forms people have in hand, and the other questions


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_examples_batch_size_and_epochs_are_another_way_to_say_it(accountant):
    public = {"noise_multiplier": 1.2, "delta": 1e-5, "accountant": accountant}
    by_rate = accounting.epsilon(sample_rate=0.1, steps=30, **public)
    assert accounting.epsilon(examples=1000, batch_size=100, epochs=3, **public) == by_rate
    assert accounting.epsilon(examples=1000, batch_size=100, steps=30, **public) == by_rate
    assert accounting.epsilon(sample_rate=0.1, epochs=3, **public) == by_rate


@pytest.mark.parametrize(("examples", "batch_size"), [(60_000, 2048), (1000, 999), (7, 3), (10**6, 10), (49, 49)])
def test_an_epoch_is_what_training_makes_of_it(examples, batch_size):
    plan = plan_training(examples, batch_size, epochs=40, noise_multiplier=1.0, delta=1e-5)
    assert accounting.sampling(None, None, examples, batch_size, 40) == (plan.sample_rate, plan.num_steps)
    assert plan.num_steps == 40 * math.ceil(examples / batch_size)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sample_rate": 0.1, "examples": 10, "batch_size": 1, "steps": 1}, "do not give one sampling rate"),
        ({"steps": 1}, "do not give one sampling rate"),
        ({"examples": 10, "steps": 1}, r"examples = 10 and batch_size = None do not give one sampling rate"),
        ({"examples": 10, "batch_size": 11, "steps": 1}, r"batch_size = 11 must be in \(0, 10\]"),
        ({"sample_rate": 0.1}, r"steps = None and epochs = None do not give one length"),
        ({"sample_rate": 0.1, "steps": 1, "epochs": 1}, "do not give one length"),
        ({"sample_rate": 0.1, "epochs": -1}, "epochs = -1 must be >= 0"),
    ],
)
def test_contradictory_forms_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        accounting.epsilon(noise_multiplier=1.0, delta=1e-5, **given)


def test_rdp_is_dp_accountings_and_looser():
    """Reference values: 2.101 by RDP, 1.828 by PLD."""
    public = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000, "delta": 1e-5}
    assert accounting.epsilon(**public, accountant="rdp") == pytest.approx(2.101, abs=1e-3)
    assert accounting.epsilon(**public) == pytest.approx(1.828, abs=1e-3)
    with pytest.raises(ValueError, match="accountant = 'moments' must be one of 'pld', 'rdp'"):
        accounting.epsilon(**public, accountant="moments")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_noise_is_calibrated_to_the_safe_side_by_either(accountant):
    public = {"sample_rate": 0.05, "steps": 200, "delta": 1e-5, "accountant": accountant}
    z = accounting.noise_multiplier(epsilon=2.0, **public)
    assert accounting.epsilon(noise_multiplier=z, **public) <= 2.0
    assert accounting.epsilon(noise_multiplier=z * 0.998, **public) > 2.0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_delta_is_the_inverse_of_epsilon(accountant):
    public = {"noise_multiplier": 1.0, "sample_rate": 0.02, "steps": 300, "accountant": accountant}
    found = accounting.delta(epsilon=1.5, **public)
    assert accounting.epsilon(delta=found, **public) == pytest.approx(1.5, rel=1e-3)
    assert accounting.delta(epsilon=1.5, **public | {"steps": 0}) == 0
    assert accounting.delta(epsilon=1.5, **public | {"noise_multiplier": 0}) == 1


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_steps_are_the_most_that_a_budget_allows(accountant):
    public = {"noise_multiplier": 1.0, "sample_rate": 0.05, "delta": 1e-5, "accountant": accountant}
    most = accounting.steps(epsilon=3.0, **public)
    assert most > 1
    assert accounting.epsilon(steps=most, **public) <= 3.0 < accounting.epsilon(steps=most + 1, **public)
    assert accounting.steps(epsilon=3.0, **public, most=5) == 5
    assert accounting.steps(epsilon=1e-6, **public) == 0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("num_steps", [1, 7, pytest.param(60, marks=pytest.mark.slow)])
def test_the_curve_is_never_below_and_exact_at_the_end(accountant, num_steps):
    public = {"noise_multiplier": 0.9, "sample_rate": 0.03, "delta": 1e-5, "accountant": accountant}
    curve = accounting.EpsilonCurve(num_steps=num_steps, points=10, **public)
    exact = {n: accounting.epsilon(steps=n, **public) for n in {1, num_steps // 3 or 1, num_steps // 2 or 1, num_steps}}
    assert all(curve(n) >= value for n, value in exact.items())
    assert curve(num_steps) == pytest.approx(exact[num_steps], rel=1e-8)
    assert curve(0) == 0
    values = [curve(n) for n in range(num_steps + 1)]
    assert values == sorted(values)
    assert accounting.EpsilonCurve(num_steps=3, **public | {"noise_multiplier": 0})(1) == math.inf


def test_past_its_end_the_curve_is_exact():
    public = {"noise_multiplier": 1.0, "sample_rate": 0.1, "delta": 1e-5}
    curve = accounting.EpsilonCurve(**public, num_steps=10)
    assert curve(25) == pytest.approx(accounting.epsilon(**public, steps=25), rel=1e-6)
