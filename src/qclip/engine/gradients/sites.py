"""Sites and sources: the records of a captured forward pass.

A *site* is a call of a torch function that combines parameters with data. A *source* is an argument of a site that
depends on parameters but not on data: a parameter itself, or a value computed from parameters and constants alone (a
slice, a transpose, a weight norm). A site holds the gradient edge of its output, never the output: an in-place
activation that follows changes the tensor, but not the edge.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import resolve_name

from qclip._validate import Refusal
from qclip.engine.gradients import rules
from qclip.engine.gradients.layouts import Layout, placed
from qclip.engine.randomness import RandomState


@dataclass(frozen=True, eq=False)
class Source:
    """A parameter, or a value computed from parameters and constants alone."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    parameters: frozenset[str]
    """The parameters it is computed from."""
    call: "Call | None" = None
    """The call that computed it; None for a parameter."""
    parents: tuple["Source", ...] = ()


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a torch function, its tensors detached."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: Mapping[int, Source]
    """By the id of the detached tensor that stands for the source among the arguments."""
    versions: tuple[tuple[Tensor, int], ...]
    """Every detached tensor, in the order of the arguments, with its version at the time of the call."""
    fixed: frozenset[int]
    """The ids of tensors that hold no examples: sources, frozen parameters, buffers and values computed from them."""
    in_place: bool
    """Whether the function overwrites its first argument."""

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that it consumes, sorted."""
        return sorted({name for source in self.sources.values() for name in source.parameters})

    @property
    def source_tensors(self) -> list[Tensor]:
        """The tensors among the arguments that stand for sources, in order."""
        return [x for x, _ in self.versions if id(x) in self.sources]

    @property
    def function_name(self) -> str:
        """The qualified name of the function, such as ``torch.conv2d``."""
        return resolve_name(self.function) or getattr(self.function, "__name__", repr(self.function))

    def with_tensors(self, replacements: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of its own, one for each entry of ``versions``."""
        return with_tensors(self.args, self.kwargs, replacements)

    def __str__(self) -> str:
        return f"{self.function_name} with {', '.join(self.parameters)}"


@dataclass(frozen=True, eq=False)
class Output:
    """A differentiable output of a site."""

    position: int
    """Among the tensors that the function returned."""
    edge: GradientEdge
    """Its gradient has as many elements as the output, but not always the same shape."""
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Site:
    """A call that combines sources with data."""

    call: Call
    entry: rules.Entry | None
    outputs: tuple[Output, ...]
    data_nodes: tuple[frozenset[Node], ...]
    """For each differentiable data argument, the autograd nodes by which the gradient may continue."""
    cast_to: torch.dtype | None
    """The dtype to which autocast converted the call's tensors; None without autocast."""
    random_state: RandomState | None
    """The state of the generators before a call that may have to run again."""
    value: Tensor | None
    """A copy of the first output, kept only for proofs."""
    broadcast_index: int | None
    """Ordinal among the parameter-only calls, of one that gives every example a row; None for ordinary sites."""
    note: str = ""
    """Why no rule fits the call, if that is known."""
    order: Tensor | None = None
    """Indices that put the rows of its output back, example by example, where data have moved them."""

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that it consumes, sorted."""
        return self.call.parameters

    def placed(self, layout: Layout, batch_size: int) -> Layout:
        """Return a layout of another pass of the same kind, with the order of the rows in this one."""
        return placed(layout, self.outputs[0].shape[0], self.order, batch_size)

    def __str__(self) -> str:
        return str(self.call)


class HasOutputs(Protocol):
    """A site, as far as its output gradients need it."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Its differentiable outputs."""
        ...


def output_gradients(
    losses: Tensor,
    weights: Tensor,
    sites: Sequence[HasOutputs],
    parameters: Mapping[str, Tensor],
    *,
    retain_graph: bool,
    after_backward: Callable[[], object] = lambda: None,
) -> list[list[Tensor | None]]:
    """Compute the gradient of the weighted losses at every output of every site, by one backward pass.

    Args:
        losses: One loss per example, [B].
        weights: The weight of each loss, [B].
        sites: The sites whose output gradients are wanted.
        parameters: The trainable parameters by name, whose ``.grad`` the backward pass must leave alone.
        retain_graph: Whether the autograd graph is needed again.
        after_backward: Called when the backward pass has ended.

    Returns:
        For each site, the gradient of each of its outputs in the shape of the output; None where the losses do not
        depend on it.

    Raises:
        Refusal: If the backward pass writes into the ``.grad`` of a parameter.
    """
    edges = [output.edge for site in sites for output in site.outputs]
    if not edges:
        return []
    before = {name: (p.grad, None if p.grad is None else p.grad._version) for name, p in parameters.items()}
    grads = torch.autograd.grad([losses], edges, grad_outputs=[weights], retain_graph=retain_graph, allow_unused=True)
    after_backward()
    _require_untouched(parameters, before)
    remaining = iter(grads)
    return [[_shaped(next(remaining), output.shape) for output in site.outputs] for site in sites]


def _shaped(grad: Tensor | None, shape: torch.Size) -> Tensor | None:
    return None if grad is None else grad.reshape(shape)


def _require_untouched(
    parameters: Mapping[str, Tensor], before: Mapping[str, tuple[Tensor | None, int | None]]
) -> None:
    """Refuse a backward pass that writes raw gradients itself, as reentrant checkpoints and reversible layers do."""
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


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in tensors(item)]
    return []


def results_of(function: Callable[..., Any], args: tuple[Any, ...], returned: Any) -> list[Tensor]:
    """Return the tensors that a call computed: those it returned, or the one that ``x[index] = value`` wrote into."""
    return [args[0]] if function is Tensor.__setitem__ else tensors(returned)


def with_tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], replacements: Iterable[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with other tensors in place of their own, in the order in which `tensors` lists these."""
    remaining = iter(replacements)
    replaced = tuple(_with_tensors(value, remaining) for value in args)
    return replaced, {key: _with_tensors(value, remaining) for key, value in kwargs.items()}


def _with_tensors(value: Any, replacements: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(replacements)
    if isinstance(value, (tuple, list)):
        items = [_with_tensors(item, replacements) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
