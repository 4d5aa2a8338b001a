"""Distributions of the gradient noise, with exact moments and exact quantiles of ``||grad + noise||``.

The distribution of the norm can be computed tightly for two geometries: noise of uniform direction (`Gaussian`,
`StudentT`), and noise along the first axis (`Pareto`, `Bernoulli`), whose asymmetry makes the clipped mean biased.

Shapes: ``g`` [..., d] holds gradients, one norm distribution each; ``xi`` [..., k] holds draws, which are added to the
first k coordinates of a gradient (k is d or 1).
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from scipy import special
from scipy.optimize.elementwise import find_root

from qclip import _validate as check
from qclip._validate import Floats

ROUNDING = 1e-15  # rounding margin of probabilities such as 1 - 0.7, when they are compared with a level


@dataclass(frozen=True)
class ClipMoments:
    """Moments of a clipped gradient: ``E min(1, tau/||g||)``, ``E clip(g)`` and ``E ||clip(g)||^2``.

    Exact for atoms and finite sums; by quadrature to 1e-8 along an axis, to a few 1e-5 of tau for uniform directions.
    """

    mean_factor: Floats
    mean: Floats
    second_moment: Floats


class Noise(Protocol):
    """A zero-mean distribution of gradient noise."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, shape: tuple[int, ...], dim: int) -> Floats:
        """Return independent draws, [*shape, k]."""

    @abstractmethod
    def sigma(self, q: float, dim: int) -> float:
        """Return ``(E ||xi||^q)^(1/q)``; infinite where that moment does not exist."""

    @abstractmethod
    def quantile(self, g: Floats, p: float | Floats) -> Floats:
        """Return the lower p-quantile of ``||g + xi||``, [...]."""

    @abstractmethod
    def clip_moments(self, g: Floats, tau: float | Floats) -> ClipMoments:
        """Return the moments of ``g + xi`` clipped at tau."""


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise, ``N(0, scale^2 I)``."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        check.nonnegative("scale", self.scale, "it is a standard deviation; 0 means no noise")

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...], dim: int) -> Floats:
        """Return draws, [*shape, dim]."""
        draws = rng.standard_normal((*shape, dim))
        draws *= self.scale
        return draws

    def sigma(self, q: float, dim: int) -> float:
        """Return a moment of the chi distribution, in closed form."""
        log_moment = q / 2 * np.log(2) + special.gammaln((dim + q) / 2) - special.gammaln(dim / 2)
        return self.scale * float(np.exp(log_moment / q))

    def radius_sf(self, r: Floats, dim: int) -> Floats:
        """Return ``P(||xi|| > r)``."""
        return special.gammaincc(dim / 2, (np.maximum(r, 0) / self.scale) ** 2 / 2)

    def radius_isf(self, level: Floats, dim: int) -> Floats:
        """Return the radius that ``||xi||`` exceeds with probability ``level``."""
        return self.scale * np.sqrt(2 * special.gammainccinv(dim / 2, level))

    def quantile(self, g: Floats, p: float | Floats) -> Floats:
        """Return the quantile, by quadrature over the direction."""
        if self.scale == 0:
            return np.linalg.norm(g, axis=-1)
        return isotropic_quantile(self, g, p)

    def clip_moments(self, g: Floats, tau: float | Floats) -> ClipMoments:
        """Return the moments, by quadrature over direction and radius."""
        if self.scale == 0:
            return _axis_clip_moments(g, tau, np.zeros(1), np.ones(1))
        return isotropic_clip_moments(self, g, tau)


