"""Progress of long operations inside a call."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a status line on a terminal while the block runs; elsewhere, write a line to the log of ``qclip``."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        logging.getLogger("qclip").info(what)
        yield
