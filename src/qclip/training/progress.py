"""Progress of calls that take long."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


PATIENCE = 1.0
"""Without a terminal, calls that take fewer seconds are not mentioned."""
log = logging.getLogger("qclip")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show ``what`` while the block runs: a spinner on a terminal; elsewhere, as in notebooks, a line in the log.

    The line has the level of a warning, which is shown without any set-up, and comes after `PATIENCE` seconds.
    """
    terminal = _terminal()
    if terminal is None:
        timer = threading.Timer(PATIENCE, log.warning, [f"{what} ..."])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
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
