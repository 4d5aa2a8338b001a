"""Checks: conditions that must hold before a gradient is used. Each refusal names the obstacle and a remedy."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from qclip._validate import Refusal
from qclip.engine.capture import constants
from qclip.engine.gradients.sites import Site
from qclip.engine.sharding import Sharding

# Classes of modules that torch.distributed makes, by name: importing it takes seconds.
_DISTRIBUTED = {"FSDPModule": "fully_shard", "FullyShardedDataParallel": "FullyShardedDataParallel", "DDP": "replicate"}
_QUANTIZERS = frozenset({"auto_gptq", "awq", "bitsandbytes", "gptqmodel", "hqq"})
_DEVICES = frozenset({"cpu", "cuda", "meta"})
_REGISTRIES = frozenset(vars(nn.Module()))
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def unwrapped(model: nn.Module, *, may_be_sharded: bool = False) -> nn.Module:
    """Return the plain module: a compiled one is unwrapped, other wrappers are refused.

    Args:
        model: The model.
        may_be_sharded: Whether the caller knows how to reach parameters that `fully_shard` has sharded.
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    name = type(model).__name__
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise Refusal(f"{name} synchronises raw gradients between processes; pass the module inside it (model.module)")
    for path, module in model.named_modules():
        maker = distributed_by(type(module))
        if maker is not None and not (may_be_sharded and maker == "fully_shard"):
            raise Refusal(
                f"{_named(path, module)} is sharded or replicated by {maker}, which synchronises raw gradients "
                f"between processes; that is not supported yet: make the model private without {maker}"
            )
        quantizer = next((package for package in map(_package, type(module).__mro__) if package in _QUANTIZERS), None)
        if quantizer is not None:
            raise Refusal(
                f"{_named(path, module)} is quantized by {quantizer}: what it does to packed weights cannot be proven "
                "to treat every example by itself; train adapters on a model in bfloat16"
            )
    if isinstance(model, torch.jit.ScriptModule):
        raise Refusal(
            f"{name}: a scripted module hides which parameters it uses where; pass the module it was scripted from"
        )
    return model


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def distributed_by(kind: type[nn.Module]) -> str | None:
    """Return the function of torch.distributed that made a class of modules, if any."""
    bases = [base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.distributed.")]
    return next((_DISTRIBUTED[name] for name in bases if name in _DISTRIBUTED), None)


def _named(path: str, module: nn.Module) -> str:
    return f"{repr(path) if path else 'the model'} ({type(module).__name__})"


def trainable(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name.

    Args:
        named_parameters: The parameters of the model.

    Returns:
        The parameters that require gradients, in the order of the model.

    Raises:
        Refusal: If there are none, or if one has a dtype that cannot be clipped exactly, a gradient hook or no shape.
    """
    parameters = {name: p for name, p in named_parameters if p.requires_grad}
    if not parameters:
        raise Refusal("the model has no trainable parameters; set requires_grad=True on those to train")
    for name, parameter in parameters.items():
        if parameter.dtype == torch.float16:
            raise Refusal(
                f"parameter {name!r} is float16, whose range is too small for gradients without a loss scale; "
                "use bfloat16 or float32, or autocast to bfloat16"
            )
        if parameter.device.type not in _DEVICES:
            raise Refusal(
                f"parameter {name!r} is on {parameter.device.type!r}, where neither proofs nor noise were ever tested; "
                "train on a CPU or a CUDA GPU"
            )
        if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise Refusal(
                f"parameter {name!r} is {parameter.dtype}; use a real floating-point type: float32, float64, bfloat16"
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
    """Of the constants, to notice writes that do not raise the version: by ``.data``, and by torch's batch norm."""
    sharding: Sharding

    @staticmethod
    def of(
        model: nn.Module,
        criterion: nn.Module | None = None,
        sharding: Sharding | None = None,
        *,
        by_value: bool = False,
    ) -> "State":
        """Take note of the current state; ``by_value`` also copies the values of constants."""
        sharding = sharding or Sharding()
        tensors = {name: (x, x._version) for name, x in named_tensors(model, criterion, sharding)}
        if not by_value:
            return State(tensors, None, sharding)
        values = {name: constants.values(x) for name, (x, _) in tensors.items() if is_constant(name, x)}
        return State(tensors, values, sharding)

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """The tensors that training does not move, by name."""
        return {name: x for name, (x, _) in self.tensors.items() if is_constant(name, x)}

    @property
    def readable_constants(self) -> dict[str, Tensor]:
        """The same, as they can be read between forward passes."""
        return {name: self.sharding.readable(x) for name, x in self.constants.items()}

    def require_unmoved(self, model: nn.Module, criterion: nn.Module | None, allowed: Iterable[str]) -> None:
        """Refuse a forward pass that changed a parameter or buffer.

        Args:
            model: The model after the forward pass.
            criterion: Its criterion.
            allowed: Glob patterns of buffers that are declared to be independent of the data. Running statistics of
                layers of torch follow the data, whatever is declared.
        """
        for name, x in named_tensors(model, criterion, self.sharding):
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
                f"change does not depend on the data, declare it with data_independent_buffers=[{name!r}]"
            )


def _require_no_running_state(model: nn.Module, changed: Tensor) -> None:
    """Refuse by name a layer of torch that made this tensor follow the data; others may share it."""
    for path, layer in model.named_modules():
        for name, x in (*layer._parameters.items(), *layer._buffers.items()):
            remedy = running_state_remedy(layer, name) if x is changed else None
            if remedy is not None:
                raise Refusal(
                    f"{_named(path, layer)} keeps what the data did to it in the forward pass, which would be released "
                    f"without noise; {remedy}"
                )


def running_state_remedy(layer: nn.Module, tensor: str) -> str | None:
    """Return a remedy for a layer of torch that updates a tensor of its own from the data of a forward pass.

    Args:
        layer: The layer; subclasses are treated like the layers of torch that they derive from.
        tensor: The name of a parameter or buffer of the layer.

    Returns:
        The remedy, or None if the layer is not known to update this tensor.
    """
    if isinstance(layer, _NormBase) and tensor in _STATISTICS:
        if isinstance(layer, _InstanceNorm):
            return (
                "call qclip.fix(model), or make it with track_running_stats=False, so that it normalises every example "
                "by itself"
            )
        return (
            "call qclip.fix(model), which replaces it by GroupNorm and keeps its weights; or, where its statistics "
            "come from public data, keep them fixed: call eval() on it after every train() of the model (its weight "
            "and bias are still trained)"
        )
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None and tensor == "weight":
        return "make it with max_norm=None; normalise what it returns instead, if need be"
    # Observers and fake quantizers, by name: torch has announced that it will remove them.
    if any(kind.__module__.startswith("torch.ao.quantization.") for kind in type(layer).__mro__):
        return "disable its observer, and quantize after private training"
    return None


CRITERION: Final = "criterion."
"""The prefix of the names of a criterion's tensors."""


def named_tensors(
    model: nn.Module, criterion: nn.Module | None = None, sharding: Sharding | None = None
) -> Iterable[tuple[str, Tensor]]:
    """Yield the parameters and buffers of the model and of its criterion, by name."""
    yield from (sharding or Sharding()).named_parameters(model)
    yield from model.named_buffers()
    if criterion is not None:
        yield from ((CRITERION + name, x) for name, x in named_tensors(criterion))


def plain_attributes(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules hold as plain attributes, also in dicts and lists, and not as buffers."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (dict, list, tuple)) and value and name not in _REGISTRIES:
                values = value.values() if isinstance(value, dict) else value
                yield from (x for x in values if isinstance(x, Tensor))


def is_constant(name: str, x: Tensor) -> bool:
    """Return whether training does not move a tensor: a buffer, a frozen parameter, or a tensor of a criterion."""
    return not x.requires_grad or name.startswith(CRITERION)


def _owner(name: str, model: nn.Module, criterion: nn.Module | None) -> nn.Module:
    root = model
    if criterion is not None and name.startswith(CRITERION):
        root, name = criterion, name.removeprefix(CRITERION)
    return root.get_submodule(name.rpartition(".")[0])


def require_gradient_mode() -> None:
    """Refuse inference mode, in which torch does not record a graph."""
    if torch.is_inference_mode_enabled():
        raise Refusal("no gradients in inference mode; leave torch.inference_mode() for training")


def require_inputs(batch: Any) -> None:
    """Refuse a batch that holds anything but dense tensors, numbers and text: other values have no examples."""
    for leaf in pytree.tree_leaves(batch, is_leaf=lambda x: isinstance(x, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            raise Refusal(
                "the batch holds a PackedSequence, in which no tensor has one row per example; pass the padded rows "
                "and their lengths, and pack them inside of the model (pack_padded_sequence(x, lengths.cpu(), "
                "batch_first=True, enforce_sorted=False)), or leave them padded with a masked loss, which is faster"
            )
        if not isinstance(leaf, (Tensor, int, float, str, bool, type(None), torch.dtype, torch.device)):
            raise Refusal(
                f"the batch holds a {type(leaf).__name__}; pass tensors, numbers and text, in tuples, lists or dicts "
                "(dict(batch) of a mapping, torch.from_numpy of an array)"
            )
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise Refusal(f"the batch holds a {leaf.layout} tensor; pass a dense one (to_dense())")


def require_losses(losses: Any, batch_size: int) -> None:
    """Refuse losses unless they are a differentiable tensor with one loss per example, [B]."""
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


def require_range(sites: Iterable[Site]) -> None:
    """Refuse computations in float16, by autocast for instance: small gradients would vanish without a loss scale."""
    for site in sites:
        if any(output.dtype == torch.float16 for output in site.outputs):
            raise Refusal(
                f"{site} computes in float16, whose range is too small for gradients without a loss scale: autocast to "
                "bfloat16 (dtype=torch.bfloat16), or leave autocast out"
            )


def unseen_parameters(
    losses: Tensor, sites: Sequence[Site], parameters: Mapping[str, Tensor]
) -> tuple[list[str], list[bool]]:
    """Walk autograd's graph from the losses to the parameters.

    Args:
        losses: One loss per example, [B].
        sites: The captured sites.
        parameters: The trainable parameters by name.

    Returns:
        The names of the parameters that the losses depend on by a path without a site; and for each site, whether the
        losses depend on it.

    Raises:
        Refusal: If the graph contains a reentrant checkpoint, which hides a part of it.
    """
    names = {get_gradient_edge(p).node: name for name, p in parameters.items()}
    at_site = {output.edge.node: site for site in sites for output in site.outputs}
    unseen: set[str] = set()
    visited: set[Node] = set()
    ahead = [get_gradient_edge(losses).node]
    while ahead:
        node = ahead.pop()
        if node in visited:
            continue
        visited.add(node)
        if node in at_site:
            beyond, strangers = _behind(node, at_site, names)
            ahead.extend(beyond)
            unseen |= strangers
        elif node in names:
            unseen.add(names[node])
        elif node.name() == "CheckpointFunctionBackward":
            raise Refusal("activation checkpointing with use_reentrant=True hides its graph; pass use_reentrant=False")
        else:
            ahead.extend(_following(node))
    reached = [any(output.edge.node in visited for output in site.outputs) for site in sites]
    return [name for name in parameters if name in unseen], reached


def _behind(node: Node, at_site: Mapping[Node, Site], names: Mapping[Node, str]) -> tuple[list[Node], set[str]]:
    """Return where the graph continues behind a site, and the parameters in between that are not the site's."""
    site = at_site[node]
    own = {source.edge.node for source in site.call.sources.values()}
    data = set().union(*site.data_nodes)
    beyond: list[Node] = []
    strangers: set[str] = set()
    visited: set[Node] = set()
    ahead = _following(node)
    while ahead:
        inner = ahead.pop()
        if inner in visited or inner in own:
            continue
        visited.add(inner)
        if inner in data or inner in at_site:
            beyond.append(inner)
        elif inner in names:
            strangers.add(names[inner])
        else:
            ahead.extend(_following(inner))
    if site.call.in_place and not all(nodes & visited for nodes in site.data_nodes):
        strangers.update(site.parameters)  # a part of a tensor was overwritten: autograd rebuilt the graph around it
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
"""Runs the model on a batch and returns one loss per example, [B]."""
