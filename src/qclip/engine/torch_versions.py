"""The versions of torch that qclip was tested with, and a warning beyond them."""

import re
import warnings
from functools import cache

OLDEST, NEWEST = (2, 11), (2, 15)
"""Minor releases; CONTRIBUTING.md has the table, pyproject.toml asks for the oldest."""


@cache
def warn_if_untested(version: str) -> None:
    """Warn, once, about a version outside the range; patch releases and builds count as their minor release."""
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release is not None and OLDEST <= release <= NEWEST:
        return
    beyond = "not one of those" if release is None else "newer than any" if release > NEWEST else "older than any"
    tested = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    remedy = (
        "compare qclip.clipped_gradients with qclip.engine.oracle.clipped_gradients on your model, or run "
        "`make test-smoke` in the source tree with this torch, before you rely on it"
    )
    # Above: this function, Engine, and make_private or clipped_gradients.
    warnings.warn(f"torch {version} is {beyond} that qclip was tested with ({tested}); {remedy}", stacklevel=4)
