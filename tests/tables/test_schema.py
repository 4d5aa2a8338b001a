"""A schema is a public function of each row, is plain data, and says all problems of a table at once."""

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qclip.tables import Schema, Table, read
from qclip.tables.encodings import Date, Dropped, Hashed, Interval, Magnitude, Number, OneOf, Words

TEXT = """patient;age;sex;temperature;admitted;seen;note;other;result
p1;71;f;36,6;25.02.2024;02/28/2024 10:30;"cough; fever, 2 days";;yes
p2;;m;37,5;22.10.2023;11/01/2023 08:00;pain in the back;;no
p1;54;?;NA;18.05.2024;05/31/2024 23:59;fell down the stairs;;no
p3;36;f;38,1;;06/30/2024 00:00;;;no
p3;54;m;36,9;07.01.2023;01/13/2023;fell down again today;;yes
"""
OPTIONS = {"target": "result", "unit": "patient"}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TEXT, encoding="latin-1")
    return read(path)


def test_every_column_becomes_what_it_is(table):
    schema = Schema.of(table, **OPTIONS)
    assert schema.encodings == {
        "age": Number(), "sex": Hashed(), "temperature": Number(), "admitted": Date("dmy"),
        "seen": Date("mdy", clock=True), "note": Words(), "other": Dropped(),
    }  # fmt: skip
    assert (schema.target, schema.classes, schema.unit) == ("result", ("no", "yes"), "patient")
    assert schema.outputs == 2
    assert schema.remarks == ("column 'other' has no values; it is not used",)
    inputs = schema.inputs(table)
    assert inputs.shape == (5, schema.width)
    assert inputs.dtype == torch.float32
    assert schema.targets(table).tolist() == [1, 0, 0, 0, 1]
    assert schema.units(table).tolist() == [0, 1, 0, 2, 2]


def test_what_each_column_became_is_said(table):
    schema = Schema.of(table, columns={"age": "0:120"}, **OPTIONS)
    assert schema.describe() == [
        "result: the target, one of 2 classes: no, yes",
        "patient: names the units of privacy; no input",
        "age: a number in 0 .. 120 (10 inputs)",
        "sex: a category, hashed (65 inputs)",
        f"temperature: a number of unknown size ({Number().width + 1} inputs)",
        "admitted: a date (day, month, year), as year, season and weekday (41 inputs)",
        "seen: a date (month, day, year), as year, season and weekday and time of day (43 inputs)",
        "note: free text, as hashed words (257 inputs)",
        "other: not used",
    ]


def test_missing_values_are_one_input_and_nothing_else(table):
    schema = Schema.of(table, columns={"age": "0:120", "temperature": "30:45"}, **OPTIONS)
    age = schema.inputs(table)[:, :10]
    assert age[1].tolist() == [0] * 9 + [1]  # the median, 54, has no say
    assert age[[0, 2, 3, 4], -1].tolist() == [0] * 4


def test_spellings_of_missing_values_can_be_added(table):
    schema = Schema.of(table, missing=["36"], **OPTIONS)
    assert schema.inputs(table)[3, Number().width] == 1
    assert Schema.from_dict(schema.to_dict()).missing == ("36",)


def test_rows_are_encoded_alone_whatever_the_other_rows(table):
    schema = Schema.of(table, **OPTIONS)
    together = schema.inputs(table)
    for k in range(len(table)):
        assert torch.equal(schema.inputs(table.take([k])), together[k : k + 1])
    assert (together.norm(dim=1) <= 6**0.5 + 1e-6).all()


def test_blocks_are_the_inputs_in_pieces(table, monkeypatch):
    schema = Schema.of(table, **OPTIONS)
    whole = schema.inputs(table)
    monkeypatch.setattr("qclip.tables.schema._CHUNK", 2)
    blocks = list(schema.blocks(table))
    assert [len(block) for block in blocks] == [2, 2, 1]
    assert torch.equal(torch.cat(blocks), whole)
    assert torch.equal(schema.inputs(table), whole)


