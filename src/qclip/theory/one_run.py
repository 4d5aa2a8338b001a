"""The certificate of one run: a bound on its own gradients that fails with a small probability.

Where Markov's inequality on an expectation pays 1/(1 - confidence), this pays its logarithm. docs/theory.md,
section 17, proves it. Three sums of the run are bounded by exponential supermartingales, each for every exponent of
`GRID` (in units that are known before the run), so nothing about the thresholds has to be known beforehand:

    theta   the inner products of the gradient with sampling and noise, and the squared norm of the noise
    u       the squared deviation of the batch's mean
    s       the errors of the counted fractions
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from qclip import _validate as check
from qclip._validate import Floats
from qclip.theory.assumptions import Assumptions
from qclip.theory.bounds import Bound, Sampling
from qclip.theory.weighted import record_arrays

GRID = 4.0 ** np.arange(-8, 8)
"""The exponents, in units of 1/(gap + sigma^2/L). Between two of them an optimum is missed by at most a quarter."""
SHARES = {"theta": 0.5, "u": 0.2, "s": 0.25, "size": 0.05}
"""How the events share 1 - confidence; ``size``: that some Poisson batch is much larger than expected."""
REACH = 0.5
"""Poisson sums are sub-Gaussian up to the factor `SPREAD` while an example moves the exponent by at most this."""
SPREAD = 2 * (math.exp(REACH) - 1 - REACH) / REACH**2
KAPPAS = np.geomspace(0.01, 1, 40)


def one_run_certificate(
    a: Assumptions,
    gammas: ArrayLike,
    taus: ArrayLike,
    clipped_fractions: ArrayLike,
    *,
    batch_size: float,
    noise_multiplier: float,
    dim: int,
    sampling: Sampling = "poisson",
    fraction_noise: ArrayLike = 0.0,
    fraction_reach: float = 0.0,
    p_lo: float = 0.0,
    confidence: float = 0.95,
) -> Bound:
    """Return a bound on the weighted mean of ``||grad f||^2`` over this run, with probability ``confidence``.

    The weight of step t is ``gamma_t a_t``, as in `weighted_certificate`. Each gamma_t and tau_t may follow from
    earlier releases. The bound holds for the record that the run happens to have: nothing needs to be fixed before the
    run but its number of steps and the confidence.

    >>> a = Assumptions(L=1, sigma=0.5, q=2, gap=1)
    >>> public = {"batch_size": 16, "noise_multiplier": 1, "dim": 10}
    >>> record = (0.02, [0.6] * 5000, [0.2] * 5000)
    >>> [round(one_run_certificate(a, *record, **public, confidence=level).total, 3) for level in (0.95, 0.999)]
    [0.102, 0.107]

    Args:
        a: The assumptions on the problem, with q = 2.
        gammas: Effective step sizes, [steps] or a number: ``eta / tau_t`` for normalized steps.
        taus: Thresholds, [steps].
        clipped_fractions: Unbiased estimates of ``P(||g|| > tau_t)``, or of other bounds on ``1 - a_t``, [steps].
        batch_size: Expected batch size.
        noise_multiplier: Noise multiplier of the gradient sum.
        dim: Number of parameters.
        sampling: "poisson", or "iid" for batches of one size, also drawn without replacement.
        fraction_noise: Standard deviation of the noise on ``clipped_fractions``: a number, or [steps].
        fraction_reach: The most that one example can move ``clipped_fractions``, times the batch size: 1 for a count, a
            half for a count centred at 1/2, 0 for fractions that are known exactly.
        p_lo: A known lower bound on the mean clip factor of every step.
        confidence: The probability with which the bound holds.

    Returns:
        The bound; ``variance`` has the price of the confidence in it, and ``beta`` is its kappa.

    Raises:
        Refusal: The parts of the record do not fit together, or no exponent of the grid gives a bound.
    """
    record = record_arrays(a, gammas, taus, clipped_fractions)
    if record[1].ndim != 1:
        raise check.refuse_shape("taus", record[1].shape, "[steps]", "certify one run at a time")
    terms = one_run_terms(
        a, *record, batch_size=batch_size, noise_multiplier=noise_multiplier, dim=dim, sampling=sampling,
        fraction_noise=fraction_noise, fraction_reach=fraction_reach, p_lo=p_lo, confidence=confidence,
    )  # fmt: skip
    optimisation, variance, bias, kappa, left = (float(value) for value in terms)
    if not math.isfinite(optimisation):
        raise check.Refusal(
            "the record certifies nothing about this run alone: its steps are too large for its noise "
            f"(largest gamma L {float(np.max(record[0])) * a.L:.3g}), or nearly every example was clipped"
        )
    return Bound(optimisation, variance, bias, kappa, left)


def one_run_terms(
    a: Assumptions,
    gamma: Floats,
    tau: Floats,
    fraction: Floats,
    *,
    batch_size: float,
    noise_multiplier: float,
    dim: int,
    sampling: Sampling,
    fraction_noise: ArrayLike,
    fraction_reach: float,
    p_lo: float,
    confidence: float,
) -> Floats:
    """Return the three terms, kappa and what they were divided by, [5, ...], of records [..., steps] of several runs.

    A run without a bound has infinite terms.
    """
    B = check.positive("batch_size", batch_size, "it is the expected number of examples a step")
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    d = check.count("dim", dim, "it is the number of trainable parameters")
    p_lo = check.between("p_lo", p_lo, 0, 1, "it bounds every mean clip factor from below", closed="both")
    poisson = check.choice("sampling", sampling, ("poisson", "iid")) == "poisson"
    fails = 1 - check.between("confidence", confidence, 0, 1, "0.95 is usual")
    logs = {name: math.log(len(GRID) / (share * fails)) for name, share in SHARES.items()}
    unit = a.gap + a.sigma**2 / a.L or 1.0  # the energy in which the exponents are measured

    gamma_L, length = gamma * a.L, gamma.sum(-1)
    largest = gamma_L.max(-1)
    margin = _margin(gamma_L, B, poisson, fraction_noise, fraction_reach, logs["s"]) / a.L
    clipped = np.clip((gamma * fraction).sum(-1) + margin, 0, length)
    deviation = _deviation(a, gamma, tau, B, poisson, unit, fails, logs["u"])

    best = np.full((5, *tau.shape[:-1]), np.inf)
    for theta in GRID / unit:
        omega = theta * gamma * gamma_L * (z / B * tau) ** 2
        possible = omega.max(-1) < 1
        omega = np.where(possible[..., None], omega, 0.5)
        loose = theta / (1 - omega)
        spread = SPREAD if poisson else 1.0
        share = gamma * tau**2 * loose / 2 * ((z / B) ** 2 + spread / (B * (1 - omega)))  # N_t
        most, per_tau = share.max(-1), (share / tau).max(-1)
        noise = -d / (2 * theta) * np.log1p(-omega).sum(-1) + deviation / (1 - omega.max(-1)) + logs["theta"] / theta
        step = (loose * gamma * tau).max(-1) / B  # the exponent that one example moves, over ||v||
        for kappa in KAPPAS:
            bias = a.sigma**2 * clipped * (1 / (2 * kappa) + largest * most)
            total = a.gap + noise + bias  # R: no f(x_t) - f_inf exceeds it
            reach = np.sqrt(2 * a.L * total + a.sigma**2)
            spent = most + reach * per_tau
            if p_lo > 0:
                spent = np.minimum(spent, most / p_lo)
            left = (1 - kappa / 2 - largest * (1 - kappa) / 2 - spent) * (length - clipped)
            valid = possible & (largest <= 1) & (left > 0)
            if poisson:
                valid &= step * reach <= REACH
            left = np.where(valid, left, np.nan)
            terms = np.stack([a.gap / left, noise / left, bias / left, np.full_like(left, kappa), left])
            better = valid & (total / np.where(valid, left, 1.0) < best[:3].sum(0))
            best = np.where(better, terms, best)
    return best


def _margin(gamma_L: Floats, B: float, poisson: bool, noise: ArrayLike, reach: float, log: float) -> Floats:
    """Return a bound on ``sum gamma_t L (h_t - recorded)``, by the exponents s; 0 for exact fractions."""
    std = np.asarray(noise, dtype=np.float64)
    if not (std >= 0).all() or std.shape not in ((), gamma_L.shape[-1:], gamma_L.shape):
        raise check.refuse_shape("fraction_noise", std.shape, "a number or [steps], >= 0", "it is a standard deviation")
    reach = check.nonnegative("fraction_reach", reach, "0 for fractions that are known exactly")
    if reach == 0 and not std.any():
        return np.zeros(gamma_L.shape[:-1])
    margins = []
    for s in GRID:
        x = s * gamma_L * reach / B
        # Poisson: e^x - 1 - x per example. Fixed sizes: Hoeffding's lemma, over a range of twice the reach at most 1.
        sampled = B * (np.expm1(np.minimum(x, 500)) - x) if poisson else B * x**2 / 2
        margins.append(((sampled + (s * gamma_L * std) ** 2 / 2).sum(-1) + log) / s)
    return np.min(margins, axis=0)


def _deviation(
    a: Assumptions, gamma: Floats, tau: Floats, B: float, poisson: bool, unit: float, fails: float, log: float
) -> Floats:
    """Return a bound on ``sum gamma_t^2 (L/2) ||xi_t||^2``, by the exponents u; xi is the error of a batch's mean."""
    weight = gamma**2 * a.L / 2
    # The largest ||xi|| over tau: 2 for batches of one size, 1 + n/B for the largest Poisson batch of the run.
    furthest = 2 + _excess(B, math.log(gamma.shape[-1] / (SHARES["size"] * fails))) if poisson else 2.0
    power = weight * (tau**2 if poisson else np.minimum(tau, a.sigma) ** 2) / B
    bounds = []
    for u in GRID / unit:
        most = u * weight * (furthest * tau) ** 2
        growth = np.expm1(np.minimum(most, 500)) / np.maximum(most, 1e-300)
        exponent = u * power * np.where(most > 0, growth, 1.0)
        if not poisson:  # by bounded differences, better for large batches
            x = u * weight * tau**2 / B
            inside = np.minimum(x, 0.49)
            concentrated = inside / (1 - 2 * inside) - np.log1p(-2 * inside) / 2
            exponent = np.minimum(exponent, np.where(x < 0.49, concentrated, np.inf))
        bounds.append((exponent.sum(-1) + log) / u)
    return np.min(bounds, axis=0)


def _excess(B: float, log: float) -> float:
    """Return x such that ``P(batch > (1 + x) B) <= e^-log``, by Chernoff: ``(1+x) log(1+x) - x = log / B``."""
    low, high = 0.0, 1.0 + 2 * log / B + math.sqrt(8 * log / B)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 + middle) * math.log1p(middle) - middle < log / B else (low, middle)
    return high
