"""The processes of a run that torchrun, or another launcher with its variables, has started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from qclip.training.ranks import Ranks


@contextmanager
def launched(device: str | None) -> Iterator[Ranks]:
    """Join the process group of the launcher, and leave it on exit; a process that was started alone stays alone.

    Args:
        device: The device of the settings: "cpu", "cuda", or None for a GPU where there is one.

    Yields:
        The processes of the run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    from qclip.training.process_group import joined

    with joined(device) as ranks:
        yield ranks
