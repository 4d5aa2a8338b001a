"""The certificate that needs no lower bound on the unclipped fractions: for any start, threshold and momentum.

docs/theory.md, sections 16 (the theorem), 18 (normalized steps) and 19 (momentum).
"""

import numpy as np
from numpy.typing import ArrayLike

from qclip import _validate as check
from qclip._validate import Floats
from qclip.theory.assumptions import Assumptions
from qclip.theory.bounds import Bound, Sampling, TheoremForm, divide


def weighted_certificate(
    a: Assumptions,
    gammas: ArrayLike,
    taus: ArrayLike,
    clipped_fractions: ArrayLike,
    *,
    batch_size: float,
    noise_multiplier: float,
    dim: int,
    momentum: float = 0.0,
    sampling: Sampling = "poisson",
) -> Bound:
    """Return the bound on the weighted mean of ``E ||grad f||^2`` that a record certifies, for bounded variance.

    The weight of step t is ``gamma_t a_t``, where a_t is the mean clip factor, at least the unclipped fraction: steps
    that clip everything count little, as they move little. Step sizes may follow from earlier releases, as those of
    normalized steps do. Only the mean clipped fraction enters, in which the noise of the counts averages out.

    >>> a = Assumptions(L=1, sigma=1, q=2, gap=1)
    >>> public = {"batch_size": 16, "noise_multiplier": 1, "dim": 10}
    >>> found = weighted_certificate(a, 0.1, [0.01] * 100 + [2.0] * 900, [1.0] * 100 + [0.2] * 900, **public)
    >>> round(found.total, 3)
    0.444

    Args:
        a: The assumptions on the problem, with q = 2.
        gammas: Effective step sizes, [steps] or a number: ``eta / tau_t`` for normalized steps. Each is known before
            its step; with momentum ``gamma_t tau_t`` (normalized) or gamma_t (plain) is one number.
        taus: Thresholds, each known before its step, [steps].
        clipped_fractions: Unbiased estimates of ``P(||g|| > tau_t)``, or of other bounds on ``1 - a_t``, [steps].
        batch_size: Expected batch size.
        noise_multiplier: Noise multiplier of the gradient sum.
        dim: Number of parameters.
        momentum: Momentum mu of torch's SGD, without dampening or Nesterov's variant. It needs a Lipschitz gradient.
        sampling: "poisson", or "iid" for batches of one size, also drawn without replacement.

    Returns:
        A bound on ``E sum gamma_t a_t ||grad f||^2 / E sum gamma_t a_t``; ``beta`` is its kappa. Its expectation over
        runs is exact for a kappa that is fixed before the run; the best one for this record is reported.

    Raises:
        Refusal: The parts of the record do not fit together, or the theorem does not hold at these step sizes.
    """
    gamma, tau, fraction = record_arrays(a, gammas, taus, clipped_fractions)
    B = check.positive("batch_size", batch_size, "it is the expected number of examples a step")
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    d = check.count("dim", dim, "it is the number of trainable parameters")
    mu = check.between("momentum", momentum, 0, 1, "0.9 is usual", closed="low")
    check.choice("sampling", sampling, ("poisson", "iid"))
    gamma = gamma / (1 - mu)
    length = float(gamma.sum())
    clipped = float(np.clip(gamma @ fraction / length, 0, 1))
    if clipped >= 1:
        remedy = "every example was clipped all the time: the certificate needs some that are not"
        raise check.refuse("mean clipped fraction", clipped, "below 1", remedy)

    # What momentum does to the two parts of a second moment: that of the mean, and the variance.
    mean_part, variance_part = 1 + 3 * mu / (1 - mu), (1 + 2 * mu) / (1 + mu)
    # Poisson sums vary with their size: with a part of ||m||^2 / B in the contraction, sampling costs sigma^2 / B.
    poisson_part = mean_part + variance_part / B if sampling == "poisson" else mean_part
    uses_variance = float(gamma.max()) * a.L * poisson_part <= 1
    single = np.minimum(tau, a.sigma) if uses_variance else tau
    worst = np.array([gamma.max() * a.L * (poisson_part if uses_variance else mean_part)])
    power = variance_part * (single**2 / B + d * (z / B * tau) ** 2)

    rule = TheoremForm(weight=1, drag=0, curvature=0.5, step_cap=1, variance=lambda _, h: h, bias=lambda p: p)
    p = np.ones(1)
    if worst[0] > 1 + 1e-12:
        limit = (1 - mu) / (mean_part * a.L)
        remedy = "lower the step size" if mu == 0 else "lower the step size or the momentum"
        raise check.refuse("largest gamma", float(gamma.max()) * (1 - mu), f"at most {limit:.6g}", remedy)
    kept = 1 - clipped
    terms = (a.gap / length, a.L / 2 * float(gamma**2 @ power) / length, a.sigma**2 / 2 * clipped)
    return divide(rule, worst, p, *(term / kept for term in terms))


def record_arrays(
    a: Assumptions, gammas: ArrayLike, taus: ArrayLike, clipped_fractions: ArrayLike
) -> tuple[Floats, Floats, Floats]:
    """Return the parts of a record as arrays of the shape of the thresholds, or refuse them."""
    if a.q != 2:
        raise check.refuse("q", a.q, "2", "without a lower bound on the unclipped fractions the variance must be known")
    tau, gamma, fraction = (np.asarray(values, dtype=np.float64) for values in (taus, gammas, clipped_fractions))
    if tau.ndim == 0 or tau.size == 0 or fraction.shape != tau.shape or gamma.shape not in ((), tau.shape):
        raise check.Refusal(
            f"the shapes of gammas {gamma.shape}, taus {tau.shape} and clipped_fractions {fraction.shape} do not fit "
            "together; give one value per step"
        )
    for name, values in (("taus", tau), ("gammas", gamma)):
        usable = (values > 0) & np.isfinite(values)
        if not usable.all():
            raise check.refuse(name, float(values[~usable][0]), "finite and > 0 at every step", "check the record")
    if not np.isfinite(fraction).all():
        raise check.Refusal("clipped_fractions has NaN or infinite entries; check the record")
    return np.broadcast_to(gamma, tau.shape), tau, fraction
