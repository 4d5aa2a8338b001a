"""The data sets of the command line, each with its model."""

from functools import partial
from pathlib import Path
from typing import Unpack

from qclip import _validate as check
from qclip.apps.data.adult import adult
from qclip.apps.data.cifar import cifar10
from qclip.apps.data.csv_file import TableOptions, csv_file
from qclip.apps.data.images import digits, fashion_mnist, mnist
from qclip.apps.data.sst2 import sst2
from qclip.apps.data.task import Defaults, Task
from qclip.apps.data.text import shakespeare
from qclip.tables.reader import ENDINGS, is_table

__all__ = ["NAMES", "Defaults", "TableOptions", "Task", "load"]

_FROM_FILES = {
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "adult": adult,
    "shakespeare": shakespeare,
    "sst2": sst2,
    "sst2-lora": partial(sst2, tuned="lora"),
    "sst2-head": partial(sst2, tuned="head"),
}
NAMES = ("digits", *_FROM_FILES)
"""The data sets known by name."""


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    **options: Unpack[TableOptions],
) -> Task:
    """Load a task by its name, or from a file.

    >>> task = load("digits")
    >>> task.description
    '1497 digits of 8 x 8 pixels, 300 held out (every 6th), 10 classes'
    >>> sorted(task.score(task.build_model()))
    ['accuracy', 'loss']

    Args:
        name: One of `NAMES`, or the path to a table with a header: .csv, .tsv, .txt (or .gz), .parquet.
        data_dir: Folder of the files of a named data set, or its parent; digits need none.
        **options: For a table, what is known of it.

    Raises:
        Refusal: The name is unknown, a file is missing or broken, or an argument does not apply to the data set.
    """
    if name not in NAMES:
        if not is_table(name):
            bound = f"one of {', '.join(map(repr, NAMES))}, or a path to a {', '.join(ENDINGS)} (or .gz)"
            raise check.refuse("name", name, bound, "check the spelling, or save other kinds of files as .csv")
        _refuse_given(name, data_dir=data_dir)
        return csv_file(Path(name), **options)
    _refuse_given(name, **options)
    if name == "digits":
        _refuse_given(name, data_dir=data_dir)
        return digits()
    return _FROM_FILES[name](data_dir)


def _refuse_given(name: str, **arguments: object) -> None:
    """Refuse arguments that do not apply to this data set."""
    for argument, value in arguments.items():
        if value is not None:
            reason = "a table is read from its own path" if name not in NAMES else "it has its own"
            raise check.Refusal(f"{argument} = {value!r} does not apply to {name!r}: {reason}; leave {argument} out")
