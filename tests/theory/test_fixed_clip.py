"""The order-level bound for a constant threshold: its terms by hand and how they scale."""

import math

import pytest

from qclip.theory import Assumptions, fixed_clip_bound


def test_terms_by_hand():
    found = fixed_clip_bound(Assumptions(L=2, sigma=3, q=2, gap=4), gamma=0.1, tau=5, steps=100)
    slow = 4 / (0.1 * 100)
    assert found.optimisation == pytest.approx((slow / 5) ** 2 + slow)
    assert found.variance == pytest.approx(0.1 * 2 * 9)
    assert found.bias == pytest.approx(81 / 25)


@pytest.mark.parametrize(("tau", "bias"), [(0.5, 4.0), (2.0, 4.0), (4.0, 1.0), (20.0, 0.04)])
def test_bias_falls_with_the_threshold_but_never_exceeds_the_variance(tau, bias):
    assert fixed_clip_bound(Assumptions(1, 2, 2, 1), 0.1, tau, steps=10).bias == pytest.approx(bias)


@pytest.mark.parametrize(("growth", "rate"), [(0.1, 0.2), (0.2, 0.4), (0.25, 0.5), (0.4, 0.5)])
def test_a_growing_threshold_reaches_the_square_root_rate_from_a_quarter_on(growth, rate):
    """Erratum H: with gamma ~ T^(-1/2) and tau ~ T^growth the rate is min(2 growth, 1/2)."""
    a = Assumptions(L=1, sigma=1, q=2, gap=1)

    def total(T):
        return fixed_clip_bound(a, gamma=T**-0.5, tau=T**growth, steps=T).total

    assert math.log(total(10**16) / total(10**17), 10) == pytest.approx(rate, abs=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": Assumptions(1, 1, 1.5, 1)}, "q = 1.5 must be 2; the result assumes bounded variance"),
        ({"gamma": 0}, "gamma = 0 must be > 0; a step size is positive"),
        ({"tau": -1}, "tau = -1 must be > 0; a threshold is positive"),
        ({"tau": math.inf}, "tau = inf must be finite"),
        ({"steps": 0}, "steps = 0 must be >= 1"),
        ({"steps": None}, "steps = None must be a whole number"),
    ],
)
def test_refuses(change, message):
    arguments = {"a": Assumptions(1, 1, 2, 1), "gamma": 0.1, "tau": 1, "steps": 10} | change
    with pytest.raises(ValueError, match=message):
        fixed_clip_bound(**arguments)
