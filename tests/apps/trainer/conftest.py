"""A small table to train on: 480 rows of two numbers, of which 400 train, in two classes."""

from functools import cache

import numpy as np
import pytest

from qclip import accounting


@pytest.fixture(autouse=True, scope="package")
def _ask_the_accountant_once():
    """The runs of these tests spend the same; each answer takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounting, "epsilon", cache(accounting.epsilon))
        patch.setattr(accounting, "spending", cache(accounting.spending))
        yield


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 480)
    points = rng.normal(size=(480, 2)) + 3.0 * label[:, None]
    path = tmp_path_factory.mktemp("data") / "points.csv"
    lines = [f"{x:.4f},{y:.4f},{'ab'[c]}" for (x, y), c in zip(points, label, strict=True)]
    path.write_text("\n".join(["x,y,kind", *lines]) + "\n")
    return path
