"""The results of a run, and its guarantee in words."""

import math
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from scipy.stats import norm

from made_runs import made_run
from qclip.apps.report import privacy, results
from qclip.apps.report.record import read
from qclip.apps.run_summary import Evaluation

RARE = Evaluation(
    guess={"accuracy": 0.75, "loss": 0.5},
    classes=["no", "<yes>"],
    confusion=[[70, 5], [15, 10]],
    positive="<yes>",
    calibration=[[0.1, 0.2, 80.0], [0.7, 0.6, 20.0]],
)


def text(fragments):
    return re.sub(r"base64,[^\"]*", "", "".join(fragments))


def test_metrics_stand_beside_a_constant_guess(tmp_path):
    html = text(results.section(read(made_run(tmp_path, evaluation=RARE))))
    assert '<td>accuracy</td><td class="number">0.39</td><td class="number">0.75</td>' in html
    assert "A constant guess says the same" in html


def test_each_class_has_its_recall_and_precision(tmp_path):
    html = text(results.section(read(made_run(tmp_path, evaluation=RARE))))
    row = "".join(f'<td class="number">{cell}</td>' for cell in ("15", "10", "0.400", "0.667"))
    assert f"<td>&lt;yes&gt;</td>{row}" in html
    assert "gives to “&lt;yes&gt;”" in html
    assert 'alt="share that came true against probability: ' in html


def test_a_run_without_details_has_its_metrics_alone(tmp_path):
    html = text(results.section(read(made_run(tmp_path))))
    assert "constant guess" not in html
    assert "Class by class" not in html


def test_a_class_that_is_never_predicted_has_no_precision(tmp_path):
    never = Evaluation({}, ["a", "b"], [[3, 0], [1, 0]], "b", [[0.1, 0.25, 4.0]])
    html = text(results.section(read(made_run(tmp_path, evaluation=never))))
    assert '<td class="number">0.000</td><td>none</td>' in html
    assert "Calibration" not in html  # one bin is no curve


def test_the_guarantee_is_told_in_words(tmp_path):
    summary = {"unit": "all rows of one <patient>", "public": ["the names of the columns"]}
    html = text(privacy.section(read(made_run(tmp_path, **summary))))
    for shown in (
        "for <b>all rows of one &lt;patient&gt;</b>",
        "the names of the columns",
        "privacy loss distributions",
        "with probability 0.1, independently",
        "adding or removing one such unit",
    ):
        assert shown in html


def test_a_run_without_privacy_makes_no_claim(tmp_path):
    assert text(privacy.section(read(made_run(tmp_path, private=False)))) == ""


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_no_gaussian_test_is_stronger_than_what_is_said(mu):
    """The best test of a Gaussian mechanism, at the epsilon and delta that it has; and at some point it comes near."""
    gaps = []
    for epsilon in np.linspace(0.1, 8, 30):
        delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        for alarm in (1e-3, 0.01, 0.05, 0.3):
            found = norm.cdf(norm.ppf(alarm) + mu)
            assert found <= privacy.power(epsilon, delta, alarm) + 1e-12
            gaps.append(privacy.power(epsilon, delta, alarm) - found)
    assert min(gaps) < 0.01
