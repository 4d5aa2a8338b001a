"""Argument checks. Each error names the argument, its value, the bound and the remedy.

Where the template of `refuse` would bend the sentence, raise `Refusal` with a sentence of its own.
"""

import difflib
import math
import operator
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

SMALLEST_NORM = 1e-12
Floats = NDArray[Any]
"""An array of floats. Numpy's stubs lose the dtype in most operations, so it is not spelled out."""


class Refusal(ValueError):
    """Raised for arguments, models and data that qclip refuses; the message says what to do instead."""


def refuse(name: str, value: object, bound: str, remedy: str) -> Refusal:
    """Return the error of a failed check, to be raised by the caller.

    >>> refuse("p", 1.2, "in (0, 1)", "pass a fraction")
    Refusal('p = 1.2 must be in (0, 1); pass a fraction')

    Args:
        name: Name of the argument.
        value: Its value.
        bound: The condition it fails, to follow "must be".
        remedy: What to do instead.
    """
    return Refusal(f"{name} = {value!r} must be {bound}; {remedy}")


def refuse_shape(name: str, shape: tuple[int, ...], bound: str, remedy: str) -> Refusal:
    """Return the error of an array of the wrong shape, to be raised by the caller.

    >>> refuse_shape("x0", (3,), "[2]", "give one start")
    Refusal('x0 has shape (3,) instead of [2]; give one start')
    """
    return Refusal(f"{name} has shape {shape} instead of {bound}; {remedy}")


def renamed(old: str, value: Any, new: str) -> Any:
    """Return the value of an argument that was given by its old name, and warn that the name will go."""
    warnings.warn(f"{old}= is now called {new}=; the old name goes with version 1.0", FutureWarning, stacklevel=3)
    return value


def real(name: str, value: object, remedy: str = "pass a finite number") -> float:
    """Return ``value`` as a finite float, or refuse it."""
    try:
        number = float("text" if isinstance(value, str) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise refuse(name, value, "a number", remedy) from None
    if not math.isfinite(number):
        raise refuse(name, value, "finite", remedy)
    return number


def positive(name: str, value: object, remedy: str = "pass a number above 0") -> float:
    """Return ``value`` as a finite float above 0, or refuse it."""
    number = real(name, value, remedy)
    if number <= 0:
        raise refuse(name, value, "> 0", remedy)
    return number


def norm(name: str, value: object, remedy: str = "pass a number above 0") -> float:
    """Return ``value`` as a clip norm, or refuse it: a finite float whose square float32 can represent."""
    number = positive(name, value, remedy)
    if number < SMALLEST_NORM:
        remedy = "smaller norms are lost in float32, where their squares underflow; multiply the loss by a constant"
        raise refuse(name, value, f">= {SMALLEST_NORM:g}", remedy)
    return number


def nonnegative(name: str, value: object, remedy: str = "pass 0 or more") -> float:
    """Return ``value`` as a finite float of at least 0, or refuse it."""
    number = real(name, value, remedy)
    if number < 0:
        raise refuse(name, value, ">= 0", remedy)
    return number


def between(name: str, value: object, low: float, high: float, remedy: str, *, closed: str = "") -> float:
    """Return ``value`` as a float in (low, high), or refuse it; ``closed`` ("low", "high", "both") admits the ends."""
    number = real(name, value, remedy)
    low_closed, high_closed = closed in ("low", "both"), closed in ("high", "both")
    above = number >= low if low_closed else number > low
    below = number <= high if high_closed else number < high
    if not (above and below):
        interval = f"{'[' if low_closed else '('}{low:g}, {high:g}{']' if high_closed else ')'}"
        raise refuse(name, value, f"in {interval}", remedy)
    return number


def quantile(name: str, value: object) -> float:
    """Return ``value`` as a quantile level in (0, 1), or refuse it."""
    return between(name, value, 0, 1, "it is the fraction of examples left unclipped, such as 0.5")


def count(name: str, value: object, remedy: str = "pass a whole number of at least 1", *, least: int = 1) -> int:
    """Return ``value`` as a whole number of at least ``least``, or refuse it; a float is accepted when it is whole."""
    try:
        number = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise refuse(name, value, "a whole number", remedy) from None
    if number < least:
        raise refuse(name, value, f">= {least}", remedy)
    return number


def choice(name: str, value: str, options: Iterable[str]) -> str:
    """Return ``value`` if it is one of the options, or refuse it."""
    options = tuple(options)
    if value not in options:
        close = difflib.get_close_matches(str(value), options, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else "check the spelling"
        raise refuse(name, value, f"one of {', '.join(map(repr, options))}", remedy)
    return value


def sequence(
    name: str, values: ArrayLike, *, low: float, high: float, remedy: str, whole: bool = False, closed: bool = False
) -> Floats:
    """Return a scalar or a non-empty 1-D sequence as a float64 array, or refuse it.

    Args:
        name: Name of the argument.
        values: A number, or one number per entry.
        low: Every value must be above ``low``.
        high: Every value must be below ``high``.
        remedy: What to do instead.
        whole: Whether the values must be whole numbers.
        closed: Whether ``low`` itself is admitted.
    """
    try:
        array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError):
        raise refuse(name, values, "a number or a sequence of numbers", remedy) from None
    if array.ndim != 1 or array.size == 0:
        raise refuse_shape(name, array.shape, "that of a number or a non-empty 1-D sequence", remedy)
    bad = ~(((array >= low) if closed else (array > low)) & (array < high))  # a NaN is bad too
    if whole:
        bad |= array != np.round(array)
    if bad.any():
        where = int(np.argmax(bad))
        label = name if array.size == 1 else f"{name}[{where}]"
        sign = ">=" if closed else ">"
        bound = f"in ({low:g}, {high:g})" if math.isfinite(high) else f"finite and {sign} {low:g}"
        bound = f"whole, {bound}" if whole else bound
        raise refuse(label, float(array[where]), bound, remedy)
    return array
