"""The command line: what it prints, and what it says when the input is wrong."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")

from qclip import accounting, theory
from qclip.apps.cli import main
from qclip.apps.experiments import reproduce as reproduce_module
from qclip.apps.experiments.claim import Outcome, claim

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
    arguments = ("--steps", "1000", "--batch-size", "64", "--params", "100", "--noise-multiplier", "1")
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
        (("--L", "1", "--sigma", "1", "--gap", "1"), "steps = None and target = None"),
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
    status, printed, _ = run(capsys, "reproduce", "--out", str(tmp_path))
    assert status == 1
    assert json.loads((tmp_path / "claims.json").read_text())[0]["measured"] in " ".join(printed.split())


def test_reproduce_names_an_unknown_claim_and_an_unwritable_folder(capsys, tmp_path):
    status, _, err = run(capsys, "reproduce", "--only", "lemma-1", "--out", str(tmp_path))
    assert status == 2
    assert "did you mean lemma1-" in " ".join(err.split())
    assert " ".join(err.split()).count(" or ") == 2  # the three nearest, not all
    assert "choose from lemma1-" in " ".join(run(capsys, "reproduce", "--only", "zzz")[2].split())
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert run(capsys, "reproduce", "--only", "lemma1-proof-step", "--out", str(blocked))[0] == 2


def test_reproduce_names_an_absent_folder_of_data(capsys, tmp_path):
    status, _, err = run(capsys, "reproduce", "--data-dir", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert (status, "must be a folder that exists; check the path" in " ".join(err.split())) == (2, True)
    assert not (tmp_path / "out").exists()


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


PRIVATE = ["plan", "--examples", "200", "--batch-size", "100", "--steps", "10"]


def test_plan_of_the_privacy_alone(capsys):
    status, out, _ = run(capsys, *PRIVATE, "--noise-multiplier", "4", "--params", "2500")
    assert status == 0
    for word in (
        "delta = 1/(10 N) = 0.0005",
        "sampling rate",
        "PrivateQuantile(0.7)",
        "count noise",
        "Epsilon spent",
    ):
        assert word in out
    assert "qclip.make_private(" in out
    assert "step size" not in out  # of the bound there is nothing to say


ADVICE = ["plan", "--examples", "1500", "--params", "5000", "--epsilon", "0.5", "--delta", "1e-4"]


def test_plan_recommends_what_was_left_out(capsys):
    status, out, _ = run(capsys, *ADVICE)
    assert status == 0
    for word in ("Recommended: batch size 64 for 480 steps", "batch_size=64, epochs=20", "What if?", "params / 10"):
        assert word in out
    assert "Recommended" not in run(capsys, *ADVICE, "--batch-size", "64", "--epochs", "20")[1]


def test_plan_recommends_around_what_was_given(capsys):
    plan = json.loads(run(capsys, *ADVICE, "--batch-size", "100", "--json")[1])["privacy_plan"]
    assert (plan["batch_size"], plan["steps_per_epoch"]) == (100, 15)
    plan = json.loads(run(capsys, *ADVICE, "--steps", "450", "--json")[1])["privacy_plan"]
    assert plan["steps"] == 450


def test_plan_says_what_other_choices_would_change(capsys):
    arguments = (*PRIVATE, "--epsilon", "0.25", "--delta", "1e-3", "--json")
    assert json.loads(run(capsys, *arguments)[1])["what_if"] == []  # S needs the number of parameters
    found = json.loads(run(capsys, *arguments, "--params", "400")[1])
    plan, rows = found["privacy_plan"], {row["change"]: row for row in found["what_if"]}
    assert rows["this plan"]["S"] == pytest.approx(plan["relative_noise"] ** 2)
    assert rows["params / 10"]["S"] == pytest.approx(rows["this plan"]["S"] / 10)
    assert rows["steps x 2"]["cost_factor"] == 2
    assert rows["epsilon / 2"]["bound_factor"] > 1


def test_plan_says_that_noise_drowns_the_gradient(capsys):
    arguments = (*PRIVATE, "--epsilon", "0.25", "--delta", "1e-3", "--params")
    assert "drowns" in run(capsys, *arguments, "1000000")[1]
    assert "drowns" not in run(capsys, *arguments, "100")[1]


def test_plan_of_a_budget_meets_it(capsys):
    found = json.loads(run(capsys, *PRIVATE, "--epsilon", "0.25", "--delta", "1e-3", "--json")[1])
    plan = found["privacy_plan"]
    assert 0.245 < plan["epsilon"] <= 0.25
    expected = accounting.noise_multiplier(epsilon=0.25, delta=1e-3, sample_rate=0.5, steps=10)
    assert plan["noise_multiplier"] == pytest.approx(expected)
    assert (plan["sample_rate"], plan["steps"], plan["steps_per_epoch"]) == (0.5, 10, 2)
    assert plan["recommended"] == "BalancedThreshold()"
    assert [row["steps"] for row in plan["spent"]] == [2, 4, 6, 8, 10]
    assert "bound" not in found


def test_plan_of_both_agrees_with_the_library(capsys):
    arguments = ("--L", "1", "--sigma", "1", "--gap", "1", "--dim", "50", "--epsilon", "0.1", "--delta", "1e-3")
    found = json.loads(run(capsys, *PRIVATE, *arguments, "--json")[1])
    privacy = theory.Privacy(0.1, 1e-3, 200)
    plan = theory.plan(theory.Assumptions(L=1, sigma=1, q=2, gap=1), steps=10, batch_size=100, dim=50, privacy=privacy)
    assert found["step_size"] == pytest.approx(plan.gamma)
    assert found["max_step"] == pytest.approx(plan.max_step)
    assert found["noise_multiplier"] == found["privacy_plan"]["noise_multiplier"]
    assert found["privacy"] == {"epsilon": 0.1, "delta": 1e-3, "examples": 200}
    assert found["privacy_plan"]["p"] == pytest.approx(plan.p)  # the thresholds are judged at the bound's quantile
    assert "twice the examples" in {move["change"] for move in found["moves"]}


def test_plan_in_epochs(capsys):
    arguments = ("--examples", "1000", "--batch-size", "300", "--epochs", "3", "--noise-multiplier", "4", "--json")
    plan = json.loads(run(capsys, "plan", *arguments)[1])["privacy_plan"]
    assert (plan["steps"], plan["steps_per_epoch"]) == (12, 4)


def test_plan_of_groups_and_of_another_quantile(capsys):
    arguments = ("--noise-multiplier", "4", "--json")
    one, four = (
        json.loads(run(capsys, *PRIVATE, *arguments, "--groups", groups, "--p", "0.7")[1])["privacy_plan"]
        for groups in ("1", "4")
    )
    assert four["p"] == 0.7
    assert four["thresholds"][1]["code"] == "PrivateQuantile(0.7)"
    noise = [plan["thresholds"][1]["count_noise_fraction"] for plan in (one, four)]
    assert noise[1] == pytest.approx(2 * noise[0])


def test_plan_says_why_no_threshold_works(capsys):
    arguments = ("--examples", "1000", "--batch-size", "2", "--steps", "5", "--noise-multiplier", "50")
    status, out, _ = run(capsys, "plan", *arguments)
    assert status == 0
    assert "None works here" in out
    assert "- PrivateQuantile: the noise on the unclipped fraction" in out


def test_plan_for_a_target_with_noise_counts_its_steps(capsys):
    arguments = ("--examples", "1000", "--batch-size", "100", "--noise-multiplier", "1", "--target", "0.2", "--json")
    found = json.loads(run(capsys, *PLAN, *arguments)[1])
    assert found["privacy_plan"]["steps"] == found["steps"]
    assert found["bound"]["total"] <= 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is nothing to plan"),
        (("--steps", "10"), "there is nothing to plan"),
        (("--L", "1", "--steps", "10"), "--L was given without --sigma"),
        (("--gap", "1", "--steps", "10"), "--gap was given without --L"),
        (("--q", "1.5", "--steps", "10"), "--q was given without --L"),
        ((*PRIVATE[1:], "--noise-multiplier", "1", "--target", "0.1"), "--target was given without --L"),
        ((*PRIVATE[1:], "--noise-multiplier", "1", "--epsilon", "2"), "--noise-multiplier = 1.0 must be left out"),
        ((*PRIVATE[1:], "--noise-multiplier", "1", "--epochs", "2"), "epochs = 2 and steps = 10"),
        (PRIVATE[1:], "--examples = 200 must be left out without --epsilon"),
        (("--examples", "200", "--steps", "5", "--epsilon", "2"), "--params is missing"),
        (("--examples", "200", "--batch-size", "10", "--epsilon", "2"), "--params is missing"),
        (("--examples", "200", "--noise-multiplier", "2"), "--noise-multiplier = 2.0 must be left out of a recommend"),
        (("--examples", "20", "--epsilon", "2", "--params", "9"), "dataset_size = 20 must be >= 64"),
        (("--examples", "200", "--epsilon", "0.1", "--params", "9999999"), "train fewer parameters"),
        (
            ("--examples", "200", "--batch-size", "10.5", "--epsilon", "2", "--steps", "3"),
            "--batch-size = 10.5 must be",
        ),
        (("--examples", "20", "--batch-size", "50", "--epsilon", "2", "--steps", "3"), "batch_size = 50 must be"),
        ((*PLAN[1:], "--epochs", "3"), "--epochs = 3 must be left out without --examples"),
        ((*PLAN[1:], "--steps", "3", "--groups", "2"), "--groups = 2 must be left out without --examples"),
        ((*PRIVATE[1:], "--noise-multiplier", "1", "--p", "1.5"), "p = 1.5 must be in (0, 1)"),
        ((*PRIVATE[1:], "--noise-multiplier", "1", "--groups", "0"), "groups = 0 must be"),
    ],
    ids=range(20),
)
def test_plan_refuses_what_does_not_fit_together(capsys, arguments, message):
    status, out, err = run(capsys, "plan", *arguments)
    assert status == 2
    assert message in " ".join(err.split())
    assert out == "" or re.fullmatch(r"delta = 1/\(10 N\) = 0.00?05\n", out)
