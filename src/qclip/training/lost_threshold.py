"""Lost thresholds: when a threshold no longer follows the gradients, and the remedy. Released values only: no cost."""

import math
from collections.abc import Sequence

import numpy as np

from qclip._validate import Floats
from qclip.thresholds import Threshold
from qclip.thresholds.threshold import at
from qclip.training.history import StepRecord

EVERY = 10
"""A threshold is judged every so many steps; in between, the last verdict stands."""
WINDOW = 30
"""Steps that a verdict looks back on. `PrivateQuantile` takes about 40 steps from 0.1 down to 1e-6."""
MARGIN = 0.1
"""A smaller error of the unclipped fraction does not count, however certain: at p = 0.99 the last steps are slow."""
SURE = 7.0
"""The number of standard errors, besides the margin, between the mean fraction and p.

By Student's t distribution, noise alone reaches it in one of 9 million verdicts on a group: in a run of 10,000 steps,
with probability one in 9,000.
"""
STILL = math.log(1.1)
"""A tau that moves towards its quantile by this much in a window, in log scale, is still converging."""


VANISHED = "more gradients vanish than p allows, and the others are clipped to almost nothing"
TOO_LOW = (
    "take BalancedThreshold(), which a few long gradients keep up, or p above the fraction of examples that the model "
    "fits (with a rare class, above 1 - its share), or Constant(tau) at the norm of the gradient of an example that it "
    "gets wrong"
)
TOO_HIGH = "lower the learning rate, or scale the loss down: the gradients have outgrown the threshold"
STUCK = "take BalancedThreshold(), a larger batch or another initial tau"
BOUND_TOO_HIGH = (
    "lower tau_min or scale the loss up; with a rare class, take a larger batch: noise may hide its gradients"
)


class LostThreshold(UserWarning):
    """The warning that a threshold no longer follows the gradients; issued once per run."""


def lost_groups(records: Sequence[StepRecord], threshold: Threshold[object], names: Sequence[str]) -> tuple[str, ...]:
    """Return the groups whose threshold counts as lost after the last of these records.

    A group is lost in one of two cases:

    * tau was at a bound of the threshold in at least half of the last `WINDOW` steps.
    * tau stands still although the unclipped fraction misses p, where there is one, by more than 0.1 and by more than
      half of min(p, 1 - p), with statistical certainty. The released fractions themselves give the size of the noise.

    A threshold without bounds and without a quantile is never lost.

    Args:
        records: The records of the run; the last `WINDOW` suffice.
        threshold: The threshold of the run.
        names: The names of the groups.

    >>> from qclip.thresholds import Constant, PrivateQuantile
    >>> records = [StepRecord(step, (1e-6,), (0.99,), 0.1) for step in range(30)]
    >>> lost_groups(records, PrivateQuantile(0.7), ["flat"]), lost_groups(records, Constant(1e-6), ["flat"])
    (('flat',), ())
    """
    if (records[-1].step + 1) % EVERY:
        return records[-2].lost if len(records) > 1 else ()
    if len(records) < WINDOW:
        return ()
    window = records[-WINDOW:]
    taus = np.array([record.tau for record in window])
    is_lost = _at_bound(taus, *_bounds(threshold)) != 0
    p = vars(threshold).get("p")
    is_noisy = threshold.private and all(record.noisy_unclipped for record in window)  # a raw quantile is exact
    if p is not None and is_noisy:
        targets = np.array([at(p, record.step) for record in window])
        errors = np.array([record.noisy_unclipped for record in window]) - targets[:, None]
        is_lost |= _stuck(errors, np.log(taus), max(MARGIN, min(targets[-1], 1 - targets[-1]) / 2))
    return tuple(name for name, lost in zip(names, is_lost, strict=True) if lost)


def _bounds(threshold: Threshold[object]) -> tuple[float, float]:
    """Return the bounds of tau: 0 and inf for a threshold without bounds, which tau never reaches."""
    settings = vars(threshold)
    return settings.get("tau_min", 0.0), settings.get("tau_max", math.inf)


def _at_bound(taus: Floats, tau_min: float, tau_max: float) -> Floats:
    """Return -1 for each group of taus, [steps, K], at its lower bound in half of the steps, 1 at the upper, else 0."""
    return np.where((taus <= tau_min).mean(0) >= 0.5, -1, np.where((taus >= tau_max).mean(0) >= 0.5, 1, 0))


def _stuck(errors: Floats, log_taus: Floats, margin: float) -> Floats:
    """Return, for errors and log taus of [steps, K], the mask of groups that miss p and do not move towards it."""
    mean = errors.mean(0)
    is_far = np.abs(mean) > margin + SURE * errors.std(0, ddof=1) / math.sqrt(len(errors))
    towards = -np.sign(mean) * (log_taus[-1] - log_taus[0])
    return is_far & (towards < STILL)


def explain(records: Sequence[StepRecord], threshold: Threshold[object], names: Sequence[str]) -> str:
    """Return since when the threshold is lost, how (for the first lost group), and the remedy.

    Empty if no group is lost in the last record.
    """
    lost = records[-1].lost if records else ()
    if not lost:
        return ""
    p, (tau_min, tau_max) = vars(threshold).get("p"), _bounds(threshold)
    since = next((record.step + 1 for record in reversed(records) if not record.lost), 0)
    window, group = records[-WINDOW:], list(names).index(lost[0])
    taus = np.array([record.tau[group] for record in window])
    fractions = [record.noisy_unclipped[group] for record in window if record.noisy_unclipped]
    fraction = f", where {np.mean(fractions):.2f} of the examples are left unclipped" if fractions else ""
    if fractions and p is not None:
        fraction += f", for p = {at(p, window[-1].step):.3g}"
    match _at_bound(taus, tau_min, tau_max):
        case -1 if p is None:
            symptom, remedy = f"tau is at its lower bound {tau_min:g}{fraction}", BOUND_TOO_HIGH
        case -1:
            symptom, remedy = f"tau is at its lower bound {tau_min:g}{fraction}: {VANISHED}", TOO_LOW
        case 1:
            symptom, remedy = f"tau is at its upper bound {tau_max:g}{fraction}", TOO_HIGH
        case _:
            symptom, remedy = f"tau stays near {taus[-1]:.3g}{fraction}", STUCK
    subject = "the threshold" if len(names) == 1 else f"the threshold of {_listed(lost)}"
    return f"{subject} is lost since step {since}: {symptom}; {remedy}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
