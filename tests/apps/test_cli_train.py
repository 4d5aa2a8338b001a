"""``qclip train`` from the command line: what it prints, what it refuses, and that Ctrl-C can be taken back."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from qclip.apps.cli import main
from qclip.apps.run_folder import RunFolder
from qclip.apps.trainer.run import QUANTILES
from qclip.thresholds import GeometricQuantile


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 480)
    points = rng.normal(size=(480, 2)) + 3.0 * label[:, None]
    path = tmp_path_factory.mktemp("data") / "points.csv"
    lines = [f"{x:.4f},{y:.4f},{'ab'[c]}" for (x, y), c in zip(points, label, strict=True)]
    path.write_text("\n".join(["x,y,kind", *lines]) + "\n")
    return path


@pytest.fixture
def small(table):
    return [
        "--data",
        str(table),
        "--target",
        "kind",
        "--noise-multiplier",
        "16",
        "--epochs",
        "2",
        "--batch-size",
        "100",
    ]


def run(capsys, *arguments):
    status = main(["train", *map(str, arguments)])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_it_trains_says_where_the_report_is_and_shows_no_raw_loss(capsys, small, tmp_path):
    status, out, err = run(capsys, *small, "--out", tmp_path / "run")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == 2
    for words in ("held-out accuracy", "held-out loss", "at delta 0.00025", "tau at the end"):
        assert words in out
    assert lines[-1] == f"report: {tmp_path / 'run' / 'report.html'}"
    assert (tmp_path / "run" / "report.html").exists()
    assert "raw_loss" not in out + RunFolder(tmp_path / "run").metrics_file.read_text()


@pytest.mark.smoke
def test_digits_are_learnt_and_reported(capsys, tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    arguments = ("--noise-multiplier", "1", "--epochs", "4", "--seed", "0", "--out", tmp_path)
    assert run(capsys, *arguments)[0] == 0
    folder = RunFolder(tmp_path)
    assert folder.summary().accuracy > 0.6  # ten classes
    (tmp_path / "report.html").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert "<img" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epsilon", "0"), "--epsilon = 0.0 must be > 0"),
        (("--epsilon", "1", "--noise-multiplier", "1"), "--noise-multiplier = 1.0 must be left out with --epsilon"),
        (("--delta", "1"), "--delta = 1.0 must be in (0, 1)"),
        (("--tau", "1"), "--tau = 1.0 must be left out without --threshold constant"),
        (("--threshold", "constant", "--tau", "1", "--p", "0.5"), "--p = 0.5 must be left out"),
        (("--batch-size", "5000"), "--batch-size = 5000 must be <= 1497"),
        (("--data", "nothing"), "'nothing' must be one of"),
        (("--resume",), "--resume was given without --out"),
        (("--resume", "--overwrite"), "--resume and --overwrite exclude each other"),
    ],
    ids=["epsilon", "both", "delta", "tau", "p", "batch-size", "data", "resume-what", "resume-and-overwrite"],
)
def test_it_refuses_in_one_sentence_and_leaves_no_run(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_out_is_refused_before_any_training(capsys, small, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    status, out, err = run(capsys, *small, "--out", blocked)
    assert (status, out) == (2, "")
    assert "is not usable" in " ".join(err.split())
    assert blocked.read_text() == "in the way"


def test_resuming_a_finished_run_and_writing_over_it(capsys, small, tmp_path):
    assert run(capsys, *small, "--out", tmp_path)[0] == 0
    before = RunFolder(tmp_path).metrics_file.read_bytes()
    for more, words in ((["--resume"], "cannot be resumed"), (small, "holds a finished run")):
        status, _, err = run(capsys, *more, "--out", tmp_path)
        assert (status, words in " ".join(err.split())) == (2, True)
    assert RunFolder(tmp_path).metrics_file.read_bytes() == before
    assert run(capsys, *small, "--out", tmp_path, "--overwrite")[0] == 0
    assert RunFolder(tmp_path).metrics_file.read_bytes() != before


@pytest.mark.filterwarnings("default")
def test_what_weakens_the_promise_is_said(capsys, table, tmp_path):
    small = ("--data", table, "--target", "kind", "--epochs", "1", "--batch-size", "100", "--out", tmp_path)
    assert "NOT private" in run(capsys, *small, "--noise-multiplier", "0")[1]
    status, out, err = run(capsys, *small, "--overwrite", "--epsilon", "0.2", "--delta", "0.003", "--seed", "1")
    assert (status, err) == (0, "")
    assert "warning: delta = 0.003 is not below 1/dataset_size" in out
    assert "anyone who knows the seed can subtract the noise" in out


def test_the_certificate_is_shown_or_why_there_is_none(capsys, table, tmp_path, monkeypatch):
    monkeypatch.setitem(QUANTILES, "geometric", partial(GeometricQuantile, initial=3.0))  # near the quantile
    asked = ["--data", table, "--target", "kind", "--epochs", "1", "--batch-size", "100", "--noise-multiplier", "0"]
    asked += ["--threshold", "geometric", "--lr", "0.05", "--L", "1", "--sigma", "1", "--gap", "1", "--out", tmp_path]
    assert "mean of ||grad f||^2 <=" in run(capsys, *asked, "--plain-steps")[1]
    assert "normalized steps, section 18" in run(capsys, *asked, "--overwrite")[1]
    del asked[asked.index("--lr") : asked.index("--lr") + 2]
    assert "no certificate" in run(capsys, *asked, "--overwrite")[1]
    report = RunFolder(tmp_path).report_file.read_text(encoding="utf-8")
    assert "There is no certificate: the learning rate of each step was found from the gradient of that step" in report


def test_an_extra_that_is_missing_is_named(capsys, small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "qclip.apps.report.run", None)  # as if an import in it failed
    status, out, _ = run(capsys, *small, "--out", tmp_path)
    assert status == 0
    assert "no report" in out
    assert RunFolder(tmp_path).summary().finished


def test_ctrl_c_finishes_the_step_and_resume_gives_the_run_that_would_have_been(capsys, table, tmp_path):
    arguments = ["--data", str(table), "--target", "kind", "--noise-multiplier", "0", "--seed", "3"]
    arguments += ["--epochs", "20", "--batch-size", "100", "--device", "cpu"]
    stopped = RunFolder(tmp_path / "stopped")
    command = [sys.executable, "-m", "qclip", "train", *arguments, "--out", str(stopped.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "300"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        while child.poll() is None and len(stopped.steps()) < 6:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate()
    assert (child.returncode, err) == (130, "\nfinishing this step; Ctrl-C again stops at once\n")
    steps = stopped.summary().steps
    assert 6 <= steps < 80
    assert f"qclip train --resume --out {stopped.path}" in out
    assert len(stopped.steps()) == steps
    status, _, err = run(capsys, "--resume", "--out", stopped.path, "--lr", "0.3")
    assert (status, "--lr = 0.3 must be" in err) == (2, True)
    status, out, _ = run(capsys, "--resume", "--out", stopped.path)
    assert (status, f"resuming after step {steps}" in out) == (0, True)
    assert run(capsys, *arguments, "--out", tmp_path / "whole")[0] == 0
    assert stopped.metrics_file.read_bytes() == RunFolder(tmp_path / "whole").metrics_file.read_bytes()


def test_the_summary_is_what_was_promised(capsys, small, tmp_path):
    run(capsys, *small, "--out", tmp_path, "--seed", "5")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["command"].startswith("qclip train --data ")
    assert {"qclip", "torch", "python"} <= summary["versions"].keys()
    assert summary["settings"]["noise_multiplier"] == 16.0


def test_the_command_line_answers_without_loading_torch():
    code = "import sys, qclip.apps.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_missing_report_is_said_before_the_training(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("qclip.apps.cli.train.find_spec", lambda name: None)
    _, printed, _ = run(capsys, *small, "--out", tmp_path / "run")
    assert printed.index("there will be no report") < printed.index("epoch 1/2")
