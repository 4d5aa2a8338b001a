"""Run folders and reports of runs that were made in Python: what `qclip train` would have written."""

import json
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import qclip
from qclip.apps import ledger
from qclip.apps.cli import main
from qclip.apps.report.compare import compare
from qclip.apps.report.record import read
from qclip.apps.run_folder import RunFolder


def make(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(torch.randn(60, 4), torch.randint(3, (60,)))
    settings = {"batch_size": 12, "epochs": 2, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp", "seed": 0}
    return qclip.make_private(model, optimizer, data, loss=nn.CrossEntropyLoss(), **settings | changes)


def train(training, log=None, upto=10):
    while len(training.history) < upto:
        for batch in training.loader:
            training.step(*batch)
            if log is not None and len(training.history) % 5 == 0:
                log.write(held_out={"accuracy": len(training.history) / 10, "loss": 1.0})
            if len(training.history) == upto:
                break
    return training


def test_a_folder_holds_the_run_and_its_scores(tmp_path):
    training = make()
    train(training, qclip.RunLog(training, tmp_path / "mine", description="Points & classes."))
    record = read(tmp_path / "mine")
    assert record.taus[:, 0].tolist() == [step.tau[0] for step in training.history]
    assert record.noisy_unclipped[:, 0].tolist() == [step.noisy_unclipped[0] for step in training.history]
    assert [(score.step, score.epoch, score.values["accuracy"]) for score in record.scores] == [
        (5, 1, 0.5),
        (10, 2, 1.0),
    ]
    summary = record.summary
    assert (record.finished, record.epsilon) == (True, training.epsilon())
    assert (summary.task, summary.description, summary.unit) == ("Sequential", "Points & classes.", "any one example")
    assert (summary.parameters, summary.examples, summary.batch_size, summary.accuracy) == (67, 60, 12, 1.0)
    assert summary.settings["epochs"] == 2
    assert summary.settings["optimizer"] == "sgd"
    assert summary.settings["lr"] == 0.5
    assert "seed" not in json.dumps(summary.settings)


def test_the_command_line_compares_it_with_a_run_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    training = make()
    train(training, qclip.RunLog(training, "mine"))
    other = make(noise_multiplier=1.2, epochs=3)
    qclip.RunLog(train(other, upto=15), "other").write(held_out={"accuracy": 0.2})
    assert main(["report", "mine", "other"]) == 0
    assert "mine" in capsys.readouterr().out
    comparison = compare([tmp_path / "mine", tmp_path / "other"])
    assert comparison.differences() == {"epochs": "2 (mine); 3 (other)"}
    together = ledger.read([tmp_path])
    assert [(run.steps, run.noise_multiplier) for run in together.runs] == [(10, 1.0), (15, 1.2)]


def test_settings_that_only_the_command_line_has_do_not_count_as_different(tmp_path):
    for name in "ab":
        train(make(), log := qclip.RunLog(make(), tmp_path / name, settings={"width": 8 if name == "a" else 9}))
        log.write()
    assert compare([tmp_path / "a", tmp_path / "b"]).differences() == {"width": "8 (a); 9 (b)"}
    for name in "cd":
        log = qclip.RunLog(make(), tmp_path / name, settings={"width": 8} if name == "c" else {})
        log.write()
    assert compare([tmp_path / "c", tmp_path / "d"]).differences() == {}


def test_a_report_of_a_run_in_memory(tmp_path):
    training = train(make(), upto=5)
    path = training.report(tmp_path / "pages" / "report.html", held_out={"accuracy": 0.75}, task="points")
    assert path == tmp_path / "pages" / "report.html"
    page = path.read_text(encoding="utf-8")
    assert "Training on points" in page
    assert "<td>0.75</td>" in page.replace(' class="number"', "")
    assert "This run is not finished: 5 of 10 steps" in page
    assert "came from a given seed" in page
    assert "<h2>Command</h2>" not in page
    assert list(tmp_path.rglob("*")) == [path.parent, path]
    assert qclip.report(training, tmp_path / "again.html").exists()


def test_a_report_in_the_folder(tmp_path):
    training = make(seed=None)
    log = qclip.RunLog(training, tmp_path / "mine")
    train(training)
    assert log.report() == tmp_path / "mine" / "report.html"
    assert len(RunFolder(tmp_path / "mine").steps()) == 10
    assert "given seed" not in log.folder.report_file.read_text(encoding="utf-8")


def test_a_run_without_privacy_says_so(tmp_path):
    training = train(make(noise_multiplier=0, threshold=qclip.ExactQuantile(0.5)))
    assert "is <b>not private</b>" in training.report(tmp_path / "r.html").read_text(encoding="utf-8")


def test_nothing_raw_is_written(tmp_path):
    """The files of two runs that differ in the data alone have the same fields, and no loss of the training."""
    training = make()
    log = qclip.RunLog(training, tmp_path / "mine")
    for batch in training.loader:
        loss = training.step(*batch)
        log.write()
        text = "".join(file.read_text() for file in (tmp_path / "mine").iterdir())
        assert f"{loss.item():.6g}" not in text
    steps = RunFolder(tmp_path / "mine").steps()
    released = {"step", "tau", "noisy_unclipped", "step_size", "noise_power", "clipped_length", "lost", "epsilon"}
    assert {key for step in steps for key in step} == released


def test_a_resumed_run_goes_on_in_its_folder(tmp_path):
    first = make()
    log = qclip.RunLog(first, tmp_path / "mine")
    train(first, log, upto=5)
    first.save(tmp_path / "run.pt")
    train(first, upto=8)
    log.write(held_out={"accuracy": 0.8})  # after the checkpoint
    second = make(seed=None)
    second.load(tmp_path / "run.pt")
    train(second, qclip.RunLog(second, tmp_path / "mine"))
    record = read(tmp_path / "mine")
    assert record.steps.tolist() == list(range(10))
    assert [score.step for score in record.scores] == [5, 10]
    assert record.taus[:, 0].tolist() == [step.tau[0] for step in second.history]
    assert record.summary.seeded  # the first run was


def test_a_folder_of_another_run_is_kept(tmp_path):
    folder = tmp_path / "mine"
    training = make()
    train(training, qclip.RunLog(training, folder))
    for other in (make(), train(make(seed=1), upto=3)):
        with pytest.raises(qclip.Refusal, match=r"folder = .*mine' holds another run: .*overwrite=True"):
            qclip.RunLog(other, folder)
    assert len(RunFolder(folder).steps()) == 10
    qclip.RunLog(other, folder, overwrite=True).write()
    assert len(RunFolder(folder).steps()) == 3


def test_arguments_are_checked(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(qclip.Refusal, match=r"folder = .*file' is not usable"):
        qclip.RunLog(make(), tmp_path / "file")
    log = qclip.RunLog(make(), tmp_path / "mine")
    with pytest.raises(qclip.Refusal, match=r"held_out\['loss'\] = nan must be finite"):
        log.write(held_out={"loss": float("nan")})
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        make().report(tmp_path / "r.html", colour="red")


def test_units_of_several_rows_are_named(tmp_path):
    training = make(rows_per_example=2)
    assert training.settings["rows_per_example"] == 2
    log = qclip.RunLog(training, tmp_path / "rows")
    log.write()
    assert log.folder.summary().unit == "any one example of 2 rows"
    shutil.rmtree(tmp_path / "rows")
    qclip.RunLog(training, tmp_path / "rows", unit="any one patient").write()
    assert log.folder.summary().unit == "any one patient"


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    training = make()
    monkeypatch.setattr(type(training), "rank", 1)
    log = qclip.RunLog(training, tmp_path / "mine")
    train(training, log)
    assert log.report() == tmp_path / "mine" / "report.html"
    assert not list(tmp_path.iterdir())
