"""The certificate of a finished run: a bound on its gradients, from the public values it recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm

from qclip import _validate as check
from qclip._validate import Floats
from qclip.theory.assumptions import Assumptions
from qclip.theory.bounds import Bound, TheoremForm, check_steps, divide


@dataclass(frozen=True)
class Certificate(Bound):
    """The bound of a run over runs, with the theorem that it follows from and, where there is one, that of this run.

    Attributes:
        theorem: The theorem, by the section of docs/theory.md.
        mean: What is bounded, in words.
        this_run: The bound on this run alone, with probability ``confidence``; None where no theorem has one.
        confidence: The probability with which ``this_run``, and the margins on noisy fractions, hold.
    """

    theorem: str = ""
    mean: str = ""
    this_run: Bound | None = None
    confidence: float = 0.95


def certificate(
    a: Assumptions,
    gammas: ArrayLike,
    taus: ArrayLike,
    clipped_fractions: ArrayLike,
    *,
    batch_size: float,
    noise_multiplier: float,
    dim: int | Sequence[int],
    p_lo: float | None = None,
    beta: float | None = None,
    fraction_std: ArrayLike = 0.0,
    confidence: float = 0.95,
) -> Bound:
    """Return the bound on the gamma-weighted mean of ``E ||grad f||^2`` that a run's own thresholds certify.

    No power of 1/(1-p) enters: the recorded tau_t replace the theorem's bounds on them, and only the gamma-weighted
    mean of the clipped fraction matters.

    Args:
        a: The assumptions on the problem.
        gammas: Step sizes, fixed before the run: a number, or [steps].
        taus: Thresholds, each fixed before its step: [steps] or [steps, groups].
        clipped_fractions: Estimates of ``P(||g|| > tau_t)``, of the same shape as ``taus``.
        batch_size: Expected batch size.
        noise_multiplier: Noise multiplier of the gradient sum.
        dim: Number of parameters; one entry per group.
        p_lo: Known lower bound on every unclipped fraction; from the record when left out.
        beta: Constant of the theorem, at most p_lo; the best one for this record when left out. Fix it beforehand for
            an exact statement about the expectation when records differ between runs.
        fraction_std: Standard deviation of ``clipped_fractions``, sampling and privacy noise together: a number, or
            [steps].
        confidence: Probability with which the margins on noisy fractions hold, all at once.

    Returns:
        A bound on the expectation over runs. Its `Bound.one_run` holds for a single run when the record hardly varies
        between runs (docs/theory.md has the exact statement).

    Raises:
        Refusal: The parts of the record do not fit together, or the theorem does not hold at these step sizes.
    """
    tau, fraction = _matrix("taus", taus), _matrix("clipped_fractions", clipped_fractions)
    steps, groups = tau.shape
    gamma = check.sequence("gammas", gammas, low=0, high=np.inf, remedy="a step size is positive")
    dims = check.sequence("dim", dim, low=0, high=np.inf, remedy="count the parameters (of each group)", whole=True)
    exact = not np.any(np.asarray(fraction_std))
    _check_record(gamma, tau, fraction, dims, exact=exact)
    gamma = np.broadcast_to(gamma, steps)
    B = check.positive("batch_size", batch_size, "it is the expected number of examples a step")
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")

    h = fraction.max(axis=1)  # of the most clipped group
    mean_margin, step_margin = _margins(gamma, fraction_std, steps, groups, confidence)
    mean_clipped = float(np.clip(gamma @ h / gamma.sum() + mean_margin, 0, 1))
    if p_lo is None:
        lowest = min(1.0, float((1 - h - step_margin).min()))
        remedy = "pass p_lo, a lower bound that you know, or record less noisy fractions"
        p_lo = check.between("lowest unclipped fraction less its margin", lowest, 0, 1, remedy, closed="high")
    elif exact and float((1 - h).min()) < p_lo:
        lowest = float((1 - h).min())
        remedy = "lower it: in the record fewer examples were unclipped"
        raise check.refuse("p_lo", p_lo, f"at most {lowest:.4g}, the lowest recorded fraction", remedy)
    p = np.array([check.between("p_lo", p_lo, 0, 1, "it bounds every unclipped fraction from below", closed="high")])

    power_t = (tau**2).sum(axis=1) / B + (z / B * tau @ np.sqrt(dims)) ** 2
    worst = np.array([gamma.max() * a.L])
    rule = TheoremForm(weight=1, drag=0, curvature=0.5, step_cap=1, variance=lambda _, h: h, bias=lambda p: p)
    check_steps(rule, a, worst, p, beta, None)
    optimisation = a.gap / float(gamma.sum())
    variance = a.L / 2 * float(gamma**2 @ power_t / gamma.sum())
    bias = a.sigma**2 * mean_clipped ** (2 - 2 / a.q) / 2
    return divide(rule, worst, p, optimisation, variance, bias, beta)


def _check_record(gamma: Floats, tau: Floats, fraction: Floats, dims: Floats, *, exact: bool) -> None:
    """Refuse a record whose shapes do not fit together or whose values are impossible."""
    steps, groups = tau.shape
    if gamma.size not in (1, steps) or fraction.shape != tau.shape or dims.size != groups:
        raise check.Refusal(
            f"the shapes of gammas {gamma.shape}, taus {tau.shape}, clipped_fractions {fraction.shape} and dim "
            f"{dims.shape} do not fit together; give one row per step and one column per group"
        )
    usable = (tau > 0) & np.isfinite(tau)
    if not usable.all():
        raise check.refuse("taus", float(tau[~usable][0]), "finite and > 0 at every step", "check the record")
    if not np.isfinite(fraction).all():
        raise check.Refusal("clipped_fractions has NaN or infinite entries; check the record")
    if exact and not ((fraction >= 0) & (fraction <= 1)).all():
        worst = float(fraction.flat[np.argmax(np.abs(fraction - 0.5))])
        raise check.refuse("clipped_fractions", worst, "in [0, 1]", "give fraction_std if they are noisy")


def _matrix(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or array.size == 0:
        raise check.refuse_shape(name, np.shape(values), "[steps] or [steps, groups]", "record each step")
    return array


def _margins(gamma: Floats, std: ArrayLike, steps: int, groups: int, confidence: float) -> tuple[float, Floats]:
    """Return margins on the mean clipped fraction and on each step's, which hold together with this confidence."""
    alpha = 1 - check.between("confidence", confidence, 0, 1, "0.95 is usual")
    std = np.asarray(std, dtype=np.float64)
    if std.ndim > 1 or std.size not in (1, steps):
        remedy = "give one for all steps, or one per step (the largest of its groups')"
        raise check.refuse_shape("fraction_std", std.shape, f"[] or [{steps}]", remedy)
    std = np.broadcast_to(std, steps)
    if not (std >= 0).all():
        raise check.refuse("fraction_std", float(np.min(std)), ">= 0", "it is a standard deviation")
    mean_std = float(np.sqrt(gamma**2 @ std**2) / gamma.sum())
    # The largest of a step's K noisy fractions needs the margin of one of them: the union bound is over K.
    return float(norm.isf(alpha / 2 / groups)) * mean_std, norm.isf(alpha / 2 / (steps * groups)) * std
