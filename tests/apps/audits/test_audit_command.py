"""`qclip audit`: rows that hold, faults that are caught, a page with figures, JSON alone on stdout, and exit codes."""

import json

import numpy as np
import pytest

import qclip
from qclip.apps.audits import foreign, installed, suite
from qclip.apps.cli import main


@pytest.fixture
def restated(monkeypatch):
    """As where no other library is installed."""
    monkeypatch.setattr(installed, "available", lambda package: False)


def test_every_foreign_fault_is_caught_and_the_control_is_not(restated):
    rows = list(suite.rows("foreign", suite.Scope(quick=True), str))
    assert {row.verdict for row in rows[1:]} == {"caught"}
    assert {row.values["rule"] for row in rows[1:]} == {"restated"}
    assert rows[0].verdict == "holds"
    assert len(rows) == 1 + len(foreign.FAULTS)


ATTACKED = [fault for fault in foreign.FAULTS if fault.restated.scores]


@pytest.mark.parametrize("fault", ATTACKED, ids=lambda fault: fault.name)
def test_a_fault_is_caught_because_of_the_canary(fault):
    """Without the canary in either world there is nothing to catch. A bound exceeds 1 by chance less than 1 in 20."""

    def without(generator, runs, _):
        return fault.restated.scores(generator, runs, canary=False)

    assert foreign.lower_bound(without, gaussian=fault.restated.gaussian, runs=4000) <= foreign.CLAIM


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in foreign.FAULTS if fault.package], ids=lambda fault: fault.name)
def test_a_fault_is_caught_in_the_library_itself(fault):
    pytest.importorskip(fault.package, reason=f"{fault.package} is not installed")
    rule, how = fault.rule()
    assert how == "run"
    if rule.check is not None:
        assert rule.check(np.random.default_rng(0))[0]
        return
    assert foreign.lower_bound(rule.scores, gaussian=rule.gaussian, runs=rule.most_runs) > foreign.CLAIM
    without = lambda generator, runs, _: rule.scores(generator, runs, canary=False)  # noqa: E731
    assert foreign.lower_bound(without, gaussian=rule.gaussian, runs=rule.most_runs) <= foreign.CLAIM


def test_the_command_writes_rows_and_a_page(restated, tmp_path, capsys):
    status = main(["audit", "--only", "foreign", "--only", "one-run", "--quick", "--json", "--out", str(tmp_path)])
    rows = json.loads(capsys.readouterr().out)
    assert status == 0
    assert {row["audit"] for row in rows} == {"foreign", "one-run"}
    assert all({"audit", "subject", "epsilon", "lower_bound", "verdict"} <= set(row) for row in rows)
    assert json.loads((tmp_path / "audit.json").read_text()) == rows
    page = (tmp_path / "report.html").read_text()
    assert "No audit exceeds its claim" in page
    assert (tmp_path / "figures" / "audit-bounds.png").exists()


def test_a_claim_that_is_exceeded_fails_the_command(tmp_path, monkeypatch, capsys):
    bad = suite.Row("one-run", "broken", "fails", 1.0, 2.0, "at least 2.00 of 1")
    monkeypatch.setattr(suite, "one_runs", lambda *_: iter([bad]))
    assert main(["audit", "--only", "one-run", "--out", str(tmp_path)]) == 1
    assert "1 of 1 rows fail" in (tmp_path / "report.html").read_text()


def test_an_unknown_audit_is_refused(capsys):
    assert main(["audit", "--only", "canaries"]) == 2
    assert "canary" in capsys.readouterr().err


def test_a_task_is_replayed_and_its_fault_found():
    task = suite.Scope().task()
    found = suite.replay_task(task, qclip.Constant(1.0), "flat", examples=1, seed=0)
    assert found.holds
    assert 0.9 < found.most_moved <= 1.0001


@pytest.mark.slow
def test_all_quick_audits_hold(tmp_path):
    assert main(["audit", "--quick", "--out", str(tmp_path)]) == 0


def test_the_rates_of_the_attacker_stay_near_what_the_claim_allows():
    generator = np.random.default_rng(0)
    mu = 1.0
    curves = {"without": generator.normal(-0.5, mu, 2000), "with": generator.normal(0.5, mu, 2000)}
    epsilon = suite.bounds.gaussian_epsilon(mu, suite.DELTA)
    rates = suite.trade_off(suite.Row("canary", "balanced", "holds", epsilon, 1.0, "", curves=curves))
    allowed = np.interp(rates["false_positives"], rates["at"], rates["allowed"])
    inside = rates["false_positives"] > 1e-3
    assert np.abs(rates["true_positives"] - allowed)[inside].max() < 0.06  # 4 standard errors of 2000 runs and more
