"""Overrides: faster computations of two torch functions in a compiled step on a GPU, with the same results.

- A large linear layer whose number of outputs is not a multiple of 8 becomes a slice of a wider layer, so that every
  product with its gradient is aligned.
- Cross entropy over many classes is computed by kernels. They read the scores as the layer left them: without the
  conversion to float32 that most losses begin with, and without the slice of a wider layer.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qclip.engine.capture.faults import CORRECTED
from qclip.engine.capture.invocation import opened
from qclip.engine.gradients.rules.linear import is_ragged, widened_linear
from qclip.engine.kernels import DTYPES
from qclip.engine.kernels.cross_entropy import cross_entropy
from qclip.engine.kernels.products import is_half

MANY_CLASSES: Final = 2**12
"""Cross entropy over more classes than this is computed by kernels."""

_differentiate = opened(torch.autograd.grad)
_T = torch.Tensor
_LOSSES = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}
_CASTS = {_T.to, _T.float, _T.type, _T.type_as}
_COPIES = {_T.contiguous, _T.clone, torch.clone}
_RESHAPES = {
    _T.view, _T.view_as, _T.reshape, _T.reshape_as, torch.reshape, _T.flatten, torch.flatten, _T.unflatten,
    torch.unflatten, _T.squeeze, torch.squeeze, _T.unsqueeze, torch.unsqueeze,
}  # fmt: skip
_MOVES = {
    _T.__getitem__, _T.narrow, torch.narrow, _T.select, torch.select, _T.transpose, torch.transpose, _T.permute,
    torch.permute, _T.movedim, torch.movedim, _T.swapaxes, torch.swapaxes, _T.swapdims, torch.swapdims,
    *(getattr(_T, name).__get__ for name in ("T", "mT")),
}  # fmt: skip
_LOG_SOFTMAX = {F.log_softmax, torch.log_softmax, _T.log_softmax}


def has_many_classes(scores: Tensor) -> bool:
    """Return whether kernels compute the cross entropy of these scores [B, C, ...]."""
    return scores.is_cuda and scores.shape[1] > MANY_CLASSES


class _Origin(NamedTuple):
    """The scores that a tensor was made from, by conversions and moves that keep their values."""

    scores: Tensor
    """In the shape of the tensor, but for one dimension that may be longer: its last columns are padding."""
    path: tuple[tuple[Tensor, int], ...]
    """The tensors in between and their versions; kept alive so that their ids stay theirs."""
    is_log: bool
    """Whether the tensor is the log-softmax of the scores over its last dimension."""

    @property
    def is_intact(self) -> bool:
        """Whether none of the tensors was written to, or has a hook that may change its gradient."""
        return all(x._version == version and not x._backward_hooks for x, version in self.path)


class Overrides(TorchFunctionMode):
    """Runs the torch functions of one traced step, and overrides some of them.

    A capture calls `run`. The backward pass enters the mode instead, so that a checkpointed block computes there what
    it computed in the forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, _Origin] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.autograd.grad:  # checkpointed blocks run again inside
            with self:
                return _differentiate(*args, **kwargs or {})
        return self.run(func, args, kwargs or {})

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function, or its override.

        Args:
            function: The torch function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            What the function returns, up to rounding.
        """
        if any(_is_wrapped(x) for x in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        if function is F.linear and is_ragged(*args, **kwargs) and _is_trained(*args[1:], *kwargs.values()):
            result, wide = widened_linear(*args, **kwargs)
            self._remember(result, _Origin(wide, (), is_log=False))
            return result
        losses = self._cross_entropy(function, args, kwargs) if function in _LOSSES else None
        if losses is not None:
            return losses
        result = CORRECTED.get(function, function)(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
            self._follow(function, args, kwargs, result)
        return result

    def whole(self, output: Tensor) -> Tensor:
        """Return the output of the wider layer that an output is a slice of, or the output itself."""
        origin = self._origins.get(id(output))
        return output if origin is None else origin.scores

    def _cross_entropy(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Return cross entropy as the function defines it, computed by kernels; None where they do not apply."""
        bound = _LOSSES[function].bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        logits, target, ignored = options["input"], options["target"], options["ignore_index"]
        if not _is_supported(logits, target, options) or not has_many_classes(logits):
            return None
        scores = self._scores(logits, of_logarithms=function is F.nll_loss)
        if scores is None:
            return None
        rows = scores.movedim(1, -1).flatten(0, -2)  # [R, W]
        smoothing = options.get("label_smoothing", 0.0)
        losses, _ = cross_entropy(rows, target.flatten(), ignored, smoothing, logits.shape[1])
        losses = losses.to(torch.float32 if torch.is_autocast_enabled(logits.device.type) else logits.dtype)
        if options["reduction"] == "none":
            return losses.view(target.shape)
        total = losses.sum()
        return total if options["reduction"] == "sum" else total / (target != ignored).sum()

    def _scores(self, logits: Tensor, *, of_logarithms: bool) -> Tensor | None:
        """Return the scores behind the first argument of a loss; None for logarithms that are not of a softmax."""
        origin = self._origin(logits)
        if of_logarithms:
            return origin.scores if origin is not None and origin.is_log and logits.dim() == 2 else None
        return origin.scores if origin is not None and not origin.is_log else logits

    def _follow(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> None:
        """Remember the origin of a result whose values are those of a tensor, converted or moved."""
        x = args[0]
        known = self._origin(x)
        origin = known or _Origin(x, ((x, x._version),), is_log=False)
        if function in _CASTS:
            if is_half(x) and result.dtype == torch.float32 and (x.shape, x.device) == (result.shape, result.device):
                self._remember(result, origin)
        elif function in _LOG_SOFTMAX:
            if (args[1] if len(args) > 1 else kwargs.get("dim")) in (-1, x.dim() - 1):
                self._remember(result, origin._replace(is_log=True))
        elif known is not None:
            moved = _moved(function, args, kwargs, result, known)
            if moved is not None:
                self._remember(result, known._replace(scores=moved))

    def _origin(self, x: Tensor) -> _Origin | None:
        origin = self._origins.get(id(x))
        return origin if origin is not None and origin.is_intact else None

    def _remember(self, x: Tensor, origin: _Origin) -> None:
        """Remember the origin of a tensor, unless the gradient of one does not reach the other (under no_grad)."""
        if x.requires_grad == origin.scores.requires_grad:
            added = ((tensor, tensor._version) for tensor in (x, origin.scores))
            self._origins[id(x)] = origin._replace(path=(*origin.path, *added))


def _is_wrapped(x: Any) -> bool:
    """Return whether a tensor is inside vmap or another transform of torch.func, which the kernels do not support."""
    return isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)


