"""Forward hooks: they capture a model's forward passes wherever the user calls it, so that an ordinary loop is private.

There are two hooks, on the root module. A copy of the model (for an average of its weights, or unpickled) carries hooks
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
    """A captured forward pass of the root module: its arguments, its outputs, and the run that captured it."""

    def __init__(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.run, self.args, self.kwargs = run, args, kwargs
        self._returned: Any = None
        self._versions: list[tuple[Tensor, int]] = []
        devices = {x.device.type for x in run.capture.parameters.values()}
        self._autocast = [(each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each)) for each in devices]

    def leave(self, returned: Any) -> None:
        """Take note of what the model returned."""
        self._returned = returned
        self._versions = [(leaf, leaf._version) for leaf in _leaves(returned) if isinstance(leaf, Tensor)]

    def require_unchanged_outputs(self) -> None:
        """Refuse outputs that were overwritten since: the gradient would include that, and the proof would not."""
        if any(leaf._version != version for leaf, version in self._versions):
            raise Refusal(
                "the outputs were changed in place after the model returned them; put what changes them into the "
                "loss, such as lambda outputs, targets: criterion(outputs - outputs.mean(1, keepdim=True), targets)"
            )

    def again(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model under the autocast of the captured forward pass."""
        with ExitStack() as stack:
            for device, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            return model(*args, **kwargs)

    def finder(self, outputs: Any) -> Callable[[Any], Any] | None:
        """Return a function that finds the user's outputs in what the model returns; None if there are others."""
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
    """Return the leaves of what a model returned, with dataclasses opened."""
    leaves = pytree.tree_leaves(returned)
    return [inner for leaf in leaves for inner in (_leaves(vars(leaf)) if is_dataclass(leaf) else [leaf])]


_watches: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Watch]]" = weakref.WeakKeyDictionary()


class Watch:
    """The hooks on a model; a model has one watch, the latest.

    Args:
        model: The root module.
        begin: Called with the arguments of a forward pass before it; returns None if it is not to be captured.
    """

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
        """Remove the hooks."""
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
    """A hook that becomes one that does nothing when it is copied or pickled."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():  # where nothing can be captured; `finish` says so
            self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _inert, ()


def do_nothing(*args: Any) -> None:
    """Do nothing: the hook of a copied model."""


def _inert() -> Callable[..., None]:
    return do_nothing
