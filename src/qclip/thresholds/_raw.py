"""Quantiles of raw norms, for thresholds that are not private."""

import numpy as np

from qclip._validate import Floats
from qclip.thresholds._motion import clamp


def raw_quantile(raw_norms: Floats, p: float, tau_min: float, tau_max: float) -> tuple[float, ...]:
    """The lower p-quantile of each group, ``inf {t : F(t) >= p}``, within the bounds.

    ``raw_norms``: [examples, groups], at least one example. A gradient that is not finite has an infinite norm.

    >>> raw_quantile(np.array([[3.0], [1.0], [np.inf], [2.0]]), 0.5, 1e-6, 1e6)
    (2.0,)
    """
    count = len(raw_norms)
    index = int(np.searchsorted(np.arange(1, count + 1) / count, p))  # the first k with k / count >= p, rounding apart
    return tuple(clamp(float(tau), tau_min, tau_max) for tau in np.sort(raw_norms, axis=0)[index])


def raw_unclipped(raw_norms: Floats | None, clip_norms: tuple[float, ...]) -> tuple[float, ...]:
    """The fraction of norms within each group's threshold; empty where there are no norms."""
    if raw_norms is None or len(raw_norms) == 0:
        return ()
    return tuple((np.asarray(raw_norms) <= np.array(clip_norms)).mean(axis=0).tolist())
