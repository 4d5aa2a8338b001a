import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from made_runs import line, made_run, rewrite_line
from qclip import schedules
from qclip.apps.report import figures, words
from qclip.apps.report.record import read, short_names
from qclip.apps.report.run import write_report
from qclip.apps.run_folder import RunFolder
from qclip.apps.run_summary import Certificate
from qclip.thresholds import PrivateQuantile
from qclip.thresholds.threshold import describe


def text_of(path):
    """The page without its pictures and its style."""
    html = re.sub(r"base64,[^\"]*", "", path.read_text(encoding="utf-8"))
    return re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)


def test_a_report_holds_its_numbers_and_its_pictures(tmp_path):
    html = text_of(write_report(made_run(tmp_path)))
    assert 'alt="threshold against steps: from ' in html
    assert html.count("<img") == 4
    for shown in (
        "0.39",
        "ε = 3.163",
        "δ = 1e-05",
        "PrivateQuantile, p = 0.5",
        "qclip train --epsilon 4",
        "qclip 0.1.0",
    ):
        assert shown in html
    assert "small &lt;images&gt; &amp; labels" in html
    assert "not finished" not in html
    assert "not private" not in html
    assert "Certificate" not in html


def test_nothing_outside_the_file_is_needed(tmp_path):
    html = write_report(made_run(tmp_path)).read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!data:)', html) == []
    assert "<script" not in html


def test_it_is_written_where_asked(tmp_path):
    path = write_report(made_run(tmp_path / "run"), tmp_path / "elsewhere" / "page.html")
    assert path.exists()
    assert not RunFolder(tmp_path / "run").report_file.exists()
    assert write_report(tmp_path / "run") == RunFolder(tmp_path / "run").report_file


def test_a_threshold_that_does_not_ask(tmp_path):
    html = text_of(write_report(made_run(tmp_path, asked=False, threshold={"name": "Constant", "tau": 1.0})))
    assert "does not measure the fraction" in html
    assert "given beforehand" in html
    assert html.count("<img") == 3


def test_a_run_without_privacy_has_no_epsilon_curve(tmp_path):
    html = text_of(write_report(made_run(tmp_path, private=False)))
    assert "not private" in html
    assert "ε = infinite" in html
    assert "Privacy spent" not in html


def test_an_unfinished_run_says_how_far_it_came(tmp_path):
    html = text_of(write_report(made_run(tmp_path, steps=7, finished=False, num_steps=1200)))
    assert "7 of 1,200 steps are done" in html
    assert "No score was recorded" in html


def test_steps_after_the_last_summary_are_paid_for(tmp_path):
    folder = RunFolder(made_run(tmp_path, steps=30, finished=False, num_steps=40))
    folder.write_summary(replace(folder.summary(), steps=20, epsilon=0.5 * np.sqrt(20)))
    record = read(tmp_path)
    assert record.done == 30
    assert record.epsilon == pytest.approx(0.5 * np.sqrt(30))


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_runs(tmp_path, steps):
    html = text_of(write_report(made_run(tmp_path, steps=steps, finished=False, num_steps=100)))
    assert html.count("<img") == (3 if steps else 0)


def test_a_loss_alone_is_the_headline(tmp_path):
    html = text_of(write_report(made_run(tmp_path, metrics=("loss",))))
    assert "held-out loss" in html
    assert "accuracy" not in html


def test_fifty_groups_are_drawn_and_listed(tmp_path):
    names = tuple(f"layer{index}" for index in range(50))
    html = text_of(write_report(made_run(tmp_path, groups=names)))
    assert "Thresholds of the 50 groups" in html
    assert all(f"<td>{name}</td>" in html for name in names)


def test_the_certificate_and_its_refusal(tmp_path):
    terms = Certificate(
        total=0.6, optimisation=0.3, variance=0.2, bias=0.1, this_run=0.7, confidence=0.95, theorem="that",
        mean="the mean; sigma^2 stays",
    )  # fmt: skip
    html = text_of(write_report(made_run(tmp_path / "a", certificate=terms)))
    assert "95% for this run alone" in html
    assert '<p class="note">σ² stays.</p>' in html.replace("Σ", "σ")
    assert '<td>this run</td><td class="number">0.7</td>' in html
    assert '<td>variance</td><td class="number">0.2</td>' in html
    html = text_of(write_report(made_run(tmp_path / "b", certificate_refused="the steps are > 1/L")))
    assert "no certificate: the steps are &gt; 1/L" in html


