"""CIFAR-10: binary batches and mosaics are the same images; damaged files are refused by name."""

import sys

import numpy as np
import pytest
import torch

from data.samples import cifar_images, cifar_labels, real_data, write_cifar, write_mosaics
from qclip.apps.data import load


@pytest.mark.parametrize("subfolder", ["", "cifar10", "cifar-10-batches-bin"])
def test_binary_batches_are_found(tmp_path, subfolder):
    write_cifar(tmp_path / subfolder)
    task = load("cifar10", data_dir=tmp_path)
    assert task.description == "30 colour images of 32 x 32 pixels, 10 classes, 6 held out (the published test set)"
    inputs, labels = task.train.tensors
    assert inputs.dtype == torch.float32
    for batch in range(5):
        part = slice(6 * batch, 6 * batch + 6)
        assert np.allclose(inputs[part].numpy(), cifar_images(batch + 1) / 127.5 - 1, atol=1e-6)
        assert labels[part].tolist() == cifar_labels(batch + 1).tolist()
    assert np.allclose(task.held_out.tensors[0].numpy(), cifar_images(6) / 127.5 - 1, atol=1e-6)


def test_mosaics_are_the_same_images(tmp_path):
    pytest.importorskip("PIL")
    binary = load("cifar10", data_dir=write_cifar(tmp_path / "binary"))
    mosaics = load("cifar10", data_dir=write_mosaics(tmp_path / "mosaics"))
    for one, other in ((binary.train, mosaics.train), (binary.held_out, mosaics.held_out)):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


def test_files_that_are_not_there_are_named(tmp_path):
    write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").rename(tmp_path / "test_batch")  # as a batch for Python is called
    message = "data_batch_1.bin and .*, or data_batch_1.webp and .* labels.npz, in it .*they are not there.; get the"
    with pytest.raises(ValueError, match=message):
        load("cifar10", data_dir=tmp_path)


def first_label(raw, value):
    return bytes([value]) + raw[1:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"", r"data_batch_3.bin has 0 bytes instead of a multiple of 3073"),
        (lambda raw: raw[:-1], r"data_batch_3.bin has 18437 bytes instead of .*; it is truncated or damaged: get it"),
        (lambda raw: raw[:-3073], r"have 6, 6, 5, 6, 6, 6 images instead of equally many; some are truncated"),
        (lambda raw: first_label(raw, 10), r"label number 0 in .*data_batch_3.bin = 10 must be in 0 .. 9"),
    ],
    ids=["empty", "cut", "cut-image", "label"],
)
def test_damaged_batches_are_refused(tmp_path, damage, message):
    path = write_cifar(tmp_path) / "data_batch_3.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((96, 60), r"data_batch_2.webp has 96 x 60 pixels, not whole tiles of 32 x 32"),
        ((96, 32), r"data_batch_1.webp .. data_batch_5.webp has 27 images and 'train' of .*labels.npz has 30 labels"),
    ],
    ids=["tiles", "counts"],
)
def test_mosaics_of_another_size_are_refused(tmp_path, size, message):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", size).save(write_mosaics(tmp_path) / "data_batch_2.webp", lossless=True)
    with pytest.raises(ValueError, match=message):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-500], lambda raw: b"no image", lambda raw: b""])
def test_damaged_mosaics_are_refused(tmp_path, damage):
    pytest.importorskip("PIL")
    path = write_mosaics(tmp_path) / "test_batch.webp"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"test_batch.webp is not a whole image .*; it is damaged: get it again"):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train": np.zeros(30, dtype=np.uint8)}, "is not an .npz file with arrays 'train' and 'test'"),
        ({"test": np.zeros(6)}, r"'test' of .* holds float64 of shape \(6,\) instead of uint8 of shape \[N\]"),
        ({"test": np.full(6, 10, dtype=np.uint8)}, "label number 0 in 'test' of .* = 10 must be in 0 .. 9"),
        ({"test": np.zeros(5, dtype=np.uint8)}, "test_batch.webp has 6 images and 'test' of .* has 5 labels"),
    ],
    ids=["missing", "kind", "range", "counts"],
)
def test_other_labels_are_refused(tmp_path, arrays, message):
    pytest.importorskip("PIL")
    train = {} if "train" in arrays else {"train": np.zeros(30, dtype=np.uint8)}
    np.savez(write_mosaics(tmp_path) / "labels.npz", **train, **arrays)
    with pytest.raises(ValueError, match=message):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("damage", [lambda raw: raw[:100], lambda raw: b"no labels", lambda raw: b""])
def test_damaged_labels_are_refused(tmp_path, damage):
    pytest.importorskip("PIL")
    path = write_mosaics(tmp_path) / "labels.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"labels.npz is not an .npz file with arrays"):
        load("cifar10", data_dir=tmp_path)


def test_mosaics_without_pillow_say_what_to_install(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    write_mosaics(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match=r"Pillow, which is not installed; pip install 'qclip\[train\]'"):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.slow
def test_the_published_images_are_read():
    pytest.importorskip("PIL")
    task = load("cifar10", data_dir=real_data("cifar10"))
    inputs, labels = task.train.tensors
    assert inputs.shape == (50_000, 3, 32, 32)
    assert (inputs.min(), inputs.max()) == (-1, 1)
    assert labels.bincount().tolist() == [5000] * 10
    assert task.held_out.tensors[1].bincount().tolist() == [1000] * 10
    # The means of red, green and blue that are usually quoted.
    means = (inputs.mean((0, 2, 3)) + 1) / 2
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
