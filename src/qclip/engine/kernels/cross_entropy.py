# ruff: noqa: ANN202 - what Triton compiles has no types
"""Cross entropy over many classes: losses in one pass over the scores, gradients in another.

Written in plain torch, the compiler would take a logarithm per score instead of per row, and read the rows of a padded
layer element by element.

Shapes: R rows (examples, or positions of examples), C classes, W >= C columns. A layer that was padded for alignment
has columns beyond the classes: they do not count, and their gradients are zero.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.kernels import installed, operator, usable
from qclip.engine.kernels.products import as_float32

if installed():
    import triton
    import triton.language as tl
else:
    triton = None

BLOCK: Final = 2048
"""The scores of a row that are read at once."""


@operator(
    "cross_entropy",
    fake=lambda scores, *_: tuple(as_float32(scores.new_empty(shape)) for shape in ((len(scores),), (2, len(scores)))),
)
def cross_entropy(
    scores: Tensor, target: Tensor, ignored: int, smoothing: float = 0.0, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy of each row.

    Autograd differentiates the losses with respect to the scores.

    Args:
        scores: [R, W].
        target: The class of each row, [R].
        ignored: The target of rows whose loss is 0.
        smoothing: The label smoothing: the part of each target that is spread evenly over all classes.
        classes: C; None if all columns are classes.

    Returns:
        The loss per row [R]; then the row maximum and the log-sum-exp after subtracting it [2, R]. In float32 (float64
        for float64).

    >>> cross_entropy(torch.ones(2, 8), torch.tensor([3, -100]), -100)
    (tensor([2.0794, 0.0000]), tensor([[1.0000, 1.0000],
            [2.0794, 2.0794]]))
    """
    compute = launch if usable(scores) else twin
    return compute(scores, target, ignored, smoothing, classes)


