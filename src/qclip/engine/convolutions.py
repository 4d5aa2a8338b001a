"""The form of a convolution's gradient: a sum of outer products over positions, with the windows not yet cut out.

Kept gradients come from one grouped convolution and clipped sums from the ordinary one, so the windows (every pixel
many times) are written out only for Gram products, which pay off where there are few positions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.forms import (
    Outer,
    Products,
    chunk,
    from_above,
    full,
    keep_examples,
    lengths,
    scale_examples,
    square_sums,
)


@dataclass(frozen=True)
class Geometry:
    """How the windows lie: one number per spatial dimension each."""

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int


def columns(images: Tensor, kernel: torch.Size, geometry: Geometry) -> Tensor:
    """What each output position sees: [images, C * kernel, positions], by views and one copy, in any dimension."""
    g = geometry
    images = F.pad(images, [side for pad in reversed(g.pads) for side in (pad, pad)])
    for k, (length, step, spread) in enumerate(zip(kernel, g.strides, g.dilations, strict=True)):
        images = images.unfold(2 + k, spread * (length - 1) + 1, step)[..., ::spread]
    count = len(kernel)  # now [images, C, *positions, *kernel]
    order = (0, 1, *range(2 + count, 2 + 2 * count), *range(2, 2 + count))
    return images.permute(order).flatten(2 + count).flatten(1, 1 + count)


@dataclass(frozen=True)
class Windows(Products):
    """A convolution over R images per example: inputs, output gradients, and how the windows lie."""

    images: Tensor
    """[B R, C, *space]."""
    grads: Tensor
    """[B R, M, *positions]."""
    count: int
    """B."""
    shape: torch.Size
    """The weight's shape, [M, C / groups, *kernel]."""
    geometry: Geometry

    @property
    def size(self) -> int:
        """G M N."""
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Of its tensors."""
        return self.grads.dtype

    @property
    def examples(self) -> int:
        """B."""
        return self.count

    @property
    def positions(self) -> int:
        """T, over all images of an example."""
        return self.grads.shape[2:].numel() * (len(self.grads) // self.examples)

    @property
    def sides(self) -> tuple[int, int]:
        """M and N of one group's outer products."""
        return self.shape[0] // self.geometry.groups, self.shape[1:].numel()

    @property
    def spelled_out(self) -> int:
        """Every window, and the gradients in another order."""
        return self.positions * sum(self.sides) * self.geometry.groups

    def squared_norms(self) -> Tensor:
        """[B], by the cheaper of the two ways that keep nothing."""
        m, n = self.sides
        return self.gram_norms() if self.positions * (m + n) <= m * n else self.direct_norms()

    def gram_norms(self) -> Tensor:
        """[B], from products of the positions with one another, a few examples at a time."""
        step = chunk(self.positions * (sum(self.sides) * self.geometry.groups + self.positions))
        return torch.cat([part.outer().gram_norms() for part in self._split(step)])

    def direct_norms(self) -> Tensor:
        """[B], from the gradients, formed a few at a time and thrown away."""
        squares = torch.cat([square_sums(part.dense()) for part in self._split(chunk(self.shape.numel()))])
        return from_above(squares, self.sizes())

    def sizes(self) -> Tensor:
        """[B]: no less than the sum of the lengths of the outer products, from whole images instead of windows."""
        per_image = (len(self.grads), -1)
        images = lengths(self.images.reshape(per_image)) * self.shape[2:].numel() ** 0.5
        grads = lengths(self.grads.reshape(per_image))  # Cauchy-Schwarz over the positions of an image
        return (images * grads).view(self.examples, -1).sum(1)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """The sum of the gradients times the factors: the ordinary gradient of a convolution."""
        rows = factors.repeat_interleave(len(self.grads) // self.examples, output_size=len(self.grads))
        grads = scale_examples(self.grads, rows)
        return self._weight_gradient(full(self.images), grads, self.shape, self.geometry.groups)

    def dense(self) -> Tensor:
        """[B, *shape]."""
        if self.images.device.type != "cpu":
            return self.outer().dense()
        # Every image as a group of channels of one large image: each group's weights get its own gradient.
        count, channels = self.images.shape[:2]
        images = full(self.images).reshape(1, count * channels, *self.images.shape[2:])
        grads = full(self.grads).reshape(1, -1, *self.grads.shape[2:])
        shape = torch.Size((count * self.shape[0], *self.shape[1:]))
        found = self._weight_gradient(images, grads, shape, count * self.geometry.groups)
        found = found.view(self.examples, -1, *self.shape)
        return found.sum(1) if count > self.examples else found.squeeze(1)

    def masked(self, keep: Tensor) -> "Windows":
        """Zero for the examples that are not kept."""
        rows = keep.repeat_interleave(len(self.grads) // self.examples, output_size=len(self.grads))
        images, grads = keep_examples(self.images, rows), keep_examples(self.grads, rows)
        return Windows(images, grads, self.examples, self.shape, self.geometry)

    def outer(self) -> Outer:
        """With the windows cut out."""
        return Outer(self._by_group(self.grads), self._by_group(self._columns()), self.shape)

    def _weight_gradient(self, images: Tensor, grads: Tensor, shape: torch.Size, groups: int) -> Tensor:
        g, none = self.geometry, [0] * len(self.geometry.strides)
        weight = images.new_zeros(()).expand(shape)  # only its shape counts
        mask = [False, True, False]
        return torch.ops.aten.convolution_backward(
            grads, images, weight, None, g.strides, g.pads, g.dilations, False, none, groups, mask
        )[1]

    def _split(self, step: int) -> "list[Windows]":
        rows = step * (len(self.grads) // self.examples)
        pairs = zip(self.images.split(rows), self.grads.split(rows), strict=True)
        each = len(self.grads) // self.examples
        return [Windows(images, grads, len(grads) // each, self.shape, self.geometry) for images, grads in pairs]

    def _columns(self) -> Tensor:
        """What each output position sees: [B R, C * kernel, positions]."""
        g, kernel = self.geometry, self.shape[2:]
        if len(kernel) == 2 and self.images.device.type == "cpu":  # on CUDA it launches a kernel for every image
            return F.unfold(self.images, tuple(kernel), g.dilations, g.pads, g.strides)
        return columns(self.images, kernel, g)

    def _by_group(self, x: Tensor) -> Tensor:
        """[B R, groups * channels, *positions] as [B, groups, R * positions, channels]."""
        groups = self.geometry.groups
        x = x.flatten(2).view(self.examples, -1, groups, x.shape[1] // groups, x[0, 0].numel())
        return x.permute(0, 2, 1, 4, 3).flatten(2, 3)
