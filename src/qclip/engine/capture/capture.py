"""Capture: which functions consumed parameters in a forward pass, with what, and where their output gradients will be.

Classifying a value as constant affects cost, never correctness: gradients of sources are exact for any value, and a
call that is wrongly recorded as a site fails the proof of ownership in `qclip.engine.proof.proof`.
"""

import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode, resolve_name

from qclip.engine.capture.faults import CORRECTED
from qclip.engine.capture.invocation import Invocation, opened
from qclip.engine.capture.origins import Origins
from qclip.engine.capture.overrides import Overrides
from qclip.engine.capture.routing import ROUTING, counted_dimension, moved_dimensions
from qclip.engine.gradients import rules
from qclip.engine.gradients.layouts import relative
from qclip.engine.gradients.sites import Call, Output, Site, Source, results_of, tensors, with_tensors
from qclip.engine.randomness import RandomState

_PART_OF_A_KIND = (int, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are the same in all passes of a kind, or do not matter; of floats only whether they are zero."""
Observe = Callable[[int, Tensor, Tensor | None], None]
"""Called with the index of a site, its first output, and the order that puts its rows back if data moved them."""
Calls = list[tuple[Callable[..., Any], "bool | Callable[..., Any]"]]
"""Torch functions in the order of their calls, each with whether it is a site, or with the function that runs in its
place and makes the calls that follow."""


class RecordedCall(NamedTuple):
    """The facts of a call that decide, with those of all others, which forward passes are of one kind."""

    function: Callable[..., Any]
    shapes: tuple[torch.Size, ...]
    """Of its results."""
    integers: tuple[int, ...]
    """Of its arguments."""
    others: tuple[Any, ...]
    """Its other arguments that matter."""


class _Inputs(NamedTuple):
    """The arguments of a call that reads parameters, classified before it runs."""

    call: Call
    entry: rules.Entry | None
    """The rule of the function."""
    has_data: bool
    """Whether any argument depends on data."""
    data_nodes: tuple[frozenset[Node], ...]
    """The autograd nodes of each differentiable data argument."""
    random_state: RandomState | None
    """The state of the generators, if the call may have to run again."""
    note: str = ""
    """Why the function was not opened."""


class Capture(TorchFunctionMode):
    """Records the sites of everything that runs inside it.

    Every call of a torch function is classified by its arguments. A call without parameters yields data, or constants
    if it reads nothing but constants. A call of parameters and constants yields a new source. A call that combines
    sources with data is a site.

    Args:
        parameters: The trainable parameters by name.
        constants: Frozen parameters, buffers and inputs that all examples share.
        batch_size: The number of examples.
        attributes: Tensors that modules hold as plain attributes.
        broadcasts: Ordinals of the parameter-only calls that give every example a row; None to guess by shapes.
        not_broadcasts: Ordinals of those that look as if they did, and do not.
        keep_values: Whether sites keep a copy of their first output.
        observe: Called with the index, the first output and the order of every site.
        overrides: Runs the functions of a forward pass that is traced for a compiled step; None for an eager one.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Iterable[Tensor],
        batch_size: int,
        *,
        attributes: Iterable[Tensor] = (),
        broadcasts: Collection[int] | None = None,
        not_broadcasts: Collection[int] = (),
        keep_values: bool = False,
        observe: Observe | None = None,
        overrides: Overrides | None = None,
    ) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self.calls: Calls = []
        """The calls, as `qclip.engine.capture.repeat` follows them."""
        self.record: list[RecordedCall] = []
        """The calls that returned tensors, in order, for comparisons with another batch size."""
        self.fingerprint = 0
        """Hash of every call: its function, shapes and integers; the same for every batch size."""
        self.routed_by = ""
        """The first call in which data decide where rows go, along a dimension that may hold examples; in words."""
        self.counted_by = ""
        """The first call that counts over the rows of several examples, in words."""
        self.origins = Origins(batch_size)
        """Where rows came from that data have moved."""
        self.parameters = parameters  # tensors are kept alive so that their ids stay theirs
        self.not_broadcasts = not_broadcasts
        self._broadcasts = broadcasts
        self._batch_size = batch_size
        self._keep_values = keep_values
        self._observe = observe
        self._overrides = overrides
        self._num_shared = 0
        self._sources = {
            id(p): Source(get_gradient_edge(p), p.shape, p.dtype, frozenset([name])) for name, p in parameters.items()
        }
        self._alive: list[Tensor] = []
        # Fixed: a frozen parameter or buffer, or computed from one; such a tensor has no dimension of examples.
        self._constants = {id(x): x for x in constants}
        self._fixed = set(self._constants)
        # Passing: constants that may be others in the next pass of the same kind; as an index, they count as data.
        self._passing: set[int] = set()
        for x in attributes:
            if id(x) not in self._constants and id(x) not in self._sources and not x.requires_grad:
                self._constants[id(x)] = x
                self._passing.add(id(x))
                if x.shape[:1] != (batch_size,):
                    self._fixed.add(id(x))

    @property
    def routes(self) -> bool:
        """Whether data decide where rows go, along a dimension that may hold examples."""
        return bool(self.routed_by)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__iter__ and args[0].dim():  # an iterator would hide the results
            with self:
                return iter(args[0].unbind())
        call = Invocation.of(func, args, kwargs or {})
        for x in call.tensors:
            if isinstance(x.grad_fn, BackwardCFunction) and id(x) not in self._sources:
                self._adopt(x, x.grad_fn)
        self.calls.append((func, False))
        if not any(id(x) in self._sources for x in call.tensors):
            return self._run_without_parameters(call)
        if not torch.is_grad_enabled():
            return func(*call.args, **call.kwargs)
        entry = rules.find(func)
        parts = rules.DECOMPOSITIONS.get(func) or (_opened(func) if entry is None else None)
        if parts is not None:
            self.calls[-1] = func, parts
            return self._run_parts(call, parts)
        return self._run_with_parameters(call, entry)

    # Run

    def _run_without_parameters(self, call: Invocation) -> Any:
        result, results = self._run(call)
        self._note_constants(call, results)
        self._follow_rows(call, results)
        self._note_call(call, results)
        return result

    def _run_parts(self, call: Invocation, parts: Callable[..., Any]) -> Any:
        """Run the calls that a function consists of, and capture these instead of the function."""
        try:
            with self:
                return parts(*call.args, **call.kwargs)
        except NotImplementedError as error:
            return self._run_with_parameters(call, None, note=str(error))

    def _run_with_parameters(self, call: Invocation, entry: rules.Entry | None, *, note: str = "") -> Any:
        inputs = self._classified(call, entry)._replace(note=note)
        result, results = self._run(call)
        self._follow_rows(call, results)
        self._record(call, inputs, outputs_of(call, results), results)
        self._note_call(call, results)
        return result

    def _run(self, call: Invocation) -> tuple[Any, list[Tensor]]:
        """Run a call; return its result, and the tensors whose gradients a site needs."""
        if self._overrides is None:
            result = CORRECTED.get(call.function, call.function)(*call.args, **call.kwargs)
        else:
            result = self._overrides.run(call.function, call.args, call.kwargs)
        results = results_of(call.function, call.args, result)
        if self._overrides is not None and call.function is F.linear:
            results = [self._overrides.whole(x) for x in results]
        return result, results

    # Classify

    def _classified(self, call: Invocation, entry: rules.Entry | None) -> _Inputs:
        """Separate the data of a call from its sources, before it runs and can overwrite an argument."""
        data = [x for x in call.read if self._is_data(x)]
        # A call without a rule may have to run again, with the same random numbers. A traced call runs only once.
        may_run_again = entry is None and bool(data) and self._overrides is None
        random_state = RandomState.now(data[0].device) if may_run_again else None
        return _Inputs(self._detached(call), entry, bool(data), _nodes(data), random_state)

    def _is_data(self, x: Tensor) -> bool:
        """Return whether a tensor may be computed from data: it is neither a source nor a constant."""
        return id(x) not in self._sources and (x.requires_grad or id(x) not in self._constants)

    def _adopt(self, x: Tensor, node: BackwardCFunction) -> None:
        """Note the result of a custom autograd function as a source, if the function used no data.

        Modes do not see such a function. What it used are the inputs that led to its node, and the tensors that it
        saved; these are not looked at where a hook, such as that of a checkpoint, would compute them again.
        """
        inputs = {edge for edge, _ in node.next_functions if edge is not None}
        parents = tuple(source for source in self._sources.values() if source.edge.node in inputs)
        if not inputs or {source.edge.node for source in parents} != inputs or _has_saving_hooks():
            return
        if not any(map(self._is_data, node.saved_tensors)):
            function = getattr(type(node), "_forward_cls", type(node))
            self._add_source(x, Call(function, (), {}, {}, (), frozenset(), in_place=False), parents)

    def _may_hold_examples(self, length: int, dim: int) -> bool:
        """Return whether a dimension may hold examples: one row each, or several in the first dimension."""
        several = dim == 0 and length > 0 and length % self._batch_size == 0
        return self._batch_size > 1 and (length == self._batch_size or several)

    def _is_broadcast(self, inputs: _Inputs, outputs: Sequence[Output]) -> bool:
        """Return whether a parameter-only call is to be recorded as a site that gives every example a row."""
        ordinal, self._num_shared = self._num_shared, self._num_shared + 1
        if self._broadcasts is not None:
            return ordinal in self._broadcasts
        if inputs.entry is None or ordinal in self.not_broadcasts:
            return False
        return self._looks_like_broadcast(inputs.call, outputs[0].shape)

    def _looks_like_broadcast(self, call: Call, shape: torch.Size) -> bool:
        """Return whether an output may have a row per example, by expanding a source or from a constant with rows."""
        if self._batch_size == 1:
            return False
        others = [x for x, _ in call.versions if id(x) not in call.sources]
        if others:
            constants = [x for x in others if id(x) not in call.fixed and x.dim() > 1]  # a vector holds positions
            has_rows = bool(shape) and self._may_hold_examples(shape[0], 0)
            return has_rows and any(x.shape[0] == shape[0] for x in constants)
        sources = [source.shape for source in call.sources.values()]
        return _repeats(shape, sources, self._batch_size) or any(
            self._may_hold_examples(length, dim) and _is_new(dim - len(shape), sources)
            for dim, length in enumerate(shape)
        )

    def _moves_examples(self, call: Invocation) -> bool:
        """Return whether data decide where rows go, along a dimension that may hold examples."""
        if call.function is Tensor.__setitem__ and not any(map(self._is_data, tensors(call.args[2]))):
            return False  # every row stays with its example, wherever something else is written over it
        written = call.in_place and any(map(self._is_data, call.tensors[1:]))
        return any(
            (self._is_data(rows) or written)
            and (id(index) not in self._constants or id(index) in self._passing)
            and any(self._may_hold_examples(rows.shape[dim], dim) for dim in dims)
            for rows, index, dims in moved_dimensions(call)
        )

    def _counts_examples(self, call: Invocation) -> bool:
        """Return whether a call counts over rows of several examples, so that what follows may depend on others."""
        dim = counted_dimension(call)
        if dim is None:
            return False
        rows = call.tensors[0]
        return self._is_data(rows) and self._may_hold_examples(rows.shape[dim], dim)

    # Record

    def _record(
        self, call: Invocation, inputs: _Inputs, outputs: tuple[Output, ...], results: Sequence[Tensor]
    ) -> None:
        """Record what a call made of its sources: a site, new sources, or constants."""
        if not outputs:
            if not inputs.has_data:
                self._note_constants(call, results)
        elif not inputs.has_data and not self._is_broadcast(inputs, outputs):
            self._record_sources(inputs.call, results)
            self._note_constants(call, results)  # such as indices, beside the values
        elif inputs.entry is not None or _depends(outputs, inputs):  # not so x.type_as(parameter)
            self._record_site(inputs, outputs, results)

    def _detached(self, call: Invocation) -> Call:
        """Return the call with detached tensors, as it is before it runs."""
        overwritten = call.args[0] if call.args and call.in_place else None
        plain = [x.detach().clone() if x is overwritten else x.detach() for x in call.tensors]
        pairs = list(zip(call.tensors, plain, strict=True))
        sources = {id(copy): self._sources[id(x)] for x, copy in pairs if id(x) in self._sources}
        fixed = frozenset(id(copy) for x, copy in pairs if id(x) in self._sources or id(x) in self._fixed)
        args, kwargs = with_tensors(call.args, call.kwargs, plain)
        versions = tuple((copy, copy._version) for copy in plain)
        return Call(call.function, args, kwargs, sources, versions, fixed, call.in_place)

    def _record_sources(self, call: Call, results: Iterable[Tensor]) -> None:
        parents = tuple(dict.fromkeys(call.sources.values()))
        for x in results:
            if x.requires_grad and (call.in_place or id(x) not in self._sources):
                self._add_source(x, call, parents)

    def _add_source(self, x: Tensor, call: Call, parents: tuple[Source, ...]) -> None:
        names = frozenset(name for parent in parents for name in parent.parameters)
        self._forget_constant(x)
        self._sources[id(x)] = Source(get_gradient_edge(x), x.shape, x.dtype, names, call, parents)
        self._alive.append(x)

    def _record_site(self, inputs: _Inputs, outputs: tuple[Output, ...], results: Sequence[Tensor]) -> None:
        first = results[outputs[0].position].detach()
        order = self.origins.order(results[outputs[0].position])
        if self._observe is not None:
            self._observe(len(self.sites), first, order)
        site = Site(
            inputs.call,
            inputs.entry,
            outputs,
            inputs.data_nodes,
            cast_to=first.dtype if torch.is_autocast_enabled(first.device.type) else None,
            random_state=inputs.random_state,
            value=first.clone() if self._keep_values else None,
            broadcast_index=None if inputs.has_data else self._num_shared - 1,
            note=inputs.note,
            order=order,
        )
        self.sites.append(site)
        self.calls[-1] = inputs.call.function, True
        for x in results:  # data from now on, even if it was a source or a constant that the call overwrote
            self._sources.pop(id(x), None)
            self._forget_constant(x)

    def _note_constants(self, call: Invocation, results: Iterable[Tensor]) -> None:
        """Remember results that are constants; forget those into which data was written."""
        read = call.read
        shared = not any(map(self._is_data, read))
        fixed = shared and any(id(x) in self._fixed or id(x) in self._sources for x in read)
        passing = any(id(x) in self._passing or id(x) in self._sources for x in read) or (
            not read and not all(isinstance(x, _PART_OF_A_KIND) for x in call.scalars)
        )
        rows = (self._batch_size,)
        for x in results:
            if x.requires_grad and id(x) in self._sources:
                continue
            self._forget_constant(x)
            if not shared or x.requires_grad:
                continue
            self._constants[id(x)] = x
            if passing:
                self._passing.add(id(x))
            expanded = x.shape[:1] == rows and not any(other.shape[:1] == rows for other in read)
            if (fixed and not expanded) or call.function is torch.eye:
                self._fixed.add(id(x))  # this call did not expand it to a row per example

    def _forget_constant(self, x: Tensor) -> None:
        self._constants.pop(id(x), None)
        self._fixed.discard(id(x))
        self._passing.discard(id(x))

    def _follow_rows(self, call: Invocation, results: Sequence[Tensor]) -> None:
        """Notice whether data move rows, and where these go."""
        moves = call.function in ROUTING and self._moves_examples(call)
        if moves and not self.routed_by:
            self.routed_by = _in_words(call)
        if not self.counted_by and self._counts_examples(call):
            self.counted_by = _in_words(call)
        if self._overrides is None and (outcome := self.origins.follow(call, results, self._is_data, moves=moves)):
            self.fingerprint = hash((self.fingerprint, outcome))

    def _note_call(self, call: Invocation, results: Sequence[Tensor]) -> None:
        """Add a call to the fingerprint."""
        if not results and not call.in_place:
            return
        shapes = tuple(x.shape for x in results)
        integers = tuple(x for x in call.scalars if isinstance(x, int))
        arrays = tuple(x.tobytes() for x in call.scalars if isinstance(x, np.ndarray) and x.dtype.kind in "iub")
        # Of floats only whether they are zero: a term that is switched on makes another kind of pass.
        others = tuple(bool(x) if isinstance(x, float) else x for x in call.scalars if isinstance(x, (float, str)))
        self.record.append(RecordedCall(call.function, shapes, integers, (*arrays, *others)))
        relative_shapes = tuple(relative(shape, self._batch_size) for shape in shapes)
        relative_integers = relative(integers, self._batch_size)
        self.fingerprint = hash((self.fingerprint, call.function, relative_shapes, relative_integers, arrays, others))


