"""One door: names, paths, and arguments that a data set has no use for."""

from pathlib import Path

import pytest

from data.samples import flowers, write_csv
from qclip.apps.data import NAMES, load


def test_unknown_names_are_refused_with_the_known_ones():
    assert NAMES == (
        "digits",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "adult",
        "shakespeare",
        "sst2",
        "sst2-lora",
        "sst2-head",
    )
    message = "name = 'cifar' must be one of 'digits', 'mnist', .*'sst2-head', or a path to a .csv, .tsv.*; check"
    with pytest.raises(ValueError, match=message):
        load("cifar")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", [{"target": "age"}, {"classes": ("a", "b")}, {"columns": {"age": "drop"}}], ids=str)
def test_named_data_have_their_own_target(name, option):
    (argument,) = option
    with pytest.raises(ValueError, match=f"{argument} = .* does not apply to '{name}': it has its own"):
        load(name, **option)


def test_folders_are_for_named_files(tmp_path):
    with pytest.raises(ValueError, match=r"data_dir = .* does not apply to 'digits'"):
        load("digits", data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"data_dir = .* does not apply to .* a table is read from its own path"):
        load(str(write_csv(tmp_path, flowers())), target="kind", data_dir=tmp_path)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("digits", "fashion-mnist")])
def test_folders_that_are_missing_are_said_to_be(name):
    with pytest.raises(ValueError, match="data_dir = None must be a folder with"):
        load(name)
    with pytest.raises(ValueError, match=r"data_dir = 'not/here' must be a folder with .* \(there is no such folder\)"):
        load(name, data_dir=Path("not/here"))
