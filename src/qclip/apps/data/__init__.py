"""The data sets that the command line can read, each with its model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from qclip import _validate as check
from qclip.apps.data.adult import adult
from qclip.apps.data.csv_file import csv_file
from qclip.apps.data.images import digits, fashion_mnist, mnist
from qclip.apps.data.task import Defaults, Task
from qclip.apps.data.text import shakespeare

__all__ = ["NAMES", "Defaults", "Task", "load"]

_FROM_FILES = {"mnist": mnist, "fashion-mnist": fashion_mnist, "adult": adult, "shakespeare": shakespeare}
NAMES = ("digits", *_FROM_FILES)
"""The data sets known by name."""


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    target: str | None = None,
    classes: Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> Task:
    """The task of this name, or of a file.

    name: one of `NAMES`, or the path to a .csv or .csv.gz file with a header.
    data_dir: the folder with the files of a named data set, in it or in a subfolder; digits need none.
    target, classes, columns: for a .csv: the column to foretell, its classes, and what the columns hold
        (`qclip.apps.data.csv_file`).

    >>> task = load("digits")
    >>> task.description
    '1497 digits of 8 x 8 pixels, 300 held out (every 6th), 10 classes'
    >>> sorted(task.score(task.build_model()))
    ['accuracy', 'loss']
    """
    if name not in NAMES:
        if not name.endswith((".csv", ".csv.gz")):
            bound = f"one of {', '.join(map(repr, NAMES))}, or a path to a .csv or .csv.gz"
            raise check.refuse("name", name, bound, "check the spelling")
        _refuse_given(name, data_dir=data_dir)
        return csv_file(Path(name), target=target, classes=classes, columns=columns)
    _refuse_given(name, target=target, classes=classes, columns=columns)
    if name == "digits":
        _refuse_given(name, data_dir=data_dir)
        return digits()
    return _FROM_FILES[name](data_dir)


def _refuse_given(name: str, **arguments: object) -> None:
    """Refuse arguments that this data set has no use for."""
    for argument, value in arguments.items():
        if value is not None:
            remedy = "a .csv is read from its own path" if name not in NAMES else "it has its own"
            raise check.refuse(argument, value, f"left out for {name!r}", remedy)