def test_later_files_need_the_same_columns_only(table):
    schema = Schema.of(table, **OPTIONS)
    columns = dict(table.columns)
    inputs = schema.inputs(table)
    del columns["result"], columns["patient"], columns["other"]
    columns["more"] = columns["age"]
    assert torch.equal(schema.inputs(Table(dict(reversed(columns.items())))), inputs)
    with pytest.raises(ValueError, match="target = 'result' must be a column of the table"):
        schema.targets(Table(columns))
    columns["Age"] = columns.pop("age")
    del columns["sex"]
    with pytest.raises(ValueError, match=r"2 problems:\n- column 'age' is missing.*mean 'Age'\?\n- column 'sex'"):
        schema.inputs(Table(columns))


def test_a_later_file_is_read_with_the_decimal_mark_of_the_first(tmp_path, table):
    schema = Schema.of(table, **OPTIONS)
    path = tmp_path / "later.csv"
    path.write_text("age;sex;temperature;admitted;seen;note\n1;f;36,600;25.02.2024;02/28/2024;x\n", encoding="utf-8")
    later = read(path)
    with pytest.raises(ValueError, match="column 'temperature' has numbers that can be read with a decimal comma"):
        later["temperature"].numbers()
    start = Number().width + 1 + 65
    shares = Number().encode(Table.of_frame({"t": [36.6]})["t"])[0]
    assert schema.inputs(later)[0, start : start + len(shares)].numpy() == pytest.approx(shares)


def test_values_that_do_not_fit_are_listed_together(table):
    schema = Schema.of(table, **OPTIONS)
    columns = dict(table.columns)
    columns["age"], columns["admitted"] = columns["note"], columns["sex"]
    with pytest.raises(ValueError, match="table has 2 problems") as refused:
        schema.inputs(Table(columns))
    first, second = str(refused.value).split("\n- ")[1:]
    assert first.startswith("column 'note' (4 lines: 2, 3, 4, ...) = 'cough; fever, 2 days', 'pain in the back'")
    assert second.startswith(
        "column 'sex' (4 lines: 2, 3, 5, ...) = 'f', 'm' must be a date in the order dmy; write it as 31.12"
    )


def test_all_problems_are_listed_at_once(table):
    columns = {"sex": "number", "age": "120:0", "stay": "drop", "note": "date"}
    with pytest.raises(ValueError, match=r"table\.csv has 6 problems") as refused:
        Schema.of(table, target="Result", unit="patients", columns=columns)
    problems = str(refused.value).split("\n- ")[1:]
    beginnings = (
        "target = 'Result'", "unit = 'patients'", "columns = 'stay'", "columns['age']", "column 'sex' (4 lines:",
        "columns['note'] = 'date' must be a kind that fits",
    )  # fmt: skip
    assert [any(problem.startswith(each) for problem in problems) for each in beginnings] == [True] * 6
    assert problems[0].endswith("did you mean 'result'?")
    assert problems[1].endswith("did you mean 'patient'?")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2", "2", "NA"], Number()),
        (["1.5", "2.5", "3.5", "1e3"], Number()),
        (["2024-01-31", "2024-02-01", "", "2024-02-03"], Date("ymd")),
        (["2024-01-31T10:00:00Z", "2024-02-01", "2024-02-02", "2024-02-03"], Date("ymd", clock=True)),
        (["31/01/2024", "01/02/2024", "05/06/2024", ""], Date("dmy")),
        (["01/31/2024", "01/02/2024", "05/06/2024", ""], Date("mdy")),
        (["31.01.2024", "01.02.2024", "01.02.2024", ""], Date("dmy")),
        (["01.02.2024", "05.06.2024", "01.02.2024", ""], Date("dmy")),
        (["a b c", "d e f", "g h i", "j"], Words()),
        (["a b c", "a b c", "a b c", "d e f"], Hashed()),
        (["new york", "new york", "rome", "rome"], Hashed()),
        (["", "?", "NA", "null"], Dropped()),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_kinds_are_guessed_from_every_value(values, kind):
    table = Table.of_frame({"x": values, "y": ["a", "b", "a", "b"], "z": ["c", "c", "d", "d"]})
    assert Schema.of(table, target="y").encodings["x"] == kind


