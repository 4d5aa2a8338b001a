"""Products of rows and settings of which `make test` runs a part, and `make test-slow` the rest."""

from collections.abc import Callable, Collection, Iterable
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
    return [_param(row, name or _name, i % n == 0 or always(row)) for i, row in enumerate(rows)]


def named(quick: Collection[str], rows: Iterable[Any], *, name: Callable[[Any], str] | None = None) -> list:
    """The rows called by these names; the others are slow."""
    name = name or _name
    return [_param(row, name, name(row) in quick) for row in rows]


def _param(row: Any, name: Callable[[Any], str], quick: bool) -> Any:
    return pytest.param(*_arguments(row), id=name(row), marks=() if quick else pytest.mark.slow)


def _name(row: Any) -> str:
    return "-".join(getattr(part, "__name__", str(part)) for part in _arguments(row))


def _arguments(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)
