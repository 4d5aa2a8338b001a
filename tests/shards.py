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
            *(row if isinstance(row, tuple) else (row,)),
            id=name(row) if name else "-".join(getattr(x, "__name__", str(x)) for x in row),
            marks=() if i % n == 0 or always(row) else pytest.mark.slow,
        )
        for i, row in enumerate(rows)
    ]