def test_a_lost_threshold_is_said_before_any_figure(tmp_path):
    told = "the threshold is lost since step 9: tau < p; take another"
    lost = made_run(tmp_path / "lost", lost_threshold=told, lost_from=9)
    html = text_of(write_report(lost))
    assert html.index("The threshold is lost since step 9: tau &lt; p; take another.") < html.index("<img")
    assert "PrivateQuantile, p = 0.5, lost" in html
    assert "The threshold was to follow" in html
    assert html.count("Shaded: the steps at which the threshold counts as lost") == 2
    html = text_of(write_report(made_run(tmp_path / "found")))
    assert "The threshold was not tuned by hand: it follows" in html
    assert "lost" not in html
    assert "Shaded" not in html


def test_the_steps_at_which_it_was_lost_are_shaded(tmp_path):
    record = read(made_run(tmp_path, lost_from=25))
    assert record.lost.tolist() == [step >= 25 for step in range(40)]
    for draw in (figures.threshold_path, figures.unclipped_fraction):
        (shade,) = draw(record).axes[0].collections
        places = shade.get_paths()[0].vertices[:, 0]
        assert (places.min(), places.max()) == (25, 39)


def test_a_threshold_at_its_lower_bound_is_not_called_too_high(tmp_path):
    quantile = {"name": "PrivateQuantile", "p": 0.5}
    html = text_of(write_report(made_run(tmp_path / "above", threshold=quantile | {"tau_min": 0.5})))
    assert "above it, too high" in html
    assert "lower bound" not in html
    html = text_of(write_report(made_run(tmp_path / "at", threshold=quantile | {"tau_min": 1.0})))
    assert "<b>Not so at its lower bound</b>, 1, which it reached" in html


BALANCED = {"name": "BalancedThreshold", "initial": 0.1, "tau_min": 1e-6, "tau_max": 1e6}


def test_a_threshold_without_p_is_not_held_to_one(tmp_path):
    costs = {"noise_power": [0.25], "clipped_length": [0.1]}
    html = text_of(write_report(made_run(tmp_path, threshold=BALANCED, costs=costs)))
    assert html.count("<img") == 5
    assert "keeps the two in balance" in html
    assert "noise 0.5, bias at most 0.1" in html
    assert "last threshold (BalancedThreshold)" in html
    assert "as much noise as it would remove bias" in html
    assert "There is no target" in html
    assert "given beforehand" not in html
    assert "fraction p" not in html
    assert "Dashed" not in html


def test_a_quantile_of_a_schedule_of_one_s_own_is_not_called_constant(tmp_path):
    record = read(made_run(tmp_path, threshold={"name": "PrivateQuantile", "p": "mine.schedule"}))
    assert "a fraction p of the examples stays unclipped" in words.aim(record)


@pytest.mark.parametrize(
    ("noise", "bias", "told"),
    [
        (0.25, 0.1, "noise 0.5, bias at most 0.1; noise cost more"),
        (0.01, 0.3, "noise 0.1, bias at most 0.3; bias cost more"),
        (0.01, 0.15, "noise 0.1, bias at most 0.15; both cost about the same"),
        (0.0, 0.15, "noise 0, bias at most 0.15; bias cost more"),
    ],
)
def test_the_costs_of_noise_and_bias_are_compared(tmp_path, noise, bias, told):
    record = read(made_run(tmp_path, costs={"noise_power": [noise], "clipped_length": [bias]}))
    assert words.costs(record) == f"At the median step, in units of the threshold: {told}."


def test_the_first_steps_do_not_decide_what_cost_more(tmp_path):
    folder = made_run(tmp_path, costs={"noise_power": [0.25], "clipped_length": [0.1]})
    rewrite_line(folder, 0, line(step=0, tau=[0.01], noise_power=[0.25], clipped_length=[100.0], epsilon=1.0))
    assert "noise 0.5, bias at most 0.1; noise cost more" in words.costs(read(folder))


