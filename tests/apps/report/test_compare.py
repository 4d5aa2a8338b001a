import re
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes

from made_runs import made_run
from qclip.apps.report.compare import compare, constant_columns
from qclip.apps.report.compare_page import _score_lines, write_comparison
from qclip.apps.report.record import read
from qclip.apps.report.style import new_figure
from qclip.apps.run_folder import RunFolder


@pytest.fixture
def two(tmp_path):
    return [
        made_run(tmp_path / "flat"),
        made_run(tmp_path / "grouped", groups=("a", "b"), finished=False, num_steps=400, steps=20, batch_size=50),
    ]


def test_rows_say_what_the_summaries_say(two):
    first, second = compare(two).rows()
    assert first == {
        "run": "flat", "task": "digits", "threshold": "PrivateQuantile", "p": "0.5", "groups": "1", "batch": "100",
        "steps": "40", "epochs": "4", "noise": "2", "epsilon": "3.163", "delta": "1e-05",
        "accuracy": "0.39", "loss": "0.39", "last threshold": "1", "seconds": "1.5",
    }  # fmt: skip
    assert (second["groups"], second["steps"], second["epochs"], second["epsilon"]) == ("2", "20 of 400", "2", "2.237")


def test_what_all_have_in_common_is_said_once(two):
    rows = compare(two).rows()
    same = constant_columns(rows)
    assert same["task"] == "digits"
    assert {"run", "batch", "steps", "epsilon", "accuracy"}.isdisjoint(same)
    assert constant_columns(rows[:1]) == {}


def test_a_column_that_no_run_fills_is_left_out(tmp_path):
    (row,) = compare([made_run(tmp_path, threshold={"name": "Constant", "tau": 1.0}, metrics=("loss",))]).rows()
    assert "p" not in row
    assert "accuracy" not in row
    assert row["loss"] == "0.39"


def test_each_run_is_compared_by_its_own_metric(tmp_path):
    found = compare([made_run(tmp_path / "a"), made_run(tmp_path / "b", metrics=("loss",))])
    assert found.metrics == ["accuracy", "loss"]
    first, second = found.rows()
    assert (first["accuracy"], first["loss"]) == ("0.39", "0.39")  # every run also by its loss
    assert (second["accuracy"], second["loss"]) == ("", "0.39")


def test_a_score_is_drawn_once_for_each_epsilon(tmp_path, monkeypatch):
    """Epsilon is recorded on a grid, so that several scores have the same: their line would go up and down."""
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda ax, x, y, *rest, **style: drawn.append((list(x), list(y))))
    record = read(made_run(tmp_path))
    scores = [replace(record.scores[0], step=k, epsilon=[1.0, 1.0, 2.0][k], values={"loss": 3.0 - k}) for k in range(3)]
    (_, by_epsilon) = new_figure(2)
    _score_lines(*by_epsilon, replace(record, scores=tuple(scores)), "loss", "run", "red")
    assert ([1.0, 2.0], [2.0, 1.0]) in drawn


def test_settings_that_differ(tmp_path):
    runs = [
        made_run(tmp_path / name, settings={"lr": lr, "epochs": 4}) for name, lr in (("a", 1.0), ("b", 2.0), ("c", 1.0))
    ]
    assert compare(runs).differences() == {"lr": "1 (a, c); 2 (b)"}
    runs += [made_run(tmp_path / name, settings={"lr": 1.0, "epochs": 4}) for name in "de"]
    assert compare(runs).differences() == {"lr": "1 (the others); 2 (b)"}


def test_a_learning_rate_that_was_found_differs_from_one_that_was_given(tmp_path):
    runs = [made_run(tmp_path / name, settings={"lr": lr}) for name, lr in (("a", 1.0), ("b", None))]
    runs.append(made_run(tmp_path / "c", settings={}))
    assert compare(runs).differences() == {"lr": "1 (a); found by the run (b); none (c)"}


BALANCED = {"name": "BalancedThreshold", "tau_min": 1e-6}


def test_runs_with_and_without_p(tmp_path):
    runs = [made_run(tmp_path / "quantile", lost_threshold="lost"), made_run(tmp_path / "balanced", threshold=BALANCED)]
    first, second = compare(runs).rows()
    assert (first["threshold"], first["p"]) == ("PrivateQuantile (lost)", "0.5")
    assert (second["threshold"], second["p"]) == ("BalancedThreshold", "")
    found = compare(runs).as_json()["runs"]
    assert [(each["p"], each["lost_threshold"]) for each in found] == [(0.5, "lost"), (None, "")]
    html = write_comparison(compare(runs), tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Dashed: the target p of the runs that have one." in html
    html = write_comparison(compare(runs[1:]), tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Dashed" not in html


def test_broken_runs_are_kept_by_their_error(two, tmp_path):
    found = compare([*two, tmp_path / "nothing"])
    assert list(found.runs) == ["flat", "grouped"]
    assert list(found.broken) == ["nothing"]
    assert "summary.json" in found.broken["nothing"]


def test_the_page_overlays_all_runs_and_names_the_broken(two, tmp_path):
    runs = [*two, made_run(tmp_path / "open", private=False), tmp_path / "no<thing"]
    path = write_comparison(compare(runs), tmp_path / "new" / "page.html")
    html = re.sub(r"base64,[^\"]*", "", path.read_text(encoding="utf-8"))
    assert html.count("<img") == 4
    assert "<b>no&lt;thing</b> is left out" in html
    for shown in ("3 runs compared", "20 of 400", "infinite", "of a run without privacy", "median over the groups"):
        assert shown in html


def test_a_page_of_runs_that_have_not_begun(tmp_path):
    runs = [made_run(tmp_path / name, steps=0, finished=False) for name in "ab"]
    assert "<img" not in write_comparison(compare(runs), tmp_path / "page.html").read_text(encoding="utf-8")


def test_many_runs_have_colours_of_their_own(tmp_path):
    names = [f"run{index}" for index in range(24)]
    found = compare([made_run(tmp_path / name, steps=1, finished=False) for name in names])
    html = write_comparison(found, tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(name in html for name in names)


def test_json_has_numbers(two):
    first, second = compare(two).as_json()["runs"]
    assert first["epsilon"] == pytest.approx(0.5 * 40**0.5)
    assert (first["run"], first["accuracy"], first["p"], first["finished"]) == ("flat", 0.39, 0.5, True)
    assert second["last_tau"] == pytest.approx([1.0, 2.0])
    assert (second["steps"], second["num_steps"], second["finished"]) == (20, 400, False)


def test_no_epsilon_is_above_that_of_all_steps(tmp_path):
    """Single steps have the epsilon of a later one, on a coarse grid; the end of a stopped run has its own."""
    folder = RunFolder(made_run(tmp_path / "run", steps=20, num_steps=400))
    folder.write_summary(replace(folder.summary(), epsilon=1.5))
    record = read(folder.path)
    assert record.epsilon == record.epsilons.max() == max(score.epsilon for score in record.scores) == 1.5
    assert record.epsilons[0] == pytest.approx(0.5)