@dataclass(frozen=True)
class StudentT:
    """Multivariate Student t noise; moments of order below ``df`` exist."""

    df: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        check.between("df", self.df, 1, np.inf, "the noise needs a mean: moments of order below df exist")
        check.positive("scale", self.scale)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...], dim: int) -> Floats:
        """Return draws, [*shape, dim]."""
        draws = rng.standard_normal((*shape, dim))
        draws *= self.scale / np.sqrt(rng.chisquare(self.df, shape) / self.df)[..., None]
        return draws

    def sigma(self, q: float, dim: int) -> float:
        """Return a moment of the square root of an F distribution, in closed form."""
        if q >= self.df:
            return np.inf
        log_moment = (
            q / 2 * np.log(self.df)
            + special.gammaln((dim + q) / 2)
            + special.gammaln((self.df - q) / 2)
            - special.gammaln(dim / 2)
            - special.gammaln(self.df / 2)
        )
        return self.scale * float(np.exp(log_moment / q))

    def radius_sf(self, r: Floats, dim: int) -> Floats:
        """Return ``P(||xi|| > r)``."""
        square = (np.maximum(r, 0) / self.scale) ** 2
        return special.betainc(self.df / 2, dim / 2, self.df / (self.df + square))

    def radius_isf(self, level: Floats, dim: int) -> Floats:
        """Return the radius that ``||xi||`` exceeds with probability ``level``."""
        y = special.betaincinv(self.df / 2, dim / 2, level)
        return self.scale * np.sqrt(self.df * (1 - y) / np.maximum(y, 1e-300))

    def quantile(self, g: Floats, p: float | Floats) -> Floats:
        """Return the quantile, by quadrature over the direction."""
        return isotropic_quantile(self, g, p)

    def clip_moments(self, g: Floats, tau: float | Floats) -> ClipMoments:
        """Return the moments, by quadrature over direction and radius."""
        return isotropic_clip_moments(self, g, tau)


@dataclass(frozen=True)
class Pareto:
    """Pareto noise along the first axis: with a random sign, or one-sided and centred.

    Its size X has ``P(X > x) = (scale/x)^tail`` for x >= scale. One-sided noise is ``X - E X``, whose long tail on one
    side biases the clipped mean. Moments of order below ``tail`` exist.
    """

    tail: float
    scale: float = 1.0
    one_sided: bool = False

    def __post_init__(self) -> None:
        check.between("tail", self.tail, 1, np.inf, "the noise needs a mean: use a tail index above 1")
        check.positive("scale", self.scale)

    @property
    def shift(self) -> float:
        """The mean of X for one-sided noise, which is subtracted; 0 for symmetric noise."""
        return self.scale * self.tail / (self.tail - 1) if self.one_sided else 0.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...], dim: int) -> Floats:
        """Return draws, [*shape, 1]."""
        size = self.scale * rng.random((*shape, 1)) ** (-1 / self.tail)
        if self.one_sided:
            return size - self.shift
        return size * np.where(rng.random((*shape, 1)) < 0.5, -1.0, 1.0)

    def sigma(self, q: float, dim: int) -> float:
        """Return the moment in closed form; for one-sided noise, by a beta function and a quadrature."""
        a, mean = self.tail, self.shift
        if q >= a:
            return np.inf
        if not self.one_sided:
            return self.scale * float((a / (a - q)) ** (1 / q))
        # With v = mean/x and w = 1 - 1/a: E|X-m|^q = C [ int_0^1 + int_1^(1/w) ] |1-v|^q v^(a-q-1) dv.
        w = 1 - 1 / a
        above = special.beta(a - q, q + 1)
        nodes, weights = special.roots_jacobi(200, 0.0, q)  # (v-1)^q on [1, 1/w], the rest is smooth
        width = 1 / w - 1
        below = (width / 2) ** (q + 1) * float(weights @ (1 + width * (nodes + 1) / 2) ** (a - q - 1))
        return mean * float((a * w**a * (above + below)) ** (1 / q))

    def cdf(self, x: Floats) -> Floats:
        """Return ``P(xi <= x)``."""
        x = np.asarray(x, dtype=np.float64) + self.shift
        tail = 0.5 * (1 + self.one_sided) * (self.scale / np.maximum(np.abs(x), self.scale)) ** self.tail
        return np.where(x >= self.scale, 1 - tail, 0.0 if self.one_sided else np.where(x <= -self.scale, tail, 0.5))

    def quantile(self, g: Floats, p: float | Floats) -> Floats:
        """Return the quantile, by bisection of the closed-form distribution function along the axis."""
        axis = np.asarray(g[..., 0], dtype=np.float64)

        def enough(k: Floats) -> Floats:
            return self.cdf(k - axis) - self.cdf(-k - axis) >= p

        far = (1 - np.asarray(p)) ** (-1 / self.tail)  # beyond this the tails hold less than 1 - p together
        high = np.abs(axis) + self.shift + 2 * self.scale * far
        return _with_rest(g, _bisect(enough, np.zeros_like(high), high))

    def clip_moments(self, g: Floats, tau: float | Floats) -> ClipMoments:
        """Return the moments, by quadrature over the probability, split where clipping begins."""
        rest = np.sqrt((g[..., 1:] ** 2).sum(-1))
        tau = np.broadcast_to(np.asarray(tau, dtype=np.float64), rest.shape)
        reach = np.sqrt(np.maximum((tau - rest) * (tau + rest), 0))[..., None] * np.array([-1.0, 1.0])
        signs = (1.0,) if self.one_sided else (1.0, -1.0)
        draws, weights = [], []
        for sign in signs:
            cuts = sign * (reach - g[..., :1] + self.shift)  # sizes at which the norm is tau
            level, weight = _cut_levels((self.scale / np.maximum(cuts, self.scale)) ** self.tail)
            draws.append(sign * self.scale * level ** (-1 / self.tail) - self.shift)
            weights.append(weight / len(signs))
        return _axis_clip_moments(g, tau, np.concatenate(draws, axis=-1), np.concatenate(weights, axis=-1))