@operator("cross_entropy_gradients", fake=lambda scores, *_: scores.new_empty(scores.shape))
def cross_entropy_gradients(
    scores: Tensor,
    target: Tensor,
    upstream: Tensor,
    sums: Tensor,
    ignored: int,
    smoothing: float = 0.0,
    classes: int | None = None,
) -> Tensor:
    """Compute the gradients of the losses with respect to the scores, times ``upstream``.

    Args:
        scores: [R, W].
        target: The class of each row, [R].
        upstream: The gradient of each loss, [R].
        sums: The second result of `cross_entropy`, [2, R].
        ignored: The target of rows whose gradient is 0.
        smoothing: The label smoothing.
        classes: C; None if all columns are classes.

    Returns:
        The gradients [R, W], in the precision of the scores; 0 beyond the classes.
    """
    compute = launch_gradients if usable(scores) else twin_gradients
    return compute(scores, target, upstream, sums, ignored, smoothing, classes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scores, target, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(scores, target, output[1])


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    scores, target, sums = ctx.saved_tensors
    return cross_entropy_gradients(scores, target, upstream, sums, *ctx.options), None, None, None, None


cross_entropy.register_autograd(_backward, setup_context=_save)


def twin(
    scores: Tensor, target: Tensor, ignored: int, smoothing: float = 0.0, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `cross_entropy` in plain torch."""
    scores = as_float32(scores[:, :classes])
    losses = F.cross_entropy(scores, target, ignore_index=ignored, reduction="none", label_smoothing=smoothing)
    highest = scores.amax(1) if scores.shape[0] else losses
    return losses, torch.stack([highest, (scores - highest[:, None]).exp().sum(1).log()])


def twin_gradients(
    scores: Tensor,
    target: Tensor,
    upstream: Tensor,
    sums: Tensor,
    ignored: int,
    smoothing: float = 0.0,
    classes: int | None = None,
) -> Tensor:
    """Compute `cross_entropy_gradients` in plain torch."""
    is_counted = target != ignored
    highest, logarithms = sums[:, :, None]
    grads = (as_float32(scores[:, :classes]) - highest - logarithms).exp().contiguous()
    own = torch.full_like(grads[:, :1], smoothing - 1)
    grads.scatter_add_(1, torch.where(is_counted, target, 0).long()[:, None], own)
    grads -= smoothing / grads.shape[1]
    grads *= torch.where(is_counted, upstream, 0).to(grads.dtype)[:, None]
    return F.pad(grads.to(scores.dtype), (0, scores.shape[1] - grads.shape[1]))


def launch(
    scores: Tensor, target: Tensor, ignored: int, smoothing: float = 0.0, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Run the kernel of `cross_entropy`."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows = len(scores)
    classes = scores.shape[1] if classes is None else classes
    losses, sums = (torch.empty(*shape, dtype=torch.float32, device=scores.device) for shape in ((rows,), (2, rows)))
    kernel: Any = _losses
    with torch.cuda.device_of(scores):
        kernel[(rows,)](
            *(scores, target.contiguous(), losses, sums, classes, scores.stride(0), ignored, smoothing, BLOCK),
            num_warps=8,
            debug=True,  # a target out of range stops the program, as in torch
            sanitize_overflow=False,
        )
    return losses, sums


def launch_gradients(
    scores: Tensor,
    target: Tensor,
    upstream: Tensor,
    sums: Tensor,
    ignored: int,
    smoothing: float = 0.0,
    classes: int | None = None,
) -> Tensor:
    """Run the kernel of `cross_entropy_gradients`."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, width = scores.shape
    classes = width if classes is None else classes
    grads = scores.new_empty((rows, width))
    kernel: Any = _gradients
    with torch.cuda.device_of(scores):
        kernel[(rows, -(-width // BLOCK))](
            *(scores, target.contiguous(), upstream.contiguous(), sums.contiguous(), grads),
            *(classes, width, scores.stride(0), ignored, smoothing, BLOCK),
            num_warps=4,
        )
    return grads


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
        SMOOTHING: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Compute one row. Each lane of a block keeps a maximum and sums of its own until the end."""
        row = tl.program_id(0).to(tl.int64)
        scores += row * ROW
        here = tl.arange(0, BLOCK)
        high = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        plain = tl.zeros((BLOCK,), tl.float32)  # of the scores themselves, for label smoothing
        for start in range(0, C // BLOCK * BLOCK, BLOCK):
            x = tl.load(scores + start + here).to(tl.float32)
            high, total = _accumulate(x, high, total)
            if SMOOTHING > 0:
                plain += x
        if C % BLOCK > 0:  # separate, because a mask makes loads narrow
            last = C // BLOCK * BLOCK + here
            x = tl.load(scores + last, mask=last < C, other=float("-inf")).to(tl.float32)
            high, total = _accumulate(x, high, total)
            if SMOOTHING > 0:
                plain += tl.where(last < C, x, 0.0)
        highest = tl.max(high)
        logarithm = tl.log(tl.sum(total * tl.exp(high - _or_zero(highest))))
        place = tl.load(target + row)
        is_counted = place != IGNORED
        tl.device_assert((place >= 0) & (place < C) | (place == IGNORED), "a target is out of range")
        own = tl.load(scores + place, mask=is_counted, other=0.0).to(tl.float32)
        # First the difference of the own score and the maximum: both may be large, and their difference is exact.
        loss = logarithm - (1 - SMOOTHING) * (own - highest)
        if SMOOTHING > 0:
            loss -= SMOOTHING * (tl.sum(plain) / C - highest)
        tl.store(losses + row, tl.where(is_counted, loss, 0.0))
        tl.store(sums + row, highest)
        tl.store(sums + tl.num_programs(0) + row, logarithm)

    @triton.jit
    def _accumulate(x, high, total):
        new = tl.maximum(high, x)
        base = _or_zero(new)
        return new, total * tl.exp(high - base) + tl.exp(x - base)

    @triton.jit
    def _or_zero(x):
        """Replace -inf by 0: -inf - (-inf) is NaN."""
        return tl.where(x == float("-inf"), 0.0, x)

    @triton.jit
    def _gradients(
        scores,
        target,
        upstream,
        sums,
        grads,
        C: tl.constexpr,
        WIDTH: tl.constexpr,
        ROW: tl.constexpr,
        IGNORED: tl.constexpr,
        SMOOTHING: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Compute one block of one row."""
        row = tl.program_id(0).to(tl.int64)
        here = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        scores += row * ROW
        grads += row * WIDTH
        place = tl.load(target + row)
        scale = tl.where(place == IGNORED, 0.0, tl.load(upstream + row).to(tl.float32))
        highest, logarithm = tl.load(sums + row), tl.load(sums + tl.num_programs(0) + row)
        if (tl.program_id(1) + 1) * BLOCK <= C:  # nearly always
            x = tl.load(scores + here).to(tl.float32)
            value = tl.exp(x - highest - logarithm) - tl.where(here == place, 1.0 - SMOOTHING, 0.0) - SMOOTHING / C
            tl.store(grads + here, (scale * value).to(grads.dtype.element_ty))
        else:
            x = tl.load(scores + here, mask=here < C, other=0.0).to(tl.float32)
            value = tl.exp(x - highest - logarithm) - tl.where(here == place, 1.0 - SMOOTHING, 0.0) - SMOOTHING / C
            value = tl.where(here < C, scale * value, 0.0)
            tl.store(grads + here, value.to(grads.dtype.element_ty), mask=here < WIDTH)
