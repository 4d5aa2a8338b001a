"""Finding and reading the files of a data set, compressed or not."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from qclip import _validate as check


def find(
    data_dir: Path | None, subfolders: Sequence[str], *alternatives: Sequence[str], source: str
) -> tuple[Path, ...]:
    """The files of the first alternative that is there, compressed or not, in ``data_dir`` or one of its subfolders.

    An alternative is a set of files that are needed together. ``source`` tells, in words, where to get them.
    """
    wanted = ", or ".join(" and ".join(names) for names in alternatives)
    if data_dir is None:
        raise check.refuse("data_dir", None, f"a folder with {wanted}", source)
    places = [data_dir, *(data_dir / name for name in subfolders)]
    for names in alternatives:
        for place in places:
            found = [_existing(place / name) for name in names]
            if None not in found:
                return tuple(path for path in found if path is not None)
    state = "they are not there" if data_dir.is_dir() else "there is no such folder"
    bound = f"a folder with {wanted}, in it or in its subfolder {' or '.join(subfolders)} ({state})"
    raise check.refuse("data_dir", str(data_dir), bound, source)


def _existing(path: Path) -> Path | None:
    """The file with or without .gz."""
    return next((each for each in (path, path.with_suffix("")) if each.is_file()), None)


def read(path: Path) -> bytes:
    """The contents of a file, unpacked where its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as stream:
            return stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error):
        remedy = "it is damaged or was not fetched to its end: get it again"
        raise check.refuse("file", str(path), "a whole gzip file", remedy) from None


def read_text(path: Path) -> str:
    """The contents of a file of text."""
    try:
        return read(path).decode("utf-8-sig")  # spreadsheets begin their files with a mark
    except UnicodeDecodeError as error:
        remedy = f"save it in that encoding (byte {error.start} is not)"
        raise check.refuse("file", str(path), "text in UTF-8", remedy) from None
