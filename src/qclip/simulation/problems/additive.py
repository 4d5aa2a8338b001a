"""Problems whose per-example gradients are the full gradient plus independent noise."""

from collections.abc import Sequence

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.simulation.problems.noise import ROUNDING, Bernoulli, ClipMoments, Gaussian, Noise
from qclip.simulation.problems.problem import Problem, levels


class AdditiveNoise(Problem):
    """``g = grad f(x) + xi`` with xi independent of x, hence one sigma everywhere. f is a sum over coordinates.

    ``dim`` alone gives a unit spectrum; ``spectrum`` alone gives the dimension.
    """

    curvature: float = 1.0  # the largest second derivative of a coordinate of unit spectrum
    f_inf: float = 0.0  # type: ignore[bad-override]

    def __init__(
        self,
        dim: int | None = None,
        noise: Noise = Gaussian(),  # noqa: B008  (immutable)
        spectrum: Sequence[float] | Floats | None = None,
        centre: Sequence[float] | Floats | None = None,
    ) -> None:
        sizes = {np.size(given) for given in (spectrum, centre) if given is not None} | ({dim} if dim else set())
        if len(sizes) > 1:
            lengths = sorted(sizes)
            raise check.refuse("lengths of dim, spectrum, centre", lengths, "equal", "give one value per coordinate")
        remedy = "give dim, or a spectrum with one curvature per coordinate"
        self.dim = check.count("dim", sizes.pop() if sizes else dim, remedy)
        self.noise = noise
        self.spectrum = np.ones(self.dim) if spectrum is None else np.array(spectrum, dtype=np.float64)
        """The curvature of each coordinate."""
        self.centre = np.zeros(self.dim) if centre is None else np.array(centre, dtype=np.float64)
        """Where each coordinate is minimal."""
        if not np.isfinite(self.centre).all():
            raise check.refuse("centre", centre, "finite", "it is the minimiser")
        if not (np.isfinite(self.spectrum).all() and self.spectrum.min() >= 0 and self.spectrum.max() > 0):
            raise check.refuse("spectrum", spectrum, "finite and >= 0, not all 0", "give curvatures")
        self.L = self.curvature * float(self.spectrum.max())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, noise={self.noise})"

    @property
    def minimiser(self) -> Floats:
        """The centre."""
        return self.centre

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Noise, [*shape, k]: k is 1 for noise along the first axis, else d."""
        return self.noise.draw(rng, shape, self.dim)

    def example_gradients(self, x: Floats, xi: Floats) -> Floats:
        """``grad f(x) + xi``."""
        g = np.repeat(self.grad(x)[..., None, :], xi.shape[-2], axis=-2)
        g[..., : xi.shape[-1]] += xi
        return g

    def quantile(self, x: Floats, p: float | Floats) -> Floats:
        """Exact: see the noise law."""
        return self.noise.quantile(self.grad(x), levels(p))

    def clip_moments(self, x: Floats, tau: float | Floats) -> ClipMoments:
        """Exact: see the noise law."""
        return self.noise.clip_moments(self.grad(x), tau)

    def sigma(self, q: float = 2.0) -> float:
        """Exact: see the noise law."""
        return self.noise.sigma(q, self.dim)


class HeavyTailedQuadratic(AdditiveNoise):
    """``f(x) = 1/2 sum_i spectrum_i (x_i - centre_i)^2`` with any noise law.

    >>> problem = HeavyTailedQuadratic(spectrum=[1.0, 0.1], noise=Gaussian(0.5))
    >>> problem.L, round(problem.sigma(2), 6)
    (1.0, 0.707107)
    """

    def loss(self, x: Floats) -> Floats:
        """The quadratic."""
        x = self.point(x)
        return 0.5 * ((x - self.centre) ** 2 * self.spectrum).sum(-1)

    def grad(self, x: Floats) -> Floats:
        """``spectrum * (x - centre)``."""
        return self.spectrum * (self.point(x) - self.centre)


class NonConvex(AdditiveNoise):
    """``f(x) = sum_i spectrum_i u_i^2 / (1 + u_i^2)``, u = x - centre: smooth, bounded, flat far from its minimum."""

    curvature = 2.0  # the second derivative of u^2/(1+u^2) at 0, its largest

    def loss(self, x: Floats) -> Floats:
        """The sum of saturating wells."""
        square = (self.point(x) - self.centre) ** 2
        return (self.spectrum * square / (1 + square)).sum(-1)

    def grad(self, x: Floats) -> Floats:
        """``2 u / (1 + u^2)^2``, weighted."""
        u = self.point(x) - self.centre
        return self.spectrum * 2 * u / (1 + u**2) ** 2


class ShiftedQuadratic(HeavyTailedQuadratic):
    """Koloskova et al.'s example: the gradient at x is ``x + jump`` with a probability, else ``x``.

    f is taken up to its constant, so that its minimum is 0.

    >>> ShiftedQuadratic(jump=10, probability=0.25).fixed_point(tau=1.0)  # x = -p c / (1 - p)
    -0.3333333333333333
    """

    def __init__(self, jump: float, probability: float) -> None:
        super().__init__(1, Bernoulli(jump, probability), centre=[-jump * probability])
        self.jump, self.probability = float(jump), float(probability)

    def fixed_point(self, tau: float) -> float:
        """Where SGD clipped at a constant tau stands still on average.

        If the minimiser clips nothing it is the root. Otherwise the larger gradient there, the rarer one, is clipped to
        tau, and the other one, unclipped, balances it; the clipped mean rises with x, so there is no other root.
        """
        w, tau = self.probability, check.positive("tau", tau, "a threshold is positive")
        minimiser = -w * self.jump
        if max(-minimiser, minimiser + self.jump) <= tau:
            return minimiser
        return -w * tau / (1 - w) if w <= 0.5 else (1 - w) * tau / w - self.jump


class TwoPoint(HeavyTailedQuadratic):
    """The paper's Example 1: ``(x+r)^2/2`` with probability omega > 1/2, ``x^2/2`` otherwise.

    The minimiser is ``-r omega``; see `fixed_points` for where QC-SGD goes instead (erratum A).
    """

    def __init__(self, r: float, omega: float) -> None:
        self.r = check.positive("r", r, "it is the distance between the two minima")
        self.omega = check.between("omega", omega, 0.5, 1, "the first function is the likelier one")
        super().__init__(1, Bernoulli(self.r, self.omega), centre=[-self.r * self.omega])
        self.f_inf = self.r**2 * self.omega * (1 - self.omega) / 2

    def loss(self, x: Floats) -> Floats:
        """``omega (x+r)^2/2 + (1-omega) x^2/2``."""
        return self.f_inf + super().loss(x)

    def fixed_points(self, p: float) -> tuple[float, ...]:
        """Roots of the expected QC-SGD step: ``-r omega`` for p > omega, else ``-r``, and 0 too for p <= 1 - omega.

        >>> TwoPoint(r=2, omega=0.7).fixed_points(0.5)
        (-2.0,)
        """
        p = check.quantile("p", p)
        p -= ROUNDING
        if p > self.omega:
            return (-self.r * self.omega,)
        return (-self.r, 0.0) if p <= 1 - self.omega else (-self.r,)

    def printed_fixed_point(self) -> float:
        """What the paper prints: ``-omega / (1 - omega)``, whatever r."""
        return -self.omega / (1 - self.omega)