@dataclass(frozen=True)
class Bernoulli:
    """A jump along the first axis with some probability, centred: a distribution of two atoms."""

    jump: float
    probability: float

    def __post_init__(self) -> None:
        check.positive("jump", self.jump)
        check.between("probability", self.probability, 0, 1, "both gradients must occur")

    @property
    def atoms(self) -> Floats:
        """The two values: with the jump, and without."""
        return np.array([self.jump * (1 - self.probability), -self.jump * self.probability])

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...], dim: int) -> Floats:
        """Return draws, [*shape, 1]."""
        jumped, stayed = self.atoms
        return np.where(rng.random((*shape, 1)) < self.probability, jumped, stayed)

    def sigma(self, q: float, dim: int) -> float:
        """Return the moment in closed form."""
        w = self.probability
        return self.jump * float((w * (1 - w) ** q + (1 - w) * w**q) ** (1 / q))

    def quantile(self, g: Floats, p: float | Floats) -> Floats:
        """Return the smaller norm if its probability reaches p, up to the rounding margin, else the larger."""
        jumped, stayed = (np.abs(g[..., 0] + atom) for atom in self.atoms)
        p = np.asarray(p) - ROUNDING
        mass_of_smaller = np.select(
            [jumped < stayed, jumped > stayed], [self.probability, 1 - self.probability], default=1.0
        )
        enough = mass_of_smaller >= p
        return _with_rest(g, np.where(enough, np.minimum(jumped, stayed), np.maximum(jumped, stayed)))

    def clip_moments(self, g: Floats, tau: float | Floats) -> ClipMoments:
        """Return the moments, summed over the two atoms."""
        return _axis_clip_moments(g, tau, self.atoms, np.array([self.probability, 1 - self.probability]))


def _with_rest(g: Floats, axis_size: Floats) -> Floats:
    """Return the norm of a vector whose first coordinate has this size and whose others are those of g."""
    return np.sqrt(axis_size**2 + (g[..., 1:] ** 2).sum(-1))


def _bisect(enough: Callable[[Floats], Floats], low: Floats, high: Floats) -> Floats:
    """Return the smallest t in (low, high] with ``enough(t)``, which is monotone and true at ``high``."""
    for _ in range(100):
        middle = (low + high) / 2
        done = enough(middle)
        low, high = np.where(done, low, middle), np.where(done, middle, high)
    return high


@lru_cache
def _unit_interval() -> tuple[Floats, Floats]:
    """Return Gauss-Legendre nodes and weights on (0, 1)."""
    x, w = special.roots_legendre(48)
    return (x + 1) / 2, w / 2


