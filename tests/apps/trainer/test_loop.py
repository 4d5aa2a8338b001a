"""Training into a folder: what is written, and that a run which was stopped is the run that would have been."""

import io
import json
import math
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from rich.console import Console

from qclip import theory
from qclip.apps.run_folder import RunFolder
from qclip.apps.trainer.interrupt import Interrupt
from qclip.apps.trainer.loop import train
from qclip.apps.trainer.run import QUANTILES, resume, start
from qclip.apps.trainer.screen import Screen
from qclip.apps.trainer.settings import Settings
from qclip.thresholds import GeometricQuantile
from qclip.training import checkpoint

LINE = {"step", "tau", "noisy_unclipped", "step_size", "noise_power", "clipped_length", "lost", "epsilon"}
STEPS, PER_EPOCH = 12, 4
NOISE = 4.0


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def settings(table):
    return Settings(
        data=str(table),
        target="kind",
        noise_multiplier=NOISE,
        delta=1e-3,
        epochs=3,
        batch_size=100,
        lr=0.2,
        p=0.5,
        seed=7,
    )


@dataclass
class Watched:
    """A screen that keeps what it is shown, and asks for a stop at a step, politely or not."""

    stop_at: int | None = None
    rudely: bool = False
    interrupt: Interrupt = field(default_factory=Interrupt)
    raw_losses: list = field(default_factory=list)
    scores: list = field(default_factory=list)
    warnings: list = field(default_factory=list)

    def step(self, line, raw_loss):
        self.raw_losses.append(raw_loss)
        if line["step"] == self.stop_at:
            self.interrupt.asked = True
            if self.rudely:
                raise KeyboardInterrupt

    def score(self, line):
        self.scores.append(line)

    def warn(self, text):
        self.warnings.append(text)


def go(run, **how):
    screen = Watched(**how)
    return train(run, screen, screen.interrupt), screen


def whole(settings, path):
    run = start(settings, RunFolder(path))
    assert go(run)[0]
    return run


@pytest.fixture(scope="module")
def uninterrupted(settings, tmp_path_factory):
    return whole(settings, tmp_path_factory.mktemp("whole"))


def same(run, other):
    """Whether two runs are one: parameters, record, metrics and summary, but for the time they took."""
    assert run.training.history == other.training.history
    for mine, others in zip(run.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, others, rtol=0, atol=0)
    assert run.folder.metrics_file.read_bytes() == other.folder.metrics_file.read_bytes()
    mine, others = (replace(each.folder.summary(), seconds=0.0, seeded=False, date="") for each in (run, other))
    assert mine == others


def test_the_folder_of_a_run(settings, tmp_path):
    run = start(settings, RunFolder(tmp_path))
    done, screen = go(run)
    assert done
    steps, scores, summary = run.folder.steps(), run.folder.scores(), run.folder.summary()
    assert [line["step"] for line in steps] == list(range(STEPS))
    assert all(line.keys() == LINE for line in steps)
    assert [tuple(line["tau"]) for line in steps] == [record.tau for record in run.training.history]
    assert [(line["step"], line["epoch"]) for line in scores] == [(4, 1), (8, 2), (12, 3)]
    assert scores == screen.scores
    assert summary.epsilon == run.training.epsilon() == pytest.approx(steps[-1]["epsilon"])
    assert all(a["epsilon"] <= b["epsilon"] for a, b in pairwise(steps))
    assert summary.held_out == scores[-1]["held_out"] == run.task.score(run.model)
    assert summary.accuracy == summary.held_out["accuracy"]
    expected = {
        "finished": True, "private": True, "steps": STEPS, "num_steps": STEPS, "examples": 400, "batch_size": 100,
        "sample_rate": 0.25, "noise_multiplier": NOISE, "delta": 1e-3, "task": "points", "certificate": None,
        "seeded": True,
    }  # fmt: skip
    assert {key: getattr(summary, key) for key in expected} == expected
    assert summary.threshold["name"] == "PrivateQuantile"
    assert summary.parameters == sum(p.numel() for p in run.model.parameters())
    assert summary.gradient_noise_multiplier >= NOISE


@pytest.mark.parametrize("stop_at", [0, 3, 5, 10])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(settings, uninterrupted, tmp_path, stop_at):
    folder = RunFolder(tmp_path / "parts")
    done, _ = go(start(settings, folder), stop_at=stop_at)
    assert not done
    summary = folder.summary()
    assert (summary.steps, summary.finished) == (stop_at + 1, False)
    taken_up = resume(Settings(), folder)
    assert summary.epsilon == taken_up.training.epsilon()
    assert go(taken_up)[0]
    same(taken_up, uninterrupted)


