"""Trained models of tables in a file: the same predictions, no secrets, nothing executed."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import qclip
from qclip.tables import Schema, Table, models
from qclip.tables.predictor import FILE, Predictor

ROWS = {
    "age": [30.0, np.nan, 71.0, 12.0],
    "city": ["Bonn", "Kiel", None, "Bonn"],
    "since": ["2024-01-31", "2023-05-02", "2020-02-29", ""],
    "note": ["a long story of it", "another story of that", "", "a long story once more"],
}


def trained(kind="linear", classes=True, **facts):
    """A predictor whose weights are not zero."""
    torch.manual_seed(0)
    goal = {"ill": ["no", "yes", "no", "yes"]} if classes else {"cost": [0.0, 3.0, 7.0, 10.0]}
    columns = {"note": "words"} if classes else {"note": "words", "cost": "0:10"}
    table = Table.of_frame(ROWS | goal)
    schema = Schema.of(table, target=next(iter(goal)), columns=columns)
    model = models.build(kind, schema.width, schema.outputs)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return Predictor(model, schema, kind, facts)


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("classes", [True, False], ids=["classes", "number"])
def test_a_file_predicts_what_its_model_predicts(kind, classes, tmp_path):
    before = trained(kind, classes, epsilon=3.0)
    before.save(tmp_path / FILE)
    for path in (tmp_path, tmp_path / FILE, str(tmp_path)):
        after = qclip.load(path)
        assert (after.schema, after.architecture, after.facts) == (before.schema, kind, {"epsilon": 3.0})
        assert after.predict(ROWS).tolist() == before.predict(ROWS).tolist()
        if classes:
            assert np.array_equal(after.predict_proba(ROWS), before.predict_proba(ROWS))


def test_predictions_are_those_of_the_model():
    predictor = trained()
    outputs = predictor.model(predictor.schema.inputs(Table.of_frame(ROWS)))
    assert np.allclose(predictor.predict_proba(ROWS), outputs.softmax(1).detach().numpy(), atol=1e-6)
    assert predictor.predict(ROWS).tolist() == [predictor.classes[k] for k in outputs.argmax(1)]
    number = trained(classes=False)
    scaled = number.model(number.schema.inputs(Table.of_frame(ROWS))).clamp(-1, 1).detach().squeeze(1)
    assert np.allclose(number.predict(ROWS), 5 + 5 * scaled.numpy(), atol=1e-5)
    assert all(0 <= value <= 10 for value in number.predict(ROWS))


def test_a_file_on_disk_is_a_table_too(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("age;city;since;note\n30;Bonn;2024-01-31;a long story of it\n;Kiel;?;another story of that\n")
    first, second = trained().predict_proba(path)
    rows = {name: values[:2] for name, values in ROWS.items()} | {"since": ["2024-01-31", ""]}
    assert np.allclose([first, second], trained().predict_proba(rows))


def test_rows_do_not_depend_on_each_other():
    together = trained().predict_proba(ROWS)
    for k in range(4):
        row = {name: [values[k]] for name, values in ROWS.items()}
        row["age"] = np.array(row["age"], dtype=float)
        assert np.allclose(trained().predict_proba(row)[0], together[k], atol=1e-6)


def test_the_file_holds_weights_and_facts_and_nothing_else(tmp_path):
    trained(epsilon=2.5).save(tmp_path / FILE)
    with safe_open(tmp_path / FILE, "pt") as opened:
        assert sorted(opened.keys()) == ["bias", "weight"]
        (about,) = opened.metadata().values()
    assert set(json.loads(about)) == {"version", "architecture", "schema", "facts"}


def test_a_number_has_no_probabilities():
    with pytest.raises(qclip.Refusal, match="call predict instead"):
        trained(classes=False).predict_proba(ROWS)


def test_a_column_that_is_gone_is_named():
    with pytest.raises(qclip.Refusal, match="'city' is missing"):
        trained().predict({name: values for name, values in ROWS.items() if name != "city"})


def damaged(path, **changes):
    trained().save(path)
    with safe_open(path, "pt") as opened:
        about = json.loads(opened.metadata()["qclip"])
        weights = {name: opened.get_tensor(name) for name in ("weight", "bias")}
    weights |= changes.pop("weights", {})
    save_file(weights, path, {"qclip": json.dumps(about | changes)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 99}, "use the version of qclip that wrote it"),
        ({"architecture": "os.system"}, "'linear', 'mlp'"),
        ({"schema": {"version": 1}}, "damaged"),
        ({"weights": {"weight": torch.zeros(2, 3)}}, "damaged"),
        ({"weights": {"more": torch.zeros(1)}}, "damaged"),
    ],
)
def test_damage_is_refused(changes, words, tmp_path):
    damaged(tmp_path / FILE, **changes)
    with pytest.raises(qclip.Refusal, match=words):
        qclip.load(tmp_path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(qclip.Refusal, match="a file that exists"):
        qclip.load(tmp_path)
    (tmp_path / FILE).write_bytes(b"no")
    with pytest.raises(qclip.Refusal, match="not a whole safetensors file"):
        qclip.load(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(qclip.Refusal, match="not the model of a table"):
        qclip.load(tmp_path)