def test_many_texts_of_several_words_are_free_text_though_each_occurs_often():
    """Reports from a template repeat; hundreds of categories would share 64 inputs."""
    table = Table.of_frame(
        {
            "report": [f"fever since day {k % 257}" for k in range(2570)],
            "diagnosis": [f"disorder of type {k % 256}" for k in range(2570)],
            "y": ["a", "b"] * 1285,
        }
    )
    encodings = Schema.of(table, target="y").encodings
    assert (encodings["report"], encodings["diagnosis"]) == (Words(), Hashed())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["01/02/2024", "05/06/2024"], r"day and month cannot be told apart; .* x=date:dmy or x=date:mdy"),
        (["01.02.24", "05.06.24"], "holds dates whose years have two digits; write four digits, or declare it: x=text"),
        (["1"] * 19 + ["<1"], r"column 'x' \(row 19\) = '<1' must be a number, as most .*--missing\), .*x=text in"),
        (["1"] * 38 + ["-", "n.a."], r"column 'x' \(2 rows: 38, 39\) = '-', 'n.a.' must be a number, as most values"),
        (["2024-01-01"] * 19 + ["soon"], r"column 'x' \(row 19\) = 'soon' must be a date, as most values"),
        (["u1", "u2"], r"column 'x' holds texts that differ in every row; .*\(x=drop in columns\)"),
        ([1, 2], "column 'x' holds whole numbers that differ in every row"),
        (["u1", "", "u2"], "column 'x' holds texts that differ in every row"),
    ],
)
def test_what_cannot_be_told_is_asked(values, message):
    table = Table.of_frame({"x": values, "y": [k % 2 for k in range(len(values))], "z": ["c"] * len(values)})
    with pytest.raises(ValueError, match=message):
        Schema.of(table, target="y")


def test_the_order_of_dates_can_be_declared():
    table = Table.of_frame({"x": ["01/02/2024", "05/06/2024"], "y": ["a", "b"]})
    assert Schema.of(table, target="y", columns={"x": "date:mdy"}).encodings["x"] == Date("mdy")
    with pytest.raises(
        ValueError, match=r"\(2 rows: 0, 1\) = '01/02/2024', '05/06/2024' must be a date in the order ymd"
    ):
        Schema.of(table, target="y", columns={"x": "date:ymd"})


def test_a_constant_column_is_remarked_on():
    table = Table.of_frame({"x": [3.0, 3.0, 3.0], "y": ["a", "b", "a"], "z": ["c", "c", "d"]})
    assert Schema.of(table, target="y").remarks == (
        "column 'x' has the same value in every row: nothing can be learnt from it",
    )


def test_names_of_persons_are_not_used_unless_declared():
    names = [f"P{k // 3}" for k in range(900)]
    table = Table.of_frame({"id": names, "ward": ["a", "b"] * 450, "y": ["n", "n", "j"] * 300})
    schema = Schema.of(table, target="y")
    assert schema.encodings == {"id": Dropped(), "ward": Hashed()}
    [remark] = schema.remarks
    assert remark.startswith("column 'id' is not used: it has 300 different texts, each in a few rows")
    assert "(--unit id)" in remark
    assert Schema.of(table, target="y", columns={"id": "text"}).encodings["id"] == Hashed()
    assert Schema.of(table, target="y", columns={"id": "drop"}).remarks == ()
    often = Table.of_frame({"town": [f"T{k % 300}" for k in range(3000)], "y": ["n", "j"] * 1500})
    assert Schema.of(often, target="y").encodings == {"town": Hashed()}