def _is_trained(*arguments: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def _is_supported(scores: Tensor, target: Tensor, options: dict[str, Any]) -> bool:
    """Return whether the kernels define this loss: classes as targets, unweighted, in a precision that they read."""
    unweighted = options["weight"] is None and options["size_average"] is None and options["reduce"] is None
    classes = not target.is_floating_point() and target.device == scores.device
    shape = (*scores.shape[:1], *scores.shape[2:])
    return unweighted and classes and scores.dim() > 1 and scores.dtype in DTYPES and target.shape == shape


def _moved(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, origin: _Origin
) -> Tensor | None:
    """Return the scores moved as a function moved the tensor made from them; None where that is not the same."""
    x, scores = args[0], origin.scores
    if function in _COPIES:
        return scores
    if function in _RESHAPES:
        if x.shape[:-1] != scores.shape[:-1] or x.shape[-1:] != result.shape[-1:]:
            return None
        return scores.reshape(*result.shape[:-1], scores.shape[-1])
    if function not in _MOVES or origin.is_log:
        return None
    moved = function(scores, *args[1:], **kwargs)
    return moved if _extra(result, moved) == _extra(x, scores) else None


def _extra(x: Tensor, scores: Tensor) -> list[tuple[int, int]]:
    """Return the lengths that differ between a tensor and its scores: of the classes, or none."""
    return [lengths for lengths in zip(x.shape, scores.shape, strict=True) if lengths[0] != lengths[1]]
