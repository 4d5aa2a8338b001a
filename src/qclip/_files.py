"""Files that are replaced whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, *, secret: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of ``path`` at the end, on the disk; after an error the old one stays.

    ``secret``: only its owner may read it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
