"""The assumptions of the analysis."""

from dataclasses import dataclass

from qclip import _validate as check


@dataclass(frozen=True)
class Assumptions:
    """Assumptions 1 and 2 of the paper, as numbers.

    >>> Assumptions(L=1, sigma=0.5, q=2, gap=3)
    Assumptions(L=1.0, sigma=0.5, q=2.0, gap=3.0)

    Args:
        L: Smoothness constant of f.
        sigma: Bound on ``(E ||g - grad f||^q)^(1/q)`` at every point (the paper's sigma_q).
        q: The bounded moment, in (1, 2]; 2 is bounded variance.
        gap: ``f(x0) - inf f``.

    Raises:
        Refusal: A value is out of bounds.
    """

    L: float
    sigma: float
    q: float
    gap: float

    def __post_init__(self) -> None:
        values = {
            "L": check.positive("L", self.L, "it is the smoothness constant of the objective"),
            "sigma": check.nonnegative("sigma", self.sigma, "it bounds a moment of the gradient noise"),
            "q": moment(self.q),
            "gap": check.nonnegative("gap", self.gap, "it is f(x0) - inf f; use a lower bound of f for inf f"),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)


def moment(q: object) -> float:
    """Return the moment q, or refuse one outside (1, 2]."""
    remedy = "use 2 when the variance is bounded, less for heavier tails (a bounded q-th moment bounds lower ones)"
    return check.between("q", q, 1, 2, remedy, closed="high")
