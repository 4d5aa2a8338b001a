"""Data frames and mappings become tables without pandas; what is missing stays missing."""

import datetime

import numpy as np
import pytest

from qclip.tables import Table


def test_kinds_of_arrays():
    table = Table.of_frame(
        {
            "float": np.array([1.5, np.nan], dtype=np.float32),
            "int": [3, 4],
            "bool": [True, False],
            "text": np.array(["a", None], dtype=object),
            "objects": np.array([1, None], dtype=object),
            "days": [datetime.date(2024, 12, 31), None],
            "times": np.array(["2024-01-01T10:00", "NaT"], dtype="datetime64[ns]"),
            5: [np.float64("nan"), "x"],
        }
    )
    assert len(table) == 2
    assert table.names[-1] == "5"
    assert table["float"].values[0] == 1.5
    assert table["int"].whole
    assert not table["float"].whole
    assert table["bool"].texts() == ["True", "False"]
    assert table["text"].texts() == ["a", ""]
    assert table["objects"].values[0] == 1
    assert table["days"].values[0] == np.datetime64("2024-12-31")
    assert table["times"].texts()[0] == "2024-01-01T10:00:00"
    missing = {name: table[name].missing().tolist() for name in table}
    assert missing == {name: [False, True] for name in ("float", "text", "objects", "days", "times")} | {
        "int": [False, False], "bool": [False, False], "5": [True, False]
    }  # fmt: skip


def test_large_whole_numbers_stay_apart():
    ids = [2**53, 2**53 + 1]
    for values in (ids, np.array([*ids], dtype=object)):
        assert Table.of_frame({"id": values})["id"].num_distinct() == 2


def test_a_data_frame_is_a_mapping():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"a": [1, 2], "b": ["x", None], "c": pandas.to_datetime(["2024-01-01", None])}, index=[7, 7]
    )
    frame["d"] = pandas.array([1, None], dtype="Int64")
    frame["e"] = frame["c"].dt.tz_localize("UTC")
    frame["f"] = frame["b"].astype("category")
    table = Table.of_frame(frame)
    assert [table[name].missing().tolist() for name in table] == [[False, False]] + [[False, True]] * 5
    assert table["d"].values[0] == 1
    assert table["c"].is_dates
    assert table["e"].is_dates
    assert table["f"].texts()[0] == "x"


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"a": [1], 1: [2], "1": [3]}, "columns = .* must be distinct names"),
        ({"a": [[1, 2]]}, r"column 'a' has shape \(1, 2\) instead of \[rows\]"),
        ({"a": [1], "b": [1, 2]}, "lengths of the columns = {'a': 1, 'b': 2} must be equal"),
        ({}, "has no rows of values"),
        ({"a": []}, "has no rows of values"),
    ],
)
def test_what_is_no_table_is_refused(frame, message):
    with pytest.raises(ValueError, match=message):
        Table.of_frame(frame)


def test_rows_are_named_as_such():
    with pytest.raises(ValueError, match=r"column 'a' \(row 1\) = 'x' must be a number"):
        Table.of_frame({"a": ["1", "x"]})["a"].numbers()
