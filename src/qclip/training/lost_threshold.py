"""A threshold that has lost its quantile: when it counts as lost, and what to do. Released values only: it is free."""

import math
from collections.abc import Sequence

import numpy as np

from qclip._validate import Floats
from qclip.schedules import Schedule
from qclip.thresholds import Threshold
from qclip.thresholds.threshold import at
from qclip.training.history import StepRecord

EVERY = 10
"""A threshold is judged at every tenth step; in between the last verdict stands."""
WINDOW = 30
"""A verdict is about so many steps. From 0.1 down to 1e-6 takes `PrivateQuantile` some 40 steps."""
MARGIN = 0.1
"""A smaller error of the unclipped fraction is no loss, however sure: at p = 0.99 the end of the way is slow."""
SURE = 7.0
"""How many standard errors the mean fraction must be away from p, besides the margin.

By Student's law noise alone gets there in one of 9 million verdicts on a group: in a run of 10,000 steps, one in 9,000.
"""
STILL = math.log(1.1)
"""A tau that makes for its quantile by this much in a window is still on its way."""


VANISHED = "more gradients vanish than p allows, and the others are clipped to almost nothing"
TOO_LOW = (
    "take p above the fraction of examples that the model fits (with a rare class, above 1 - its share), or "
    "Constant(tau) at the norm of the gradient of an example that it gets wrong"
)
TOO_HIGH = "lower the learning rate, or scale the loss down: the gradients have outgrown the threshold"
STUCK = "take a larger batch, another initial tau or another threshold"


class LostThreshold(UserWarning):
    """A threshold has lost its quantile; said once in a run."""


def lost_groups(records: Sequence[StepRecord], threshold: Threshold[object], names: Sequence[str]) -> tuple[str, ...]:
    """The groups whose threshold counts as lost after the last of these records.

    That is where tau was at a bound of the threshold in at least half of the last `WINDOW` steps; or where it stands
    still although the unclipped fraction is off: p is missed by more than 0.1 and half of min(p, 1 - p), surely. The
    size of the noise is that of the released fractions themselves. A threshold without a quantile has none to lose.

    >>> from qclip.thresholds import Constant, PrivateQuantile
    >>> records = [StepRecord(step, (1e-6,), (0.99,), 0.1) for step in range(30)]
    >>> lost_groups(records, PrivateQuantile(0.7), ["flat"]), lost_groups(records, Constant(1e-6), ["flat"])
    (('flat',), ())
    """
    if "p" not in vars(threshold):
        return ()
    p, tau_min, tau_max = _aim(threshold)
    if (records[-1].step + 1) % EVERY:
        return records[-2].lost if len(records) > 1 else ()
    if len(records) < WINDOW:
        return ()
    last = records[-WINDOW:]
    taus = np.array([record.tau for record in last])
    lost = _at_bound(taus, tau_min, tau_max) != 0
    if threshold.private and all(record.noisy_unclipped for record in last):  # a raw quantile is where it should be
        targets = np.array([at(p, record.step) for record in last])
        errors = np.array([record.noisy_unclipped for record in last]) - targets[:, None]
        lost |= _stuck(errors, np.log(taus), max(MARGIN, min(targets[-1], 1 - targets[-1]) / 2))
    return tuple(name for name, gone in zip(names, lost, strict=True) if gone)


def _aim(threshold: Threshold[object]) -> tuple[Schedule | float, float, float]:
    """The p of a quantile, and its bounds where it has some."""
    settings = vars(threshold)
    return settings["p"], settings.get("tau_min", 0.0), settings.get("tau_max", math.inf)


def _at_bound(taus: Floats, tau_min: float, tau_max: float) -> Floats:
    """For each group of [steps, groups]: -1 where tau was at its lower bound in half of the steps, 1 at the upper."""
    return np.where((taus <= tau_min).mean(0) >= 0.5, -1, np.where((taus >= tau_max).mean(0) >= 0.5, 1, 0))


def _stuck(errors: Floats, log_taus: Floats, margin: float) -> Floats:
    """Which groups of [steps, groups] miss their fraction for good, and do nothing about it."""
    mean = errors.mean(0)
    far = np.abs(mean) > margin + SURE * errors.std(0, ddof=1) / math.sqrt(len(errors))
    towards = -np.sign(mean) * (log_taus[-1] - log_taus[0])
    return far & (towards < STILL)


def explain(records: Sequence[StepRecord], threshold: Threshold[object], names: Sequence[str]) -> str:
    """Since when the threshold is lost, in what way (that of the first group that is), and the remedy.

    Empty where the last record says that none is lost.
    """
    lost = records[-1].lost if records else ()
    if not lost:
        return ""
    p, tau_min, tau_max = _aim(threshold)
    since = next((record.step + 1 for record in reversed(records) if not record.lost), 0)
    last, group = records[-WINDOW:], list(names).index(lost[0])
    taus = np.array([record.tau[group] for record in last])
    fractions = [record.noisy_unclipped[group] for record in last if record.noisy_unclipped]
    wanted = f"for p = {at(p, last[-1].step):.3g}"
    found = f", where {np.mean(fractions):.2f} of the examples are left unclipped, {wanted}" if fractions else ""
    match _at_bound(taus, tau_min, tau_max):
        case -1:
            how, remedy = f"tau is at its lower bound {tau_min:g}{found}: {VANISHED}", TOO_LOW
        case 1:
            how, remedy = f"tau is at its upper bound {tau_max:g}{found}", TOO_HIGH
        case _:
            how, remedy = f"tau stays near {taus[-1]:.3g}{found}", STUCK
    who = "the threshold" if len(names) == 1 else f"the threshold of {_listed(lost)}"
    return f"{who} is lost since step {since}: {how}; {remedy}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
