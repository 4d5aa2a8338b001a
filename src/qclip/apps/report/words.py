"""The values of a run as text: numbers are short, missing values empty."""

import math
from collections.abc import Mapping
from typing import Any

from qclip.apps.report.record import Record


def number(value: float | None, digits: int = 4) -> str:
    """Format a number in few digits; None is empty.

    >>> number(0.000123456), number(60000), number(math.inf), number(None)
    ('0.0001235', '60,000', 'infinite', '')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return "infinite" if value > 0 else str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def epsilon(value: float, digits: int = 3) -> str:
    """Format an epsilon, rounded up so that no budget looks better than it is.

    >>> epsilon(2.99971), epsilon(0.0001), epsilon(math.inf), epsilon(0.51961, 4)
    ('3.000', '0.001', 'infinite', '0.5197')
    """
    scale = 10**digits
    return f"{math.ceil(scale * value) / scale:.{digits}f}" if math.isfinite(value) else number(value)


def plain(value: Any) -> str:
    """Format any value of a JSON file.

    >>> plain([1, 2.5]), plain(True), plain({"initial": 0.3, "high": None})
    ('1, 2.5', 'yes', 'initial 0.3')
    """
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int() | float():
            return number(value)
        case list() | tuple():
            return ", ".join(plain(each) for each in value)
        case Mapping():
            inner = (
                (key, f"({plain(each)})" if isinstance(each, Mapping) else plain(each)) for key, each in value.items()
            )
            return ", ".join(f"{key} {text}" for key, text in inner if text)
        case _:
            return str(value)


def threshold(record: Record) -> str:
    """Return the name of the threshold."""
    return str(record.threshold.get("name", "unknown"))


def threshold_settings(record: Record) -> str:
    """Return the name and settings of the threshold."""
    settings = plain({key: value for key, value in record.threshold.items() if key != "name"})
    return f"{threshold(record)}: {settings}" if settings else threshold(record)


def quantile(record: Record) -> str:
    """Format the target p of the threshold: a number, or the first and the last; empty without one."""
    targets = record.targets
    if targets is None:
        return ""
    first, last = number(float(targets[0]), 3), number(float(targets[-1]), 3)
    return first if first == last else f"{first} to {last}"


def taus(record: Record) -> str:
    """Format the last threshold, or its range over the groups."""
    if not len(record.steps):
        return ""
    low, high = float(record.taus[-1].min()), float(record.taus[-1].max())
    return number(low, 3) if len(record.groups) == 1 else f"{number(low, 3)} to {number(high, 3)}"


def steps(record: Record) -> str:
    """Format the number of steps done; for an unfinished run, of how many."""
    done, planned = plain(record.done), plain(record.summary.num_steps)
    return done if record.finished else f"{done} of {planned}"


def epochs(record: Record) -> float:
    """Return the planned epochs of a finished run; otherwise how often each example was used on average."""
    given = record.summary.settings.get("epochs")
    if record.finished and isinstance(given, int):
        return given
    return round(record.done * record.summary.sample_rate, 2)
