"""Checks: everything that must be true before a gradient is used. Each refusal names what and says what to do."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree

from qclip._validate import Refusal
from qclip.engine.capture import constants, running_state
from qclip.engine.gradients.sites import Site

# What torch.distributed makes of modules, by name: importing it takes seconds.
_DISTRIBUTED = {"FSDPModule": "fully_shard", "FullyShardedDataParallel": "FullyShardedDataParallel", "DDP": "replicate"}


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain module: a compiled one is unwrapped, other wrappers are refused."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    name = type(model).__name__
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise Refusal(f"{name} synchronises raw gradients between processes; pass the module inside it (model.module)")
    for path, module in model.named_modules():
        way = _distributed_by(type(module))
        if way is not None:
            raise Refusal(
                f"{_named(path, module)} is sharded or replicated by {way}, which synchronises raw gradients "
                f"between processes; that is not supported yet: make the model private without {way}"
            )
    if isinstance(model, torch.jit.ScriptModule):
        raise Refusal(
            f"{name}: a scripted module hides which parameters it uses where; pass the module it was scripted from"
        )
    return model


def _distributed_by(kind: type[nn.Module]) -> str | None:
    """What made this class of modules, where torch.distributed did."""
    bases = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.distributed.")]
    return next((_DISTRIBUTED[name] for name in bases if name in _DISTRIBUTED), None)


def _named(path: str, module: nn.Module) -> str:
    return f"{repr(path) if path else 'the model'} ({type(module).__name__})"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, in precisions that can be clipped exactly."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise Refusal("the model has no trainable parameters; set requires_grad=True on those to train")
    for name, parameter in parameters.items():
        if parameter.dtype == torch.float16:
            raise Refusal(
                f"parameter {name!r} is float16, whose range is too small for gradients without a loss scale; "
                "use bfloat16 or float32, or autocast to bfloat16"
            )
        if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise Refusal(
                f"parameter {name!r} is {parameter.dtype}; real floating-point parameters are supported, not this"
            )
        if parameter._backward_hooks:
            raise Refusal(
                f"parameter {name!r} has a gradient hook, which sees no per-example gradient; remove it, or change the "
                "gradient after it was released"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise Refusal(f"parameter {name!r} has no shape yet; run one batch through the model first")
    return parameters


@dataclass(frozen=True)
class State:
    """The parameters and buffers of a model, and of its criterion, as they were before a forward pass."""

    tensors: Mapping[str, tuple[Tensor, int]]
    values: Mapping[str, Tensor] | None
    """Of the constants, for what writes without raising the version: ``.data``, and torch's own batch norm."""

    @staticmethod
    def of(model: nn.Module, criterion: nn.Module | None = None, *, by_value: bool = False) -> "State":
        """Now."""
        tensors = {name: (x, x._version) for name, x in named_tensors(model, criterion)}
        if not by_value:
            return State(tensors, None)
        return State(tensors, {name: constants.values(x) for name, (x, _) in tensors.items() if is_constant(name, x)})

    @property
    def constants(self) -> dict[str, Tensor]:
        """What training does not move."""
        return {name: x for name, (x, _) in self.tensors.items() if is_constant(name, x)}

    def require_unmoved(self, model: nn.Module, criterion: nn.Module | None, allowed: Iterable[str]) -> None:
        """Refuse a forward pass that changed a parameter or buffer, other than those declared data-independent.

        What is known to follow the data cannot be declared away.
        """
        for name, x in named_tensors(model, criterion):
            tensor, version = self.tensors.get(name, (None, 0))
            value = None if self.values is None else self.values.get(name)
            if tensor is x and x._version == version and (value is None or constants.same(value, constants.values(x))):
                continue
            _require_no_running_state(model, x)
            if any(fnmatchcase(name, pattern) for pattern in allowed):
                continue
            raise Refusal(
                f"{name!r} ({type(_owner(name, model, criterion)).__name__}) changed in the forward pass: that would "
                "release what the data did to it without noise; use a layer that keeps nothing of the data, or, if the "
                f"change does not depend on the data, declare it with data_independent=[{name!r}]"
            )


def _require_no_running_state(model: nn.Module, changed: Tensor) -> None:
    """Refuse by name a layer of torch that made this tensor follow the data; others may share it."""
    for path, layer in model.named_modules():
        for name, x in (*layer._parameters.items(), *layer._buffers.items()):
            remedy = running_state.remedy(layer, name) if x is changed else None
            if remedy is not None:
                raise Refusal(
                    f"{_named(path, layer)} keeps what the data did to it in the forward pass, which would be released "
                    f"without noise; {remedy}"
                )


CRITERION: Final = "criterion."
"""What the names of a criterion's tensors begin with."""


def named_tensors(model: nn.Module, criterion: nn.Module | None = None) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers, of the model and of its criterion."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    if criterion is not None:
        yield from ((CRITERION + name, x) for name, x in named_tensors(criterion))


