"""The two lemmas of the analysis, one about a clipped gradient, one about a step; and the exact bias of clipping."""

import numpy as np
from numpy.typing import ArrayLike

from qclip import _validate as check
from qclip._validate import Floats
from qclip.theory.assumptions import Assumptions


def lemma1_threshold(a: Assumptions, p: float, grad_norm: float) -> float:
    """Return Lemma 1's bound on the p-quantile of ``||g||``: ``||grad f|| + sigma (1-p)^(-1/q)``.

    >>> lemma1_threshold(Assumptions(L=1, sigma=1, q=2, gap=1), p=0.75, grad_norm=3)
    5.0
    """
    h = 1 - check.quantile("p", p)
    return check.nonnegative("grad_norm", grad_norm) + a.sigma * h ** (-1 / a.q)


def lemma1_bias(a: Assumptions, p: float) -> float:
    """Return Lemma 1's bound on the clipping bias: ``||E[clipped g] - E[alpha] grad f|| <= sigma (1-p)^(1-1/q)``.

    >>> lemma1_bias(Assumptions(L=1, sigma=1, q=2, gap=1), p=0.75)
    0.5
    """
    h = 1 - check.quantile("p", p)
    return a.sigma * h ** (1 - 1 / a.q)


def squared_bias(q: float, mean_factor: ArrayLike) -> Floats:
    """Return psi_q(a): the largest ``||E[clipped g] - a grad f||^2 / sigma^2`` where a is the mean clip factor.

    It is attained. Lemma 1's ``(1-p)^(2-2/q)`` is larger, and ``psi_q(a) / a`` falls with a, so that over all a >= p
    the cost of the bias is largest at p (docs/theory.md, sections 2 and 7).

    >>> float(squared_bias(2.0, 0.75))  # a (1 - a)
    0.1875
    """
    a = np.asarray(mean_factor, dtype=np.float64)
    h = 1 - a
    return (a * h) ** (2 - 2 / q) / (a ** (q - 1) + h ** (q - 1)) ** (2 / q)


def bias_floor(a: Assumptions, p: float) -> float:
    """Return the value of ``||grad f||^2`` that no step size gets QC-SGD below: ``sigma^2 psi_q(p) / p^2``, attained.

    >>> round(bias_floor(Assumptions(L=1, sigma=2, q=2, gap=1), p=0.8), 12)  # sigma^2 (1 - p) / p
    1.0
    """
    p = check.quantile("p", p)
    return a.sigma**2 * float(squared_bias(a.q, p)) / p**2


def lemma2_descent(
    a: Assumptions, gamma: float, p: float, grad_norm: float, *, beta: float, mean_factor: float | None = None
) -> float:
    """Return Lemma 2's upper bound on ``E f(x_(t+1)) - f(x_t)`` for one step of QC-SGD with one example.

    >>> round(lemma2_descent(Assumptions(1, 1, 2, 1), gamma=0.1, p=0.75, grad_norm=2, beta=0.5), 4)
    -0.095

    Args:
        a: The assumptions on the problem.
        gamma: Step size.
        p: Quantile to clip at.
        grad_norm: ``||grad f(x_t)||``.
        beta: The constant that splits the clipping bias between two terms.
        mean_factor: ``E min(1, tau/||g||)`` at x_t; p, a lower bound on it, when left out.
    """
    gamma = check.positive("gamma", gamma, "a step size is positive")
    beta = check.positive("beta", beta, "it splits the clipping bias between two terms")
    p = check.quantile("p", p)
    alpha = (
        p
        if mean_factor is None
        else check.between("mean_factor", mean_factor, 0, 1, "it is E min(1, tau/||g||)", closed="both")
    )
    h = 1 - p
    descent = gamma * (alpha - beta / 2 - gamma * a.L) * check.nonnegative("grad_norm", grad_norm) ** 2
    bias = gamma / (2 * beta) * lemma1_bias(a, p) ** 2
    variance = gamma**2 * a.L * a.sigma**2 * h ** (-2 / a.q)
    return -descent + bias + variance
