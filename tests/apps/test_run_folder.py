"""The folder of a run: what is written can be read, and no interruption leaves half of it."""

import json
import math
import os
from pathlib import Path

import pytest

from made_runs import made_summary
from qclip.apps.run_folder import RunFolder


def step(number):
    return {"step": number, "tau": [0.1], "noisy_unclipped": [], "step_size": 2.0, "epsilon": 0.5}


def score(done):
    return {"step": done, "epoch": 1, "held_out": {"accuracy": 0.5}, "epsilon": 0.5}


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.prepare()
    return folder


def test_lines_come_back_as_steps_and_scores(folder):
    for line in (step(0), step(1), score(2), step(2)):
        folder.append(line)
    assert folder.steps() == [step(0), step(1), step(2)]
    assert folder.scores() == [score(2)]


def test_truncating_keeps_the_scores_of_the_steps_that_are_kept(folder):
    for line in (step(0), step(1), score(2), step(2), step(3), score(4)):
        folder.append(line)
    folder.truncate(2)
    assert (folder.steps(), folder.scores()) == ([step(0), step(1)], [score(2)])
    folder.truncate(0)
    assert folder.metrics_file.read_text() == ""


def test_truncating_refuses_metrics_that_lack_steps(folder):
    folder.append(step(0))
    before = folder.metrics_file.read_text()
    with pytest.raises(ValueError, match="has 1 of the checkpoint's 2 steps"):
        folder.truncate(2)
    assert folder.metrics_file.read_text() == before


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_refused(folder):
    folder.append(step(0))
    with folder.metrics_file.open("a") as stream:
        stream.write('{"step": 1, "ta')
    assert folder.steps() == [step(0)]
    folder.truncate(1)
    folder.append(step(1))
    assert folder.steps() == [step(0), step(1)]
    folder.metrics_file.write_text('{"step": \n{}\n')
    with pytest.raises(ValueError, match=r"line 1 = .* must be a JSON object with a step"):
        folder.steps()


def test_what_json_cannot_say_is_null(folder):
    folder.append({"step": 0, "epsilon": math.inf, "tau": (1.0, math.nan), "where": Path("a/b")})
    (line,) = folder.metrics_file.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 0, "epsilon": None, "tau": [1.0, None], "where": "a/b",
    }  # fmt: skip


def test_an_interrupted_summary_leaves_the_old_one(folder, monkeypatch):
    folder.write_summary(made_summary(steps=1))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.write_summary(made_summary(steps=2))
    assert folder.summary() == made_summary(steps=1)


@pytest.mark.parametrize("content", ["{", "[1]", "", "{}"], ids=["torn", "list", "empty", "nothing"])
def test_a_summary_that_is_none_is_refused(folder, content):
    with pytest.raises(ValueError, match=r"not the folder of a run, with a summary\.json"):
        folder.summary()
    folder.summary_file.write_text(content)
    with pytest.raises(ValueError, match=r"summary\.json (is not|has no)"):
        folder.summary()


def test_holds_run_and_clear(folder):
    other = folder.path / "notes.txt"
    other.write_text("mine")
    assert not folder.holds_run
    folder.append(step(0))
    assert folder.holds_run
    folder.write_summary(made_summary())
    folder.clear()
    assert not folder.holds_run
    assert other.read_text() == "mine"


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for path in (blocked, blocked / "below"):
        with pytest.raises(ValueError, match=r"--out = .* is not usable: .*file is a file"):
            RunFolder(path).refuse_unwritable()
    assert blocked.read_text() == "in the way"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    for path in (closed, closed / "a" / "b"):
        with pytest.raises(ValueError, match="closed is not writable"):
            RunFolder(path).refuse_unwritable()


def test_asking_whether_a_folder_can_be_written_to_makes_nothing(tmp_path, monkeypatch):
    RunFolder(tmp_path / "a" / "b").refuse_unwritable()
    monkeypatch.chdir(tmp_path)
    RunFolder(Path("c") / "d").refuse_unwritable()
    assert list(tmp_path.iterdir()) == []
