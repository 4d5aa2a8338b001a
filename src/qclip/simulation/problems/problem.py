"""The interface of stochastic problems: an objective, per-example gradients and the exact quantile of their norms."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.simulation.problems.noise import ClipMoments
from qclip.theory import Assumptions


def levels(p: float | Floats) -> float | Floats:
    """Return p, or refuse it where it leaves (0, 1)."""
    check.sequence("p", np.ravel(p), low=0, high=1, remedy="it is the fraction of examples left unclipped")
    return p


class Problem(ABC):
    """A stochastic objective ``f(x) = E f_xi(x)`` with exact oracles.

    Shapes: ``x`` is [..., d]; leading dimensions are independent points. Per-example gradients are [..., n, d].
    """

    dim: int
    L: float

    @property
    @abstractmethod
    def minimiser(self) -> Floats:
        """A minimiser of f, [d]."""

    @property
    @abstractmethod
    def f_inf(self) -> float:
        """The infimum of f."""

    @abstractmethod
    def loss(self, x: Floats) -> Floats:
        """Return f(x), [...]."""

    @abstractmethod
    def grad(self, x: Floats) -> Floats:
        """Return the full gradient, [..., d]."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        """Draw independent examples xi, one for each entry of ``shape``."""

    @abstractmethod
    def example_gradients(self, x: Floats, xi: Any) -> Floats:
        """Return the gradients of the examples ``xi`` [..., n] at x, [..., n, d]."""

    @abstractmethod
    def quantile(self, x: Floats, p: float | Floats) -> Floats:
        """Return the exact lower p-quantile of the norm of a per-example gradient at x, [...]."""

    @abstractmethod
    def clip_moments(self, x: Floats, tau: float | Floats) -> ClipMoments:
        """Return the moments of a per-example gradient at x clipped at tau (`ClipMoments` gives their accuracy)."""

    @abstractmethod
    def sigma(self, q: float = 2.0) -> float:
        """Return ``(E ||g - grad f||^q)^(1/q)``, or a tight bound on it, over all x."""

    def sample_gradients(self, x: Floats, count: int, rng: np.random.Generator) -> Floats:
        """Return ``count`` independent per-example gradients at x, [..., count, d]."""
        x = self.point(x)
        return self.example_gradients(x, self.draw(rng, (*x.shape[:-1], count)))

    def point(self, x: Any, name: str = "x") -> Floats:
        """Return x as an array [..., d], or refuse it under this name."""
        x = np.asarray(x, dtype=np.float64)
        if x.ndim == 0 and self.dim == 1:
            x = x[None]
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise check.refuse_shape(name, x.shape, f"[..., {self.dim}]", "the last axis holds the parameters")
        if not np.isfinite(x).all():
            raise check.Refusal(f"{name} has NaN or infinite entries; check its source")
        return x

    def assumptions(self, x0: Any, q: float = 2.0) -> Assumptions:
        """Return the constants of the theorem for a run from x0.

        Raises:
            Refusal: The noise has no moment of order q.
        """
        sigma = self.sigma(q)
        if not np.isfinite(sigma):
            raise check.refuse("q", q, "a moment that the noise has", "lower q below the tail index of the noise")
        gap = np.max(self.loss(self.point(x0, "x0"))) - self.f_inf
        return Assumptions(L=self.L, sigma=sigma, q=q, gap=float(max(gap, 0.0)))
