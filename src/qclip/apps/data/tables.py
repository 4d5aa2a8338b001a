"""Comma-separated files: rows, columns and encoded inputs."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qclip import _validate as check
from qclip.apps.data import files
from qclip.apps.data.columns import Column, Encoding


@dataclass(frozen=True)
class CsvRow:
    """The stripped values of a row, and the line of the file on which they end."""

    line: int
    fields: tuple[str, ...]


def read_rows(path: Path) -> list[CsvRow]:
    """Return the rows of a file that are not blank."""
    reader = csv.reader(io.StringIO(files.read_text(path), newline=""), skipinitialspace=True, strict=True)
    try:
        return [CsvRow(reader.line_num, tuple(field.strip() for field in fields)) for fields in reader if any(fields)]
    except csv.Error as error:
        raise check.Refusal(
            f"{path} is not comma-separated ({error} at line {reader.line_num}); quote values that hold commas, quotes "
            "or line feeds"
        ) from None


def columns(names: Sequence[str], rows: Sequence[CsvRow], path: Path) -> dict[str, Column]:
    """Return the columns of the rows by name; rows of another length are refused."""
    if not rows:
        raise check.Refusal(f"{path} has no rows of values; check that it is the right file")
    for row in rows:
        if len(row.fields) != len(names):
            raise check.Refusal(
                f"line {row.line} of {path} has {len(row.fields)} values for {len(names)} columns; complete the row, "
                "or quote values that hold commas"
            )
    lines = tuple(row.line for row in rows)
    values = zip(*(row.fields for row in rows), strict=True)
    return {name: Column(name, column, lines) for name, column in zip(names, values, strict=True)}


def encode(columns: Mapping[str, Column], encodings: Mapping[str, Encoding]) -> Tensor:
    """Return the inputs of all columns that have an encoding, side by side, [rows, inputs]."""
    blocks = [encoding.encode(columns[name]).astype(np.float32) for name, encoding in encodings.items()]
    return torch.from_numpy(np.hstack(blocks))
