"""Adult, the census income data (Becker and Kohavi, 1996), encoded by its published schema."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from qclip.apps.data import files
from qclip.apps.data.task import Defaults, Task, classifier
from qclip.tables.columns import Column
from qclip.tables.encodings import Dropped, Encoding, Interval, Magnitude, OneOf
from qclip.tables.models import linear
from qclip.tables.reader import read_records
from qclip.tables.table import Table


def _options(text: str) -> OneOf:
    return OneOf(tuple(text.split()))


# The categories are those of adult.names, and "?" for a missing answer. There, numbers are only called "continuous":
# their ranges are those of the survey, which covers people over 16, up to 90 and 99 hours.
SCHEMA: dict[str, Encoding] = {
    "age": Interval(16, 90),
    "workclass": _options(
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked ?"
    ),
    "fnlwgt": Dropped(),  # a weight of the sampling, not a fact about the person
    "education": _options(
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters 1st-4th 10th "
        "Doctorate 5th-6th Preschool"
    ),
    "education-num": Interval(1, 16),
    "marital-status": _options(
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent Married-AF-spouse"
    ),
    "occupation": _options(
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
        "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv "
        "Armed-Forces ?"
    ),
    "relationship": _options("Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    "race": _options("White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    "sex": _options("Female Male"),
    "capital-gain": Magnitude(),
    "capital-loss": Magnitude(),
    "hours-per-week": Interval(0, 99),
    "native-country": _options(
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan Greece South "
        "China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland France "
        "Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand "
        "Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands ?"
    ),
}
INCOME = _options("<=50K >50K")
FILES = ("adult.data.gz", "adult.test.gz")


def adult(data_dir: Path | None) -> Task:
    """Load Adult: predict who earns over 50,000 dollars a year; the published test rows are held out."""
    train, held_out = (encoded(adult_table(path)) for path in adult_files(data_dir))
    inputs = train.tensors[0].shape[1]
    description = (
        f"{len(train)} people, {len(held_out)} held out (the published test set), {inputs} inputs by the published "
        f"schema, 2 classes: {' and '.join(INCOME.options)}"
    )
    defaults = Defaults(batch_size=1024, epochs=20)
    return classifier(
        "adult", train, held_out, partial(linear, inputs, 2), defaults, description, classes=INCOME.options
    )


def adult_files(data_dir: Path | None) -> tuple[Path, ...]:
    """Return the files of the training and of the test rows."""
    source = "get the Adult data set (census income) of the UCI machine learning repository and name its folder"
    return files.find(data_dir, ("adult",), FILES, source=source)


def adult_table(path: Path) -> Table:
    """Return the table of a file: the columns of `SCHEMA`, and "income" as in `INCOME`."""
    records = read_records(path, separator=",")
    rows = ((line, fields) for line, fields in records if not fields[0].startswith("|"))  # a remark in adult.test
    table = Table.of_records([*SCHEMA, "income"], rows, str(path))
    income = [value.removesuffix(".") for value in table["income"].texts()]  # adult.test has dots
    places = table["income"].places
    return Table({**table.columns, "income": Column.of_texts("income", income, places)}, table.source)


def encoded(table: Table) -> TensorDataset:
    """Return inputs [N, F] with labels [N]."""
    inputs = np.hstack([encoding.encode(table[name]) for name, encoding in SCHEMA.items()]).astype(np.float32)
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(INCOME.indices(table["income"])))
