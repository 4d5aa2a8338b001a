"""Problems whose per-example gradients are the full gradient plus independent noise."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.problems.noise import Bernoulli, ClipMoments, Gaussian, Noise
from qclip.problems.problem import Problem


class AdditiveNoise(Problem):
    """``g = grad f(x) + xi`` with xi independent of x, hence one sigma everywhere. f is a sum over coordinates."""

    noise: Noise
    spectrum: Floats  # the curvature of each coordinate
    centre: Floats  # where each coordinate is minimal

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
        return self.noise.quantile(self.grad(x), p)

    def clip_moments(self, x: Floats, tau: float | Floats) -> ClipMoments:
        """Exact: see the noise law."""
        return self.noise.clip_moments(self.grad(x), tau)

    def sigma(self, q: float = 2.0) -> float:
        """Exact: see the noise law."""
        return self.noise.sigma(q, self.dim)


@dataclass(frozen=True, eq=False)
class HeavyTailedQuadratic(AdditiveNoise):
    """``f(x) = 1/2 sum_i spectrum_i (x_i - centre_i)^2`` with any noise law.

    ``dim`` alone gives a unit spectrum; ``spectrum`` alone gives the dimension.

    >>> problem = HeavyTailedQuadratic(spectrum=[1.0, 0.1], noise=Gaussian(0.5))
    >>> problem.L, round(problem.sigma(2), 6)
    (1.0, 0.707107)
    """

    dim: int = 0
    noise: Noise = field(default_factory=Gaussian)
    spectrum: Sequence[float] | Floats | None = None  # type: ignore[assignment]
    centre: Sequence[float] | Floats | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _fill_landscape(self)

    @property
    def L(self) -> float:  # type: ignore[override]
        """The largest curvature."""
        return float(self.spectrum.max())

    f_inf = 0.0

    def loss(self, x: Floats) -> Floats:
        """The quadratic."""
        return 0.5 * ((x - self.centre) ** 2 * self.spectrum).sum(-1)

    def grad(self, x: Floats) -> Floats:
        """``spectrum * (x - centre)``."""
        return self.spectrum * (x - self.centre)


@dataclass(frozen=True, eq=False)
class NonConvex(AdditiveNoise):
    """``f(x) = sum_i spectrum_i u_i^2 / (1 + u_i^2)``, u = x - centre: smooth, bounded, flat far from its minimum."""

    dim: int = 0
    noise: Noise = field(default_factory=Gaussian)
    spectrum: Sequence[float] | Floats | None = None  # type: ignore[assignment]
    centre: Sequence[float] | Floats | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _fill_landscape(self)

    @property
    def L(self) -> float:  # type: ignore[override]
        """Twice the largest weight: the second derivative of u^2/(1+u^2) is at most 2, at 0."""
        return 2 * float(self.spectrum.max())

    f_inf = 0.0

    def loss(self, x: Floats) -> Floats:
        """The sum of saturating wells."""
        square = (x - self.centre) ** 2
        return (self.spectrum * square / (1 + square)).sum(-1)

    def grad(self, x: Floats) -> Floats:
        """``2 u / (1 + u^2)^2``, weighted."""
        u = x - self.centre
        return self.spectrum * 2 * u / (1 + u**2) ** 2


@dataclass(frozen=True, eq=False)
class ShiftedQuadratic(AdditiveNoise):
    """Koloskova et al.'s example: the gradient at x is ``x + jump`` with a probability, else ``x``.

    >>> ShiftedQuadratic(jump=10, probability=0.25).fixed_point(tau=1.0)  # x = -p c / (1 - p)
    -0.3333333333333333
    """

    jump: float
    probability: float

    def __post_init__(self) -> None:
        _fill_jump(self, self.jump, self.probability)

    dim = 1
    L = 1.0
    f_inf = 0.0

    def loss(self, x: Floats) -> Floats:
        """``(x - minimiser)^2 / 2``: f up to its constant."""
        return 0.5 * ((x - self.centre) ** 2).sum(-1)

    def grad(self, x: Floats) -> Floats:
        """``x + jump * probability``."""
        return x - self.centre

    def fixed_point(self, tau: float) -> float:
        """Where SGD clipped at a constant tau stands still on average.

        Both gradients unclipped, or the jumped one clipped, or both: the clipped mean rises with x, so one of the
        closed forms below is its only root.
        """
        w = self.probability
        unclipped = -w * self.jump
        if abs(unclipped) <= tau and abs(unclipped + self.jump) <= tau:
            return unclipped
        if w <= 0.5 and w * tau / (1 - w) <= tau:
            root = -w * tau / (1 - w)
            if root + self.jump >= tau:
                return root
        if w > 0.5:  # mirrored: the unjumped gradient, at most -tau, is the clipped one
            root = (1 - w) * tau / w - self.jump
            if root <= -tau:
                return root
        raise check.refuse("tau", tau, "below the jump, or so large that nothing is clipped", "no closed form here")


@dataclass(frozen=True, eq=False)
class TwoPoint(AdditiveNoise):
    """The paper's Example 1: ``(x+r)^2/2`` with probability omega > 1/2, ``x^2/2`` otherwise.

    The minimiser is ``-r omega``; see `fixed_points` for where QC-SGD goes instead (erratum A).
    """

    r: float
    omega: float

    def __post_init__(self) -> None:
        check.positive("r", self.r, "it is the distance between the two minima")
        check.between("omega", self.omega, 0.5, 1, "the first function is the likelier one")
        _fill_jump(self, self.r, self.omega)

    dim = 1
    L = 1.0

    @property
    def f_inf(self) -> float:  # type: ignore[override]
        """The minimum, ``r^2 omega (1 - omega) / 2``."""
        return self.r**2 * self.omega * (1 - self.omega) / 2

    def loss(self, x: Floats) -> Floats:
        """``omega (x+r)^2/2 + (1-omega) x^2/2``."""
        return self.f_inf + 0.5 * ((x - self.centre) ** 2).sum(-1)

    def grad(self, x: Floats) -> Floats:
        """``x + r omega``."""
        return x - self.centre

    def fixed_points(self, p: float) -> tuple[float, ...]:
        """Roots of the expected QC-SGD step: ``-r omega`` for p > omega, else ``-r``, and 0 too for p <= 1 - omega.

        >>> TwoPoint(r=2, omega=0.7).fixed_points(0.5)
        (-2.0,)
        """
        p = check.quantile("p", p)
        if p > self.omega:
            return (-self.r * self.omega,)
        return (-float(self.r), 0.0) if p <= 1 - self.omega else (-float(self.r),)

    def printed_fixed_point(self) -> float:
        """What the paper prints: ``-omega / (1 - omega)``, whatever r."""
        return -self.omega / (1 - self.omega)


def _fill_landscape(problem: HeavyTailedQuadratic | NonConvex) -> None:
    """Settle dim, spectrum and centre from whichever of them were given."""
    given = [np.size(v) for v in (problem.spectrum, problem.centre) if v is not None and np.ndim(v) > 0]
    dim = problem.dim or (given[0] if given else 0)
    dim = check.count("dim", dim, "give dim, or a spectrum with one curvature per coordinate")
    if any(size != dim for size in given):
        raise check.refuse("dim", dim, f"the length of spectrum and centre, {given}", "make the lengths agree")
    spectrum = np.broadcast_to(np.asarray(1.0 if problem.spectrum is None else problem.spectrum, float), dim)
    if not (np.isfinite(spectrum).all() and (spectrum >= 0).all() and spectrum.max() > 0):
        raise check.refuse("spectrum", problem.spectrum, "finite and >= 0, not all 0", "give curvatures")
    centre = np.broadcast_to(np.asarray(0.0 if problem.centre is None else problem.centre, float), dim)
    object.__setattr__(problem, "dim", dim)
    object.__setattr__(problem, "spectrum", np.ascontiguousarray(spectrum))
    object.__setattr__(problem, "centre", np.ascontiguousarray(centre))


def _fill_jump(problem: ShiftedQuadratic | TwoPoint, jump: float, probability: float) -> None:
    """``x + jump`` with a probability, else ``x``: the gradient of a unit quadratic plus centred Bernoulli noise."""
    object.__setattr__(problem, "noise", Bernoulli(jump, probability))
    object.__setattr__(problem, "spectrum", np.ones(1))
    object.__setattr__(problem, "centre", np.array([-jump * probability]))
