"""Labelled images: bytes scaled by constants, and labels that fit."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from qclip import _validate as check

NUM_CLASSES = 10

Bytes = NDArray[np.uint8]


def labelled(images: Bytes, labels: Bytes) -> TensorDataset:
    """Return images [N, C, H, W] in [-1, 1] with their labels [N]."""
    return TensorDataset(scaled(torch.from_numpy(images)), torch.from_numpy(labels).long())


def check_labels(labels: Bytes, count: int, *, image_file: str, label_file: str) -> None:
    """Refuse labels that do not fit the images or the classes.

    Args:
        labels: The labels, [N].
        count: The number of images.
        image_file: The file of the images, for the error.
        label_file: The file of the labels, for the error.
    """
    if len(labels) != count or count == 0:
        raise check.Refusal(
            f"{image_file} has {count} images and {label_file} has {len(labels)} labels; the files belong together: "
            "get both again"
        )
    if labels.max() >= NUM_CLASSES:
        where = int(np.argmax(labels >= NUM_CLASSES))
        name = f"label number {where} in {label_file}"
        raise check.refuse(name, int(labels[where]), f"in 0 .. {NUM_CLASSES - 1}", "get the file again")


def scaled(pixels: Tensor) -> Tensor:
    """Scale bytes to [-1, 1] by constants.

    >>> scaled(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])
    """
    return pixels.float().div_(127.5).sub_(1)  # in place: the floats of CIFAR-10 take 600 MB
