"""Setting up a run: what is refused before any training, and what a refusal leaves as it was."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

from made_runs import made_summary
from qclip.apps import data
from qclip.apps.run_folder import RunFolder
from qclip.apps.trainer.run import free_folder, resume, start
from qclip.apps.trainer.settings import Settings
from qclip.thresholds import BalancedThreshold, PrivateQuantile


@pytest.fixture
def settings(table):
    return Settings(data=str(table), target="kind", noise_multiplier=16.0, epochs=1, batch_size=100)


@pytest.fixture
def finished(tmp_path):
    folder = RunFolder(tmp_path / "finished")
    folder.prepare()
    folder.append({"step": 0})
    folder.checkpoint_file.write_bytes(b"weights")
    folder.write_summary(made_summary(finished=True))
    return folder


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.path.iterdir()}


def test_what_was_left_out_is_filled_in(settings, tmp_path):
    run = start(settings, RunFolder(tmp_path))
    assert run.settings.delta == 1 / 4000
    assert run.settings.lr is None
    assert run.training.threshold == BalancedThreshold()


@pytest.mark.parametrize("given", [{"p": 0.7}, {"threshold": "private-quantile"}])
def test_whoever_asks_for_a_quantile_gets_one_on_a_table(settings, tmp_path, given):
    run = start(replace(settings, **given), RunFolder(tmp_path))
    assert run.training.threshold == PrivateQuantile(0.7)
    assert run.settings.tau is None


def test_another_run_is_not_written_over(settings, finished):
    before = contents(finished)
    with pytest.raises(ValueError, match=r"--out = .* holds a finished run; resume it"):
        start(settings, finished)
    finished.write_summary(made_summary(finished=False))
    with pytest.raises(ValueError, match="holds an unfinished run"):
        start(settings, finished)
    finished.write_summary(made_summary(finished=True))
    assert contents(finished) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epsilon": 1.0}, "--noise-multiplier"),
        ({"batch_size": 401}, r"--batch-size = 401 must be <= 400"),
        ({"target": "colour"}, "colour"),
        ({"data": "no-such.csv"}, "no-such.csv"),
        ({"columns": ("x",)}, r"--columns = 'x' must be NAME=KIND"),
        ({"device": "quantum"}, r"--device = 'quantum' does not work here"),
    ],
    ids=["contradiction", "batch-size", "target", "file", "columns", "device"],
)
def test_a_refused_start_loses_nothing_of_the_run_it_would_have_replaced(settings, finished, wrong, message):
    before = contents(finished)
    with pytest.raises(ValueError, match=message):
        start(replace(settings, **wrong), finished, overwrite=True)
    assert contents(finished) == before


def test_overwriting_removes_the_files_of_the_run_and_no_others(settings, finished):
    (finished.path / "notes.txt").write_text("mine")
    start(settings, finished, overwrite=True)
    assert set(contents(finished)) == {"notes.txt"}


def test_a_finished_run_is_not_resumed_and_a_folder_without_one_is_named(finished, tmp_path):
    with pytest.raises(ValueError, match="holds a finished run, which cannot be resumed"):
        resume(Settings(), finished)
    with pytest.raises(ValueError, match=r"empty.* is not the folder of a run"):
        resume(Settings(), RunFolder(tmp_path / "empty"))
    whole = made_summary(finished=False).as_json()
    finished.summary_file.write_text(json.dumps({key: whole[key] for key in whole if key != "settings"}))
    with pytest.raises(ValueError, match=r"summary\.json has no settings"):
        resume(Settings(), finished)


def test_labels_without_an_output_are_refused(settings, tmp_path, monkeypatch):
    task = data.load(str(settings.data), target="kind")
    for label, shown in ((7, "7"), (-1, "-1")):
        inputs, targets = task.train.tensors
        bad = targets.clone()
        bad[3] = label
        broken = replace(task, train=TensorDataset(inputs, bad))
        monkeypatch.setattr(data, "load", lambda *_, broken=broken, **__: broken)
        with pytest.raises(ValueError, match=rf"label = {shown} must be in 0 \.\. 1"):
            start(settings, RunFolder(tmp_path))


def test_numbers_are_foretold_without_classes(settings, tmp_path):
    run = start(replace(settings, target="x", columns=("x=-5:10",)), RunFolder(tmp_path))
    assert "loss" in run.task.score(run.model)


def test_the_global_generator_is_left_alone(settings, tmp_path):
    before = torch.get_rng_state()
    start(replace(settings, seed=3), RunFolder(tmp_path))
    assert torch.equal(before, torch.get_rng_state())


def test_where_no_folder_is_named_a_free_one_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = free_folder(Settings(data="x/points.csv.gz"))
    assert first.path.as_posix() == "out/points"
    first.prepare()
    first.write_summary(made_summary())
    assert free_folder(Settings(data="points.csv")).path.as_posix() == "out/points-2"
    assert free_folder(Settings()).path.as_posix() == "out/digits"
