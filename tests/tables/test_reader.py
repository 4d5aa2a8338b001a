"""Files as people have them: separators, encodings and decimal marks are recognised and said, or refused by line."""

import codecs
import gzip

import numpy as np
import pytest

from qclip.tables import read
from qclip.tables.reader import SEPARATORS, stem

ROWS = [
    ("name", "size", "note"),
    ("Smith, J; jr|x\ty", "1.5", 'he said "so"'),
    ("Öz", "2.5", "two\nlines"),
    ("", "3", ""),
]


def write(tmp_path, content, name="table.csv", encoding="utf-8"):
    path = tmp_path / name
    raw = content.encode(encoding) if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


def quoted(rows, mark, end="\n"):
    return "".join(
        mark.join('"' + v.replace('"', '""') + '"' if set(v) & set(' "\n,;|\t') else v for v in row) + end
        for row in rows
    )


def values(table):
    return list(zip(*(column.texts() for column in table.columns.values()), strict=True))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["unix", "windows", "mac"])
@pytest.mark.parametrize("mark", SEPARATORS, ids=SEPARATORS.values())
def test_separators_are_recognised_among_quoted_others(tmp_path, mark, end):
    table = read(write(tmp_path, quoted(ROWS, mark, end)))
    assert table.names == ROWS[0]
    assert values(table) == ROWS[1:]
    assert table.notes == (() if mark == "," else (f"separated by {SEPARATORS[mark]}",))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.tab", "a.txt", "a.csv.gz", "a.TSV"])
def test_the_ending_does_not_decide(tmp_path, name):
    assert values(read(write(tmp_path, quoted(ROWS, "\t"), name))) == ROWS[1:]


def test_a_column_of_its_own_and_a_single_row_are_read(tmp_path):
    assert read(write(tmp_path, "text\nhello\nworld\n"))["text"].texts() == ["hello", "world"]
    assert values(read(write(tmp_path, "a;b\n1;2\n"))) == [("1", "2")]


@pytest.mark.parametrize("text", ["a;b\n1,5;2,5\n3,5;4\n", "a;b\n1,5;2,5\n3,5;4,5\n6,5;7,5\n"], ids=["some", "all"])
def test_decimal_commas_are_no_separators(tmp_path, text):
    table = read(write(tmp_path, text))
    assert table.names == ("a", "b")
    assert table["a"].numbers()[0] == 1.5
    assert table.notes == ("separated by semicolons", "decimal commas in a, b")


def test_a_separator_may_be_given(tmp_path):
    path = write(tmp_path, "a:b\n1:x\n")
    assert read(path, separator=":").names == ("a", "b")
    assert read(write(tmp_path, "a,b\tc\n1\t2,3\n"), separator="tab").names == ("a,b", "c")
    with pytest.raises(ValueError, match="separator = 'ab' must be one character"):
        read(path, separator="ab")


@pytest.mark.parametrize(
    ("encoding", "found"),
    [
        ("utf-8", ()),
        ("utf-8-sig", ()),
        ("utf-16", ("read as utf-16 (by its mark)",)),
        ("cp1252", ("read as cp1252 (it is not UTF-8; --encoding names another)",)),
    ],
)
def test_encodings_are_recognised_and_said(tmp_path, encoding, found):
    text = "größe,straße\n1,Ödweg – „5“\n"
    table = read(write(tmp_path, text, encoding=encoding))
    assert table.names == ("größe", "straße")
    assert table["straße"].texts() == ["Ödweg – „5“"]
    assert table.notes == found


def test_what_cp1252_does_not_have_is_latin_1(tmp_path):
    assert read(write(tmp_path, b"a,b\n\x81\xe9,1\n")).notes[0].startswith("read as latin-1 (it is not UTF-8")


def test_utf8_is_found_beyond_the_first_block(tmp_path):
    text = "a,b\n" + f"{'x' * 1000},1\n" * 1100 + "é,2\n"
    assert read(write(tmp_path, text)).notes == ()
    assert "cp1252" in read(write(tmp_path, text, encoding="cp1252")).notes[0]


def test_an_encoding_may_be_given(tmp_path):
    path = write(tmp_path, "a,b\nя,1\n", encoding="cp1251")
    assert read(path, encoding="cp1251")["a"].texts() == ["я"]
    assert read(write(tmp_path, "a,b\nя,1\n", "b.csv", "utf-16-le"), encoding="utf-16-le")["a"].texts() == ["я"]
    with pytest.raises(ValueError, match="encoding = 'latin-x' must be an encoding that Python knows; such as"):
        read(path, encoding="latin-x")
    with pytest.raises(ValueError, match=r"is not text in utf-8-sig \(.*; save it as UTF-8, or give its encoding"):
        read(path, encoding="utf-8")


