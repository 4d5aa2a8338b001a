"""The form of a convolution's gradient: a sum of outer products over positions, with the windows not yet unfolded.

Clipped sums come from the ordinary backward pass of a convolution. The gradients themselves come from one grouped
convolution, or from products with unfolded windows (which repeat every pixel) where these are cheap to write, as for
Gram matrices.

Shapes: B batch size, R images per example, C and M input and output channels, T positions.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.gradients.forms import Dense, Dimensions, Outer, Products, Squares
from qclip.engine.kernels.products import (
    as_float32,
    chunk,
    is_native,
    keep_examples,
    lengths,
    relative_error_bound,
    round_up,
    scale_examples,
    square_sums,
)
from qclip.engine.kernels.windows import window_gradients, window_squares, window_sums

FEW_CHANNELS: Final = 8
"""Below this number of channels, products with unfolded windows beat a grouped convolution on a CPU."""

WINDOWS_BYTES: Final = 2**24
"""The memory of unfolded windows on a CPU: larger blocks return to the system and cost new pages every step."""

LONG_ROW: Final = 8
"""From this length on, copying rows of a window is faster than copying strided rows of positions."""


class Geometry(NamedTuple):
    """The geometry of the windows, with one number per spatial dimension in each tuple."""

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int


def columns(images: Tensor, kernel: torch.Size, geometry: Geometry) -> Tensor:
    """Unfold the windows: [images, C * kernel, positions], by views and one copy, in any number of dimensions."""
    g = geometry
    images = F.pad(images, [side for pad in reversed(g.pads) for side in (pad, pad)])
    for k, (length, step, spread) in enumerate(zip(kernel, g.strides, g.dilations, strict=True)):
        images = images.unfold(2 + k, spread * (length - 1) + 1, step)[..., ::spread]
    spatial = len(kernel)  # now [images, C, *positions, *kernel]
    places, inside = range(2, 2 + spatial), range(2 + spatial, 2 + 2 * spatial)
    if g.strides[-1] > 1 and kernel[-1] >= LONG_ROW:
        return images.permute(0, *places, 1, *inside).flatten(1 + spatial).flatten(1, spatial).mT
    return images.permute(0, 1, *inside, *places).flatten(2 + spatial).flatten(1, 1 + spatial)


@dataclass(frozen=True)
class Windows(Products):
    """A convolution over R images per example: inputs, output gradients, and the geometry of the windows."""

    images: Tensor
    """[B R, C, *space]."""
    grads: Tensor
    """[B R, M, *positions]."""
    batch_size: int
    shape: torch.Size
    """The weight's shape, [M, C / groups, *kernel]."""
    geometry: Geometry

    @cached_property
    def dims(self) -> Dimensions:
        """The sizes; T is over all images of an example."""
        positions = self.grads.shape[2:].numel() * self._images_each
        sides = self.shape[0] // self.geometry.groups, self.shape[1:].numel()
        unfolded = positions * sum(sides) * self.geometry.groups  # every window, and the gradients in another order
        return Dimensions(self.batch_size, positions, sides, self.shape.numel(), unfolded)

    @property
    def sample(self) -> Tensor:
        """The output gradients."""
        return self.grads

    @property
    def _images_each(self) -> int:
        """R, the number of images of each example."""
        return len(self.grads) // self.batch_size

    @property
    def sums_gradients(self) -> bool:
        """Whether this is on a GPU: see `weighted_sum`."""
        return self.images.is_cuda

    @property
    def in_kernels(self) -> bool:
        """Whether Triton kernels form the gradients: no windows are written, nor gradients that are not kept."""
        plain = self.geometry.groups == 1 and len(self.shape) == 4 and len(self.grads) == self.batch_size
        return plain and is_native(self.images) and is_native(self.grads)

    def gram_norms(self) -> Squares:
        """Compute norms from Gram matrices of the positions, chunk by chunk."""
        step = chunk(self.dims.unfolded + self.dims.positions**2, self.images)
        squares = Squares.cat([windows.outer().gram_norms() for windows in self._split(step)])
        # On a GPU the sum adds rounded gradients, whatever the factor.
        return Squares.exact(squares.scaled)

    def direct_norms(self) -> Squares:
        """Compute norms from the gradients, formed chunk by chunk and not kept."""
        # On a GPU the sum adds the very same gradients, rounded alike: no rounding margin is needed.
        if self.in_kernels:  # not split: chunks would fix the strides of images and gradients, by copies
            return Squares.exact(window_squares(self.images, self.grads, self.shape[2:], *self.geometry[:3]))
        chunks = self._split(chunk(self.shape.numel(), self.images))
        if self.images.is_cuda:
            return Squares.cat([windows.kept().squared_norms() for windows in chunks])
        squares = torch.cat([square_sums(windows.dense()) for windows in chunks])
        return Squares.exact(round_up(squares, self.sizes(), relative_error_bound(self.grads)))

    def sizes(self) -> Tensor:
        """Return upper bounds [B] of the summed lengths of the outer products, from whole images, not windows."""
        per_image = (len(self.grads), -1)
        images = lengths(self.images.reshape(per_image)) * self.shape[2:].numel() ** 0.5
        grads = lengths(self.grads.reshape(per_image))  # Cauchy-Schwarz over the positions of an image
        return (images * grads).view(self.batch_size, -1).sum(1)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum of the gradients times the factors [B]: on a CPU, an ordinary weight gradient.

        A GPU's convolutions round in their own ways, so there the sum adds the very gradients that gave the norms.
        """
        if self.in_kernels:
            return window_sums(self.images, self.grads, factors, self.shape[2:], *self.geometry[:3])
        if self.images.is_cuda:
            step = chunk(self.shape.numel(), self.images)
            chunks = zip(self._split(step), factors.split(step), strict=True)
            return torch.stack([windows.kept().weighted_sum(scales) for windows, scales in chunks]).sum(0)
        grads = scale_examples(self.grads, self._per_image(factors))
        return self._weight_gradient(as_float32(self.images), grads, self.shape, self.geometry.groups)

    def dense(self) -> Tensor:
        """Return the gradients, [B, *shape]."""
        if self.images.device.type != "cpu":
            return self.outer().dense()
        if not self._unfolding_is_faster():
            return self._grouped()
        step = max(1, WINDOWS_BYTES // (4 * self.dims.unfolded))
        grads = [windows.outer().dense() for windows in self._split(step)]
        return grads[0] if len(grads) == 1 else torch.cat(grads)

    def _unfolding_is_faster(self) -> bool:
        """Return whether products with unfolded windows are faster than a grouped convolution on a CPU."""
        few_channels = self.geometry.groups == 1 and self.shape[1] < FEW_CHANNELS
        return few_channels or self.dims.positions <= self.dims.sides[0]  # fewer elements than the gradients have

    def _grouped(self) -> Tensor:
        """Return the gradients [B, *shape] by one convolution."""
        # Every image is a group of channels of one large image: each group's weights get its own gradient.
        num_images, channels = self.images.shape[:2]
        images = as_float32(self.images).reshape(1, num_images * channels, *self.images.shape[2:])
        grads = as_float32(self.grads).reshape(1, -1, *self.grads.shape[2:])
        shape = torch.Size((num_images * self.shape[0], *self.shape[1:]))
        weights = self._weight_gradient(images, grads, shape, num_images * self.geometry.groups)
        weights = weights.view(self.batch_size, -1, *self.shape)
        return weights.sum(1) if num_images > self.batch_size else weights.squeeze(1)

    def kept(self) -> Dense:
        """Return the gradients themselves, in the precision they are computed in."""
        if self.in_kernels:
            return Dense(*window_gradients(self.images, self.grads, self.shape[2:], *self.geometry[:3]))
        return self.outer().kept() if self.images.is_cuda else Dense(self.dense())

    def masked(self, is_kept: Tensor) -> "Windows":
        """Return the form with zeros in the other examples."""
        is_kept = self._per_image(is_kept)
        images, grads = keep_examples(self.images, is_kept), keep_examples(self.grads, is_kept)
        return Windows(images, grads, self.batch_size, self.shape, self.geometry)

    def outer(self) -> Outer:
        """Return the outer products of the output gradients and the unfolded windows."""
        windows = columns(self.images, self.shape[2:], self.geometry)
        return Outer(self._by_group(self.grads), self._by_group(windows), self.shape)

    def _weight_gradient(self, images: Tensor, grads: Tensor, shape: torch.Size, groups: int) -> Tensor:
        g, none = self.geometry, [0] * len(self.geometry.strides)
        weight = images.new_zeros(()).expand(shape)  # only its shape is used
        mask = [False, True, False]
        return torch.ops.aten.convolution_backward(
            grads, images, weight, None, g.strides, g.pads, g.dilations, False, none, groups, mask
        )[1]

    def _split(self, step: int) -> "list[Windows]":
        """Split the batch into chunks of ``step`` examples."""
        each = self._images_each
        pairs = zip(self.images.split(step * each), self.grads.split(step * each), strict=True)
        return [Windows(images, grads, len(grads) // each, self.shape, self.geometry) for images, grads in pairs]

    def _per_image(self, x: Tensor) -> Tensor:
        """Repeat the values [B] of the examples for each of their images, [B R]."""
        return x.repeat_interleave(self._images_each, output_size=len(self.grads))

    def _by_group(self, x: Tensor) -> Tensor:
        """Reshape [B R, groups * channels, *positions] to [B, groups, R * positions, channels]."""
        groups = self.geometry.groups
        x = x.flatten(2).view(self.batch_size, -1, groups, x.shape[1] // groups, x[0, 0].numel())
        return x.permute(0, 2, 1, 4, 3).flatten(2, 3)
