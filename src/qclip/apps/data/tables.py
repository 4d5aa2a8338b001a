"""Comma-separated files: rows, columns, and the inputs that encodings make of them."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qclip import _validate as check
from qclip.apps.data import files
from qclip.apps.data.columns import Column, Dropped, Encoding


@dataclass(frozen=True)
class CsvRow:
    """The values between commas, without the blanks around them, and the line of the file on which they end."""

    line: int
    fields: tuple[str, ...]


def read_rows(path: Path) -> list[CsvRow]:
    """The rows of a file that are not blank."""
    reader = csv.reader(io.StringIO(files.read_text(path), newline=""), skipinitialspace=True, strict=True)
    try:
        return [CsvRow(reader.line_num, tuple(field.strip() for field in fields)) for fields in reader if any(fields)]
    except csv.Error as error:
        remedy = "quote values that hold commas, quotes or line feeds"
        raise check.refuse("file", str(path), f"comma-separated ({error} at line {reader.line_num})", remedy) from None


def columns(names: Sequence[str], rows: Sequence[CsvRow], path: Path) -> dict[str, Column]:
    """The rows' columns by name; rows of another length are refused."""
    if not rows:
        raise check.refuse("file", str(path), "one with rows of values", "it has none: check that it is the right one")
    for row in rows:
        if len(row.fields) != len(names):
            remedy = "complete the row, or quote values that hold commas"
            label = f"line {row.line} of {path}"
            raise check.refuse(label, f"{len(row.fields)} values", f"{len(names)}, one for each column", remedy)
    lines = tuple(row.line for row in rows)
    values = zip(*(row.fields for row in rows), strict=True)
    return {name: Column(name, column, lines) for name, column in zip(names, values, strict=True)}


def encode(columns: Mapping[str, Column], encodings: Mapping[str, Encoding]) -> Tensor:
    """The inputs of all columns that have an encoding, side by side, [rows, inputs]."""
    blocks = [encoding.encode(columns[name]).astype(np.float32) for name, encoding in encodings.items()]
    return torch.from_numpy(np.hstack(blocks))


def longest_row(encodings: Iterable[Encoding]) -> float:
    """The largest norm of a row's inputs, with the 1 that the bias is multiplied by: each column has at most length 1.

    Where a linear model of a table is clipped. The gradient of a row is its inputs, times how wrong the model is: at
    most sqrt(2) times, for classes, and then nearly certain of a wrong one; only rows that it is far off on are
    clipped. A quantile would be no use: where most rows are easy, as they are when a class is rare, it vanishes.

    >>> from qclip.apps.data.columns import Magnitude
    >>> longest_row([Dropped()] * 5), longest_row([Magnitude()] * 8)
    (1.0, 3.0)
    """
    return math.sqrt(1 + sum(not isinstance(encoding, Dropped) for encoding in encodings))
