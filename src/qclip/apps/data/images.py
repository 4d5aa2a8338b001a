"""Images: scikit-learn's digits, MNIST and Fashion-MNIST."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from qclip import _validate as check
from qclip.apps.data import files, models
from qclip.apps.data.pixels import NUM_CLASSES, Bytes, check_labels, labelled
from qclip.apps.data.task import Defaults, Task, classifier, hold_out
from qclip.tables.models import perceptron

DIGITS = tuple(map(str, range(10)))
CLOTHES = (
    "T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
IDX_FILES = (
    "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz",
)  # fmt: skip
SIDE = 28
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""The folder of Debian's package dataset-fashion-mnist."""


def digits() -> Task:
    """Load the 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn; every sixth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as missing:
        message = "the digits come with scikit-learn, which is not installed; pip install 'qclip[train]'"
        raise ModuleNotFoundError(message, name=missing.name) from None
    pixels, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    train, held_out = hold_out(pixels.float() / 16, labels.long())
    description = f"{len(train)} digits of 8 x 8 pixels, {len(held_out)} held out (every 6th), 10 classes"
    model = partial(perceptron, 64, 64, NUM_CLASSES)
    defaults = Defaults(batch_size=256, epochs=30)
    return classifier("digits", train, held_out, model, defaults, description, classes=DIGITS)


def mnist(data_dir: Path | None) -> Task:
    """Load MNIST, handwritten digits of 28 x 28 pixels."""
    source = "get the four idx files of the MNIST database (LeCun, Cortes and Burges) and name their folder"
    paths = files.find(data_dir, ("mnist",), IDX_FILES, source=source)
    return _idx_task("mnist", DIGITS, paths, Defaults(batch_size=1024, epochs=15))


def fashion_mnist(data_dir: Path | None) -> Task:
    """Load Fashion-MNIST, articles of clothing of 28 x 28 pixels; Debian's package needs no ``data_dir``."""
    source = (
        "install Debian's package dataset-fashion-mnist (which needs no data_dir), or get the four idx files of "
        "Zalando Research's Fashion-MNIST and name their folder"
    )
    if data_dir is None and DEBIAN_FASHION_MNIST.is_dir():
        data_dir = DEBIAN_FASHION_MNIST
    paths = files.find(data_dir, ("fashion_mnist", "fashion-mnist"), IDX_FILES, source=source)
    return _idx_task("fashion-mnist", CLOTHES, paths, Defaults(batch_size=1024, epochs=15))


def _idx_task(name: str, classes: Sequence[str], paths: tuple[Path, ...], defaults: Defaults) -> Task:
    train, held_out = _pairs(*paths[:2]), _pairs(*paths[2:])
    shape = f"images of {SIDE} x {SIDE} pixels, {NUM_CLASSES} classes"
    description = f"{len(train)} {shape}, {len(held_out)} held out (the published test set)"
    return classifier(name, train, held_out, models.mnist_cnn, defaults, description, classes=classes)


def _pairs(image_file: Path, label_file: Path) -> TensorDataset:
    """Return images [N, 1, 28, 28] in [-1, 1] with their labels [N]."""
    images, labels = read_idx(image_file, dimensions=3), read_idx(label_file, dimensions=1)
    if images.shape[1:] != (SIDE, SIDE):
        raise check.Refusal(
            f"the images of {image_file} have shape {images.shape} instead of [N, {SIDE}, {SIDE}], the size of the "
            "model; take the files of MNIST or Fashion-MNIST"
        )
    check_labels(labels, len(images), image_file=image_file.name, label_file=str(label_file))
    return labelled(images[:, None], labels)


def read_idx(path: Path, *, dimensions: int) -> Bytes:
    """Return the array in an idx file: two zeros, 8, the number of dimensions, big-endian lengths, the bytes."""
    raw = files.read(path)
    magic = bytes([0, 0, 8, dimensions])
    if raw[:4] != magic:
        raise check.Refusal(
            f"{path} begins with {raw[:4].hex(' ') or 'nothing'} instead of {magic.hex(' ')}, as an idx file of bytes "
            f"with {dimensions} dimensions does; get it again, or check that images and labels are not mixed up"
        )
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(raw[k : k + 4], "big") for k in range(4, start, 4)]
    if len(raw) != start + math.prod(shape):
        raise check.Refusal(
            f"{path} has {len(raw)} bytes instead of {start + math.prod(shape)}, for shape {shape}; it is truncated or "
            "damaged: get it again"
        )
    return np.frombuffer(bytearray(raw[start:]), dtype=np.uint8).reshape(shape)  # writable, for torch
