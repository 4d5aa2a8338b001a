"""The form of a convolution's gradient: a sum of outer products over positions, with the windows not yet cut out.

Clipped sums come from the ordinary convolution. The gradients themselves come from one grouped convolution, or from
products with the windows (every pixel many times) where these are cheap to write out, as for Gram products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.gradients.forms import (
    Dense,
    Outer,
    Products,
    Squares,
    chunk,
    from_above,
    keep_examples,
    lengths,
    scale_examples,
    square_sums,
)
from qclip.engine.kernels.products import doubt, full, is_native
from qclip.engine.kernels.windows import window_gradients, window_squares, window_sums

FEW_CHANNELS: Final = 8
"""Below so many channels, products with the windows are faster on the CPU than a grouped convolution."""

WINDOWS_BYTES: Final = 2**24
"""How much memory windows may take at once on the CPU: larger blocks are given back and cost new pages every step."""

LONG_ROW: Final = 8
"""From this length on, rows of a window are copied faster than rows of positions that lie apart."""


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
    places, inside = range(2, 2 + count), range(2 + count, 2 + 2 * count)
    if g.strides[-1] > 1 and kernel[-1] >= LONG_ROW:
        return images.permute(0, *places, 1, *inside).flatten(1 + count).flatten(1, count).mT
    return images.permute(0, 1, *inside, *places).flatten(2 + count).flatten(1, 1 + count)


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
    def like(self) -> Tensor:
        """One of its tensors."""
        return self.grads

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

    @property
    def sums_gradients(self) -> bool:
        """On a GPU: see `weighted_sum`."""
        return self.images.is_cuda

    @property
    def in_kernels(self) -> bool:
        """Whether a GPU's kernels form the gradients: no windows are written, nor gradients that are thrown away."""
        alone = self.geometry.groups == 1 and len(self.shape) == 4 and len(self.grads) == self.examples
        return alone and is_native(self.images) and is_native(self.grads)

    def squared_norms(self) -> Squares:
        """By the cheaper of the two ways that keep nothing."""
        m, n = self.sides
        return self.gram_norms() if self.positions * (m + n) <= m * n else self.direct_norms()

    def gram_norms(self) -> Squares:
        """From products of the positions with one another, a few examples at a time."""
        step = chunk(self.positions * (sum(self.sides) * self.geometry.groups + self.positions), self.images)
        found = Squares.cat([part.outer().gram_norms() for part in self._split(step)])
        # On a GPU the sum adds up rounded gradients, whatever the factor.
        return Squares.exact(found.scaled)

    def direct_norms(self) -> Squares:
        """From the gradients, formed a few at a time and thrown away."""
        # On a GPU the sum adds up the very same gradients, rounded alike: nothing is in doubt.
        if self.in_kernels:  # not split: pieces would fix how images and gradients lie in memory, by copies
            return Squares.exact(window_squares(self.images, self.grads, *self._pairs()))
        parts = self._split(chunk(self.shape.numel(), self.images))
        if self.images.is_cuda:
            return Squares.cat([part.kept().squared_norms() for part in parts])
        squares = torch.cat([square_sums(part.dense()) for part in parts])
        return Squares.exact(from_above(squares, self.sizes(), doubt(self.grads)))

    def sizes(self) -> Tensor:
        """[B]: no less than the sum of the lengths of the outer products, from whole images instead of windows."""
        per_image = (len(self.grads), -1)
        images = lengths(self.images.reshape(per_image)) * self.shape[2:].numel() ** 0.5
        grads = lengths(self.grads.reshape(per_image))  # Cauchy-Schwarz over the positions of an image
        return (images * grads).view(self.examples, -1).sum(1)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """The sum of the gradients times the factors: on the CPU, the ordinary gradient of a convolution.

        A GPU's convolutions round in their own ways, so there the gradients that gave the norms are added up.
        """
        if self.in_kernels:
            return window_sums(self.images, self.grads, factors, *self._pairs())
        if self.images.is_cuda:
            step = chunk(self.shape.numel(), self.images)
            parts = zip(self._split(step), factors.split(step), strict=True)
            return torch.stack([part.kept().weighted_sum(some) for part, some in parts]).sum(0)
        rows = factors.repeat_interleave(len(self.grads) // self.examples, output_size=len(self.grads))
        grads = scale_examples(self.grads, rows)
        return self._weight_gradient(full(self.images), grads, self.shape, self.geometry.groups)

    def dense(self) -> Tensor:
        """[B, *shape]."""
        if self.images.device.type != "cpu":
            return self.outer().dense()
        if not self._cuts_out():
            return self._grouped()
        step = max(1, WINDOWS_BYTES // (4 * self.spelled_out))
        parts = [part.outer().dense() for part in self._split(step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _cuts_out(self) -> bool:
        """Whether products with the windows are faster than a grouped convolution on the CPU."""
        few_channels = self.geometry.groups == 1 and self.shape[1] < FEW_CHANNELS
        return few_channels or self.positions <= self.sides[0]  # fewer numbers than the gradients have

    def _grouped(self) -> Tensor:
        """[B, *shape], by one convolution."""
        # Every image as a group of channels of one large image: each group's weights get its own gradient.
        count, channels = self.images.shape[:2]
        images = full(self.images).reshape(1, count * channels, *self.images.shape[2:])
        grads = full(self.grads).reshape(1, -1, *self.grads.shape[2:])
        shape = torch.Size((count * self.shape[0], *self.shape[1:]))
        found = self._weight_gradient(images, grads, shape, count * self.geometry.groups)
        found = found.view(self.examples, -1, *self.shape)
        return found.sum(1) if count > self.examples else found.squeeze(1)

    def kept(self) -> Dense:
        """The gradients themselves, in the precision they are computed in; on a GPU without writing windows out."""
        if self.in_kernels:
            return Dense(*window_gradients(self.images, self.grads, *self._pairs()))
        return self.outer().kept() if self.images.is_cuda else Dense(self.dense())

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

    def _pairs(self) -> tuple[tuple[int, int], ...]:
        """How the windows lie in two dimensions: kernel, strides, pads, dilations."""
        g = self.geometry
        kernel, strides, pads, dilations = map(_pair, (self.shape[2:], g.strides, g.pads, g.dilations))
        return kernel, strides, pads, dilations

    def _columns(self) -> Tensor:
        """What each output position sees: [B R, C * kernel, positions]."""
        return columns(self.images, self.shape[2:], self.geometry)

    def _by_group(self, x: Tensor) -> Tensor:
        """[B R, groups * channels, *positions] as [B, groups, R * positions, channels]."""
        groups = self.geometry.groups
        x = x.flatten(2).view(self.examples, -1, groups, x.shape[1] // groups, x[0, 0].numel())
        return x.permute(0, 2, 1, 4, 3).flatten(2, 3)


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    first, second = sizes
    return first, second
