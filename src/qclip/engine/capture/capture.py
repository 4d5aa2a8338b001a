"""Capture: which functions consumed parameters in a forward pass, with what, and where their output gradients will be.

Classifying a value as constant is about cost, never about truth: gradients of sources are exact for any value, and a
call wrongly taken for a site fails the proof of ownership in `qclip.engine.proof.proof`.
"""

import types
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from qclip._validate import Refusal
from qclip.engine.capture import faults
from qclip.engine.gradients import rules
from qclip.engine.gradients.layouts import relative
from qclip.engine.gradients.rules.linear import is_ragged, widened_linear
from qclip.engine.gradients.sites import Call, Output, Site, Source, is_in_place, leaves, map_leaves, tensors
from qclip.engine.randomness import RandomState

_T = torch.Tensor
# Functions that take or put rows where an index says.
_ROUTERS = {
    _T.__getitem__, _T.__setitem__, torch.index_select, _T.index_select, torch.gather, _T.gather, torch.take, _T.take,
    torch.take_along_dim, _T.take_along_dim, torch.masked_select, _T.masked_select, torch.scatter, _T.scatter,
    _T.scatter_, torch.scatter_add, _T.scatter_add, _T.scatter_add_, torch.index_add, _T.index_add,
    _T.index_add_, torch.index_copy, _T.index_copy, _T.index_copy_, torch.index_put, _T.index_put, _T.index_put_,
    torch.index_fill, _T.index_fill, _T.index_fill_, torch.index_reduce, _T.index_reduce, _T.index_reduce_,
    torch.scatter_reduce, _T.scatter_reduce, _T.scatter_reduce_, torch.masked_scatter, _T.masked_scatter,
    _T.masked_scatter_, torch.repeat_interleave, _T.repeat_interleave, torch.narrow, _T.narrow, torch.select, _T.select,
}  # fmt: skip


