"""The two lemmas that carry the analysis: what one clipped gradient does, and what one step does."""

from qclip import _validate as check
from qclip.theory.assumptions import Assumptions


def lemma1_threshold(a: Assumptions, p: float, grad_norm: float) -> float:
    """Lemma 1, first bound: the p-quantile of ``||g||`` is at most ``||grad f|| + sigma (1-p)^(-1/q)``.

    >>> lemma1_threshold(Assumptions(L=1, sigma=1, q=2, gap=1), p=0.75, grad_norm=3)
    5.0
    """
    h = 1 - check.quantile("p", p)
    return check.nonnegative("grad_norm", grad_norm) + a.sigma * h ** (-1 / a.q)


def lemma1_bias(a: Assumptions, p: float) -> float:
    """Lemma 1, second bound: ``||E[clipped g] - E[alpha] grad f|| <= sigma (1-p)^(1-1/q)``.

    >>> lemma1_bias(Assumptions(L=1, sigma=1, q=2, gap=1), p=0.75)
    0.5
    """
    h = 1 - check.quantile("p", p)
    return a.sigma * h ** (1 - 1 / a.q)


def lemma2_descent(
    a: Assumptions, gamma: float, p: float, grad_norm: float, *, beta: float, mean_factor: float | None = None
) -> float:
    """Lemma 2: an upper bound on ``E f(x_(t+1)) - f(x_t)`` for one step of QC-SGD with one example.

    ``mean_factor`` is ``E min(1, tau/||g||)`` at x_t where it is known; p, which never exceeds it, stands in.

    >>> round(lemma2_descent(Assumptions(1, 1, 2, 1), gamma=0.1, p=0.75, grad_norm=2, beta=0.5), 4)
    -0.095
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
