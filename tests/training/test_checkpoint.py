"""Checkpoint files: whole or not at all, plain data, refused when they do not fit."""

import os
import random
import zipfile
from collections import defaultdict

import numpy as np
import pytest
import torch

from qclip.engine.randomness import RandomState
from qclip.training import checkpoint

CONTENT = {"training": {"state": (1.0, "a"), "history": [{"tau": (0.5,)}]}, "model": {"weight": torch.arange(300.0)}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


def test_what_is_written_is_read(path):
    checkpoint.write(path, CONTENT)
    found = checkpoint.read(path)
    assert found["training"] == CONTENT["training"]
    assert torch.equal(found["model"]["weight"], CONTENT["model"]["weight"])
    assert path.stat().st_mode & 0o077 == 0  # it may hold seeds


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    checkpoint.write(path, CONTENT)
    before = path.read_bytes()

    def interrupted(*args):
        raise KeyboardInterrupt

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.write(path, {"model": {}})
        assert path.read_bytes() == before
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_what_would_have_to_be_executed_is_refused_by_its_place(path):
    checkpoint.write(path, CONTENT)
    with pytest.raises(ValueError, match=r"others\['ema'\]\[0\] = 'a builtins.function' must be plain data"):
        checkpoint.write(path, {"others": {"ema": [lambda: 0]}})
    with pytest.raises(ValueError, match=r"others = 'a collections.defaultdict' must be plain data"):
        checkpoint.write(path, {"others": defaultdict(int)})
    assert checkpoint.read(path)["training"] == CONTENT["training"]


def test_numbers_of_numpy_become_numbers(path):
    checkpoint.write(path, {"x": {"p": np.float64(0.5), "n": (np.int64(3), np.bool_(True))}})
    assert checkpoint.read(path)["x"] == {"p": 0.5, "n": (3, True)}


class Bomb:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_loading_executes_nothing(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": checkpoint.FORMAT, "version": 1, "model": Bomb()}, path)
    with pytest.raises(ValueError, match="must be a whole qclip checkpoint"):
        checkpoint.read(path)
    assert not (tmp_path / "executed").exists()


def test_a_missing_truncated_or_foreign_file_is_refused(path):
    with pytest.raises(ValueError, match="must be an existing checkpoint"):
        checkpoint.read(path)
    checkpoint.write(path, CONTENT)
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated or damaged"):
            checkpoint.read(path)
    path.write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match="truncated or damaged"):
        checkpoint.read(path)
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="must be a qclip checkpoint"):
        checkpoint.read(path)


def test_a_flipped_bit_is_noticed(path):
    checkpoint.write(path, CONTENT)
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename.split("/", 1)[1]: entry for entry in archive.infolist()}
    for name in ("data.pkl", "data/0"):
        start = entries[name].header_offset + 30 + len(entries[name].orig_filename)
        for offset in (entries[name].file_size // 3, entries[name].file_size // 2):
            # The local header has a field of padding of its own length after the name.
            extra = int.from_bytes(whole[entries[name].header_offset + 28 : entries[name].header_offset + 30], "little")
            damaged = bytearray(whole)
            damaged[start + extra + offset] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="path"):
                checkpoint.read(path)


def test_a_newer_version_is_refused(path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    checkpoint.write(path, CONTENT)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="checkpoint version = 2 must be <= 1; it was written by a newer qclip"):
        checkpoint.read(path)


def test_random_states_come_back(path):
    checkpoint.write(path, {"random": RandomState.now().state_dict()})

    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]  # noqa: NPY002

    first = draw()
    assert draw() != first
    RandomState.from_state_dict(checkpoint.read(path)["random"]).restore()
    assert draw() == first