def test_the_costs_of_groups_add_up_by_squares(tmp_path):
    costs = {"noise_power": [0.25, 0.04], "clipped_length": [0.3, 0.2]}
    record = read(made_run(tmp_path, groups=("a", "b"), threshold=BALANCED, costs=costs))
    first, second = record.taus.T
    assert record.noise == pytest.approx(np.hypot(0.5 * first, 0.2 * second))
    assert record.bias == pytest.approx(np.hypot(0.3 * first, 0.2 * second))
    noise, bias = figures.costs(record).axes[0].get_lines()
    assert (noise.get_label(), bias.get_label()) == ("noise", "bias, at most")
    assert np.array_equal(noise.get_ydata(), record.noise)
    assert np.array_equal(bias.get_ydata(), record.bias)
    assert "in units of the threshold of all groups together" in words.costs(record)


def test_a_threshold_that_cannot_tell_the_bias_shows_the_noise_alone(tmp_path):
    folder = made_run(tmp_path, costs={"noise_power": [0.25], "clipped_length": []})
    html = text_of(write_report(folder))
    assert "does not estimate the bias" in html
    assert "in units of the threshold: noise 0.5." in html
    assert "in balance" not in html
    assert [one.get_label() for one in figures.costs(read(folder)).axes[0].get_lines()] == ["noise"]


def test_without_noise_and_bias_there_is_no_section(tmp_path):  # nor in an older folder, as above: four pictures
    html = text_of(write_report(made_run(tmp_path, costs={"noise_power": [0.0], "clipped_length": []})))
    assert "noise and clipping cost" not in html
    assert html.count("<img") == 4


def test_a_learning_rate_that_was_found_is_drawn_in_units_of_the_threshold(tmp_path):
    folder = made_run(tmp_path / "found", settings={"epochs": 4, "lr": None})
    html = text_of(write_report(folder))
    assert "<h2>Learning rate</h2>" in html
    assert "It began at 4 and came to 2." in html  # half-way, tau has fallen from 4 to 2
    assert "<dt>lr</dt><dd>found by the run</dd>" in html
    record = read(folder)
    (drawn,) = figures.learning_rate(record).axes[0].get_lines()
    assert np.array_equal(drawn.get_ydata(), record.taus[:, 0])
    for name, settings in (("given", {"lr": 2.0}), ("older", {})):
        assert read(made_run(tmp_path / name, settings=settings)).learning_rates is None


def test_a_seeded_run_is_not_passed_off_as_private(tmp_path):
    assert "can subtract the noise" in text_of(write_report(made_run(tmp_path, seeded=True)))


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.5, [0.5, 0.5, 0.5]),
        (schedules.polynomial(0.25, 0.5), [0.25, 0.25 * 2**0.5, 0.25 * 3**0.5]),
        (schedules.polynomial(0.25, 1.0, high=0.6), [0.25, 0.5, 0.6]),
        (schedules.coupled(2, step_size=1, clipped_fraction=0.4).p, [0.6, 1 - 0.4 / 2**0.5, 1 - 0.4 / 3**0.5]),
    ],
    ids=["number", "polynomial", "clamped", "coupled"],
)
def test_targets_follow_the_schedule_of_p(tmp_path, p, expected):
    record = read(made_run(tmp_path, steps=3, threshold=describe(PrivateQuantile(p))))
    assert record.targets == pytest.approx(expected)


