"""The files of a data set, compressed or not."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from qclip import _validate as check


def find(
    data_dir: Path | None, subfolders: Sequence[str], *alternatives: Sequence[str], source: str
) -> tuple[Path, ...]:
    """Return the files of the first alternative that exists in ``data_dir`` or one of its subfolders.

    Args:
        data_dir: The folder to look into.
        subfolders: Names of subfolders to look into.
        alternatives: Sets of files that are needed together; a file may lack its .gz ending.
        source: Instructions to get them, for the error.

    Raises:
        Refusal: No alternative is complete.
    """
    wanted = ", or ".join(" and ".join(names) for names in alternatives)
    if data_dir is None:
        raise check.refuse("data_dir", None, f"a folder with {wanted}", source)
    places = [data_dir, *(data_dir / name for name in subfolders)]
    for names in alternatives:
        for place in places:
            paths = [_existing(place / name) for name in names]
            if None not in paths:
                return tuple(path for path in paths if path is not None)
    state = "they are not there" if data_dir.is_dir() else "there is no such folder"
    bound = f"a folder with {wanted}, in it or in its subfolder {' or '.join(subfolders)} ({state})"
    raise check.refuse("data_dir", str(data_dir), bound, source)


def _existing(path: Path) -> Path | None:
    """Return the file with or without .gz; None where there is neither."""
    plain = path.with_name(path.name.removesuffix(".gz"))
    return next((each for each in (path, plain) if each.is_file()), None)


def read(path: Path) -> bytes:
    """Return the contents of a file, decompressed where its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as stream:
            return stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise check.Refusal(f"{path} is not a whole gzip file; it is damaged or incomplete: get it again") from None


def read_text(path: Path) -> str:
    """Return the contents of a text file."""
    try:
        return read(path).decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        raise check.Refusal(f"{path} is not UTF-8 text (byte {error.start}); save it in that encoding") from None
