"""Clipping at a constant threshold, for comparison (Koloskova et al., 2023)."""

from qclip import _validate as check
from qclip.theory.assumptions import Assumptions
from qclip.theory.bounds import Bound


def fixed_clip_bound(a: Assumptions, gamma: float, tau: float, *, steps: int) -> Bound:
    """Return the order of the paper's bound on clipped SGD at a constant tau, without its constants.

    The terms are ``(F/(gamma T tau))^2 + F/(gamma T)`` (optimisation), ``gamma L sigma^2`` (variance) and
    ``min(sigma^2, sigma^4/tau^2)`` (bias). Compare their growth, never their value, with the other bounds. Koloskova et
    al. bound the square of ``min_t E ||grad f||`` (erratum H).

    >>> fixed_clip_bound(Assumptions(L=1, sigma=1, q=2, gap=1), gamma=0.1, tau=2, steps=100).bias
    0.25

    Args:
        a: The assumptions on the problem, with q = 2.
        gamma: Step size.
        tau: Threshold.
        steps: Number of steps.
    """
    if a.q != 2:
        raise check.refuse("q", a.q, "2", "the result assumes bounded variance; give the standard deviation as sigma")
    gamma = check.positive("gamma", gamma, "a step size is positive")
    tau = check.positive("tau", tau, "a threshold is positive")
    slow = a.gap / (gamma * check.count("steps", steps))
    bias = min(a.sigma**2, a.sigma**4 / tau**2)
    return Bound((slow / tau) ** 2 + slow, gamma * a.L * a.sigma**2, bias)
