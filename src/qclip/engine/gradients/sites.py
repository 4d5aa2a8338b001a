"""Sites and sources: the records that a capture leaves.

A *site* is a call of a torch function that combines parameters with data. A *source* is what a site gets from
parameters: a parameter itself, or a value made from parameters and constants alone (a slice, a transpose, a weight
norm). Sites hold the gradient edge of their output, never the output: an in-place activation behind it would change the
tensor, not the edge.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import resolve_name

from qclip._validate import Refusal
from qclip.engine.gradients import rules
from qclip.engine.randomness import RandomState


@dataclass(frozen=True, eq=False)
class Source:
    """A parameter, or a value made from parameters and constants alone."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    parameters: frozenset[str]
    """The parameters it is made from."""
    call: "Call | None" = None
    """The call that made it; None for a parameter."""
    parents: tuple["Source", ...] = ()


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a torch function, its tensors detached."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: Mapping[int, Source]
    """By the id of the detached tensor that stands for it in the arguments."""
    versions: tuple[tuple[Tensor, int], ...]
    """The tensors as they were at the call."""
    fixed: frozenset[int]
    """The ids of tensors that hold no examples: sources, frozen parameters, buffers and what is made from them."""

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters it consumes."""
        return sorted({name for source in self.sources.values() for name in source.parameters})

    @property
    def source_tensors(self) -> list[Tensor]:
        """The tensors among the arguments that stand for sources, in order."""
        return [x for x, _ in self.versions if id(x) in self.sources]

    @property
    def function_name(self) -> str:
        """Such as ``torch.conv2d``."""
        return resolve_name(self.function) or getattr(self.function, "__name__", repr(self.function))

    def __str__(self) -> str:
        return f"{self.function_name} with {', '.join(self.parameters)}"


@dataclass(frozen=True, eq=False)
class Output:
    """A differentiable output of a site."""

    position: int
    """Among the tensors that the function returned."""
    edge: GradientEdge
    """Its gradient has as many numbers as the output, not always the same shape."""
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Site:
    """A call that combines sources with data."""

    call: Call
    entry: rules.Entry | None
    outputs: tuple[Output, ...]
    data_nodes: tuple[frozenset[Node], ...]
    """Where the gradient goes on to, for each differentiable data argument: any of its nodes."""
    cast_to: torch.dtype | None
    """What autocast made of the call's tensors; None without autocast."""
    random_state: RandomState | None
    """The generators before a call that may have to be run again."""
    value: Tensor | None
    """The first output as it was, where a check asked for it."""
    spread: int | None
    """For a call without data, taken for a site because it seems to give rows to examples: the how-manieth it was."""

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters it consumes."""
        return self.call.parameters

    def __str__(self) -> str:
        return str(self.call)


_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__imatmul__", "__ipow__"}


def output_gradients(
    losses: Tensor,
    weights: Tensor,
    sites: Sequence[Site],
    parameters: Mapping[str, Tensor],
    *,
    retain_graph: bool,
    after_backward: Callable[[], object] = lambda: None,
) -> list[list[Tensor | None]]:
    """The gradient of the weighted losses at every output of every site; None where there is none."""
    outputs = [output for site in sites for output in site.outputs]
    if not outputs:
        return []
    edges = [output.edge for output in outputs]
    before = {name: (p.grad, None if p.grad is None else p.grad._version) for name, p in parameters.items()}
    grads = torch.autograd.grad([losses], edges, grad_outputs=[weights], retain_graph=retain_graph, allow_unused=True)
    after_backward()
    _require_untouched(parameters, before)
    shaped = iter(
        None if grad is None else grad.reshape(output.shape) for grad, output in zip(grads, outputs, strict=True)
    )
    return [[next(shaped) for _ in site.outputs] for site in sites]


def _require_untouched(
    parameters: Mapping[str, Tensor], before: Mapping[str, tuple[Tensor | None, int | None]]
) -> None:
    """Refuse a backward pass that writes raw gradients by itself, as reentrant checkpoints and reversible layers do."""
    written = []
    for name, parameter in parameters.items():
        grad, version = before[name]
        if parameter.grad is not grad or (grad is not None and grad._version != version):
            written.append(repr(name))
            parameter.grad = grad if parameter.grad is not grad else None
    if written:
        raise Refusal(
            f"the backward pass wrote raw gradients into {', '.join(written)}: a custom function calls backward() "
            "inside; use torch.utils.checkpoint with use_reentrant=False, or return the gradients from the function"
        )


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the values, lists and tuples opened."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Everything in lists, tuples and slices."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from leaves(value)
        elif isinstance(value, slice):
            yield from (value.start, value.stop, value.step)
        else:
            yield value


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to everything in lists and tuples. (A closure that calls itself would keep tensors alive.)"""
    if isinstance(value, (tuple, list)):
        mapped = [map_leaves(x, function) for x in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return function(value)


def is_in_place(function: Callable[..., Any]) -> bool:
    """Whether the function overwrites its first argument."""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