def test_a_unit_must_be_known_and_another_column(table):
    with pytest.raises(ValueError, match="unit = 'result' must be another column than the target"):
        Schema.of(table, target="result", unit="result")
    with pytest.raises(ValueError, match=r"column 'note' \(line 5\) = '' must be known, because it is the unit"):
        Schema.of(table, target="result", unit="note", columns={"patient": "text"})
    with pytest.raises(ValueError, match=r"columns\['patient'\] = 'text' is the unit of privacy, which is no input"):
        Schema.of(table, columns={"patient": "text"}, **OPTIONS)


def test_without_a_unit_each_row_is_one(table):
    schema = Schema.of(table, target="result", columns={"patient": "drop"})
    assert schema.unit is None
    assert schema.units(table).tolist() == [0, 1, 2, 3, 4]


def test_a_target_that_is_a_number(table):
    options = {"target": "temperature", "columns": {"temperature": "30:40", "patient": "drop", "age": "0:120"}}
    with pytest.raises(ValueError, match=r"column 'temperature' \(line 4\) = 'NA' must be known; it is the target"):
        Schema.of(table, **options)
    known = table.take([0, 1, 3])
    schema = Schema.of(known, **options)
    assert schema.outputs == 1
    assert schema.targets(known).flatten().tolist() == pytest.approx([0.32, 0.5, 0.62])


ENCODINGS = (
    Dropped(), Number(), Magnitude(), Interval(-1.5, 3), Hashed(), Words(), OneOf(("a", "ß")), Date("dmy"),
    Date("ymd", clock=True),
)  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.kind)
def test_every_encoding_makes_the_round_trip_through_json(encoding):
    schema = Schema({"x ä": encoding}, "y", classes=("a", "b"), unit="u", missing=("none",), decimals={"x ä": ","})
    content = json.loads(json.dumps(schema.to_dict()))
    assert Schema.from_dict(content) == schema
    assert Schema.from_dict(content).to_dict() == schema.to_dict()


def test_a_range_makes_the_round_trip_through_json():
    schema = Schema({"x": Number()}, "y", interval=Interval(0, 1e300))
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema


def _changed(*path, to):
    content = Schema({"x": Interval(0, 1), "d": Date("dmy")}, "y", classes=("a", "b")).to_dict()
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return content


@pytest.mark.parametrize(
    "content",
    [
        None, [], {}, _changed("version", to=2), _changed("version", to=True), _changed("columns", to="x"),
        _changed("columns", 0, "kind", to="eval"), _changed("columns", 0, "kind", to=["range"]),
        _changed("columns", 0, "low", to="0"), _changed("columns", 0, "low", to=True),
        _changed("columns", 0, "low", to=2),
        _changed("columns", 0, "more", to=1), _changed("columns", 0, "name", to="d"),
        _changed("columns", 0, "name", to=3),
        _changed("columns", 1, "order", to="ydm"), _changed("columns", 1, "clock", to=1), _changed("target", to={}),
        _changed("target", to={"name": "y"}), _changed("target", "classes", to=["a"]), _changed("unit", to=3),
        _changed("target", "range", to=[0, 1]), _changed("missing", to=[1]), _changed("decimals", to={"x": "?"}),
        _changed("more", to=1),
    ],
)  # fmt: skip
def test_what_qclip_does_not_write_is_refused(content):
    before = copy.deepcopy(content)
    with pytest.raises(ValueError, match=r"schema|column|encoding"):
        Schema.from_dict(content)
    assert content == before


@given(
    st.dictionaries(st.sampled_from(["version", "columns", "target"]), st.recursive(st.none() | st.text(), st.lists))
)
def test_damaged_schemas_are_refusals(content):
    with pytest.raises(ValueError, match=r"schema"):
        Schema.from_dict({"version": 1} | content)


def test_numpy_is_not_needed_to_read_a_schema(table):
    def plain(value):
        kinds = (dict, list, str, int, float, bool, type(None))
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return isinstance(value, kinds) and not isinstance(value, np.generic) and all(map(plain, inside))

    assert plain(Schema.of(table, columns={"age": "0:120"}, **OPTIONS).to_dict())
