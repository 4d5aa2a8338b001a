"""The ledger: what runs on the same data spent together, from their folders."""

import json
import math

import pytest

import qclip
from made_runs import made_run
from qclip import accounting
from qclip.apps import ledger
from qclip.apps.cli import main

SPENDING = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 500, "delta": 1e-5}


def run(path, **changes):
    """A folder of a run that spent what its plan says."""
    settings = SPENDING | changes
    plan = {key: settings[key] for key in SPENDING}
    made_run(path, steps=2)
    content = json.loads((path / "summary.json").read_text())
    content |= settings | {"epsilon": accounting.epsilon(**plan), "num_steps": settings["steps"]}
    (path / "summary.json").write_text(json.dumps(content))
    return path


def test_equal_runs_cost_what_one_long_run_costs(tmp_path):
    folders = [run(tmp_path / name) for name in "ab"]
    found = ledger.read(folders)
    assert found.epsilon == pytest.approx(accounting.epsilon(**SPENDING | {"steps": 1000}), rel=1e-4)
    assert found.epsilon < sum(each.epsilon for each in found.runs)
    assert ledger.read([tmp_path]) == found


def test_different_runs_cost_more_than_each_and_less_than_their_sum(tmp_path):
    run(tmp_path / "a"), run(tmp_path / "b", noise_multiplier=2.0, sample_rate=0.05)
    found = ledger.read([tmp_path])
    spent = [each.epsilon for each in found.runs]
    assert max(spent) < found.epsilon < sum(spent)
    run(tmp_path / "c", delta=1e-6, steps=1)
    assert ledger.read([tmp_path]).delta == 1e-5


def test_a_run_without_a_guarantee_makes_the_total_infinite(tmp_path, capsys):
    run(tmp_path / "a"), made_run(tmp_path / "b", private=False)
    found = ledger.read([tmp_path])
    assert math.isinf(found.epsilon)
    assert "without a guarantee" in found.notes[-1]
    assert main(["audit", "--json", "--ledger", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] is None


def test_other_data_and_empty_folders_are_refused(tmp_path):
    run(tmp_path / "a"), run(tmp_path / "b", examples=7)
    with pytest.raises(qclip.Refusal, match="same data: examples"):
        ledger.read([tmp_path])
    (tmp_path / "none").mkdir()
    with pytest.raises(qclip.Refusal, match="no run in"):
        ledger.read([tmp_path / "none"])
    with pytest.raises(qclip.Refusal, match="not a folder"):
        ledger.read([tmp_path / "absent"])


def test_the_command_prints_the_total(tmp_path, capsys):
    run(tmp_path / "a"), run(tmp_path / "b", finished=False)
    assert main(["audit", "--ledger", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"epsilon {ledger.read([tmp_path]).epsilon:.4g}" in out
    assert "not finished" in out


def test_nothing_costs_nothing_and_order_does_not_matter():
    one, other = accounting.Spending(1.0, 0.01, 300), accounting.Spending(3.0, 0.2, 40)
    assert accounting.together([], 1e-5) == 0
    assert accounting.together([one._replace(steps=0)], 1e-5) == 0
    assert math.isinf(accounting.together([one, other._replace(noise_multiplier=0.0)], 1e-5))
    assert accounting.together([one, other], 1e-5) == pytest.approx(accounting.together([other, one], 1e-5), rel=1e-6)
    assert accounting.together([one, other], 1e-5) < accounting.together([one, other], 1e-5, "rdp")