def _cut_levels(cuts: Floats) -> tuple[Floats, Floats]:
    """Return nodes and weights on (0, 1), [..., n], for functions that are smooth between the ``cuts`` [..., 2].

    The nodes cluster at both ends as ``y^4`` does, because radii as functions of their level are singular there.
    """
    x, w = _unit_interval()
    cuts = np.sort(np.clip(cuts, 0, 1), axis=-1)
    near, far = cuts**0.25, (1 - cuts) ** 0.25
    ends = np.concatenate([np.zeros_like(cuts[..., :1]), near / (near + far), np.ones_like(cuts[..., :1])], axis=-1)
    width = np.diff(ends)[..., None]
    y = (ends[..., :-1, None] + width * x).reshape(*cuts.shape[:-1], -1)
    both = y**4 + (1 - y) ** 4
    slope = 4 * (y * (1 - y)) ** 3 / both**2
    return np.maximum(y**4 / both, 1e-300), (width * w).reshape(y.shape) * slope


def _axis_clip_moments(g: Floats, tau: float | Floats, xi: Floats, weights: Floats) -> ClipMoments:
    """Return the moments as sums over draws xi [..., n] along the first axis, with weights [..., n]."""
    rest = (g[..., 1:] ** 2).sum(-1)
    axis = g[..., :1] + xi
    norm = np.sqrt(axis**2 + rest[..., None])
    factor = clip_factor(norm, np.asarray(tau)[..., None])
    a = (factor * weights).sum(-1)
    mean = g * a[..., None]
    mean[..., 0] = (factor * axis * weights).sum(-1)
    return ClipMoments(a, mean, ((factor * norm) ** 2 * weights).sum(-1))


def clip_factor(norm: Floats, tau: float | Floats) -> Floats:
    """Return the clip factor ``min(1, tau/norm)``; 1 for a zero vector."""
    tau = np.broadcast_to(tau, norm.shape)
    return np.divide(tau, norm, out=np.ones(norm.shape), where=norm > tau)


class Isotropic(Protocol):
    """Noise of uniform direction, given by the distribution of its radius."""

    def radius_sf(self, r: Floats, dim: int) -> Floats:
        """Return ``P(||xi|| > r)``."""

    def radius_isf(self, level: Floats, dim: int) -> Floats:
        """Return the radius that ``||xi||`` exceeds with probability ``level``."""


@lru_cache
def _cosines(dim: int) -> tuple[Floats, Floats]:
    """Return nodes and weights for the cosine between a uniform direction and a fixed one."""
    if dim == 1:
        return np.array([1.0, -1.0]), np.array([0.5, 0.5])
    u, w = special.roots_jacobi(64, (dim - 3) / 2, (dim - 3) / 2)
    return u, w / w.sum()


@lru_cache
def _half_turn(dim: int) -> tuple[Floats, Floats]:
    """Return nodes and weights on (-pi/2, pi/2), more of them in higher dimensions, where the cosine concentrates."""
    x, w = special.roots_legendre(128 * math.ceil(math.sqrt(dim) / 3))
    return x * np.pi / 2, w * np.pi / 2