@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": "adam", "lr": 0.05},
        {"physical_batch_size": 30},
        {"groups": "per-layer", "threshold": "geometric"},
        {"threshold": "slack", "batch_size": 200, "epochs": 6},
        {"threshold": "histogram"},
        {"threshold": "rolling"},
        {"threshold": "exact", "noise_multiplier": 0.0},
        {"threshold": "constant", "tau": 0.5, "p": None, "write_raw_loss": True},
    ],
    ids=["adam", "physical", "groups", "slack", "histogram", "rolling", "exact", "constant"],
)
def test_every_kind_of_run_goes_on_as_it_would_have(settings, tmp_path, other):
    settings = replace(settings, **other)
    uninterrupted = whole(settings, tmp_path / "whole")
    folder = RunFolder(tmp_path / "parts")
    go(start(settings, folder), stop_at=5)
    taken_up = resume(Settings(), folder)
    assert go(taken_up)[0]
    same(taken_up, uninterrupted)


def test_a_run_does_not_go_on_with_rows_that_changed(settings, tmp_path):
    file = tmp_path / "points.csv"
    shutil.copy(settings.data, file)
    folder = RunFolder(tmp_path / "run")
    go(start(replace(settings, data=str(file)), folder), stop_at=5)
    header, held_out, first, *rest = rows = file.read_text().splitlines()
    other = first[:-1] + {"a": "b", "b": "a"}[first[-1]]
    file.write_text("\n".join([header, held_out, other, *rest]) + "\n")  # as many rows, columns and classes
    before = folder.metrics_file.read_bytes()
    with pytest.raises(ValueError, match=r"dataset has changed .* put back the data that the run began with"):
        resume(Settings(), folder)
    assert folder.metrics_file.read_bytes() == before
    file.write_text("\n".join(rows) + "\n")
    resume(Settings(), folder)


