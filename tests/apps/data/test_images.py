"""Digits, and idx files: read as they are, scaled by constants, refused when damaged."""

import gzip
import sys

import numpy as np
import pytest
import torch

from data.samples import idx_bytes, real_data, write_idx
from qclip.apps.data import images, load


def test_digits_are_split_and_scaled_by_constants():
    task = load("digits")
    inputs, labels = task.train.tensors
    assert (len(task.train), len(task.held_out)) == (1497, 300)
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert torch.equal(labels.unique(), torch.arange(10))
    assert torch.equal((inputs * 16).round(), inputs * 16)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"scikit-learn, which is not installed; pip install 'qclip\[train\]'"
    ):
        load("digits")


@pytest.mark.parametrize("zipped", [True, False], ids=["zipped", "plain"])
@pytest.mark.parametrize(
    ("name", "subfolder"),
    [("mnist", ""), ("mnist", "mnist"), ("fashion-mnist", "fashion_mnist"), ("fashion-mnist", "fashion-mnist")],
)
def test_idx_files_are_found(tmp_path, name, subfolder, zipped):
    write_idx(tmp_path / subfolder, zipped=zipped)
    task = load(name, data_dir=tmp_path)
    assert task.name == name
    assert task.description == "40 images of 28 x 28 pixels, 10 classes, 15 held out (the published test set)"
    image, label = task.train[13]
    assert image.shape == (1, 28, 28)
    assert label == 3
    expected = np.random.default_rng(0).integers(0, 256, (40, 28, 28))[13] / 127.5 - 1
    assert np.allclose(image[0].numpy(), expected, atol=1e-6)


def test_fashion_mnist_of_debian_is_found_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "DEBIAN_FASHION_MNIST", write_idx(tmp_path / "debian"))
    assert len(load("fashion-mnist").train) == 40
    with pytest.raises(ValueError, match="there is no such folder"):
        load("fashion-mnist", data_dir=tmp_path / "elsewhere")  # a folder that was named is the only one


def test_files_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    with pytest.raises(
        ValueError, match=r"data_dir = None must be a folder with train-images-idx3-ubyte.gz and .*; get"
    ):
        load("mnist")
    with pytest.raises(ValueError, match="install Debian's package dataset-fashion-mnist"):
        load("fashion-mnist")
    message = "t10k-labels-idx1-ubyte.gz, in it or in its subfolder mnist .they are not there.; get the four idx files"
    with pytest.raises(ValueError, match=message):
        load("mnist", data_dir=tmp_path)
    (write_idx(tmp_path) / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match="they are not there"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        (
            {"train_images_idx3_ubyte": b""},
            "begins with nothing instead of .*, as an idx file of bytes with 3 dimensions",
        ),
        (
            {"train_images_idx3_ubyte": idx_bytes(np.zeros((2, 28, 28)), kind=13)},
            "begins with 00 00 0d 03 instead of 00 00 08 03, as an idx file of bytes with 3 dimensions",
        ),
        ({"train_images_idx3_ubyte": idx_bytes(np.zeros(40))}, "check that images and labels are not mixed up"),
        (
            {"train_images_idx3_ubyte": idx_bytes(np.zeros((40, 28, 28)))[:-1]},
            r"has 31375 bytes instead of 31376, for shape \[40, 28, 28\]; it is truncated",
        ),
        ({"train_images_idx3_ubyte": bytes([0, 0, 8, 3, 0, 0])}, "it is truncated"),
        ({"train_images_idx3_ubyte": idx_bytes(np.zeros((40, 28, 28))) + b"!"}, "it is truncated or damaged"),
        (
            {"train_labels_idx1_ubyte": idx_bytes(np.zeros(39))},
            r"train-images.* has 40 images and .* has 39 labels; the files belong together",
        ),
        (
            {"t10k_labels_idx1_ubyte": idx_bytes(np.arange(15) % 11)},
            r"label number 10 in .* = 10 must be in 0 .. 9",
        ),
    ],
    ids=["empty", "kind", "labels", "cut", "cut-header", "longer", "counts", "range"],
)
def test_damaged_files_are_refused(tmp_path, replaced, message):
    write_idx(tmp_path, **replaced)
    with pytest.raises(ValueError, match=message):
        load("mnist", data_dir=tmp_path)


def test_images_of_another_size_are_refused(tmp_path):
    write_idx(tmp_path, side=32)
    with pytest.raises(ValueError, match=r"have shape \(40, 32, 32\) instead of \[N, 28, 28\], the size of the model"):
        load("mnist", data_dir=tmp_path)


def test_empty_sets_are_refused(tmp_path):
    write_idx(tmp_path, test=0)
    with pytest.raises(ValueError, match=r"has 0 images and .* has 0 labels"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-20], lambda raw: b"no gzip at all", lambda raw: b""])
def test_damaged_gzip_files_are_refused(tmp_path, damage):
    path = write_idx(tmp_path) / "train-images-idx3-ubyte.gz"
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    message = "not a whole gzip file; it is damaged or incomplete" if damaged else "begins with nothing"
    with pytest.raises(ValueError, match=message):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion-mnist", "fashion_mnist")])
def test_the_published_files_are_read(name, folder):
    task = load(name, data_dir=real_data(folder))
    inputs, labels = task.train.tensors
    assert inputs.shape == (60_000, 1, 28, 28)
    assert (inputs.min(), inputs.max()) == (-1, 1)
    assert len(task.held_out) == 10_000
    # Fashion-MNIST has equally many of each class; MNIST's most frequent digit is known to be 1, 6742 times.
    assert labels.bincount().max() == {"mnist": 6742, "fashion-mnist": 6000}[name]


def test_a_gzip_of_idx_bytes_is_what_is_read(tmp_path):
    path = tmp_path / "some.gz"
    array = np.arange(24).reshape(2, 3, 4)
    path.write_bytes(gzip.compress(idx_bytes(array)))
    assert np.array_equal(images.read_idx(path, dimensions=3), array)