def isotropic_sf(noise: Isotropic, G: Floats, t: Floats, dim: int) -> Floats:
    """Return ``P(||g + xi|| > t)`` for ``||g|| = G``, by quadrature over the angle between g and xi.

    Along a direction with cosine u the ball of radius t is crossed at radii r with ``r^2 + 2 G u r = t^2 - G^2``. With
    ``D^2 = |t^2 - G^2|`` and ``r = D e^-w`` this is ``u = (D/G) sinh w`` when t >= G and ``u = -(D/G) cosh w`` when
    t < G, which resolves all scales of t - G; and ``1 - u^2 = (D/G)^2 sinh(W-w) sinh(W+w)`` with
    ``sinh W = min(G, t)/D``. The last substitution, ``w = W sin theta``, removes the endpoint powers of the density of
    the cosine.
    """
    G, t = np.broadcast_arrays(np.asarray(G, dtype=np.float64)[..., None], np.asarray(t, dtype=np.float64)[..., None])
    if dim == 1:
        out, back = noise.radius_sf(t - G, 1), noise.radius_sf(t + G, 1)
        missed = 1 - noise.radius_sf(np.maximum(G - t, 0), 1)  # with xi against g, too short to enter
        return 0.5 * (np.where(t >= G, out, 1.0) + back + np.where(t < G, missed, 0.0))[..., 0]
    G, t = np.maximum(G, 1e-50), np.maximum(t, 1e-100)  # so that every quotient below exists
    D = np.maximum(np.sqrt(np.abs(t - G) * (t + G)), 1e-9 * G)
    W = np.arcsinh(np.minimum(G, t) / D)
    theta, weight = _half_turn(dim)
    w = W * np.sin(theta)
    below, above = 2 * W * np.sin((np.pi / 2 - theta) / 2) ** 2, 2 * W * np.sin((np.pi / 2 + theta) / 2) ** 2
    square = (D / G) ** 2 * np.sinh(below) * np.sinh(above)
    density = square ** ((dim - 3) / 2) / special.beta((dim - 1) / 2, 0.5)
    outside = noise.radius_sf(D * np.exp(-w), dim) * density * (D / G) * W * np.cos(theta)
    far = (outside * np.cosh(w)) @ weight
    near = 1 - (outside * np.sinh(w)) @ weight
    return np.clip(np.where((t >= G)[..., 0], far, near), 0, 1)


def isotropic_quantile(noise: Isotropic, g: Floats, p: float | Floats) -> Floats:
    """Return the p-quantile of ``||g + xi||``, as the root of `isotropic_sf` (the distribution is continuous)."""
    dim = g.shape[-1]
    G = np.linalg.norm(g, axis=-1)
    p = np.broadcast_to(np.asarray(p, dtype=np.float64), G.shape)
    # ||g + xi|| lies between | ||g|| - ||xi|| | and ||g|| + ||xi||, and its quantiles accordingly.
    small, large = noise.radius_isf(p, dim), noise.radius_isf(1 - p, dim)
    low = np.maximum(np.maximum(G - small, large - G), 0)
    bracket = low * (1 - 1e-9), (G + large) * (1 + 1e-9)
    root = find_root(
        lambda t, G, h: np.log(np.maximum(isotropic_sf(noise, G, t, dim), 1e-300) / h),
        bracket,
        args=(G, 1 - p),
        tolerances={"xrtol": 1e-14, "fatol": 0, "frtol": 0},
    )
    assert root.success.all(), (noise, G, p)
    return root.x


def isotropic_clip_moments(noise: Isotropic, g: Floats, tau: float | Floats) -> ClipMoments:
    """Return the moments of the clipped gradient, by quadrature over direction and radius, split at the ball.

    By symmetry the mean is along g.
    """
    dim = g.shape[-1]
    G = np.linalg.norm(g, axis=-1)[..., None]
    tau = np.broadcast_to(np.asarray(tau, dtype=np.float64)[..., None], G.shape)
    u, w_u = _cosines(dim)
    half_chord = np.sqrt(np.maximum(tau**2 - G**2 * (1 - u**2), 0))
    crossings = np.stack([-G * u + half_chord, -G * u - half_chord], axis=-1)
    levels, w_r = _cut_levels(noise.radius_sf(crossings, dim))
    r = noise.radius_isf(levels, dim)
    along = G[..., None] + r * u[:, None]
    norm = np.hypot(along, r * np.sqrt(np.maximum(1 - u**2, 0))[:, None])
    factor = clip_factor(norm, tau[..., None])

    def expect(values: Floats) -> Floats:
        return (values * w_r).sum(-1) @ w_u

    direction = np.divide(g, G, out=np.zeros(g.shape), where=G > 0)
    mean = direction * expect(factor * along)[..., None]
    return ClipMoments(expect(factor), mean, expect((factor * norm) ** 2))
