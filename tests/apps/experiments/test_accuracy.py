"""The accuracy experiment: what it runs, what it remembers, and how it judges."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("sklearn")  # for the digits

from qclip import accounting
from qclip.apps.cli import main
from qclip.apps.experiments import accuracy_runs
from qclip.apps.experiments.accuracy import accuracy, best
from qclip.apps.experiments.accuracy_runs import Job, LateDecay, Run, RunFile
from qclip.apps.experiments.accuracy_settings import AccuracySettings
from qclip.apps.experiments.accuracy_table import difference, verdict
from qclip.training.auto_step_size import AutoStepSize

# Calibrating the noise is quick for large noise.
SMALL = AccuracySettings(epsilon=1.0, epochs=1, rates=(1.0, 3.0), quantiles=(0.5, 0.7), constants=(1.0, 0.1), seeds=2)
JOB = Job("digits", 256, 1, 1e-5, 1.0, "balanced", None, None, seed=0)


def runs_with(accuracies, first_seed=100):
    return [Run(replace(JOB, seed=first_seed + k), accuracy=x, loss=1.0) for k, x in enumerate(accuracies)]


def lines(folder):
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished experiment, with its table."""
    settings = replace(SMALL, out=tmp_path_factory.mktemp("accuracy"), also_epsilon=(1.5,), reference_rates=(0.01,))
    return settings, accuracy(settings, say=lambda text: None)


def test_every_stage_runs_at_its_budget(finished):
    settings, _ = finished
    jobs = [Job(**row["job"]) for row in lines(settings.out)]
    balanced = [job for job in jobs if job.family == "balanced"]
    automatic = [(job.epsilon, job.seed) for job in balanced if job.rate is None]
    assert automatic == [(1.0, 100), (1.0, 101), (1.5, 100), (1.5, 101)]
    assert [job.rate for job in balanced if job.seed == 0] == [1.0, 3.0]
    (best_rate,) = {job.rate for job in balanced if job.seed > 0 and job.rate is not None}
    for family, grid in (("quantile", [0.5, 0.7]), ("constant", [1.0, 0.1])):
        of_family = [job for job in jobs if job.family == family]
        assert {job.rate for job in of_family} == {best_rate}
        assert [job.value for job in of_family if job.seed == 0] == grid
        again = [job for job in of_family if job.seed > 0]
        assert len({job.value for job in again}) == 1
        assert {(job.epsilon, job.seed) for job in again} == {(e, seed) for e in (1.0, 1.5) for seed in (100, 101)}
    assert [(job.family, job.epsilon) for job in jobs if job.epsilon is None] == [("unclipped", None)]
    assert len(jobs) == len(set(jobs)) == 4 + 2 + 1 + 4 + 4 + 8
    for row in lines(settings.out):
        epsilon = row["job"]["epsilon"]
        if epsilon is not None:
            spent = accounting.epsilon(
                noise_multiplier=row["noise_multiplier"], sample_rate=256 / 1497, steps=row["steps"], delta=1e-5
            )
            assert 0.99 * epsilon < spent <= epsilon


def test_the_best_of_a_grid_is_what_is_run_again(finished):
    settings, _ = finished
    file = RunFile(settings.out / "runs.jsonl")
    rates = [file.get(replace(JOB, rate=rate)) for rate in settings.rates]
    winner = best(rates, settings)
    assert winner.accuracy == max(run.accuracy for run in rates)
    assert file.get(replace(winner.job, seed=100)) is not None


def test_the_table_shows_each_stage(finished):
    settings, table = finished
    assert (settings.out / "table.md").read_text() == table
    for text in ("| nothing | 0 | balanced |", "| learning rate, p | 4 | p = ", "Epsilon = 1.5", "Without privacy"):
        assert text in table
    assert "23 runs, 0 of them failed" in table
    assert "qclip experiment accuracy --epsilon 1 --also-epsilon 1.5 --epochs 1 --rates 1 3" in table
    assert str(settings.out) not in table


def test_the_figure(finished):
    pytest.importorskip("matplotlib")
    settings, _ = finished
    assert not (settings.out / "accuracy.png").exists()
    accuracy(replace(settings, figure=True), say=pytest.fail)
    assert (settings.out / "accuracy.png").stat().st_size > 1000


def test_a_second_call_runs_nothing(finished, monkeypatch):
    settings, table = finished
    monkeypatch.setattr(accuracy_runs, "train", None)
    assert accuracy(settings, say=pytest.fail) == table


def test_after_a_kill_only_what_is_missing_is_run(finished, tmp_path):
    settings, _ = finished
    whole = (settings.out / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join(whole[:5] + whole[7:-1]) + whole[-1][:40])
    said = []
    again = replace(settings, out=tmp_path)
    accuracy(again, say=said.append)
    assert len(said) == 3
    redone = {Job(**row["job"]): (row["accuracy"], row["loss"], row["tau"]) for row in lines(tmp_path)}
    before = {Job(**row["job"]): (row["accuracy"], row["loss"], row["tau"]) for row in lines(settings.out)}
    assert redone == before


def test_a_table_of_what_is_there(finished, tmp_path, monkeypatch):
    settings, _ = finished
    whole = (settings.out / "runs.jsonl").read_text().splitlines(keepends=True)
    monkeypatch.setattr(accuracy_runs, "train", None)
    for kept in (0, 3, 8, len(whole) - 2):
        (tmp_path / "runs.jsonl").write_text("".join(whole[:kept]))
        table = accuracy(replace(settings, out=tmp_path, table_only=True), say=pytest.fail)
        assert "**Incomplete**: at least " in table
        assert f"{kept} runs, 0 of them failed" in table


