"""The estimators of scikit-learn: its own checks, mixed columns, and a guarantee that covers what was fitted."""

import math
import pickle

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pandas")

import pandas as pd
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import check_estimator

import qclip
from qclip import accounting

NOISE = "at epsilon = 3 on 200 rows, the noise leaves less than the R squared of 0.5 that the check asks for"


def failures(estimator, expected=None):
    results = check_estimator(estimator, on_skip=None, on_fail=None, expected_failed_checks=expected or {})
    skipped = {each["check_name"] for each in results if each["status"] == "skipped"}
    assert skipped <= {"check_array_api_input", "check_pipeline_consistency"}  # without a seed, no two fits agree
    return [f"{each['check_name']}: {each['exception']}" for each in results if each["status"] == "failed"]


@pytest.mark.slow
def test_the_classifier_passes_the_checks_of_scikit_learn():
    assert failures(qclip.PrivateClassifier(epochs=10)) == []


@pytest.mark.slow
def test_the_regressor_passes_the_checks_of_scikit_learn_but_one():
    assert failures(qclip.PrivateRegressor((-3, 3), epochs=10), {"check_regressors_train": NOISE}) == []


@pytest.mark.slow
def test_it_is_the_noise_that_fails_the_one():
    assert failures(qclip.PrivateRegressor((-3, 3), noise_multiplier=0, epsilon=None)) == []


def people(rows=3000, seed=0):
    rng = np.random.default_rng(seed)
    age, city = rng.uniform(20, 90, rows), rng.choice(["Bonn", "Kiel", "Ulm"], rows)
    when = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 365, rows), unit="D")
    z = (age - 55) / 10 + 1.5 * (city == "Kiel")
    frame = pd.DataFrame({"age": np.where(rng.random(rows) < 0.1, np.nan, age), "city": city, "when": when})
    return frame, np.where(rng.random(rows) < 1 / (1 + np.exp(-z)), "ill", "well"), z + 55 / 10


def test_a_frame_of_mixed_columns_is_learnt_from():
    X, y, _ = people()
    private = qclip.PrivateClassifier(epsilon=3.0, columns={"age": "20:90"}, epochs=20, random_state=0).fit(X, y)
    fresh, answers, _ = people(seed=1)
    assert private.score(fresh, answers) > 0.78  # who knows the law reaches about 0.82
    assert private.classes_.tolist() == ["ill", "well"]
    assert private.predict_proba(fresh).shape == (3000, 2)
    plan = {"sample_rate": 1000 / 3000, "steps": private.n_iter_, "delta": private.delta_}
    z = accounting.noise_multiplier(epsilon=3.0, **plan)
    assert private.epsilon_ == pytest.approx(accounting.epsilon(noise_multiplier=z, **plan))
    assert private.epsilon_ <= 3.0
    assert private.delta_ == 1 / 30_000


def test_a_number_is_learnt_from_its_public_range():
    X, _, number = people()
    private = qclip.PrivateRegressor((0, 12), columns={"age": "20:90"}, epochs=20, random_state=0).fit(X, number)
    fresh, _, answers = people(seed=1)
    assert private.score(fresh, answers) > 0.7
    assert private.epsilon_ <= 3.0


def test_a_saved_estimator_predicts_the_same(tmp_path):
    X, y, _ = people(300)
    private = qclip.PrivateClassifier(epochs=2, random_state=0).fit(X, y)
    private.save(tmp_path / "model.safetensors")
    loaded = qclip.load(tmp_path)
    assert loaded.predict(X).tolist() == private.predict(X).tolist()
    assert loaded.facts["epsilon"] == private.epsilon_
    assert pickle.loads(pickle.dumps(private)).predict(X).tolist() == private.predict(X).tolist()


def test_a_seed_repeats_a_fit_and_no_seed_does_not():
    X, y, _ = people(300)
    first, again, other = (
        qclip.PrivateClassifier(epochs=1, random_state=seed).fit(X, y).predict_proba(X) for seed in (3, 3, None)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_it_works_with_the_tools_of_scikit_learn():
    X, y, _ = people(900)
    private = qclip.PrivateClassifier(columns={"age": "20:90"}, epochs=5, random_state=0)
    assert clone(private).get_params() == private.get_params()
    assert cross_val_score(private, X, y, cv=3).mean() > 0.6


def test_given_classes_are_not_read_from_the_data():
    X, y, _ = people(300)
    private = qclip.PrivateClassifier(classes=["well", "ill", "gone"], epochs=1, random_state=0).fit(X, y)
    assert private.classes_.tolist() == ["gone", "ill", "well"]
    assert private.predict_proba(X).shape == (300, 3)
    with pytest.raises(qclip.Refusal, match="complete the classes"):
        qclip.PrivateClassifier(classes=["well", "gone"]).fit(X, y)


def test_no_noise_is_no_privacy():
    X, y, _ = people(300)
    assert math.isinf(qclip.PrivateClassifier(noise_multiplier=0, epochs=1).fit(X, y).epsilon_)


def test_a_range_is_asked_for():
    with pytest.raises(qclip.Refusal, match=r"target_range.*public range"):
        qclip.PrivateRegressor().fit([[1.0], [2.0], [3.0]], [1.0, 2.0, 3.0])
    with pytest.raises(qclip.Refusal, match=r"target_range = \(100.0, 0.0\) must be \(low, high\) with low < high"):
        qclip.PrivateRegressor((100, 0)).fit([[1.0], [2.0], [3.0]], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("unknown", [None, np.nan, pd.NA])
def test_targets_must_be_known(unknown):
    X, y, _ = people(300)
    with pytest.raises(qclip.Refusal, match="y holds missing values; leave out these rows"):
        qclip.PrivateClassifier(epochs=1).fit(X, pd.Series([unknown, *y[1:]], dtype=object))


def test_a_learning_rate_is_a_number_or_auto():
    X, y, _ = people(300)
    with pytest.raises(qclip.Refusal, match="learning_rate = 'fast' must be a number"):
        qclip.PrivateClassifier(learning_rate="fast", epochs=1).fit(X, y)


def test_a_column_that_is_not_used_is_said():
    X, y, _ = people(900)
    names = [f"P{k // 3}" for k in range(900)]
    with pytest.warns(UserWarning, match="column 'patient' is not used: it has 300 different texts"):
        private = qclip.PrivateClassifier(epochs=1, random_state=0).fit(X.assign(patient=names), y)
    assert (
        private.predict(X.assign(patient="someone else")).tolist() == private.predict(X.assign(patient=names)).tolist()
    )
