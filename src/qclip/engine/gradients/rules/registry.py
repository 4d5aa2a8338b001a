"""Rules: for one torch function, its parameters' per-example gradients from its inputs and its output gradient."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qclip.engine.gradients.forms import Form

Gradient = Form | Callable[[], Form]
"""A form, or a function that makes it: it is called only for arguments that are trained."""
Rule = Callable[..., Mapping[str, Gradient]]


@dataclass(frozen=True)
class Entry:
    """A registered rule."""

    rule: Rule
    signature: inspect.Signature
    broadcasts: bool
    """Elementwise: arguments with fewer dimensions are aligned at the right, as in torch's broadcasting."""


_entries: dict[Any, Entry] = {}


def register_rule(*functions: Callable[..., Any], broadcasts: bool = False) -> Callable[[Rule], Rule]:
    """Teach the engine a torch function: ``@register_rule(function)`` on a rule.

    A rule is called as ``rule(grad, *args, **kwargs)`` with the arguments of the call it stands for, so its signature
    is the function's with ``grad`` in front. Tensors that carry examples arrive as ``[B, *what the function sees for
    one example]`` (one example of a batch-first model has a first dimension of length 1), parameters and shared
    tensors as they are, all detached. It returns, for each argument that may be a parameter, its per-example gradient
    as a form of `forms`, or a function that makes it. It must be pure: no synchronisation, no shape that
    depends on data.

    >>> import torch, qclip
    >>> from qclip.engine import Dense
    >>> @register_rule(torch.addcmul)
    ... def addcmul(grad, input, tensor1, tensor2, *, value=1):  # input + value * tensor1 * tensor2
    ...     return {"tensor1": Dense((value * grad * tensor2).sum(1))}  # [B, 1, d] -> one [d] each
    >>> unregister_rule(torch.addcmul)

    What a rule says is believed; `qclip.engine.oracle` is there to test it. The last registration of a function wins.
    ``broadcasts`` says that the function is elementwise.
    """

    def register(rule: Rule) -> Rule:
        entry = Entry(rule, inspect.signature(rule), broadcasts)
        _entries.update(dict.fromkeys(functions, entry))
        return rule

    return register


def unregister_rule(*functions: Callable[..., Any]) -> None:
    """Forget the functions' rules."""
    for function in functions:
        _entries.pop(function, None)


def find(function: Callable[..., Any]) -> Entry | None:
    """The function's rule."""
    return _entries.get(function)


def rows_of(grad: Tensor) -> Tensor:
    """[B, *, d] as [B, T, d]: a layer that acts on the last dimension sees every other one as positions."""
    return grad.reshape(grad.shape[0], -1, grad.shape[-1])


def sum_to(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo broadcasting within each example: [B, *broadcast shape] summed to [B, *shape]."""
    extra = grad.dim() - 1 - len(shape)
    if extra > 0:
        grad = grad.sum(tuple(range(1, 1 + extra)))
    wide = [k + 1 for k, length in enumerate(shape) if length == 1 and grad.shape[k + 1] != 1]
    return grad.sum(wide, keepdim=True) if wide else grad