@pytest.mark.parametrize("stop_at", [0, 3, 6, 11])
def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(settings, uninterrupted, tmp_path, stop_at):
    folder = RunFolder(tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        go(start(settings, folder), stop_at=stop_at, rudely=True)
    with folder.metrics_file.open("a") as stream:
        stream.write('{"step": 7, "tau": [0.')  # the line that was being written
    taken_up = resume(Settings(), folder)
    assert len(taken_up.training.history) == stop_at // PER_EPOCH * PER_EPOCH
    assert go(taken_up)[0]
    same(taken_up, uninterrupted)


def test_a_run_killed_between_its_last_checkpoint_and_its_summary_is_completed(settings, uninterrupted, tmp_path):
    folder = RunFolder(tmp_path / "parts")
    run = whole(settings, folder.path)
    folder.write_summary(replace(folder.summary(), finished=False, steps=8))
    run = resume(Settings(), folder)
    assert go(run)[0]
    same(run, uninterrupted)


def test_without_a_seed_the_checkpoint_still_decides_what_follows(settings, tmp_path):
    settings = replace(settings, seed=None)
    go(start(settings, RunFolder(tmp_path / "a")), stop_at=5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    runs = [resume(Settings(), RunFolder(tmp_path / name)) for name in "ab"]
    for run in runs:
        go(run)
    same(*runs)
    fresh = whole(settings, tmp_path / "c")
    assert fresh.training.history[0] != runs[0].training.history[0]


def test_no_file_but_the_checkpoint_knows_the_seed(settings, tmp_path):
    run = whole(replace(settings, seed=987654321), tmp_path)
    for file in (run.folder.summary_file, run.folder.metrics_file):
        assert "987654321" not in file.read_text()
    assert checkpoint.read(run.folder.checkpoint_file)["training"]["secrets"] is None  # nor does that, at the end


def test_the_seed_decides_everything(settings, uninterrupted, tmp_path):
    same(whole(settings, tmp_path / "a"), uninterrupted)
    other = whole(replace(settings, seed=8), tmp_path / "b")
    assert other.folder.metrics_file.read_bytes() != uninterrupted.folder.metrics_file.read_bytes()


def test_the_raw_loss_is_written_on_request_only(settings, uninterrupted, tmp_path):
    run = start(replace(settings, write_raw_loss=True, physical_batch_size=30), RunFolder(tmp_path / "a"))
    _, screen = go(run)
    assert [line["raw_loss"] for line in run.folder.steps()] == screen.raw_losses
    assert "raw_loss" not in uninterrupted.folder.metrics_file.read_text()
    # The mean over the examples of a step, however they are cut.
    whole_steps = whole(replace(settings, write_raw_loss=True), tmp_path / "c").folder.steps()
    assert [line["raw_loss"] for line in whole_steps] == pytest.approx(screen.raw_losses, rel=1e-4)


def test_the_raw_loss_is_shown_on_a_terminal_and_nowhere_else():
    line = {"step": 0, "tau": [0.5], "noisy_unclipped": [0.4], "step_size": 1.0, "lost": ["flat"], "epsilon": 0.5}
    shown = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120, legacy_windows=False)
        with Screen(console, STEPS, 0, 3) as screen:
            screen.step(line, 0.777)
            screen.score({"step": 4, "epoch": 1, "held_out": {"accuracy": 0.5}, "epsilon": None})
            screen.warn("raw")
        shown[terminal] = console.file.getvalue()
    assert "raw_loss (not private) 0.777" in shown[True]
    assert "tau 0.5 (lost)  unclipped 0.40" in shown[True]
    assert "raw" in shown[True]
    assert shown[False] == "epoch 1/3  step 4/12  held-out accuracy 0.5  epsilon infinite\n"


def test_it_learns(settings, tmp_path):
    run = whole(replace(settings, noise_multiplier=0.0, lr=2.0), tmp_path)
    assert run.held_out["accuracy"] > 0.9


def test_without_noise_epsilon_is_infinite_and_written_as_null(settings, tmp_path):
    summary = whole(replace(settings, noise_multiplier=0.0), tmp_path).folder.summary()
    assert (summary.epsilon, summary.private) == (None, False)
    assert all(line["epsilon"] is None for line in RunFolder(tmp_path).steps())


def test_the_certificate_of_a_run(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(QUANTILES, "geometric", partial(GeometricQuantile, initial=3.0))  # near the quantile
    asked = replace(settings, noise_multiplier=0.0, threshold="geometric", lr=0.05, L=1.0, sigma=1.0, gap=1.0)
    run = whole(replace(asked, plain_steps=True), tmp_path)
    found = run.folder.summary().certificate
    bound = run.training.certificate(theory.Assumptions(L=1, sigma=1, q=2, gap=1))
    assert (found.total, found.theorem, found.mean) == (bound.total, bound.theorem, bound.mean)
    assert (found.this_run, found.confidence) == (bound.this_run and bound.this_run.total, 0.95)


def test_a_certificate_that_cannot_be_had_does_not_cost_the_run(settings, tmp_path):
    run = whole(replace(settings, lr=None, L=1.0, sigma=1.0, gap=1.0), tmp_path)
    summary = run.folder.summary()
    assert summary.finished
    assert summary.certificate is None
    assert "found from the gradient of that step itself" in summary.certificate_refused


def test_a_run_with_defaults_says_what_a_certificate_would_need(settings, tmp_path, monkeypatch):
    """The constants of the loss, and a learning rate that does not follow from the step's own gradient."""
    refused = whole(replace(settings, lr=None), tmp_path / "a").folder.summary().certificate_refused
    assert "were not given (--L, --sigma, --gap)" in refused
    assert "found from the gradient of that step itself" in refused
    monkeypatch.setitem(QUANTILES, "geometric", partial(GeometricQuantile, initial=3.0))  # near the quantile
    given = replace(settings, threshold="geometric", lr=0.5)
    assert whole(given, tmp_path / "b").folder.summary().certificate_refused.endswith("(--L, --sigma, --gap)")
    certified = whole(replace(given, L=0.01, sigma=1.0, gap=1.0), tmp_path / "c").folder.summary().certificate
    assert certified.theorem == "normalized steps, section 18"


def test_parameters_that_are_lost_stop_the_run_and_keep_its_checkpoint(settings, uninterrupted, tmp_path):
    folder = RunFolder(tmp_path)
    run = start(settings, folder)
    go(run, stop_at=4)
    run = resume(Settings(), folder)
    with torch.no_grad():
        next(run.model.parameters())[0] = math.inf
    with pytest.raises(ValueError, match=r"not finite|finite; .*lower"):
        go(run)
    assert (folder.summary().steps, folder.summary().finished) == (5, False)
    good = resume(Settings(), folder)
    assert all(p.isfinite().all() for p in good.model.parameters())
    go(good)
    same(good, uninterrupted)


def test_a_step_size_that_makes_the_parameters_overflow_is_named(settings, tmp_path):
    with pytest.raises(ValueError, match=r"must be finite; .*lower --lr than 1e\+38"):
        whole(replace(settings, lr=1e38, plain_steps=True, threshold="constant", tau=100.0, p=None), tmp_path)
    assert RunFolder(tmp_path).summary().steps == 0
    assert RunFolder(tmp_path).checkpoint_file.exists()


def test_a_held_out_loss_that_is_not_finite_stops_the_run(settings, tmp_path):
    run = start(settings, RunFolder(tmp_path))
    run.task = replace(run.task, score=lambda _: {"accuracy": 0.1, "loss": math.nan})
    with pytest.raises(ValueError, match=r"held-out loss = nan must be finite; .*lower --lr"):
        go(run)
    assert RunFolder(tmp_path).scores() == []
    assert RunFolder(tmp_path).summary().steps == 0


def test_a_training_example_without_a_finite_loss_is_mentioned_and_trained_past(settings, tmp_path):
    run = start(replace(settings, batch_size=400, epochs=5), RunFolder(tmp_path))
    run.task.train.tensors[0][5] = math.nan
    done, screen = go(run)
    assert done
    assert ["not finite" in text for text in screen.warnings] == [True]
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_metrics_are_json_without_extensions(settings, tmp_path):
    run = whole(replace(settings, noise_multiplier=0.0, write_raw_loss=True), tmp_path)
    for line in [*run.folder.metrics_file.read_text().splitlines(), run.folder.summary_file.read_text()]:
        json.loads(line, parse_constant=pytest.fail)
