"""Problems whose per-example gradients are the full gradient plus independent noise."""

from collections.abc import Sequence

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.simulation.problems.noise import ROUNDING, Bernoulli, ClipMoments, Gaussian, Noise
from qclip.simulation.problems.problem import Problem, levels


class AdditiveNoise(Problem):
    """``g = grad f(x) + xi`` with xi independent of x, hence one sigma everywhere; f is a sum over coordinates.

    Unless a subclass says otherwise, ``f(x) = f_inf + 1/2 sum_i spectrum_i (x_i - centre_i)^2``.

    Args:
        dim: Number of parameters d; the length of ``spectrum`` or ``centre`` when left out.
        noise: Distribution of xi.
        spectrum: Curvature of each coordinate, [d]; ones when left out.
        centre: Minimiser of each coordinate, [d]; zeros when left out.
        f_inf: Minimum of f.

    Raises:
        Refusal: The lengths differ, or a value is out of bounds.
    """

    curvature: float = 1.0  # the largest second derivative of a coordinate of unit spectrum
    f_inf: float = 0.0  # type: ignore[bad-override]

    def __init__(
        self,
        dim: int | None = None,
        noise: Noise = Gaussian(),  # noqa: B008  (immutable)
        spectrum: Sequence[float] | Floats | None = None,
        centre: Sequence[float] | Floats | None = None,
        f_inf: float = 0.0,
    ) -> None:
        sizes = {np.size(given) for given in (spectrum, centre) if given is not None} | ({dim} if dim else set())
        if len(sizes) > 1:
            lengths = sorted(sizes)
            raise check.refuse("lengths of dim, spectrum, centre", lengths, "equal", "give one value per coordinate")
        remedy = "give dim, or a spectrum with one curvature per coordinate"
        self.dim = check.count("dim", sizes.pop() if sizes else dim, remedy)
        self.noise = noise
        self.spectrum = np.ones(self.dim) if spectrum is None else np.array(spectrum, dtype=np.float64)
        self.centre = np.zeros(self.dim) if centre is None else np.array(centre, dtype=np.float64)
        self.f_inf = f_inf
        if not np.isfinite(self.centre).all():
            raise check.refuse("centre", centre, "finite", "it is the minimiser")
        if not (np.isfinite(self.spectrum).all() and self.spectrum.min() >= 0 and self.spectrum.max() > 0):
            raise check.refuse("spectrum", spectrum, "finite and >= 0, not all 0", "give curvatures")
        self.L = self.curvature * float(self.spectrum.max())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, noise={self.noise})"

    @property
    def minimiser(self) -> Floats:
        """The centre, [d]."""
        return self.centre

    def loss(self, x: Floats) -> Floats:
        """Return f(x), [...]."""
        return self.f_inf + 0.5 * ((self.point(x) - self.centre) ** 2 * self.spectrum).sum(-1)

    def grad(self, x: Floats) -> Floats:
        """Return ``spectrum * (x - centre)``, [..., d]."""
        return self.spectrum * (self.point(x) - self.centre)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Draw noise, [*shape, k]: k is 1 for noise along the first axis, else d."""
        return self.noise.draw(rng, shape, self.dim)

    def example_gradients(self, x: Floats, xi: Floats) -> Floats:
        """Return ``grad f(x) + xi``, [..., n, d]."""
        g = np.repeat(self.grad(x)[..., None, :], xi.shape[-2], axis=-2)
        g[..., : xi.shape[-1]] += xi
        return g

    def quantile(self, x: Floats, p: float | Floats) -> Floats:
        """Return the exact p-quantile of ``||g||`` at x, from the distribution of the noise, [...]."""
        return self.noise.quantile(self.grad(x), levels(p))

    def clip_moments(self, x: Floats, tau: float | Floats) -> ClipMoments:
        """Return the moments of the clipped gradient at x, from the distribution of the noise."""
        return self.noise.clip_moments(self.grad(x), tau)

    def sigma(self, q: float = 2.0) -> float:
        """Return ``(E ||xi||^q)^(1/q)``, exactly."""
        return self.noise.sigma(q, self.dim)


class HeavyTailedQuadratic(AdditiveNoise):
    """``f(x) = 1/2 sum_i spectrum_i (x_i - centre_i)^2`` with any noise; the arguments are those of `AdditiveNoise`.

    >>> problem = HeavyTailedQuadratic(spectrum=[1.0, 0.1], noise=Gaussian(0.5))
    >>> problem.L, round(problem.sigma(2), 6)
    (1.0, 0.707107)
    """


class NonConvex(AdditiveNoise):
    """``f(x) = sum_i spectrum_i u_i^2 / (1 + u_i^2)``, u = x - centre: smooth, bounded, flat far from its minimum."""

    curvature = 2.0  # the second derivative of u^2/(1+u^2) at 0, its largest

    def loss(self, x: Floats) -> Floats:
        """Return the sum of the wells at x, [...]."""
        square = (self.point(x) - self.centre) ** 2
        return (self.spectrum * square / (1 + square)).sum(-1)

    def grad(self, x: Floats) -> Floats:
        """Return ``spectrum * 2 u / (1 + u^2)^2``, [..., d]."""
        u = self.point(x) - self.centre
        return self.spectrum * 2 * u / (1 + u**2) ** 2


class ShiftedQuadratic(AdditiveNoise):
    """Koloskova et al.'s example: the gradient at x is ``x + jump`` with a probability, else ``x``.

    f is taken up to a constant, so that its minimum is 0.

    >>> ShiftedQuadratic(jump=10, probability=0.25).fixed_point(tau=1.0)  # x = -p c / (1 - p)
    -0.3333333333333333
    """

    def __init__(self, jump: float, probability: float) -> None:
        super().__init__(1, Bernoulli(jump, probability), centre=[-jump * probability])
        self.jump, self.probability = float(jump), float(probability)

    def fixed_point(self, tau: float) -> float:
        """Return the point where SGD clipped at a constant tau stands still on average.

        If nothing is clipped at the minimiser, the minimiser is the root. Otherwise the larger gradient there, the
        rarer one, is clipped to tau and balances the other, unclipped one. The clipped mean rises with x, so there is
        no other root.
        """
        w, tau = self.probability, check.positive("tau", tau, "a threshold is positive")
        minimiser = -w * self.jump
        if max(-minimiser, minimiser + self.jump) <= tau:
            return minimiser
        return -w * tau / (1 - w) if w <= 0.5 else (1 - w) * tau / w - self.jump


class TwoPoint(AdditiveNoise):
    """The paper's Example 1: ``(x+r)^2/2`` with probability omega > 1/2, ``x^2/2`` otherwise.

    The minimiser is ``-r omega``; `fixed_points` gives the points that QC-SGD goes to instead (erratum A).

    Args:
        r: Distance between the two minima.
        omega: Probability of the first function, in (1/2, 1).
    """

    def __init__(self, r: float, omega: float) -> None:
        self.r = check.positive("r", r, "it is the distance between the two minima")
        self.omega = check.between("omega", omega, 0.5, 1, "the first function is the likelier one")
        f_inf = self.r**2 * self.omega * (1 - self.omega) / 2
        super().__init__(1, Bernoulli(self.r, self.omega), centre=[-self.r * self.omega], f_inf=f_inf)

    def fixed_points(self, p: float) -> tuple[float, ...]:
        """Return the roots of the expected QC-SGD step.

        They are ``-r omega`` for p > omega, else ``-r``, and 0 as well for p <= 1 - omega.

        >>> TwoPoint(r=2, omega=0.7).fixed_points(0.5)
        (-2.0,)
        """
        p = check.quantile("p", p)
        p -= ROUNDING
        if p > self.omega:
            return (-self.r * self.omega,)
        return (-self.r, 0.0) if p <= 1 - self.omega else (-self.r,)

    def printed_fixed_point(self) -> float:
        """Return the fixed point that the paper prints: ``-omega / (1 - omega)``, whatever r."""
        return -self.omega / (1 - self.omega)
