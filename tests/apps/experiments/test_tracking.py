"""The tracking experiment runs, and what it simulates is what a step releases."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("matplotlib")

from qclip import accounting
from qclip.apps.experiments import tracking
from qclip.apps.experiments.tracking import Setting, Size, follow
from qclip.thresholds import Constant, PrivateQuantile, SlackQuantile
from qclip.thresholds.threshold import ROUNDING_MARGIN

TINY = Size(("log-normal",), 60, 2)


def test_it_compares_every_estimator_and_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "QUICK", TINY)
    setting = Setting(256, 1.0, 0.5)
    rows = tracking.report(tmp_path / "new", [setting], quick=True)
    assert [row.estimator for row in rows] == list(tracking.estimators(setting))
    for row in rows:
        assert math.isnan(row.cost) == (not row.private)
        assert abs(row.bias) < 0.1
        assert 0 < row.error < 0.2
        assert 0 <= min(row.steps_up, row.steps_down) <= max(row.steps_up, row.steps_down) <= 60
    written = (tmp_path / "new" / "thresholds.md").read_text()
    assert written == tracking.table(rows) + "\n"
    assert written.count("\n") == len(rows) + 2
    assert 5_000 < (tmp_path / "new" / "thresholds.png").stat().st_size < 150_000


def test_it_says_which_runs_are_refused():
    (slack,) = [row for row in tracking.tracking([Setting(16, 1.0, 0.5)], TINY) if row.estimator == "SlackQuantile"]
    assert slack.refused
    assert "| SlackQuantile * |" in tracking.table([slack])


def test_the_same_seed_gives_the_same_rows():
    setting = Setting(64, 1.0, 0.9)
    run = {"distribution": stats.lognorm(1.0), "path": np.zeros(20), "setting": setting, "runs": 3}
    first, again = (follow(PrivateQuantile(0.9), rng=np.random.default_rng(1), **run) for _ in range(2))
    assert (first.distance == again.distance).all()


class Recorder(SlackQuantile):
    """Stays where it is, and keeps what it is told."""

    def update(self, state, step, answer):
        TOLD.append(answer)
        return state


TOLD = []


def test_answers_have_the_noise_that_they_state_and_that_a_step_has():
    """One group: the slack's coordinate a has noise z tau / a, and sampling adds F / B."""
    TOLD.clear()
    setting = Setting(100, 2.0, 0.5)
    rng = np.random.default_rng(0)
    follow(Recorder(0.5, initial=1.0), stats.lognorm(1.0), np.zeros(400), setting, runs=20, rng=rng)
    ((inner, outer), *_) = TOLD[0].within_std
    assert outer == pytest.approx(2.0 / math.sqrt((1 - ROUNDING_MARGIN) ** 2 - 0.95**2) / 100, rel=1e-9)
    assert inner == pytest.approx(2.0 / math.sqrt(0.95**2 - 0.8**2) / 100, rel=1e-9)
    found = np.array([answer.noisy_within for answer in TOLD])[:, :, 1].ravel()
    truth = stats.lognorm(1.0).cdf(0.95)
    # 8000 draws: the mean is known up to 0.001, the standard deviation up to 0.8 %. Five of these fail one time in 1e6.
    assert found.mean() == pytest.approx(truth, abs=0.005)
    assert found.std() == pytest.approx(math.hypot(outer, math.sqrt(truth / 100)), rel=0.04)


class CountRecorder(PrivateQuantile):
    """The same for the paid count."""

    def update(self, state, step, answer):
        TOLD.append(answer)
        return state


def test_paid_counts_have_the_noise_that_they_cost():
    TOLD.clear()
    setting = Setting(100, 2.0, 0.5)
    rng = np.random.default_rng(0)
    follow(CountRecorder(0.5, initial=2.0), stats.lognorm(1.0), np.zeros(400), setting, runs=20, rng=rng)
    assert TOLD[0].bins_std == pytest.approx(accounting.split(2.0, 0.01).counts * 0.5 / 100)
    found = np.array([answer.noisy_bins for answer in TOLD]).ravel()
    assert found.mean() == pytest.approx(stats.lognorm(1.0).cdf(2.0), abs=0.005)
    assert found.std() == pytest.approx(math.hypot(TOLD[0].bins_std, 0.05), rel=0.04)


def test_a_constant_keeps_its_distance():
    path = np.linspace(0, 1, 11)
    trace = follow(Constant(1.0), stats.lognorm(1.0), path, Setting(8, 1.0, 0.5), runs=2, rng=np.random.default_rng(0))
    assert trace.distance == pytest.approx(np.repeat(-path[:, None], 2, axis=1))
    assert trace.unclipped == pytest.approx(stats.norm.cdf(trace.distance))


def test_steps_to_reach_are_those_of_the_first_step_that_is_near():
    distance = np.array([[3.0, -3.0, 1.0], [1.0, 0.5, 1.0], [0.1, 0.0, 1.0]])
    trace = replace(tracking.Trace(distance, distance))
    assert trace.steps_to_reach().tolist() == [2, 1, 3]


@pytest.mark.parametrize(("setting", "share"), [(Setting(64, 1, 0.5), 0.0124), (Setting(256, 4, 0.9), 0.0124)])
def test_the_literatures_count_costs_what_theory_says(setting, share):
    """Andrew et al.: noise of B/20 on a count of sensitivity one half, z_gradient^-2 = z^-2 - (2 sigma_b)^-2."""
    found = tracking.literature_share(setting)
    assert found == pytest.approx(share, abs=1e-4)
    counts = accounting.split(setting.noise_multiplier, found).counts
    assert counts * 0.5 == pytest.approx(setting.batch_size / 20)