def _in_words(call: Invocation) -> str:
    name = resolve_name(call.function) or call.function.__name__
    return f"{name} of a tensor of shape {list(call.tensors[0].shape)}"


def outputs_of(call: Invocation, results: Sequence[Tensor]) -> tuple[Output, ...]:
    """Return the differentiable tensors that a call computed, without arguments that it passed on."""
    passed_on = set() if call.in_place else {id(x) for x in call.tensors}  # such as by x.contiguous()
    old = set() if call.in_place else {id(x._base) for x in call.tensors if x._is_view()} | passed_on
    return tuple(
        Output(k, _lasting_edge(x, old), x.shape, x.dtype)
        for k, x in enumerate(results)
        if x.requires_grad and id(x) not in passed_on
    )


def _has_saving_hooks() -> bool:
    """Return whether a hook, such as that of a checkpoint, stands between autograd and the tensors that it saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _nodes(data: Iterable[Tensor]) -> tuple[frozenset[Node], ...]:
    """Return the autograd nodes of each differentiable tensor."""
    differentiable = [x for x in data if x.requires_grad]
    return tuple(frozenset({get_gradient_edge(x).node, _lasting_edge(x).node}) for x in differentiable)


def _repeats(shape: torch.Size, sources: Iterable[torch.Size], batch_size: int) -> bool:
    """Return whether a shape is that of a source repeated for every example."""
    return any(len(s) == len(shape) and s[:1] and s[0] * batch_size == shape[0] for s in sources)


def _is_new(dim: int, shapes: Iterable[torch.Size]) -> bool:
    """Return whether none of the shapes has a dimension, counted from the end, other than of length 1."""
    return all(len(shape) < -dim or shape[dim] == 1 for shape in shapes)


def _lasting_edge(x: Tensor, old: Collection[int] = ()) -> GradientEdge:
    """Return the edge of a tensor's value, such that writing into the tensor later does not remove it from the graph.

    Writing into a view makes new nodes for the view and keeps those of its base. So a new view of a whole base is
    identified by the base.

    Args:
        x: The tensor.
        old: The ids of bases that existed before the call and have a value of their own.
    """
    base = x._base if x._is_view() else None
    whole = base is not None and id(base) not in old and base.numel() == x.numel()
    if whole and base.requires_grad and x.is_contiguous() and base.is_contiguous():
        return get_gradient_edge(base)
    return get_gradient_edge(x)


def _depends(outputs: Iterable[Output], inputs: _Inputs) -> bool:
    """Return whether the gradient of the outputs reaches a source by another way than through the data."""
    wanted = {source.edge.node for source in inputs.call.sources.values()}
    seen = set().union(*inputs.data_nodes)
    ahead = [output.edge.node for output in outputs]
    while ahead:
        node = ahead.pop()
        if node in wanted:
            return True
        if node not in seen:
            seen.add(node)
            ahead.extend(following for following, _ in node.next_functions if following is not None)
    return False


def _opened(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a torch function written in Python such that its inner calls are captured one by one; else None."""
    in_python = isinstance(function, types.FunctionType) and function.__module__ == F.__name__
    return opened(function) if in_python and not function.__closure__ else None
