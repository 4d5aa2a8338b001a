"""Files of a table: separators, encodings and decimal marks are recognised, and said."""

import codecs
import csv
import gzip
import itertools
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal

from qclip import _validate as check
from qclip.tables.columns import Column, Decimal, decimal_mark
from qclip.tables.table import Table

ENDINGS = (".csv", ".tsv", ".tab", ".txt", ".parquet")
"""The endings of files that are read; all but parquet also with .gz."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_BY_NAME = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "bar": "|", "pipe": "|"}
_SNIFFED = 200
"""Records from which the separator is recognised."""
_BLOCK = 2**20


def is_table(name: str) -> bool:
    """Return whether a name ends as that of a table.

    >>> is_table("beds.csv.gz"), is_table("digits")
    (True, False)
    """
    plain = name.lower().removesuffix(".gz")
    return plain.endswith(ENDINGS)


def stem(path: Path) -> str:
    """Return the name of a file without the endings of tables.

    >>> stem(Path("in/beds.csv.gz"))
    'beds'
    """
    name = path.name[:-3] if _is_gzip(path) else path.name
    return next((name[: -len(ending)] for ending in ENDINGS if name.lower().endswith(ending)), name)


def _is_gzip(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def read(
    path: str | Path,
    *,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: Literal[".", ","] | None = None,
) -> Table:
    """Read a table from a file whose first line is the header.

    What is not given is recognised, and said in `Table.notes`:

    - The separator, from the first records, quoted values respected.
    - The encoding: by its mark of byte order, else UTF-8 where the whole file is, else Windows' cp1252 (latin-1 where
      cp1252 has no such character).
    - Names for columns without one: "column 1" where the first has none.
    - The decimal mark, for each column, unless the separator is a comma: there, and where "1,234" may be thousands or a
      decimal, it has to be given before the column is read as numbers.

    Args:
        path: A .csv, .tsv, .tab or .txt file, compressed (.gz) or not; or a .parquet file, with pyarrow.
        separator: The character between values, or its name: "tab", "comma", "semicolon", "bar".
        encoding: The encoding, such as "utf-8", "cp1252" or "utf-16-le".
        decimal: The decimal mark of all columns.

    Raises:
        qclip.Refusal: The file cannot be read as a table; the message says in which line, and what to do.
        ModuleNotFoundError: For parquet, where pyarrow is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise check.refuse("path", str(path), "a file that exists", "check the path")
    if decimal is not None:
        check.choice("decimal", decimal, (".", ","))
    if path.suffix.lower() == ".parquet":
        given = {"separator": separator, "encoding": encoding, "decimal": decimal}
        for argument, value in given.items():
            if value is not None:
                raise check.refuse(argument, value, "left out for a .parquet file", "it says that itself")
        return _parquet(path)
    known = _encoding(path, encoding)
    mark = _sniffed(path, known) if separator is None else _separator(separator)
    with closing(read_records(path, separator=mark, encoding=known)) as records:
        names, unnamed = _named(next(records, (0, ()))[1])
        _check_header(path, names)
        table = Table.of_records(names, records, str(path))
    columns = _with_decimals(table, mark, decimal)
    notes = _notes(mark if separator is None else ",", known if encoding is None else "utf-8-sig")
    if unnamed:
        notes.append(f"columns without a name in the header: {', '.join(unnamed)}")
    commas = [name for name, column in columns.items() if column.decimal == ","]
    if commas and decimal is None:
        notes.append(f"decimal commas in {', '.join(commas)}")
    return Table(columns, str(path), tuple(notes))


def read_records(path: Path, *, separator: str, encoding: str = "utf-8-sig") -> Generator[tuple[int, tuple[str, ...]]]:
    """Yield the rows of a file that are not blank, stripped, each with the line on which it ends.

    Args:
        path: The file.
        separator: The character between values.
        encoding: The encoding.

    Raises:
        qclip.Refusal: The file is damaged, or not a table of this separator and encoding.
    """
    with _open(path, encoding) as lines:
        reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
        try:
            for fields in reader:
                if any(fields):
                    yield reader.line_num, tuple(field.strip() for field in fields)
        except csv.Error as error:
            raise check.Refusal(
                f"{path} is not separated by {SEPARATORS.get(separator, repr(separator))} ({error} at line "
                f"{reader.line_num}); quote values that hold separators, quotes or line feeds, or give the separator "
                "(--separator)"
            ) from None


