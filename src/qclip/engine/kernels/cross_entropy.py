# ruff: noqa: ANN202, ARG001 - what Triton compiles has no types; a fake has the signature of its operator
"""Cross entropy over many classes: losses in one pass over the scores, gradients in another.

Written out in torch, the compiler takes logarithms per score instead of per row, and reads rows of a padded layer one
number at a time.

Shapes: R rows (examples, or positions of examples), C classes.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.kernels import installed, usable
from qclip.engine.kernels.products import full

if installed():
    import triton
    import triton.language as tl
else:
    triton = None

BLOCK: Final = 2048
"""How many scores of a row are read at once."""


@torch.library.custom_op("qclip::cross_entropy", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def cross_entropy(scores: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Each row's loss [R], then its highest score and the logarithm of the summed exponentials of what the others are
    less than that [2, R], at least float32.

    ``scores`` is [R, C]. The loss is 0 where the ``target`` [R] is ``ignored``.

    >>> cross_entropy(torch.ones(2, 8), torch.tensor([3, -100]), -100)
    (tensor([2.0794, 0.0000]), tensor([[1.0000, 1.0000],
            [2.0794, 2.0794]]))
    """
    return launch(scores, target, ignored) if usable(scores) else twin(scores, target, ignored)


@cross_entropy.register_fake
def _(scores: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    return full(scores.new_empty(len(scores))), full(scores.new_empty((2, len(scores))))


@torch.library.custom_op("qclip::cross_entropy_gradients", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def cross_entropy_gradients(
    scores: Tensor, target: Tensor, upstream: Tensor, sums: Tensor, ignored: int, width: int
) -> Tensor:
    """The gradients of the losses times ``upstream`` [R], with zeros up to ``width``: [R, width], as precise as scores.

    ``sums`` are the second result of `cross_entropy`.
    """
    find = launch_gradients if usable(scores) else twin_gradients
    return find(scores, target, upstream, sums, ignored, width)


@cross_entropy_gradients.register_fake
def _(scores: Tensor, target: Tensor, upstream: Tensor, sums: Tensor, ignored: int, width: int) -> Tensor:
    return scores.new_empty((len(scores), width))


def twin(scores: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    scores = full(scores)
    losses = F.cross_entropy(scores, target, ignore_index=ignored, reduction="none")
    highest = scores.amax(1) if scores.shape[0] else losses
    return losses, torch.stack([highest, (scores - highest[:, None]).exp().sum(1).log()])


def twin_gradients(scores: Tensor, target: Tensor, upstream: Tensor, sums: Tensor, ignored: int, width: int) -> Tensor:
    """The same in plain torch."""
    counted = target != ignored
    highest, logarithms = sums[:, :, None]
    found = (full(scores) - highest - logarithms).exp().contiguous()  # however the scores lie
    found.scatter_add_(1, torch.where(counted, target, 0).long()[:, None], -torch.ones_like(found[:, :1]))
    found *= torch.where(counted, upstream, 0).to(found.dtype)[:, None]
    return F.pad(found.to(scores.dtype), (0, width - scores.shape[1]))


def launch(scores: Tensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Run the kernel: what `twin` gives."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, classes = scores.shape
    losses, sums = (torch.empty(*shape, dtype=torch.float32, device=scores.device) for shape in ((rows,), (2, rows)))
    kernel: Any = _losses
    with torch.cuda.device_of(scores):
        kernel[(rows,)](
            *(scores, target.contiguous(), losses, sums, classes, scores.stride(0), ignored, BLOCK),
            num_warps=8,
            debug=True,  # a class that there is not stops the program, as in torch
            sanitize_overflow=False,
        )
    return losses, sums


def launch_gradients(
    scores: Tensor, target: Tensor, upstream: Tensor, sums: Tensor, ignored: int, width: int
) -> Tensor:
    """Run the kernel: what `twin_gradients` gives."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, classes = scores.shape
    found = scores.new_empty((rows, width))
    kernel: Any = _gradients
    with torch.cuda.device_of(scores):
        kernel[(rows, -(-width // BLOCK))](
            *(scores, target.contiguous(), upstream.contiguous(), sums.contiguous(), found),
            *(classes, width, scores.stride(0), ignored, BLOCK),
            num_warps=4,
        )
    return found


if triton is not None:

    @triton.jit
    def _losses(
        scores,
        target,
        losses,
        sums,
        C: tl.constexpr,
        ROW: tl.constexpr,
        IGNORED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One row. Each place of a block has a highest score and a sum of its own until the end."""
        row = tl.program_id(0).to(tl.int64)
        scores += row * ROW
        here = tl.arange(0, BLOCK)
        high = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, C // BLOCK * BLOCK, BLOCK):
            high, total = _taken_in(tl.load(scores + start + here).to(tl.float32), high, total)
        if C % BLOCK > 0:  # apart, because a mask makes loads narrow
            last = C // BLOCK * BLOCK + here
            high, total = _taken_in(
                tl.load(scores + last, mask=last < C, other=float("-inf")).to(tl.float32), high, total
            )
        highest = tl.max(high)
        logarithm = tl.log(tl.sum(total * tl.exp(high - _or_zero(highest))))
        place = tl.load(target + row)
        counted = place != IGNORED
        tl.device_assert((place >= 0) & (place < C) | (place == IGNORED), "a target is no class")
        own = tl.load(scores + place, mask=counted, other=0.0).to(tl.float32)
        # The highest score is taken from the own one first: both may be large, and their difference is exact.
        tl.store(losses + row, tl.where(counted, logarithm - (own - highest), 0.0))
        tl.store(sums + row, highest)
        tl.store(sums + tl.num_programs(0) + row, logarithm)

    @triton.jit
    def _taken_in(x, high, total):
        new = tl.maximum(high, x)
        base = _or_zero(new)
        return new, total * tl.exp(high - base) + tl.exp(x - base)

    @triton.jit
    def _or_zero(x):
        """-inf less itself is no number."""
        return tl.where(x == float("-inf"), 0.0, x)

    @triton.jit
    def _gradients(
        scores,
        target,
        upstream,
        sums,
        found,
        C: tl.constexpr,
        WIDTH: tl.constexpr,
        ROW: tl.constexpr,
        IGNORED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """One block of one row."""
        row = tl.program_id(0).to(tl.int64)
        here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        scores += row * ROW
        found += row * WIDTH
        place = tl.load(target + row)
        scale = tl.where(place == IGNORED, 0.0, tl.load(upstream + row).to(tl.float32))
        highest, logarithm = tl.load(sums + row), tl.load(sums + tl.num_programs(0) + row)
        if (tl.program_id(1) + 1) * BLOCK <= C:  # nearly always
            x = tl.load(scores + here).to(tl.float32)
            value = scale * (tl.exp(x - highest - logarithm) - tl.where(here == place, 1.0, 0.0))
            tl.store(found + here, value.to(found.dtype.element_ty))
        else:
            x = tl.load(scores + here, mask=here < C, other=0.0).to(tl.float32)
            value = scale * (tl.exp(x - highest - logarithm) - tl.where(here == place, 1.0, 0.0))
            tl.store(found + here, tl.where(here < C, value, 0.0).to(found.dtype.element_ty), mask=here < WIDTH)
