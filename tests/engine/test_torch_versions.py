"""A torch outside the tested range is named once; the range is the one that the project states elsewhere."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import qclip
from qclip.engine import Engine
from qclip.engine.torch_settings import NEWEST, OLDEST, warn_if_untested

ROOT = Path(__file__).parents[2]
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def version(release, minors=0, rest=".0"):
    """The text of a version so many minor releases after this one."""
    return f"{release[0]}.{release[1] + minors}{rest}"


@pytest.fixture(autouse=True)
def _fresh():
    warn_if_untested.cache_clear()
    yield
    warn_if_untested.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """A function that sets the version torch says it has."""
    return lambda version: monkeypatch.setattr(torch, "__version__", version)


def loss(outputs, targets):
    return (outputs - targets).square().sum(1)


def private():
    model = nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qclip.make_private(model, optimizer, data, loss=loss, batch_size=4, steps=1, noise_multiplier=1, delta=1e-2)


DOORS = {
    "engine": lambda: Engine(nn.Linear(2, 1)),
    "clipped_gradients": lambda: qclip.clipped_gradients(nn.Linear(2, 1), loss, torch.eye(2), torch.ones(2, 1), 1.0),
    "make_private": private,
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_newer_torch_is_named_once(door, installed):
    installed(found := version(NEWEST, 1))
    with pytest.warns(UserWarning, match=rf"torch {re.escape(found)} is newer than .* \({RANGE}\)") as caught:
        door()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door()
    assert len(caught) == 1
    assert "qclip.engine.oracle.clipped_gradients" in str(caught[0].message)
    assert "make test-smoke" in str(caught[0].message)


def test_the_warning_points_at_the_line_that_called_make_private(installed):
    installed(version(NEWEST, 1))
    with pytest.warns(UserWarning, match="newer") as caught:
        private()
    assert caught[0].filename == __file__


NEWER = [(1, ".0"), (1, ".0a0+git1a2b3c"), (1, ".0.dev20270101+cu130"), (1, ".0rc1"), (1, ".1"), (90, ".0+cpu")]


@pytest.mark.parametrize(("minors", "rest"), NEWER)
def test_newer_builds_of_any_kind(minors, rest, installed):
    installed(version(NEWEST, minors, rest))
    with pytest.warns(UserWarning, match="is newer than"):
        Engine(nn.Linear(2, 1))


def test_the_next_major_release_is_newer(installed):
    installed(f"{NEWEST[0] + 1}.0.0")
    with pytest.warns(UserWarning, match="is newer than"):
        Engine(nn.Linear(2, 1))


@pytest.mark.parametrize("found", [version(OLDEST, -1), version(OLDEST, -1, ".9+cu118"), f"{OLDEST[0] - 1}.99.0"])
def test_an_older_torch_is_named(found, installed):
    installed(found)
    with pytest.warns(UserWarning, match=rf"torch {re.escape(found)} is older than .* \({RANGE}\)"):
        Engine(nn.Linear(2, 1))


@pytest.mark.parametrize("rest", [".0", ".1", ".12", ".0+cpu", ".1+cu130", ".0a0+git1a2b3c", ""])
@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_patch_releases_and_builds_of_tested_releases_are_not(release, rest, installed):
    installed(version(release, 0, rest))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(nn.Linear(2, 1))


def test_a_version_that_cannot_be_read_is_named(installed):
    installed("main")
    with pytest.warns(UserWarning, match=rf"torch main is not one of those .* \({RANGE}\)"):
        Engine(nn.Linear(2, 1))


def test_the_oldest_is_the_one_that_the_package_asks_for():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={OLDEST[0]}.{OLDEST[1]}" in needs


def test_the_pinned_one_is_tested():
    (pinned,) = re.findall(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert OLDEST <= tuple(map(int, pinned)) <= NEWEST


def test_the_table_of_what_was_tested_spans_the_range():
    """Its rows begin with a version of Python and one of torch."""
    rows = re.findall(r"^\| 3\.\d+\.\d+ \| (\d+)\.(\d+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    tested = sorted(tuple(map(int, row)) for row in rows)
    assert (tested[0], tested[-1]) == (OLDEST, NEWEST)
