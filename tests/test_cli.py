"""The command line: what it prints, and what it says when the input is wrong."""

import json
import subprocess
import sys

import pytest

from qclip import theory
from qclip.cli import main
from qclip.experiments import reproduce as reproduce_module
from qclip.experiments.claim import Outcome, claim

PLAN = ["plan", "--L", "1", "--sigma", "1", "--gap", "1"]


def run(capsys, *arguments):
    status = main(list(arguments))
    output = capsys.readouterr()
    return status, output.out, output.err


def test_plan_prints_its_choice_and_its_reasons(capsys):
    status, out, _ = run(capsys, *PLAN, "--steps", "10000")
    assert status == 0
    for word in ("step size gamma", "0.01549", "optimisation", "How the optimum moves", "largest", "unknown number"):
        assert word in out


def test_plan_json_equals_the_library(capsys):
    status, out, _ = run(capsys, *PLAN, "--q", "1.5", "--steps", "1000", "--json")
    found = json.loads(out)
    plan = theory.plan(theory.Assumptions(L=1, sigma=1, q=1.5, gap=1), steps=1000)
    assert status == 0
    assert found["step_size"] == pytest.approx(plan.gamma)
    assert found["quantile"] == pytest.approx(plan.p)
    assert found["bound"]["total"] == pytest.approx(plan.bound.total)
    assert found["bound"]["dominant"] == plan.bound.dominant
    assert {"moves", "unknown_horizon", "noise_multiplier", "assumptions"} <= found.keys()


def test_plan_with_noise_recommends_a_constant_quantile(capsys):
    arguments = ("--steps", "1000", "--batch-size", "64", "--dim", "100", "--noise-multiplier", "1")
    _, out, _ = run(capsys, *PLAN, *arguments)
    assert "Keep p constant" in out
    found = json.loads(run(capsys, *PLAN, *arguments, "--json")[1])
    assert found["unknown_horizon"]["constant_p"] is True


def test_plan_for_a_target_reaches_it(capsys):
    found = json.loads(run(capsys, *PLAN, "--target", "0.05", "--json")[1])
    assert found["bound"]["total"] <= 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--L", "-1", "--sigma", "1", "--gap", "1", "--steps", "10"), "L = -1.0 must be > 0"),
        (("--L", "1", "--sigma", "1", "--gap", "1", "--q", "2.5", "--steps", "10"), "q = 2.5 must be in"),
        (("--L", "1", "--sigma", "1", "--gap", "1"), "steps, target"),
        (("--L", "1", "--sigma", "1", "--gap", "1", "--steps", "10", "--delta", "1e-5"), "--epsilon"),
        (("--L", "1", "--sigma", "1", "--gap", "1", "--steps", "10", "--epsilon", "1"), "--examples"),
        (("--L", "1", "--sigma", "nan", "--gap", "1", "--steps", "10"), "sigma = nan must be finite"),
    ],
)
def test_plan_refuses_bad_input_in_one_sentence(capsys, arguments, message):
    status, _, err = run(capsys, "plan", *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


def test_reproduce_writes_and_says_where(capsys, tmp_path):
    out = tmp_path / "run"
    status, printed, _ = run(capsys, "reproduce", "--quick", "--only", "lemma1-proof-step", "--out", str(out))
    assert status == 0
    assert "erratum" in printed
    assert "report.html" in printed.replace("\n", "")  # a long path is wrapped
    assert (out / "report.html").exists()


def test_reproduce_fails_when_a_claim_fails(capsys, tmp_path, monkeypatch):
    @claim("broken", "A claim that does not hold", "nowhere")
    def broken(effort):
        return Outcome("1", "2", printed=False)

    monkeypatch.setattr(reproduce_module, "CLAIMS", (broken,))
    assert run(capsys, "reproduce", "--out", str(tmp_path))[0] == 1


def test_reproduce_names_an_unknown_claim_and_an_unwritable_folder(capsys, tmp_path):
    status, _, err = run(capsys, "reproduce", "--only", "lemma-1", "--out", str(tmp_path))
    assert status == 2
    assert "lemma-1" in err
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert run(capsys, "reproduce", "--only", "lemma1-proof-step", "--out", str(blocked))[0] == 2


def test_module_and_help():
    shown = subprocess.run([sys.executable, "-m", "qclip", "--help"], capture_output=True, text=True, check=True).stdout
    assert "reproduce" in shown
    assert "plan" in shown


def test_only_takes_several_ids_however_they_are_given(capsys, tmp_path):
    several = ("--only", "lemma1-proof-step,term2-direction", "--only", "exact-quantile-not-private")
    assert run(capsys, "reproduce", "--quick", *several, "--out", str(tmp_path))[0] == 0
    found = {entry["id"] for entry in json.loads((tmp_path / "claims.json").read_text())}
    assert found == {"lemma1-proof-step", "term2-direction", "exact-quantile-not-private"}


def test_version_and_an_empty_dataset(capsys):
    assert run(capsys, "--version")[1].startswith("qclip ")
    status, _, err = run(capsys, *PLAN, "--steps", "10", "--epsilon", "1", "--examples", "0")
    assert (status, "--examples = 0 must be >= 1" in err) == (2, True)
