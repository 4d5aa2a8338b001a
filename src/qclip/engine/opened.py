"""Functions of torch that are written in Python, opened: the calls inside them are seen one by one."""

import types
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def opened(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function remade so that modes see what it calls; None for one that is not written in plain Python.

    Such a function first asks whether a mode or subclass wants to handle it as a whole. This copy is told no.
    """
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return None
    no = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **no}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False
