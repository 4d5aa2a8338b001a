"""Files that are replaced whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, *, secret: bool = False) -> Iterator[IO[bytes]]:
    """Open a draft that takes the place of ``path`` when the block ends, and is on the disk by then.

    After an error the draft is removed and the old file stays.

    Args:
        path: The file to replace.
        secret: Whether only its owner may read the file.
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


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``, whole or not at all."""
    with replacing(path) as file:
        file.write(content)