@pytest.mark.parametrize(
    "p",
    [None, "mine.schedule", "print(1)", "Polynomial(1)", "Polynomial(initial='x')", "0.5 +", True],
    ids=["none", "function", "call", "positional", "text", "torn", "boolean"],
)
def test_a_target_that_is_not_understood_is_left_out(tmp_path, p):
    record = read(made_run(tmp_path, threshold={"name": "Own", "p": p}))
    assert record.targets is None
    assert len(figures.unclipped_fraction(record).axes[0].get_lines()) == 2  # points and mean, no target


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"summary\.json"):
        write_report(tmp_path / "nowhere")
    RunFolder(made_run(tmp_path / "run")).metrics_file.unlink()
    with pytest.raises(ValueError, match=r"run/metrics\.jsonl"):
        write_report(tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 3, ', r"metrics\.jsonl"),
        (line(step="three", tau=[1.0]), r"metrics\.jsonl, line 4 = .*three.* must be a JSON object with a step"),
        (line(step=3, tau=1.0), r"metrics\.jsonl, step 3: tau is not a list"),
        (line(step=3, tau=[]), r"step 3: tau does not have one value per group"),
        (line(step=3, tau=[1.0, 2.0]), r"step 3: tau does not have one value per group"),
        (line(step=3, tau=[-1.0]), r"step 3: its thresholds are not all positive"),
        (line(step=3, tau=[None]), r"step 3: its thresholds are not all positive"),
        (line(step=3, tau=["x"]), r"step 3: 'x' is not a number"),
        (line(step=3, tau=[1.0], noisy_unclipped=[0.1, 0.2]), r"noisy_unclipped does not have one value per group"),
        (line(step=3, tau=[1.0], epsilon="much"), r"'much' is not a number"),
        (line(step=3, held_out=[0.5]), r"step 3: held_out is not an object"),
    ],
    ids=["torn", "step", "no-list", "empty", "groups", "negative", "null", "text", "fractions", "epsilon", "held-out"],
)
def test_a_broken_line_is_named(tmp_path, text, message):
    rewrite_line(made_run(tmp_path), 3, text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_thresholds_of_other_groups_than_the_summary_s_are_named(tmp_path):
    folder = RunFolder(made_run(tmp_path))
    folder.write_summary(replace(folder.summary(), groups=["a", "b"]))
    with pytest.raises(ValueError, match=r"step 0: it has 1 thresholds for the 2 groups of summary\.json"):
        read(tmp_path)


def test_a_last_line_that_was_torn_is_left_out(tmp_path):
    file = RunFolder(made_run(tmp_path, steps=5)).metrics_file
    file.write_text(file.read_text()[:-9])
    assert len(read(tmp_path).steps) == 4


def test_a_step_that_was_written_twice_counts_once(tmp_path):
    RunFolder(made_run(tmp_path, steps=5)).append({"step": 4, "tau": [9.0], "noisy_unclipped": [], "epsilon": 2.0})
    record = read(tmp_path)
    assert len(record.steps) == 5
    assert record.taus[-1, 0] == 9.0
    assert np.isnan(record.noisy_unclipped[-1, 0])


def test_running_means_equal_a_loop():
    rng = np.random.default_rng(0)
    values = rng.random((23, 3))
    values[rng.random(values.shape) < 0.4] = np.nan
    values[:9, 2] = np.nan
    found = figures.running_mean(values, 5)
    for row in range(23):
        for column in range(3):
            near = values[max(row - 2, 0) : row + 3, column]
            near = near[np.isfinite(near)]
            expected = near.mean() if near.size else np.nan
            assert found[row, column] == pytest.approx(expected, nan_ok=True)


def test_figures_show_what_was_recorded(tmp_path):
    record = read(made_run(tmp_path, groups=("a", "b")))
    drawn = figures.threshold_path(record).axes[0].get_lines()
    assert [one.get_label() for one in drawn] == ["a", "b"]
    assert np.array_equal(drawn[1].get_ydata(), record.taus[:, 1])
    epsilon = figures.epsilon_spent(record).axes[0].get_lines()
    assert epsilon[0].get_xdata()[-1] == 40  # steps done, not the last step's number
    assert epsilon[1].get_label() == "budget 4"


def test_the_epsilon_curve_goes_through_the_computed_points(tmp_path):
    folder = made_run(tmp_path, steps=6)
    for step, epsilon in enumerate(
        [1.0, 1.0, 1.5, 1.5, 1.5, 2.0]
    ):  # rounded up to a grid: computed at 2, 5 and 6 steps
        rewrite_line(folder, step, line(step=step, tau=[1.0], noisy_unclipped=[], epsilon=epsilon))
    RunFolder(folder).write_summary(replace(RunFolder(folder).summary(), epsilon=1.75))  # at 6 steps; 2.0 is for more
    curve = figures.epsilon_spent(read(folder)).axes[0].get_lines()[0]
    assert curve.get_xdata().tolist() == [0, 2, 5, 6]
    assert curve.get_ydata().tolist() == [0, 1, 1.5, 1.75]


def test_names_are_short_and_tell_apart(tmp_path):
    assert short_names([tmp_path / "a" / "run", tmp_path / "b"]) == ["run", "b"]
    assert short_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert short_names([tmp_path / "run", tmp_path / "run"]) == ["run", "run"]