class Capture(TorchFunctionMode):
    """Records the sites of what runs inside it."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor],
        batch_size: int,
        *,
        not_spreading: Collection[int] = (),
        keep_values: bool = False,
        observe: Callable[[int, Tensor], None] | None = None,
        traced: bool = False,
    ) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self.fingerprint = 0
        """Of every call: which function, what shapes, which whole numbers; the same for every batch size."""
        self.routes = False
        """Whether data decide which rows of a dimension that may hold examples go where."""
        self._batch_size = batch_size
        self._keep_values = keep_values
        self._observe = observe
        self._traced = traced  # nothing is run, so there are no generators to remember
        self._not_spreading = not_spreading
        self._spread = -1
        self.parameters = parameters  # tensors are kept alive so that their ids stay theirs
        self._sources = {
            id(p): Source(get_gradient_edge(p), p.shape, p.dtype, frozenset([name])) for name, p in parameters.items()
        }
        self._alive: list[Tensor] = []
        # Fixed: a frozen parameter or buffer, or made from one; such a tensor has no dimension of examples.
        self._constants = {id(x): x for x in constants}
        self._fixed = set(self._constants)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function, kwargs = func, kwargs or {}
        found = list(tensors(args)) + list(tensors(kwargs.values()))
        if not any(id(x) in self._sources for x in found):
            result = self._note_constant(function(*args, **kwargs), found)
            self._note_call(function, args, kwargs, result)
            return result
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        opened = rules.DECOMPOSITIONS.get(function) or (_opened(function) if rules.find(function) is None else None)
        if opened is not None:
            try:
                with self:
                    return opened(*args, **kwargs)
            except NotImplementedError as error:
                call = self._describe(function, args, kwargs)
                raise Refusal(f"{call}: {error}") from error
        result = self._call(function, args, kwargs, found)
        self._note_call(function, args, kwargs, result)
        return result

    def _note_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Add a call to the fingerprint, and notice rows that are moved about by data."""
        shapes = tuple(relative(x.shape, self._batch_size) for x in tensors((result,)))
        if shapes or is_in_place(function):
            given = list(leaves((args, tuple(kwargs.values()))))
            numbers = relative([x for x in given if isinstance(x, int)], self._batch_size)
            # Of other numbers only whether they are zero: a term that is switched on is another kind of pass.
            others = tuple(bool(x) if isinstance(x, float) else x for x in given if isinstance(x, (float, str)))
            self.fingerprint = hash((self.fingerprint, function, shapes, numbers, others))
            if not self.routes:
                self.routes = function in _ROUTERS and self._routes(args, kwargs)
                lookup = function in (F.embedding, torch.embedding)
                self.routes |= lookup and self._looks_up_rows(tensors((*args, *kwargs.values())))

    def _routes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether data say which rows are taken, along a dimension that may hold examples."""
        rows, *rest = (*args, *kwargs.values())
        if not isinstance(rows, Tensor) or id(rows) in self._sources or id(rows) in self._constants:
            return False
        dims = [x for x in rest if isinstance(x, int)]
        k = dims[0] % max(rows.dim(), 1) if dims and not isinstance(rest[0], (tuple, Tensor)) else 0
        for index in rest[0] if rest and isinstance(rest[0], tuple) else [x for x in rest if isinstance(x, Tensor)][:1]:
            if index is Ellipsis:
                k = rows.dim() - 1  # what follows counts from the end; the last dimension stands for it
                continue
            width = (
                0 if index is None else index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1
            )
            by_data = isinstance(index, Tensor) and id(index) not in self._constants
            if by_data and any(self._may_hold(rows.shape[j], j) for j in range(k, min(k + width, rows.dim()))):
                return True
            k += width
        return False

    def _looks_up_rows(self, found: Iterable[Tensor]) -> bool:
        """Whether the table of an embedding is itself data."""
        tables = [x for x in found if x.is_floating_point() and id(x) not in self._sources]
        return any(id(x) not in self._constants and x.dim() and self._may_hold(x.shape[0]) for x in tables)

    def _may_hold(self, length: int, dim: int = 0) -> bool:
        """Whether a dimension may hold examples: one row each, or several in the first dimension."""
        return self._batch_size > 1 and (
            length == self._batch_size or (dim == 0 and length > 0 and length % self._batch_size == 0)
        )

    def _note_constant(self, result: Any, found: list[Tensor]) -> Any:
        constant = all(id(x) in self._constants for x in found)
        fixed = constant and any(id(x) in self._fixed for x in found)
        rows = (self._batch_size,)
        for x in tensors((result,)):
            if constant and not x.requires_grad:
                self._constants[id(x)] = x
                if fixed and (x.shape[:1] != rows or any(other.shape[:1] == rows for other in found)):
                    self._fixed.add(id(x))  # not expanded to a row per example just now
            elif id(x) in self._constants:  # data was written into it
                del self._constants[id(x)]
                self._fixed.discard(id(x))
        return result

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Tensor]
    ) -> Any:
        data = [x for x in found if id(x) not in self._sources and (x.requires_grad or id(x) not in self._constants)]
        entry = rules.find(function)
        # A call without a rule may have to be run again, so its randomness must be known.
        random_state = None if entry is not None or not data or self._traced else RandomState.now(data[0].device)
        nodes = tuple(frozenset({get_gradient_edge(x).node, _lasting_edge(x).node}) for x in data if x.requires_grad)
        call = self._describe(function, args, kwargs)
        if self._traced and function is F.linear and is_ragged(*args, **kwargs):
            result, whole = widened_linear(*args, **kwargs)
            results = [whole]
        else:
            result = faults.right(function)(*args, **kwargs)
            results = list(tensors((result,)))
        in_place = is_in_place(function)
        passed_on = set() if in_place else {id(x) for x in found}  # such as x.contiguous() where it already was
        old = set() if in_place else {id(x._base) for x in found if x._is_view()} | passed_on
        outputs = tuple(
            Output(k, _lasting_edge(x, old), x.shape, x.dtype)
            for k, x in enumerate(results)
            if x.requires_grad and id(x) not in passed_on
        )
        if not outputs:
            return result if data else self._note_constant(result, [])
        if not data and (entry is None or not self._is_spreading(call, outputs)):
            self._derive(call, results)
            return result
        if entry is None and not _depends(outputs, call.sources.values(), nodes):
            return result  # such as x.type_as(parameter)
        first = results[outputs[0].position].detach()
        cast_to = first.dtype if torch.is_autocast_enabled(first.device.type) else None
        value = first.clone() if self._keep_values else None
        if self._observe is not None:
            self._observe(len(self.sites), first)
        self.sites.append(
            Site(call, entry, outputs, nodes, cast_to, random_state, value, None if data else self._spread)
        )
        for x in results:  # data by now, whatever it was before
            self._sources.pop(id(x), None)
            self._constants.pop(id(x), None)
            self._fixed.discard(id(x))
        return result

    def _describe(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        sources: dict[int, Source] = {}
        fixed: set[int] = set()
        versions: list[tuple[Tensor, int]] = []
        overwritten = args[0] if args and is_in_place(function) else None

        def detach(x: Any) -> Any:
            if isinstance(x, Tensor):
                source = self._sources.get(id(x))
                plain = x.detach().clone() if x is overwritten else x.detach()
                versions.append((plain, plain._version))
                if source is not None:
                    sources[id(plain)] = source
                if source is not None or id(x) in self._fixed:
                    fixed.add(id(plain))
                return plain
            return x

        args = tuple(map_leaves(x, detach) for x in args)
        kwargs = {key: map_leaves(x, detach) for key, x in kwargs.items()}
        return Call(function, args, kwargs, sources, tuple(versions), frozenset(fixed))

    def _derive(self, call: Call, results: list[Tensor]) -> None:
        parents = tuple(dict.fromkeys(call.sources.values()))
        names = frozenset(name for parent in parents for name in parent.parameters)
        in_place = is_in_place(call.function)
        for x in results:
            if x.requires_grad and (in_place or id(x) not in self._sources):
                self._sources[id(x)] = Source(get_gradient_edge(x), x.shape, x.dtype, names, call, parents)
                self._alive.append(x)

    def _is_spreading(self, call: Call, outputs: tuple[Output, ...]) -> bool:
        if not self._spreads(call, outputs):
            return False
        self._spread += 1
        return self._spread not in self._not_spreading

    def _spreads(self, call: Call, outputs: tuple[Output, ...]) -> bool:
        """Whether a call without data gives its sources a row per example, by expanding or from a constant with one."""
        count, shape = self._batch_size, outputs[0].shape
        if count == 1:
            return False
        others = [x for x, _ in call.versions if id(x) not in call.sources]
        if others:  # a vector is rather one of positions than one of examples
            constants = [x for x in others if id(x) not in call.fixed]
            grown = bool(shape) and self._may_hold(shape[0])
            return grown and any(x.dim() > 1 and x.shape[0] == shape[0] for x in constants)
        brought = [source.shape for source in call.sources.values()]
        if any(len(s) == len(shape) and s[:1] and s[0] * count == shape[0] for s in brought):
            return True  # repeated as a whole
        return any(
            self._may_hold(shape[-k], len(shape) - k) and all(len(s) < k or s[-k] == 1 for s in brought)
            for k in range(1, len(shape) + 1)
        )


def _lasting_edge(x: Tensor, old: Collection[int] = ()) -> GradientEdge:
    """The edge of a tensor's value now, such that writing into the tensor later does not take it out of the graph.

    Writing into a view makes new nodes for the view and keeps those of its base, so a new view of all of its base is
    known by the base. ``old`` holds the ids of bases that were there before and have a value of their own.
    """
    base = x._base if x._is_view() else None
    whole = base is not None and id(base) not in old and base.numel() == x.numel()
    if whole and base.requires_grad and x.is_contiguous() and base.is_contiguous():
        return get_gradient_edge(base)
    return get_gradient_edge(x)


def _depends(outputs: Iterable[Output], sources: Iterable[Source], data_nodes: Iterable[frozenset[Node]]) -> bool:
    """Whether the outputs' gradient reaches a source by another way than through the data."""
    wanted = {source.edge.node for source in sources}
    seen = set().union(*data_nodes)
    ahead = [output.edge.node for output in outputs]
    while ahead:
        node = ahead.pop()
        if node in wanted:
            return True
        if node not in seen:
            seen.add(node)
            ahead.extend(following for following, _ in node.next_functions if following is not None)
    return False


@cache
def _opened(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A torch function written in Python, remade so that the calls inside it are seen one by one.

    Such a function first asks whether a mode or subclass wants to handle it as a whole. This copy is told no.
    """
    if not isinstance(function, types.FunctionType) or function.__module__ != F.__name__ or function.__closure__:
        return None
    no = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **no}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False
