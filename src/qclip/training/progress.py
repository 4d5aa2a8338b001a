"""Progress of what takes long inside a call."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something is being done, on a terminal; a line in the log of ``qclip`` elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        logging.getLogger("qclip").info(what)
        yield
