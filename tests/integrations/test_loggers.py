"""Logs of W&B, MLflow and CSV files, and of any function: every logical step once, released values only."""

import csv

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import qclip
from qclip.integrations.csv import CsvLog
from qclip.integrations.mlflow import MlflowLog
from qclip.integrations.release_log import ReleaseLog, released
from qclip.integrations.wandb import WandbLog

GROUPS = {"the last layer": "2.*", "(rest)": "*"}


def make(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(torch.randn(60, 4), torch.randint(3, (60,)))
    settings = {"batch_size": 12, "steps": 6, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp", "seed": 0}
    return qclip.make_private(model, optimizer, data, loss=nn.CrossEntropyLoss(), **settings | changes)


def run(training, log, upto=6):
    for batch in training.loader:
        training.step(*batch)
        log.write(held_out={"accuracy": 0.5} if len(training.history) == upto else None)
        if len(training.history) == upto:
            break


def expected(training, prefix=""):
    """What a log of the whole run holds: {step: {name: value}}."""
    rows = {record.step: released(training, record) for record in training.history}
    rows[5]["held_out/accuracy"] = 0.5
    return {step: {prefix + name: value for name, value in row.items()} for step, row in rows.items()}


def test_any_function_of_values_and_step_can_write():
    training, rows = make(), {}
    run(training, ReleaseLog(training, lambda values, step: rows.setdefault(step, {}).update(values)))
    assert rows == expected(training)
    assert rows[3].keys() == {"tau", "noisy_unclipped", "step_size", "epsilon"}


def test_scores_without_a_new_step_are_written_with_the_last():
    training, rows = make(), []
    log = ReleaseLog(training, lambda values, step: rows.append((step, values)))
    run(training, log)
    rows.clear()
    log.write(held_out={"loss": 2})
    assert rows == [(5, {"held_out/loss": 2.0})]


def test_other_ranks_write_nothing(monkeypatch, tmp_path):
    training, rows = make(), []
    monkeypatch.setattr(type(training), "rank", 1)
    run(training, ReleaseLog(training, lambda values, step: rows.append(values)), 3)
    run(training, CsvLog(training, tmp_path / "run.csv"))
    WandbLog(training, None).write(held_out={"accuracy": 1.0})
    assert not rows
    assert not list(tmp_path.iterdir())


def test_the_raw_loss_needs_a_word_everywhere(tmp_path):
    training = make()
    loss = training.step(*next(iter(training.loader)))
    logs = [ReleaseLog(training, print), WandbLog(training, Run()), MlflowLog(training, Run())]
    for log in [*logs, CsvLog(training, tmp_path / "run.csv")]:
        with pytest.raises(qclip.Refusal, match="raw_loss=True"):
            log.write(raw_loss=loss)


class Run:
    """The calls that the loggers make."""

    def __init__(self):
        self.rows, self.axes = {}, {}

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, data):
        data = dict(data)
        self.rows[data.pop("qclip/step")] = data

    def log_metrics(self, metrics, step=None):
        assert step not in self.rows
        self.rows[step] = metrics


def test_weights_and_biases_gets_each_step_on_an_axis_of_its_own():
    training, there = make(groups=GROUPS), Run()
    run(training, WandbLog(training, there))
    assert there.axes == {"qclip/step": None, "qclip/*": "qclip/step"}
    assert there.rows == expected(training, "qclip/")


def test_weights_and_biases_itself(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    training = make()
    there = wandb.init(mode="offline", dir=tmp_path, project="qclip", settings=wandb.Settings(x_disable_stats=True))
    run(training, WandbLog(training, there))
    there.log({"something else": 1.0})
    last = dict(there.summary)
    there.finish()
    for name, value in expected(training, "qclip/")[5].items():
        assert last[name] == pytest.approx(value), name
    assert last["qclip/step"] == 5


def test_mlflow_gets_names_that_it_accepts():
    training, there = make(groups=GROUPS), Run()
    run(training, MlflowLog(training, there))
    assert {"qclip/tau/the last layer", "qclip/tau/_rest_"} <= there.rows[0].keys()
    assert [row["qclip/epsilon"] for row in there.rows.values()] == [
        row["epsilon"] for row in expected(training).values()
    ]


def test_mlflow_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow")
    training = make(groups=GROUPS)
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as there:
        run(training, MlflowLog(training, mlflow))
    client = mlflow.MlflowClient()
    for name in ("tau/the last layer", "tau/(rest)", "epsilon"):
        key = "qclip/" + name.replace("(", "_").replace(")", "_")
        found = [(metric.step, metric.value) for metric in client.get_metric_history(there.info.run_id, key)]
        assert found == [(step, row[name]) for step, row in expected(training).items()]


def read(path):
    with path.open(newline="") as stream:
        return {int(row.pop("step")): {n: float(x) for n, x in row.items() if x} for row in csv.DictReader(stream)}


def test_a_csv_file_has_a_line_for_each_step_and_a_column_for_each_value(tmp_path):
    training = make(groups=GROUPS)
    run(training, CsvLog(training, tmp_path / "run.csv"))
    assert read(tmp_path / "run.csv") == expected(training)
    assert (tmp_path / "run.csv").read_text().splitlines()[0].startswith("step,tau/the last layer,tau/(rest),")


def test_a_resumed_run_goes_on_in_its_csv_file(tmp_path):
    path = tmp_path / "run.csv"
    first = make()
    log = CsvLog(first, path)
    run(first, log, upto=2)
    first.save(tmp_path / "run.pt")
    run(first, log, upto=4)  # after the checkpoint: these steps are taken again
    second = make(seed=None)
    second.load(tmp_path / "run.pt")
    run(second, CsvLog(second, path))
    assert list(read(path)) == list(range(6))
    rows = expected(second)
    rows[1]["held_out/accuracy"] = 0.5
    assert read(path) == rows


def test_a_csv_file_of_another_run_is_not_overwritten(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,tau\n0,1.0\n")
    with pytest.raises(qclip.Refusal, match=r"run\.csv exists already; choose another file"):
        CsvLog(make(), path)
    assert path.read_text() == "step,tau\n0,1.0\n"