@contextmanager
def _open(path: Path, encoding: str | None) -> Iterator[IO[Any]]:
    """Open a file for its text, or its bytes without an encoding, decompressed where its name ends in .gz."""
    mode: Any = "rb" if encoding is None else "rt"
    newline = None if encoding is None else ""
    try:
        with (gzip.open if _is_gzip(path) else open)(path, mode, encoding=encoding, newline=newline) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise check.Refusal(f"{path} is not a whole gzip file; it is damaged or incomplete: get it again") from None
    except UnicodeError as error:
        raise _not_text(path, f"in {encoding} ({error})") from None


def _not_text(path: Path, why: str) -> check.Refusal:
    return check.Refusal(f"{path} is not text {why}; save it as UTF-8, or give its encoding (--encoding)")


def _encoding(path: Path, given: str | None) -> str:
    """Return the encoding of a file: given, by its mark, or the first one that fits the whole file."""
    if given is not None:
        try:
            name = codecs.lookup(given).name
        except LookupError:
            remedy = "such as utf-8, cp1252, latin-1 or utf-16"
            raise check.refuse("encoding", given, "an encoding that Python knows", remedy) from None
        return "utf-8-sig" if name == "utf-8" else name
    with _open(path, None) as stream:
        start = stream.read(4)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        fits = {name: codecs.getincrementaldecoder(name)() for name in ("utf-8-sig", "cp1252")}
        for block in itertools.chain([start], iter(lambda: stream.read(_BLOCK), b""), [b""]):
            if b"\0" in block:
                raise _not_text(path, "(it has bytes 0)")
            for name in list(fits):
                try:
                    fits[name].decode(block, final=not block)
                except UnicodeDecodeError:
                    del fits[name]
    return next(iter(fits), "latin-1")


def _separator(given: str) -> str:
    mark = _BY_NAME.get(given.lower(), given)
    if len(mark) != 1 or mark in '"\r\n ':
        raise check.refuse("separator", given, 'one character, or "tab"', 'such as "," or ";"')
    return mark


def _sniffed(path: Path, encoding: str) -> str:
    """Return the separator that cuts the first records into the most values, equally many in each."""
    best = (0.0, 1, ",")
    for mark in SEPARATORS:
        try:
            with closing(read_records(path, separator=mark, encoding=encoding)) as records:
                sizes = [len(fields) for _, fields in itertools.islice(records, _SNIFFED)]
        except check.Refusal:
            continue
        if sizes and sizes[0] > 1:
            best = max(
                best, (sum(size == sizes[0] for size in sizes) / len(sizes), sizes[0], mark), key=lambda each: each[:2]
            )
    return best[2]


def _named(header: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of all columns, and those given to columns without one, such as the index of a data frame.

    >>> _named(["", "age"])
    (['column 1', 'age'], ['column 1'])
    """
    names = [name or f"column {number}" for number, name in enumerate(header, start=1)]
    return names, [name for name, given in zip(names, header, strict=True) if not given]


def _check_header(path: Path, names: Sequence[str]) -> None:
    if not names:
        raise check.Refusal(f"{path} is empty; give a file with a header and rows of values")
    if len(set(names)) < len(names):
        remedy = "the first line is the header: give each column a name of its own"
        raise check.refuse("header", list(names), "a list of distinct names", remedy)


def _with_decimals(table: Table, separator: str, decimal: Literal[".", ","] | None) -> dict[str, Column]:
    """Return the columns with their decimal marks."""
    if decimal is not None:
        return {name: replace(column, decimal=decimal) for name, column in table.columns.items()}
    marks: dict[str, Decimal] = {name: decimal_mark(column.values) for name, column in table.columns.items()}
    if "," in marks.values():
        for name, column in table.columns.items():
            marks[name] = decimal_mark(column.values, commas_elsewhere=True)
    if separator == ",":
        marks = {name: "?" if mark == "," else mark for name, mark in marks.items()}
    return {name: replace(column, decimal=marks[name]) for name, column in table.columns.items()}


def _notes(mark: str, encoding: str) -> list[str]:
    """Return what was recognised, where it is not plain UTF-8 with commas."""
    notes = [] if mark == "," else [f"separated by {SEPARATORS[mark]}"]
    if encoding != "utf-8-sig":
        why = "by its mark" if encoding == "utf-16" else "it is not UTF-8; --encoding names another"
        notes.append(f"read as {encoding} ({why})")
    return notes


def _parquet(path: Path) -> Table:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as missing:
        message = f"{path.name} is read with pyarrow, which is not installed; pip install pyarrow, or save it as .csv"
        raise ModuleNotFoundError(message, name=missing.name) from None
    try:
        content: Any = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise check.Refusal(
            f"{path} is not a whole parquet file ({str(error).splitlines()[0]}); get it again"
        ) from None
    frame = {name: content.column(name).to_numpy(zero_copy_only=False) for name in content.column_names}
    return Table.of_frame(frame, source=str(path))
