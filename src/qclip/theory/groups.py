"""One threshold per group of parameters: the allocation of the noise, and the theorem."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.theory.assumptions import Assumptions
from qclip.theory.bounds import Bound, PerStep, Sampling, align, bound_private, check_steps, divide, private_form
from qclip.theory.lemmas import squared_bias

Allocation = Literal["optimal", "equal", "proportional"]


@dataclass(frozen=True)
class GroupNoise:
    """The standard deviation of each group's noise per coordinate, and the total expected squared norm, ``power``."""

    stds: Floats
    power: float


def group_noise(
    taus: Sequence[float] | Floats,
    dims: Sequence[int] | Floats,
    noise_multiplier: float,
    allocation: Allocation = "optimal",
) -> GroupNoise:
    """Allocate the noise of one Gaussian release among groups that are clipped separately.

    >>> [round(group_noise([1, 1], [4, 1], 2.0, how).power, 6) for how in ("optimal", "equal", "proportional")]
    [36.0, 40.0, 40.0]

    Args:
        taus: Threshold of each group.
        dims: Number of parameters of each group.
        noise_multiplier: Noise multiplier z of the whole release.
        allocation: "optimal" has the least power, ``z^2 (sum tau_k sqrt(d_k))^2``; "equal" gives all groups one
            standard deviation, "proportional" one ratio of standard deviation to tau.

    Returns:
        The standard deviations s_k and their power.

    Guarantees:
        - Every allocation costs exactly one release with ``noise_multiplier``: ``sum tau_k^2 / s_k^2 = 1 / z^2``.

    Raises:
        Refusal: The lengths differ, or a value is out of bounds.
    """
    tau = check.sequence("taus", taus, low=0, high=np.inf, remedy="a threshold is positive")
    dim = check.sequence("dims", dims, low=0, high=np.inf, remedy="count the parameters of each group", whole=True)
    if tau.size != dim.size:
        raise check.refuse("len(dims)", dim.size, f"len(taus) = {tau.size}", "give one dimension per threshold")
    z = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    check.choice("allocation", allocation, ("optimal", "equal", "proportional"))
    if allocation == "equal":
        stds = np.full_like(tau, z * np.linalg.norm(tau))
    elif allocation == "proportional":
        stds = z * np.sqrt(tau.size) * tau
    else:
        stds = z * np.sqrt(tau / np.sqrt(dim) * (tau @ np.sqrt(dim)))
    return GroupNoise(stds, float(dim @ stds**2))


def bound_groups(
    a: Assumptions,
    gammas: PerStep,
    ps: Sequence[float],
    beta: float | None = None,
    c: float | None = None,
    *,
    dims: Sequence[int],
    batch_size: float,
    noise_multiplier: float,
    sigmas: Sequence[float] | None = None,
    steps: int | None = None,
    sampling: Sampling = "poisson",
) -> Bound:
    """Return the sharp bound when each group is clipped at its own quantile and the noise is allocated optimally.

    The flat theorem holds unchanged with the same sigma (the groups' moments add up to less than the whole's). With
    the groups' own ``sigmas`` it is tighter: ``d sigma^2 h^(-2/q)`` becomes ``(sum sigma_k sqrt(d_k) h_k^(-1/q))^2``.

    Args:
        a: The assumptions on the problem.
        gammas: Step sizes: a number or a schedule with ``steps``, or one value per step.
        ps: Quantile of each group.
        beta: Constant of the theorem; the best one when left out.
        c: Contraction that is left; the largest one when left out.
        dims: Number of parameters of each group.
        batch_size: Expected batch size.
        noise_multiplier: Noise multiplier of the whole release.
        sigmas: Moment bound of each group.
        steps: Number of steps.
        sampling: "poisson" or "iid".

    Raises:
        Refusal: The lengths differ, or the theorem does not hold at these step sizes.
    """
    p = check.sequence("ps", ps, low=0, high=1, remedy="give one quantile per group")
    dim = check.sequence("dims", dims, low=0, high=np.inf, remedy="count the parameters of each group", whole=True)
    if p.size != dim.size:
        raise check.refuse("len(ps)", p.size, f"len(dims) = {dim.size}", "give one quantile per group")
    total_dim = int(dim.sum())
    p_lo, p_hi = float(p.min()), float(p.max())
    if sigmas is None:
        return bound_private(
            a, gammas, p_lo, beta, c, batch_size=batch_size, noise_multiplier=noise_multiplier, dim=total_dim,
            steps=steps, sampling=sampling, p_hi=p_hi,
        )  # fmt: skip
    sigma = check.sequence("sigmas", sigmas, low=0, high=np.inf, remedy="give one moment bound per group", closed=True)
    if sigma.size != dim.size:
        raise check.refuse("len(sigmas)", sigma.size, f"len(dims) = {dim.size}", "give one moment bound per group")

    rule = private_form(
        a, batch_size=batch_size, noise_multiplier=noise_multiplier, dim=total_dim, form="sharp", sampling=sampling
    )
    quiet = private_form(a, batch_size=batch_size, noise_multiplier=0, dim=1, form="sharp", sampling=sampling)
    gamma, p_min, _, counts = align(gammas, p_lo, None, steps)
    gamma_L = gamma * a.L
    check_steps(rule, a, gamma_L, p_min, beta, c)

    h = 1 - p
    sampling_noise = float(sigma**2 @ quiet.variance(h, h))
    added_noise = (noise_multiplier / batch_size * float(sigma * np.sqrt(dim) @ h ** (-1 / a.q))) ** 2
    length = float(counts @ gamma)
    optimisation = a.gap / length
    variance = (sampling_noise + added_noise) * float(counts * gamma @ gamma_L) / length
    bias = float(sigma**2 @ (p_lo * squared_bias(a.q, p) / p)) / 2
    return divide(rule, gamma_L, p_min, optimisation, variance, bias, beta, c)
