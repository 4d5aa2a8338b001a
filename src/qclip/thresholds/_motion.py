"""Shared parts of the estimators: bounds of tau, steps of log tau, and the tracking of a moving quantile."""

import math
from statistics import NormalDist
from typing import NamedTuple

from qclip import _validate as check
from qclip.schedules import Schedule
from qclip.thresholds.threshold import Conditions, at

NORMAL = NormalDist()
MAX_MOVE = 0.3
"""Largest step of log tau besides its velocity: a factor of 100 takes 16 steps. A larger limit would amplify noise."""
MAX_VELOCITY = 0.05
MAX_GAIN = 0.4
RESTART = 8
"""Number of steps that an average counts for at most after the quantile was lost: it belongs to another tau."""
FALSE_ALARM = NORMAL.inv_cdf(0.99)
"""Least error, in standard deviations, at which the quantile counts as lost: noise exceeds it in 1 % of steps. More
false alarms would restart averages and hold the velocity without need, and on one side only, which is a bias."""
SETTLED = 2.0
"""Number of time constants (steps times gain) before the velocity is learnt. A Kalman filter that starts at rest at an
unknown position corrects the position by 1/n at step n until its steady gain, and the velocity hardly before this."""
USUAL_DRIFT = 0.004
"""Change of the unclipped fraction per step that the gain is tuned for: norms that drift by 1 %, at the median."""


def level(p: Schedule | float, step: int) -> float:
    """Return the target quantile of this step, or refuse one outside (0, 1)."""
    return check.quantile("p", at(p, step))


def check_range(initial: float, tau_min: float, tau_max: float) -> None:
    """Refuse bounds that are not positive, and an initial value outside them."""
    check.norm("tau_min", tau_min)
    check.positive("tau_max", tau_max)
    check.between("initial", initial, tau_min, tau_max, "widen tau_min, tau_max", closed="both")


def clamp(value: float, low: float, high: float) -> float:
    """Return the nearest value in [low, high]; ``low`` for a NaN."""
    return min(high, max(low, value))  # the order matters: every comparison with a NaN is false


def moved(tau: float, change: float, tau_min: float, tau_max: float) -> float:
    """Return ``tau exp(change)``, clamped to the bounds."""
    return clamp(tau * math.exp(clamp(change, -700.0, 700.0)), tau_min, tau_max)  # exp overflows past 709


def plausible(fraction: float, std: float) -> float:
    """Clamp a noisy fraction to the values that noise and sampling of this standard deviation can produce."""
    return clamp(fraction, -0.5 - 5 * std, 1.5 + 5 * std)


def usual_slope(p: float) -> float:
    """Return the slope of the unclipped fraction in log tau, at the p-quantile of log-normal norms with unit spread.

    >>> round(usual_slope(0.5), 3), round(usual_slope(0.9), 3)
    (0.399, 0.175)
    """
    return NORMAL.pdf(NORMAL.inv_cdf(p))


def gain(std: float, p: float, seen: float = math.inf) -> float:
    """Return the part of an error to correct in one step, when a step's fraction has this standard deviation.

    A gain g passes on noise of variance ``g std^2 / 2`` and follows a drift of d per step at a distance ``d / g``: the
    sum of squares is least at a power 2/3 of ``d / std``. While only a few steps were ``seen``, their plain mean is
    better. The last bound keeps noise from driving tau to where the fraction is 1 (or 0) faster than the error there,
    1 - p (or p), brings it back.

    >>> [round(gain(std, 0.5), 2) for std in (0.0, 0.02, 0.1, 1.0)]
    [0.4, 0.34, 0.12, 0.03]
    >>> [round(gain(0.1, 0.5, seen), 2) for seen in (1, 4, 16)]
    [0.4, 0.25, 0.12]
    """
    if std == 0:
        return MAX_GAIN
    best = max((USUAL_DRIFT / std) ** (2 / 3), 1 / seen)
    return min(MAX_GAIN, best, 0.15 * (min(p, 1 - p) / std) ** 2)


class Correction(NamedTuple):
    """A change of log tau, the next velocity, and whether tau is so far off that averages should restart."""

    change: float
    velocity: float
    lost: bool


def pursue(velocity: float, error: float, slope: float, std: float, p: float, seen: int) -> Correction:
    """Return a damped Newton step on log tau, and a velocity that learns a steady drift.

    The proportional and the integral part are critically damped: an error decays at half the gain, without swinging.
    The velocity is held while a step is clamped and until the position is known; otherwise it would learn the approach
    as a drift, wind up and overshoot.

    Args:
        velocity: Velocity of log tau.
        error: Estimated unclipped fraction less p.
        slope: Derivative of the unclipped fraction by log tau.
        std: Standard deviation of ``error``.
        p: Target quantile.
        seen: Number of steps since the start, or since the quantile was lost.
    """
    rate = gain(std, p, seen)
    wanted = -rate * error / slope
    change = clamp(wanted, -MAX_MOVE, MAX_MOVE)
    if change != wanted:
        return Correction(change + velocity, velocity, lost=True)
    # Hardly any norm is within tau, or nearly every one, and noise alone seldom looks like that.
    lost = abs(error) > 0.75 * (p if error < 0 else 1 - p) > FALSE_ALARM * std
    settled = seen * rate >= SETTLED
    push = -(rate**2) / 4 * clamp(error / slope, -1.0, 1.0) if settled else 0.0
    return Correction(change + velocity, clamp(velocity + push, -MAX_VELOCITY, MAX_VELOCITY), lost)


def attainable(p: float, noise: float, conditions: Conditions) -> float:
    """Return the quantile p, or refuse it where the noise on a paid fraction is too large to track it.

    The standard deviation ``noise`` may be up to 1, the whole batch, and 10 min(p, 1 - p), ten times the largest error
    on the shorter side. Beyond that, tau would wander for hundreds of steps.
    """
    most = min(1.0, 10 * min(p, 1 - p))
    if noise > most:
        raise check.Refusal(
            f"the noise on the unclipped fraction has a standard deviation of {noise:.2f}, above {most:.2g} "
            f"({facts(conditions, p)}); take a larger batch, a larger noise_share, fewer groups, p nearer 0.5, or "
            "Constant(tau)"
        )
    return p


def facts(conditions: Conditions, p: float | None = None) -> str:
    """Return the conditions as text, for errors."""
    size, z, groups = conditions.batch_size, conditions.noise_multiplier, len(conditions.dims)
    return f"batch size {size}, noise multiplier {z:g}, groups {groups}" + ("" if p is None else f", p {p:g}")
