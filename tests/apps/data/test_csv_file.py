"""Any .csv: kinds and classes are read or given, encodings are fixed, and what cannot be used is refused by name."""

import pytest
import torch

from data.samples import flowers, write_csv
from qclip.apps.data import load


def task(tmp_path, text, *, name="table.csv", target="kind", **options):
    return load(str(write_csv(tmp_path, text, name)), target=target, **options)


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz"])
def test_a_table_becomes_a_task(tmp_path, name):
    found = task(tmp_path, flowers(), name=name)
    assert found.name == "table"
    assert found.description == (
        "50 rows, 10 held out (every 6th); columns: 1 of numbers, 1 of text; "
        "2 classes (read from the file as public): iris, rose"
    )
    inputs, labels = found.train.tensors
    assert inputs.shape == (50, 40 + 65)
    assert labels.tolist() == [k % 2 == 0 for k in range(60) if k % 6]
    assert found.build_model()(inputs).shape == (50, 2)


def test_other_rows_do_not_change_how_a_row_is_encoded(tmp_path):
    options = {"classes": ("iris", "rose"), "columns": {"height": "number", "colour": "text"}}
    few, many = task(tmp_path, flowers(20), **options), task(tmp_path, flowers(60) + "1e5,green,rose\n", **options)
    assert torch.equal(few.train.tensors[0], many.train.tensors[0][: len(few.train)])
    assert torch.equal(few.train.tensors[1], many.train.tensors[1][: len(few.train)])


def test_classes_may_be_given_and_then_need_not_occur(tmp_path):
    found = task(tmp_path, flowers(), classes=("tulip", "rose", "iris"))
    assert found.description.endswith("3 classes (given): tulip, rose, iris")
    assert found.train.tensors[1].unique().tolist() == [1, 2]
    with pytest.raises(
        ValueError, match=r"column 'kind' \(30 lines: 2, 4, 6, ...\) = 'rose' must be one of 'iris', 't"
    ):
        task(tmp_path, flowers(), classes=("iris", "tulip"))
    with pytest.raises(ValueError, match=r"classes of 'kind' = \['iris'\] must be at least 2, and distinct"):
        task(tmp_path, flowers(), classes=("iris",))


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    rows = "".join(f"{k / 8},{(2, 10, 9)[k % 3]}\n" for k in range(30))
    assert task(tmp_path, "x,kind\n" + rows).description.endswith(": 2, 9, 10")


def test_kinds_may_be_given(tmp_path):
    found = task(tmp_path, flowers(), columns={"height": "0:8", "colour": "drop"})
    assert found.train.tensors[0].shape == (50, 10)
    assert "columns: 1 of numbers, 1 not used;" in found.description
    assert task(tmp_path, flowers(), columns={"height": "text"}).train.tensors[0].shape == (50, 130)
    with pytest.raises(ValueError, match=r"column 'colour' .* = 'red', 'blue' must be a number"):
        task(tmp_path, flowers(), columns={"colour": "number"})


@pytest.mark.parametrize("kind", ["day", "3", "5:1", "1:1", "a:b", "nan:3", "0:inf", ""])
def test_kinds_that_are_none_are_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=r"columns\['height'\] = '.*' must be 'number', .*'drop' or a range LOW"):
        task(tmp_path, flowers(), columns={"height": kind})


def test_a_number_is_foretold_when_its_range_is_given(tmp_path):
    text = "x,y\n" + "".join(f"{k / 8},{k * 2.5}\n" for k in range(48))
    found = task(tmp_path, text, target="y", columns={"y": "0:100"})
    assert found.description.endswith("a number in 0 .. 100")
    assert found.train.tensors[1].shape == (40, 1)
    assert found.train.tensors[1][:2].flatten().tolist() == pytest.approx([-0.95, -0.9])
    assert found.train.tensors[1].max() == 1  # 117.5 is moved to the end of the range
    model = found.build_model()  # zero: it foretells 50
    held_out = [min(k * 2.5, 100) for k in range(0, 48, 6)]
    score = found.score(model)
    assert score["mean_absolute_error"] == pytest.approx(sum(abs(y - 50) for y in held_out) / 8, rel=1e-6)
    assert score["loss"] == pytest.approx(sum((y / 50 - 1) ** 2 for y in held_out) / 8, rel=1e-6)
    losses = found.loss(model(found.train.tensors[0]), found.train.tensors[1])
    assert losses.shape == (40,)


