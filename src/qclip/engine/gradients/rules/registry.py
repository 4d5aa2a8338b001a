"""The registry of rules. A rule computes per-example gradients of one torch function's parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qclip.engine.gradients.forms import GradientForm

Gradient = GradientForm | Callable[[], GradientForm]
"""A form, or a function that returns it, which is called only for arguments that are trained."""
Rule = Callable[..., Mapping[str, Gradient]]


@dataclass(frozen=True)
class Entry:
    """A registered rule."""

    rule: Rule
    signature: inspect.Signature
    broadcasts: bool
    """Whether arguments with fewer dimensions are aligned at the right, as in torch's broadcasting."""


_entries: dict[Any, Entry] = {}


def register_rule(*functions: Callable[..., Any], broadcasts: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions: ``@register_rule(function)``.

    A rule is called as ``rule(grad, *args, **kwargs)``: its signature is the function's with the output gradient in
    front. It returns the per-example gradient of each argument that may be a parameter, by name, as a form (`Dense`,
    `Outer`, `Rows`) or as a function that returns the form.

    - Tensors with examples arrive as ``[B, *shape of the argument for one example]``; one example of a batch-first
      model has a first dimension of length 1.
    - Parameters and shared tensors arrive as they are. All tensors are detached.
    - A rule must be pure: no synchronisation with the device, no shape that depends on data.
    - The engine trusts a rule; test it against `qclip.engine.oracle`.

    Args:
        functions: The torch functions. The last registration of a function wins.
        broadcasts: Whether the functions are elementwise, with torch's broadcasting.

    >>> import torch, qclip
    >>> from qclip.engine import Dense
    >>> @register_rule(torch.addcmul)
    ... def addcmul(grad, input, tensor1, tensor2, *, value=1):  # input + value * tensor1 * tensor2
    ...     return {"tensor1": Dense((value * grad * tensor2).sum(1))}  # [B, 1, d] -> one [d] each
    >>> unregister_rule(torch.addcmul)
    """

    def register(rule: Rule) -> Rule:
        entry = Entry(rule, inspect.signature(rule), broadcasts)
        _entries.update(dict.fromkeys(functions, entry))
        return rule

    return register


def unregister_rule(*functions: Callable[..., Any]) -> None:
    """Remove the rules of the functions."""
    for function in functions:
        _entries.pop(function, None)


def find(function: Callable[..., Any]) -> Entry | None:
    """Return the rule of a function, or None."""
    return _entries.get(function)


def rows_of(grad: Tensor) -> Tensor:
    """Reshape [B, *, d] to [B, T, d]: a layer on the last dimension takes all others as positions."""
    return grad.reshape(grad.shape[0], -1, grad.shape[-1])


def sum_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo broadcasting within each example: sum [B, *broadcast shape] to [B, *shape]."""
    extra = grad.dim() - 1 - len(shape)
    if extra > 0:
        grad = grad.sum(tuple(range(1, 1 + extra)))
    wide = [k + 1 for k, length in enumerate(shape) if length == 1 and grad.shape[k + 1] != 1]
    return grad.sum(wide, keepdim=True) if wide else grad
