"""Progress of calls that take long."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show ``what`` while the block runs: a spinner on a terminal, otherwise a line in the log of ``qclip``."""
    terminal = _terminal()
    if terminal is None:
        logging.getLogger("qclip").info(what)
        yield
    else:
        with terminal.status(what):
            yield


def _terminal() -> "Console | None":
    """Return the terminal, or None without one or without rich, which only the command line needs."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    console = Console(stderr=True)
    return console if console.is_terminal else None