def test_each_column_has_its_own_decimal_mark(tmp_path):
    text = "de;us;whole;mixed;name\n1.234,5;1,234.5;7;1,5;1,x\n36,6;36.6;8;1.5;b\n"
    table = read(write(tmp_path, text))
    assert table["de"].numbers().tolist() == [1234.5, 36.6]
    assert table["us"].numbers().tolist() == [1234.5, 36.6]
    assert table["whole"].numbers().tolist() == [7, 8]
    with pytest.raises(ValueError, match="column 'mixed' has numbers that can be read with a decimal comma or"):
        table["mixed"].numbers()


@pytest.mark.parametrize("text", ["a;b\n1,234;x\n2,500;y\n", 'a,b\n"1,5",x\n"2,5",y\n', "a;b\n1.234;1,5\n2.500;2,5\n"])
def test_thousands_never_become_decimals_in_silence(tmp_path, text):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=r'column \'a\' has numbers .*decimal="," or decimal="." \(--decimal\)'):
        read(path)["a"].numbers()
    first = text.split("\n")[1].split('"' if '"' in text else ";")['"' in text]
    for decimal, other in (",.", ".,"):
        if (first, decimal) != ("1,5", "."):
            expected = float(first.replace(other, "").replace(decimal, "."))
            assert read(path, decimal=decimal)["a"].numbers()[0] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; give a file with a header"),
        ("a,b\n", "has no rows of values"),
        ("a,a\n1,2\n", r"header = \['a', 'a'\] must be a list of distinct names; the first line is the header"),
        ("column 2,\n1,2\n", "give each column a name of its own"),
        ("a,b\n1,2\n\n3\n", "line 4 of .* has 1 values for 2 columns; complete the row"),
        ("a,b\n1,2\n3\n4,5,6\n", "2 lines of .* than its 2 columns: line 3 has 1, line 4 has 3; complete"),
        ('a,b\n1,"2\n', r"is not separated by commas \(unexpected end of data at line 2\); quote values"),
        (b"a,b\n\x00,1\n", r"is not text \(it has bytes 0\); save it as UTF-8, or give its encoding"),
        (codecs.BOM_UTF16_LE + b"a\x00,", r"is not text in utf-16 \(.*truncated"),
    ],
    ids=["empty", "header", "twice", "unnamed", "short-row", "ragged", "open-quote", "binary", "half-utf-16"],
)  # fmt: skip
def test_files_that_are_no_table_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path, content))


def test_a_damaged_archive_and_an_absent_file_are_refused(tmp_path):
    path = write(tmp_path, quoted(ROWS, ","), "a.csv.gz")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is not a whole gzip file; it is damaged or incomplete"):
        read(path)
    with pytest.raises(ValueError, match=r"path = '.*none.csv' must be a file that exists; check the path"):
        read(tmp_path / "none.csv")


def test_columns_without_a_name_are_numbered(tmp_path):
    table = read(write(tmp_path, ",age,\n0,30,a\n1,41,b\n"))
    assert table.names == ("column 1", "age", "column 3")
    assert table.notes == ("columns without a name in the header: column 1, column 3",)


def test_the_ending_gz_may_be_in_capitals(tmp_path):
    path = tmp_path / "BEDS.CSV.GZ"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    assert (read(path).names, stem(path)) == (("a", "b"), "BEDS")


def test_lines_are_those_of_the_file(tmp_path):
    column = read(write(tmp_path, 'a,b\n"x\ny",1\n\nz,2\n'))["b"]
    assert column.places.tolist() == [3, 5]


def test_parquet_is_read_as_the_same_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"size": [1.5, None, 2.5], "name": ["a", None, "b"], "number": [1, 2, None]}
    columns["day"] = np.array(["2024-01-01", "2024-02-01", "NaT"], dtype="datetime64[s]")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    table = read(path)
    assert table["size"].values.tolist()[::2] == [1.5, 2.5]
    assert table["name"].texts() == ["a", "", "b"]
    assert [table[name].missing().tolist() for name in table] == [[False, True, False]] * 2 + [[False, False, True]] * 2
    assert table["day"].is_dates
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="is not a whole parquet file"):
        read(path)
    with pytest.raises(ValueError, match=r"separator = ';' must be left out for a \.parquet file"):
        read(path, separator=";")


def test_parquet_without_pyarrow_has_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"a\.parquet is read with pyarrow, which is not installed; pip install"
    ):
        read(write(tmp_path, b"PAR1", "a.parquet"))
