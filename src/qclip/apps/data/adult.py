"""Adult, the census income data (Becker and Kohavi, 1996), encoded by its published schema."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from qclip.apps.data import files, models, tables
from qclip.apps.data.columns import Column, Dropped, Encoding, Interval, Magnitude, OneOf
from qclip.apps.data.task import Defaults, Task, classifier


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
    train, held_out = (encoded(adult_columns(path)) for path in adult_files(data_dir))
    inputs = train.tensors[0].shape[1]
    description = (
        f"{len(train)} people, {len(held_out)} held out (the published test set), {inputs} inputs by the published "
        f"schema, 2 classes: {' and '.join(INCOME.options)}"
    )
    defaults = Defaults(batch_size=1024, epochs=20)
    return classifier("adult", train, held_out, partial(models.linear, inputs, 2), defaults, description)


def adult_files(data_dir: Path | None) -> tuple[Path, ...]:
    """Return the files of the training and of the test rows."""
    source = "get the Adult data set (census income) of the UCI machine learning repository and name its folder"
    return files.find(data_dir, ("adult",), FILES, source=source)


def adult_columns(path: Path) -> dict[str, Column]:
    """Return the columns of a file by name: those of `SCHEMA`, and "income" as in `INCOME`."""
    rows = [row for row in tables.read_rows(path) if not row.fields[0].startswith("|")]  # a remark in adult.test
    columns = tables.columns([*SCHEMA, "income"], rows, path)
    income = columns["income"]
    values = tuple(value.removesuffix(".") for value in income.values)  # adult.test has dots
    return columns | {"income": replace(income, values=values)}


def encoded(columns: Mapping[str, Column]) -> TensorDataset:
    """Return inputs [N, F] with labels [N]."""
    return TensorDataset(tables.encode(columns, SCHEMA), torch.from_numpy(INCOME.indices(columns["income"])))
