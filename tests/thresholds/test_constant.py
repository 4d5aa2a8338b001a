"""A given threshold: refused when it cannot be one, scheduled by the step."""

import pytest

from qclip import schedules
from qclip.thresholds import Answer, Constant, Question


@pytest.mark.parametrize("tau", [0, -1.0, float("nan"), float("inf"), "one"])
def test_a_bad_threshold_is_refused_at_once(tau):
    with pytest.raises(ValueError, match=r"tau = .* must be"):
        Constant(tau)


def test_a_schedule_is_followed_and_checked_at_each_step():
    growing = Constant(schedules.polynomial(1.0, 0.5))
    assert growing.clip_norms(1, 3) == (2.0,)
    falling = Constant(lambda step: 1.0 - step)
    with pytest.raises(ValueError, match=r"tau = 0.0 must be > 0"):
        falling.clip_norms(1, 1)


def test_it_asks_for_nothing_and_pays_nothing():
    assert Constant(1.0).ask(1, 0) == Question()
    assert Constant(1.0).unclipped(1, 0, Answer()) == ()
    assert Constant(1.0).noise_share == 0