def is_constant(name: str, x: Tensor) -> bool:
    """Whether training leaves it alone: a buffer, a frozen parameter, anything of a criterion."""
    return not x.requires_grad or name.startswith(CRITERION)


def _owner(name: str, model: nn.Module, criterion: nn.Module | None) -> nn.Module:
    root = model
    if criterion is not None and name.startswith(CRITERION):
        root, name = criterion, name.removeprefix(CRITERION)
    return root.get_submodule(name.rpartition(".")[0])


def require_gradient_mode() -> None:
    """Refuse to train where torch keeps no record of what was computed."""
    if torch.is_inference_mode_enabled():
        raise Refusal("no gradients in inference mode; leave torch.inference_mode() for training")


def require_inputs(batch: Any) -> None:
    """Only tensors, numbers and text: what else a batch holds could not be told apart by example."""
    for leaf in pytree.tree_leaves(batch):
        if not isinstance(leaf, (Tensor, int, float, str, bool, type(None), torch.dtype, torch.device)):
            raise Refusal(
                f"the batch holds a {type(leaf).__name__}; pass tensors, numbers and text, in tuples, lists or dicts "
                "(dict(batch) of a mapping, torch.from_numpy of an array)"
            )
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise Refusal(f"the batch holds a {leaf.layout} tensor; pass a dense one (to_dense())")


def require_losses(losses: Any, batch_size: int) -> None:
    """One loss per example, differentiable."""
    if not isinstance(losses, Tensor):
        raise Refusal(
            f"the loss is a {type(losses).__name__}; it must be a tensor of {batch_size} losses, one per example"
        )
    if losses.shape != (batch_size,):
        remedy = (
            "use reduction='none'"
            if losses.dim() == 0
            else "reduce every dimension but the first, such as losses.flatten(1).mean(1)"
        )
        raise Refusal(
            f"the loss has shape {list(losses.shape)}; it must be [{batch_size}], one value per example: {remedy}. "
            "(The number of examples is the first dimension of the batch; pass mask= if that is not so.)"
        )
    if not losses.requires_grad:
        raise Refusal(
            "the loss does not depend on any trainable parameter; check detach(), no_grad() and requires_grad "
            "in the model"
        )
    if losses.dtype == torch.float16:
        raise Refusal(
            "the losses are float16, whose range is too small for gradients without a loss scale; use bfloat16"
        )


def unseen_parameters(
    losses: Tensor, sites: Sequence[Site], parameters: Mapping[str, Tensor]
) -> tuple[list[str], list[bool]]:
    """The parameters that the loss depends on by a way that no site accounts for, by autograd's own graph.

    And which sites it depends on.
    """
    names = {get_gradient_edge(p).node: name for name, p in parameters.items()}
    at_site = {output.edge.node: site for site in sites for output in site.outputs}
    found: set[str] = set()
    seen: set[Node] = set()
    ahead = [get_gradient_edge(losses).node]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in at_site:
            beyond, strangers = _behind(node, at_site, names)
            ahead.extend(beyond)
            found |= strangers
        elif node in names:
            found.add(names[node])
        else:
            if node.name() == "CheckpointFunctionBackward":
                raise Refusal(
                    "activation checkpointing with use_reentrant=True hides its graph; pass use_reentrant=False"
                )
            ahead.extend(_following(node))
    reached = [any(output.edge.node in seen for output in site.outputs) for site in sites]
    return [name for name in parameters if name in found], reached


def _behind(node: Node, at_site: Mapping[Node, Site], names: Mapping[Node, str]) -> tuple[list[Node], set[str]]:
    """Where the graph goes on behind a site, and the parameters in between that are not the site's."""
    site = at_site[node]
    own = {source.edge.node for source in site.call.sources.values()}
    data = set().union(*site.data_nodes)
    beyond: list[Node] = []
    strangers: set[str] = set()
    seen: set[Node] = set()
    ahead = _following(node)
    while ahead:
        inner = ahead.pop()
        if inner in seen or inner in own:
            continue
        seen.add(inner)
        if inner in data or inner in at_site:
            beyond.append(inner)
        elif inner in names:
            strangers.add(names[inner])
        else:
            ahead.extend(_following(inner))
    if site.call.in_place and not all(nodes & seen for nodes in site.data_nodes):
        strangers.update(site.parameters)  # written into a part of a tensor: the graph was made anew around the site
    return beyond, strangers


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def require_unchanged_inputs(sites: Iterable[Site]) -> None:
    """Refuse a tensor that was overwritten after a site read it."""
    for site in sites:
        for x, version in site.call.versions:
            if x._version != version:
                raise Refusal(
                    f"an input of {site} was changed in place after it was used; replace the in-place operation on it "
                    "(such as x += y) by one that makes a new tensor (x = x + y)"
                )


Evaluate = Callable[[Any], Tensor]