def test_a_target_with_many_values_needs_a_range_or_classes(tmp_path):
    text = "x,y\n" + "".join(f"{k / 8},{k}\n" for k in range(48))
    message = "distinct values of target 'y' = 48 must be at most 30 when .* y=LOW:HIGH in columns; .* give all classes"
    with pytest.raises(ValueError, match=message):
        task(tmp_path, text, target="y")
    assert task(tmp_path, text, target="y", classes=[str(k) for k in range(48)]).build_model().out_features == 48


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": None},
            "no target was given; .*, --target NAME, one of: 'height', 'colour', 'kind'",
        ),
        ({"target": "Kind"}, "target = 'Kind' must be a column of .*: 'height', 'colour', 'kind'; did you mean 'kind'"),
        ({"columns": {"id": "drop"}}, "columns = 'id' must be a column of the file: 'height'"),
        (
            {"columns": {"kind": "text"}},
            r"columns\['kind'\] = 'text' must be a range LOW:HIGH, because",
        ),
        ({"columns": {"kind": "0:1"}, "classes": ("a", "b")}, "contradict each other"),
        ({"columns": {"height": "drop", "colour": "drop"}}, "drops every column; keep one to predict"),
    ],
    ids=["no-target", "unknown-target", "unknown-column", "kind-of-target", "range-and-classes", "nothing-left"],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        task(tmp_path, flowers(), **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give a file with a header and rows of values"),
        ("height,colour,kind\n", "has no rows of values; check that it is the right file"),
        ("height,height,kind\n1,2,a\n2,3,b\n", r"header = \['height', 'height', 'kind'\] must be a list of"),
        ("height,kind\n1,a\n", "has 1 rows of values; give a header and at least 2 rows"),
        ("height/kind\n1/a\n2/b\n", "has fewer than 2 columns; .*give the separator"),
        (flowers() + "1.5,red\n", "line 62 of .* has 2 values for 3 columns; complete the row"),
        (flowers() + "1.5,red,rose,\n", "line 62 of .* has 4 values for 3 columns"),
        (flowers() + '1.5,"red,rose\n', r"is not separated by commas \(.* at line 62\)"),
        (flowers() + "tall,red,rose\n", r"'height' \(line 62\) = 'tall' must be a number, as most values .*--missing"),
        (flowers() + "1.5,red,\n", r"column 'kind' \(line 62\) = '' must be known"),
        (flowers() + "inf,red,rose\n", r"column 'height' \(line 62\) = 'inf' must be finite"),
        (flowers().replace("iris", "rose"), r"classes of 'kind' = \['rose'\] must be at least 2"),
    ],
    ids=[
        "empty", "header-only", "twice", "one-row", "slashes", "short-row", "long-row", "quotes",
        "nearly-numbers", "missing-target", "infinite", "one-class",
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        task(tmp_path, text)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (range(60), "whole numbers that differ in every row"),
        (range(9_000_000, 9_000_600, 10), "whole numbers that differ in every row"),
        ((f"user-{k}" for k in range(60)), "texts that differ in every row"),
    ],
    ids=["counts", "numbers", "texts"],
)
def test_names_of_rows_are_refused_by_name(tmp_path, values, found):
    header, *rows = flowers().splitlines()
    named = "\n".join([f"id,{header}", *(f"{name},{row}" for name, row in zip(values, rows, strict=True))])
    with pytest.raises(ValueError, match=f"column 'id' holds {found}; .*id=drop in col"):
        task(tmp_path, named)
    assert torch.equal(task(tmp_path, named, columns={"id": "drop"}).train[0][0], task(tmp_path, flowers()).train[0][0])
    assert task(tmp_path, named, columns={"id": "text"}).train[0][0].shape == (65 + 40 + 65,)


def test_fractions_that_differ_in_every_row_are_data(tmp_path):
    text = "x,kind\n" + "".join(f"{k + 0.25},{'ab'[k % 2]}\n" for k in range(30))
    assert task(tmp_path, text).train.tensors[0].shape == (25, 40)


def test_quotes_blanks_and_marks_of_spreadsheets_are_understood(tmp_path):
    text = '\ufeffname, size ,kind\n"Smith, J", 1.5,a\n\n"Smith, J",2.5 ,b\n"Two\nlines",3.5,a\n"Two\nlines",0.5,b\n'
    found = task(tmp_path, text)
    assert len(found.train) + len(found.held_out) == 4
    with pytest.raises(ValueError, match="'name', 'size', 'kind'"):
        task(tmp_path, text, target=None)


def test_a_path_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path = '.*none.csv' must be a file that exists; check the path"):
        load(str(tmp_path / "none.csv"), target="kind")


def test_the_default_batch_is_at_most_a_third_of_the_rows(tmp_path):
    number = task(tmp_path, flowers(), target="height", columns={"height": "0:8"})
    assert number.defaults.batch_size == 17