def test_a_refusal_is_a_failed_run(tmp_path):
    """At epsilon = 0.01 the noise drowns the histogram of the balanced threshold, which is refused."""
    settings = replace(SMALL, epsilon=0.01, rates=(1.0,), quantiles=(0.5,), constants=(1.0,), out=tmp_path)
    table = accuracy(settings, say=lambda text: None)
    errors = [row["error"] for row in lines(tmp_path)]
    assert len(errors) == 3
    assert all("noise" in error for error in errors)
    assert "3 runs, 3 of them failed" in table


def test_a_loss_that_is_not_finite_is_a_failed_run(monkeypatch):
    monkeypatch.setattr(accuracy_runs, "held_out_scores", lambda *_: {"accuracy": 0.1, "loss": math.nan})
    run = accuracy_runs.train(SMALL, JOB, noise_multiplier=1.0)
    assert run.error.startswith("diverged")
    assert math.isnan(run.accuracy)


def test_other_errors_are_no_results(tmp_path, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(accuracy_runs, "held_out_scores", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        accuracy(replace(SMALL, out=tmp_path), say=lambda text: None)
    assert not (tmp_path / "runs.jsonl").exists()


@pytest.mark.slow
def test_processes_give_the_same_runs(finished, tmp_path):
    settings, _ = finished
    accuracy(replace(settings, workers=2, out=tmp_path), say=lambda text: None)
    ours, theirs = ({Job(**row["job"]): row["loss"] for row in lines(folder)} for folder in (tmp_path, settings.out))
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_a_kill_ends_the_processes_and_the_next_call_goes_on(finished, tmp_path):
    """Processes that outlive the command would keep the memory of the device; they hold its output open, too."""
    settings, _ = finished
    words = [sys.executable, "-m", *replace(settings, workers=2).command.split(), "--out", tmp_path]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as command:
        assert command.stdout.readline().startswith(b"1/")
        command.kill()
        command.communicate(timeout=30)  # until the last process has closed it
    before = len(lines(tmp_path))
    assert 1 <= before < len(lines(settings.out))
    said = []
    accuracy(replace(settings, out=tmp_path), say=said.append)
    assert len(said) == len(lines(settings.out)) - before


def test_worse_is_beyond_the_margin_and_two_standard_errors():
    theirs = runs_with([0.80, 0.82, 0.81, 0.79])
    ours = runs_with([0.795, 0.812, 0.805, 0.782])  # differences -0.5, -0.8, -0.5, -0.8: -0.65 with error 0.087
    measured = difference(ours, theirs)
    assert measured.points == pytest.approx(-0.65)
    assert measured.error == pytest.approx(math.sqrt(0.03 / 4))
    assert verdict(ours, theirs, 0.3) == "-0.65 ± 0.09, worse by more than 0.3"
    assert verdict(ours, theirs, 1.0) == "-0.65 ± 0.09, not worse"
    noisy = runs_with([0.85, 0.76, 0.80, 0.75])
    assert verdict(noisy, theirs, 0.3).endswith("not worse")


def test_seeds_are_paired():
    theirs = runs_with([0.5, 0.9, 0.7])
    ours = runs_with([0.51, 0.91, 0.71])[::-1]
    assert difference(ours, theirs).error == pytest.approx(0.0, abs=1e-9)


def test_failures_count_against_the_automatic_run():
    failed = [*runs_with([0.9, 0.9]), Run(replace(JOB, seed=102), error="diverged")]
    assert verdict(failed, runs_with([0.8, 0.8, 0.8]), 0.3) == "failed on 1 of 3 seeds"
    assert difference(runs_with([0.8, 0.9, 0.7]), failed).points == pytest.approx(-5.0)
    assert verdict(runs_with([0.8]), runs_with([0.9]), 0.3) == "too few seeds to tell"


def test_the_choice_by_loss():
    runs = [Run(JOB, accuracy=0.9, loss=2.0), Run(JOB, accuracy=0.8, loss=1.0), Run(JOB, error="failed")]
    assert best(runs, SMALL) is runs[0]
    assert best(runs, replace(SMALL, choose="loss")) is runs[1]
    assert best(runs[2:], SMALL) is None
    equal = [Run(JOB, accuracy=0.9, loss=2.0), Run(JOB, accuracy=0.9, loss=1.5)]
    assert best(equal, SMALL) is equal[1]


@pytest.mark.parametrize("num_steps", [1, 2, 7, 8])
def test_rates_of_the_grid_decay_as_the_automatic_one(num_steps):
    auto = AutoStepSize(num_steps)
    weights = [torch.zeros(3)]
    rates = [auto.next_rate(step, weights, weights, noise_power=0.0) for step in range(num_steps)]
    assert rates == [LateDecay(rates[0], num_steps)(step) for step in range(num_steps)]


def test_the_command(tmp_path, capsys):
    grids = ["--rates", "3", "--quantiles", "0.7", "--constants", "1", "--seeds", "2"]
    assert main(["experiment", "accuracy", "--epsilon", "1", "--epochs", "1", *grids, "--out", str(tmp_path)]) == 0
    assert "| nothing | 0 | balanced |" in capsys.readouterr().out
    missing = ["experiment", "accuracy", "--data", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path)]
    assert main(missing) == 2
    assert "data_dir" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"workers": 0}, {"rates": ()}, {"choose": "auc"}])
def test_wrong_settings_are_refused_before_anything_runs(wrong, tmp_path):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        accuracy(replace(SMALL, out=tmp_path / "new", **wrong), say=pytest.fail)
    assert not (tmp_path / "new").exists()
