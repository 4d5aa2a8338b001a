"""Products of rows and settings of which `make test` runs a part, and `make test-slow` the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every(
    n: int,
    rows: Iterable[Any],
    *,
    name: Callable[[Any], str] | None = None,
    always: Callable[[Any], bool] = lambda row: False,
) -> list:
    """Every n-th row, and those to be run ``always``; the others are slow. A tuple is several arguments.

    ``name`` says how a row is called; a tuple by its members unless told otherwise.
    """
    return [
        pytest.param(
            *_arguments(row),
            id=name(row) if name else _name(row),
            marks=() if i % n == 0 or always(row) else pytest.mark.slow,
        )
        for i, row in enumerate(rows)
    ]


def _name(row: Any) -> str:
    return "-".join(getattr(part, "__name__", str(part)) for part in _arguments(row))


def _arguments(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)
