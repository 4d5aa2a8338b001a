"""Watching a model: its forward passes are captured wherever the user calls it, so that an ordinary loop can be
private.

Two hooks on the root module do it. A copy of the model (for an average of its weights, or unpickled) carries hooks
that do nothing.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qclip._validate import Refusal


class Watched:
    """A captured forward pass of the root module: what went in, what came out, and the run that saw it."""

    def __init__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.run, self.args, self.kwargs = run, args, kwargs
        self._returned: Any = None
        self._versions: list[tuple[Tensor, int]] = []
        kinds = {x.device.type for x in run.capture.parameters.values()}
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    def leave(self, returned: Any) -> None:
        """Note what the model returned."""
        self._returned = returned
        self._versions = [(leaf, leaf._version) for leaf in _leaves(returned) if isinstance(leaf, Tensor)]

    def require_unchanged_outputs(self) -> None:
        """Refuse outputs that were overwritten since: the gradient would know of it, and the proof would not."""
        if any(leaf._version != version for leaf, version in self._versions):
            raise Refusal(
                "the outputs were changed in place after the model returned them; put what changes them into the "
                "loss, such as lambda outputs, targets: criterion(outputs - outputs.mean(1, keepdim=True), targets)"
            )

    def again(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model as it was called, under the same autocast."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            return model(*args, **kwargs)

    def finder(self, outputs: Any) -> Callable[[Any], Any] | None:
        """How to find the user's ``outputs`` in what the model returns; None if they were computed from it."""
        if outputs is self._returned:
            return lambda returned: returned
        places = {id(leaf): k for k, leaf in enumerate(_leaves(self._returned))}
        wanted, structure = pytree.tree_flatten(outputs)
        if not all(id(leaf) in places for leaf in wanted):
            return None
        order = [places[id(leaf)] for leaf in wanted]

        def find(returned: Any) -> Any:
            leaves = _leaves(returned)
            return pytree.tree_unflatten([leaves[k] for k in order], structure)

        return find


def _leaves(returned: Any) -> list[Any]:
    """The leaves of what a model returned, dataclasses opened."""
    leaves = pytree.tree_leaves(returned)
    return [part for leaf in leaves for part in (_leaves(vars(leaf)) if is_dataclass(leaf) else [leaf])]


_watches: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Watch]]" = weakref.WeakKeyDictionary()


class Watch:
    """The hooks on a model; `remove` takes them off. A model has one watch, the latest."""

    def __init__(self, model: nn.Module, begin: Callable[[tuple[Any, ...], dict[str, Any]], Watched | None]) -> None:
        self.last: Watched | None = None
        """The last captured forward pass."""
        self._begin = begin
        self._open: tuple[Watched, ExitStack] | None = None
        earlier = _watches[model]() if model in _watches else None
        if earlier is not None:
            earlier.remove()
        _watches[model] = weakref.ref(self)
        self._handles = (
            model.register_forward_pre_hook(_Hook(self._enter), prepend=True, with_kwargs=True),
            model.register_forward_hook(_Hook(self._leave), always_call=True),
        )

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self.last = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open is not None:  # left behind by an interrupt; or the model calls itself, which is refused later
            self._open[1].close()
            self._open = None
        if not torch.is_grad_enabled():
            return
        watched = self._begin(args, kwargs)
        if watched is not None:
            self.last = None
            stack = ExitStack()
            self._open = watched, stack
            watched.run.enter(stack)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
        if self._open is None:
            return
        (watched, stack), self._open = self._open, None
        stack.close()
        watched.leave(returned)
        self.last = None if returned is None else watched  # None: the forward pass failed


class _Hook:
    """A hook that copies and pickles as one that does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():  # nothing could be captured; `finish` says so
            self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _inert, ()


def do_nothing(*args: Any) -> None:
    """What a hook becomes in a copy of the model."""


def _inert() -> Callable[..., None]:
    return do_nothing
