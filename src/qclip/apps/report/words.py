"""The values of a run as text: numbers are short, missing values empty."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qclip._validate import Floats
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


def setting(name: str, value: Any) -> str:
    """Format a setting of the command line; None is empty, but a run without a learning rate finds its own.

    >>> setting("lr", None), setting("lr", 2.0), setting("tau", None)
    ('found by the run', '2', '')
    """
    return "found by the run" if name == "lr" and value is None else plain(value)


def threshold(record: Record) -> str:
    """Return the name of the threshold."""
    return str(record.threshold.get("name", "unknown"))


def is_balanced(record: Record) -> bool:
    """Return whether the threshold balances noise and bias."""
    return threshold(record) == "BalancedThreshold"


def aim(record: Record) -> str:
    """Say what the threshold follows, or was to follow if it is lost; empty for a threshold of the user's own."""
    if "p" in record.threshold:
        text = "follow the gradients, so that a fraction p of the examples stays unclipped"
    elif is_balanced(record):
        text = "follow the gradients to where a higher threshold would add as much noise as it would remove bias"
    elif "tau" in record.threshold:
        return "The threshold was given beforehand and does not depend on the data."
    else:
        return ""
    if record.summary.lost_threshold:
        return f"The threshold was to {text}. Here it has lost them: see the note above."
    return f"The threshold was not tuned by hand: it {text.replace('follow', 'follows', 1)}."


def costs(record: Record) -> str:
    """Say in a sentence what noise and bias amount to over the run; empty where the noise was not recorded."""
    noise, bias = (_median(lengths / record.clip_norms) for lengths in (record.noise, record.bias))
    if noise is None:
        return ""
    where = "At the median step, in units of the threshold" + (
        " of all groups together" if len(record.groups) > 1 else ""
    )
    if bias is None:
        return f"{where}: noise {number(noise, 2)}."
    if max(noise, bias) < 2 * min(noise, bias):
        verdict = "both cost about the same"
    else:
        verdict = "noise cost more" if noise > bias else "bias cost more"
    return f"{where}: noise {number(noise, 2)}, bias at most {number(bias, 2)}; {verdict}."


def _median(values: Floats) -> float | None:
    """Return the median of the finite values: a mean would be that of the first steps, where tau is far off."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else None


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


def course(values: Floats) -> str:
    """Return in words how a row of values, [n] or [n, K], goes, for readers who do not see its figure.

    >>> course(np.array([0.1, 3.0, 1.5625])), course(np.array([[2.0, np.nan], [4.0, np.nan]]))
    ('from 0.1 to 1.562, between 0.1 and 3', 'from 2 to 4, between 2 and 4')
    >>> course(np.array([np.nan]))
    'without values'
    """
    rows = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    rows = rows[np.isfinite(rows).any(axis=1)]
    if not len(rows):
        return "without values"
    first, last = (number(float(np.nanmean(row))) for row in rows[[0, -1]])
    return f"from {first} to {last}, between {number(float(np.nanmin(rows)))} and {number(float(np.nanmax(rows)))}"


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
