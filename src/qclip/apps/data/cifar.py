"""CIFAR-10 (Krizhevsky, 2009): the published binary batches, or lossless mosaics of them."""

import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qclip import _validate as check
from qclip.apps.data import files, models
from qclip.apps.data.pixels import NUM_CLASSES, Bytes, check_labels, labelled
from qclip.apps.data.task import Defaults, Task, classifier

BATCHES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
BINARY_FILES = tuple(f"{name}.bin" for name in BATCHES)
MOSAIC_FILES = (*(f"{name}.webp" for name in BATCHES), "labels.npz")
CHANNELS = 3
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
RECORD = 1 + CHANNELS * SIDE**2
"""Bytes of an image in a binary batch: its label, then red, green and blue."""


def cifar10(data_dir: Path | None) -> Task:
    """Load CIFAR-10, photographs of 32 x 32 pixels; the published test images are held out."""
    source = (
        "get the binary version of Alex Krizhevsky's CIFAR-10 (cifar-10-binary.tar.gz), unpack it and name its folder"
    )
    paths = files.find(data_dir, ("cifar10", "cifar-10-batches-bin"), BINARY_FILES, MOSAIC_FILES, source=source)
    images, labels = (_read_binary if paths[0].suffix == ".bin" else _read_mosaics)(paths)
    sizes = [len(batch) for batch in images]
    if len(set(sizes)) > 1:
        raise check.Refusal(
            f"the batches in {paths[0].parent} have {', '.join(map(str, sizes))} images instead of equally many; some "
            "are truncated: get them again"
        )
    train = labelled(np.concatenate(images[:-1]), np.concatenate(labels[:-1]))
    held_out = labelled(images[-1], labels[-1])
    shape = f"colour images of {SIDE} x {SIDE} pixels, {NUM_CLASSES} classes"
    description = f"{len(train)} {shape}, {len(held_out)} held out (the published test set)"
    defaults = Defaults(batch_size=1024, epochs=30)
    return classifier("cifar10", train, held_out, models.cifar_cnn, defaults, description, classes=CLASSES)


def _read_binary(paths: Sequence[Path]) -> tuple[list[Bytes], list[Bytes]]:
    """Return the images [N, 3, 32, 32] and labels [N] of each binary batch."""
    images, labels = [], []
    for path in paths:
        raw = np.fromfile(path, dtype=np.uint8)
        if len(raw) % RECORD or len(raw) == 0:
            raise check.Refusal(
                f"{path} has {len(raw)} bytes instead of a multiple of {RECORD}, the label and the pixels of an image; "
                "it is truncated or damaged: get it again"
            )
        records = raw.reshape(-1, RECORD)
        images.append(records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE))
        labels.append(records[:, 0])
        check_labels(labels[-1], len(records), image_file=path.name, label_file=str(path))
    return images, labels


def _read_mosaics(paths: Sequence[Path]) -> tuple[list[Bytes], list[Bytes]]:
    """Return the images [N, 3, 32, 32] and labels [N] of each mosaic; the last path is that of the labels."""
    *mosaics, label_file = paths
    images = [_read_mosaic(path) for path in mosaics]
    train, test = _read_labels(label_file)
    several = f"{mosaics[0].name} .. {mosaics[-2].name}"
    check_labels(train, sum(map(len, images[:-1])), image_file=several, label_file=f"'train' of {label_file}")
    check_labels(test, len(images[-1]), image_file=mosaics[-1].name, label_file=f"'test' of {label_file}")
    return images, [*np.split(train, np.cumsum([len(batch) for batch in images[:-2]])), test]


def _read_mosaic(path: Path) -> Bytes:
    """Return the images of a mosaic, row by row, [N, 3, 32, 32]."""
    try:
        from PIL import Image
    except ModuleNotFoundError as missing:
        message = f"{path.name} is read with Pillow, which is not installed; pip install 'qclip[train]'"
        raise ModuleNotFoundError(message, name=missing.name) from None
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, Image.DecompressionBombError) as error:
        raise check.Refusal(f"{path} is not a whole image ({error}); it is damaged: get it again") from None
    height, width, _ = pixels.shape
    if height % SIDE or width % SIDE:
        raise check.Refusal(
            f"{path} has {width} x {height} pixels, not whole tiles of {SIDE} x {SIDE}; check that it is a mosaic of "
            "CIFAR-10, and get it again"
        )
    tiles = pixels.reshape(height // SIDE, SIDE, width // SIDE, SIDE, CHANNELS)
    return tiles.transpose(0, 2, 4, 1, 3).reshape(-1, CHANNELS, SIDE, SIDE)


def _read_labels(path: Path) -> tuple[Bytes, Bytes]:
    """Return the labels of the training and of the test images."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as arrays:  # given a path, it leaves a damaged file open
            train, test = arrays["train"], arrays["test"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error):
        raise check.Refusal(
            f"{path} is not an .npz file with arrays 'train' and 'test'; it is damaged or another file: get it again"
        ) from None
    for name, labels in (("train", train), ("test", test)):
        if labels.dtype != np.uint8 or labels.ndim != 1:
            raise check.Refusal(
                f"{name!r} of {path} holds {labels.dtype} of shape {labels.shape} instead of uint8 of shape [N]; write "
                "one byte for each image"
            )
    return train, test
