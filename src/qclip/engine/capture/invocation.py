"""Invocations: a call of a torch function while it happens, its arguments flattened once."""

import types
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__imatmul__", "__ipow__"}

_CASTS = {Tensor.to, Tensor.type_as}


class Invocation(NamedTuple):
    """A call of a torch function, with the tensors that the model passed to it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    """The tensors among the arguments, with lists and tuples opened."""
    scalars: list[Any]
    """All other arguments, with lists, tuples and slices opened."""
    in_place: bool
    """Whether the function overwrites its first argument."""

    @property
    def read(self) -> list[Tensor]:
        """The tensors whose values the result depends on: of others only the dtype or the device is read."""
        return self.tensors[:1] if self.function in _CASTS else self.tensors

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Invocation":
        """Flatten the arguments of a call."""
        tensors: list[Tensor] = []
        scalars: list[Any] = []
        _flatten(args, tensors, scalars)
        _flatten(kwargs.values(), tensors, scalars)
        return Invocation(function, args, kwargs, tensors, scalars, is_in_place(function))


def _flatten(values: Iterable[Any], tensors: list[Tensor], scalars: list[Any]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            _flatten(value, tensors, scalars)
        elif isinstance(value, slice):
            scalars += (value.start, value.stop, value.step)
        else:
            scalars.append(value)


def is_in_place(function: Callable[..., Any]) -> bool:
    """Return whether the function overwrites its first argument, by torch's naming convention."""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


@cache
def opened(function: types.FunctionType) -> Callable[..., Any]:
    """Return a copy of a torch function written in Python that no mode or subclass handles as a whole.

    Such a function first asks whether one does. For the copy the answer is no, so that modes see its inner calls.
    """
    no = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **no}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False
