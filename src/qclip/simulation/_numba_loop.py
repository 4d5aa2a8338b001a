"""The numba loop of the simulator, for additive noise: seeds run in parallel, quantiles are solved in place.

For noise along one axis, the quantile is the root of a closed-form distribution function. A safeguarded Newton
iteration finds it, starting from the seed's last threshold. For noise of uniform direction, the quantile depends on
``||grad f||`` and p alone. It is read from a table of the exact oracle (`QuantileTable`), whose error is measured when
the table is made.
"""

import numpy as np
from numba import njit, prange
from numpy.polynomial import chebyshev

from qclip._validate import Floats
from qclip.simulation._types import SAME_NORM, Draws, Records, Setup, SimulationState
from qclip.simulation.problems import (
    AdditiveNoise,
    Bernoulli,
    Gaussian,
    HeavyTailedQuadratic,
    Noise,
    NonConvex,
    Pareto,
    ShiftedQuadratic,
    StudentT,
    TwoPoint,
)

TABLE_TOLERANCE = 1e-5
THRESHOLD, TABLE, PARETO, BERNOULLI = 0, 1, 2, 3

# The compiled code knows these and nothing else: a subclass or another distribution may compute anything.
LANDSCAPES = (HeavyTailedQuadratic, NonConvex, ShiftedQuadratic, TwoPoint)
DISTRIBUTIONS = (Gaussian, StudentT, Pareto, Bernoulli)


class Unsuited(Exception):
    """A run that cannot be compiled; the message says why."""


class QuantileTable:
    """The p-quantile of ``||g + xi||`` for isotropic noise, as cubic interpolation in ``G/(G+s)`` and ``log(1-p)``.

    The table stores ``(tau - G)/s``, which stays bounded as G grows. Its values come from a Chebyshev interpolant of
    the exact oracle; ``error`` is the largest measured deviation, relative to tau.

    Args:
        noise: Isotropic noise.
        dim: Number of parameters d.
        p_low: Lowest quantile to tabulate.
        p_high: Highest quantile to tabulate.

    Raises:
        Unsuited: No table of up to 128 nodes per axis is within `TABLE_TOLERANCE`.
    """

    def __init__(self, noise: Noise, dim: int, p_low: float, p_high: float) -> None:
        self.scale = noise.sigma(1.0, dim)
        self.log_h = np.log([1 - p_high, 1 - p_low])
        self.constant = p_high - p_low < 1e-12
        if self.scale == 0:  # without noise the quantile is ||g||
            self.scale, self.values, self.error = 1.0, np.zeros((4, 4)), 0.0
            return
        for degree in (32, 64, 128):
            self.values = self._tabulate(noise, dim, degree)
            self.error = self._measure(noise, dim)
            if self.error < TABLE_TOLERANCE:
                return
        raise Unsuited(f"the table of {noise} has relative error {self.error:.1e}, above {TABLE_TOLERANCE}")

    def _exact(self, noise: Noise, dim: int, u: Floats, log_h: Floats) -> Floats:
        G = self.scale * u / (1 - u)
        g = np.zeros((*G.shape, dim))
        g[..., 0] = G
        return (noise.quantile(g, -np.expm1(log_h)) - G) / self.scale

    def _tabulate(self, noise: Noise, dim: int, degree: int) -> Floats:
        low, high = self.log_h
        u_nodes = (chebyshev.chebpts1(degree) + 1) / 2
        h_nodes = np.array([0.0]) if self.constant else chebyshev.chebpts1(degree)
        log_h = low + (high - low) * (h_nodes + 1) / 2
        exact = self._exact(noise, dim, *np.meshgrid(np.minimum(u_nodes, 1 - 1e-9), log_h, indexing="ij"))
        fine_u = np.linspace(-1, 1, 1025)
        along_u = chebyshev.chebval(fine_u, chebyshev.chebfit(2 * u_nodes - 1, exact, degree - 1)).T
        if self.constant:
            return np.repeat(along_u, 4, axis=1)
        fine_h = np.linspace(-1, 1, 257)
        return chebyshev.chebval(fine_h, chebyshev.chebfit(h_nodes, along_u.T, degree - 1))

    def _measure(self, noise: Noise, dim: int) -> float:
        rng = np.random.default_rng(0)
        low, high = self.log_h
        u, log_h = rng.random(100), rng.uniform(low, high, 100)
        G = self.scale * u / (1 - u)
        read = np.array([_read(self.values, low, high, self.scale, g, y) for g, y in zip(G, log_h, strict=True)])
        exact = G + self.scale * self._exact(noise, dim, u, log_h)
        return float(np.abs(read / exact - 1).max())


class NumbaLoop:
    """The loop over one chunk of steps; values that all chunks share are prepared once.

    Raises:
        Unsuited: The compiled code does not know the problem, or the quantile table is not exact enough.
    """

    def __init__(self, setup: Setup) -> None:
        problem = setup.problem
        if not isinstance(problem, AdditiveNoise) or type(problem) not in LANDSCAPES:
            raise Unsuited(f"the compiled loop does not know {problem!r}")
        noise = problem.noise
        if type(noise) not in DISTRIBUTIONS:
            raise Unsuited(f"the compiled loop does not know {problem!r}")
        self.wells = isinstance(problem, NonConvex)
        self.solver, self.parameters = THRESHOLD, np.zeros(4)
        self.table, self.table_box = np.zeros((4, 4)), np.zeros(3)
        self.tau = np.zeros(0)
        if setup.kind == "threshold":
            return
        if isinstance(noise, Pareto):
            self.solver = PARETO
            self.parameters = np.array([noise.tail, noise.scale, noise.shift, 1.0 if noise.one_sided else 0.5])
        elif isinstance(noise, Bernoulli):
            self.solver = BERNOULLI
            self.parameters = np.array([*noise.atoms, noise.probability, 0.0])
        else:
            self.solver = TABLE
            table = QuantileTable(noise, problem.dim, float(setup.level.min()), float(setup.level.max()))
            self.table, self.table_box = table.values, np.array([*table.log_h, table.scale])

    def __call__(self, setup: Setup, state: SimulationState, draws: Draws, first: int, offsets: np.ndarray) -> Records:
        """Advance the state over the chunk and return the records at the offsets (see `Loop`)."""
        problem = setup.problem
        assert isinstance(problem, AdditiveNoise)
        length, seeds = draws.counts.shape
        if self.tau.size != seeds:
            self.tau = np.zeros(seeds)
        records = Records.blank(offsets.size, seeds, problem.dim)
        _run_chunk(
            state.x, state.weighted, self.tau, problem.spectrum, problem.centre, self.wells,
            setup.gamma[first : first + length], setup.level[first : first + length], draws.examples, draws.counts,
            draws.noise, setup.noise_multiplier / setup.batch_size, float(setup.batch_size),
            self.solver, self.parameters, self.table, self.table_box, offsets, *records,
        )  # fmt: skip
        return records


@njit(cache=True, error_model="numpy")
def _weight(x: float) -> tuple[float, float, float, float]:
    """Return the cubic Lagrange weights at 0 <= x <= 1 for nodes -1, 0, 1, 2."""
    return (
        -x * (x - 1) * (x - 2) / 6,
        (x + 1) * (x - 1) * (x - 2) / 2,
        -(x + 1) * x * (x - 2) / 2,
        (x + 1) * x * (x - 1) / 6,
    )


@njit(cache=True, error_model="numpy")
def _read(table: Floats, low: float, high: float, scale: float, G: float, log_h: float) -> float:
    """Return the quantile at gradient norm G, from the table of ``(tau - G)/scale``."""
    rows, columns = table.shape
    u = G / (G + scale) * (rows - 1)
    i = min(max(int(u), 1), rows - 3)
    wu = _weight(u - i)
    v = (log_h - low) / (high - low) * (columns - 1) if high - low > 1e-12 else 1.0
    j = min(max(int(v), 1), columns - 3)
    wv = _weight(v - j)
    total = 0.0
    for a in range(4):
        for b in range(4):
            total += wu[a] * wv[b] * table[i - 1 + a, j - 1 + b]
    return G + scale * total


@njit(cache=True, error_model="numpy")
def _pareto_tail(x: float, parameters: Floats) -> tuple[float, float]:
    """Return ``P(xi <= x)`` and its density.

    The parameters are those of the noise: tail index, scale, shift that centres it, and mass of one tail.
    """
    tail, scale, shift, mass = parameters
    x += shift
    if abs(x) <= scale:
        return 1 - mass, 0.0
    side = mass * (scale / abs(x)) ** tail
    density = tail * side / abs(x)
    if x > 0:
        return 1 - side, density
    return (side, density) if mass < 1 else (0.0, 0.0)


@njit(cache=True, error_model="numpy")
def _pareto_quantile(g: float, p: float, parameters: Floats, guess: float) -> float:
    """Return the p-quantile of ``|g + xi|``, by Newton's method inside a shrinking bracket."""
    low = 0.0
    high = abs(g) + parameters[2] + 2 * parameters[1] * (1 - p) ** (-1 / parameters[0])
    k = guess if low < guess < high else (low + high) / 2
    width = high - low
    for i in range(200):
        right, right_density = _pareto_tail(k - g, parameters)
        left, left_density = _pareto_tail(-k - g, parameters)
        excess = right - left - p
        if excess >= 0:
            high = k
        else:
            low = k
        density = right_density + left_density
        step = k - excess / density if density > 0 else -1.0
        slow = False  # every fourth time, check that the bracket has halved: at a jump of the density it may not
        if i % 4 == 3:
            slow, width = high - low > width / 2, high - low
        if slow or not (low < step < high):
            step = (low + high) / 2
        if abs(step - k) <= 1e-14 * k or high - low <= 1e-14 * high:
            return step
        k = step
    return high


@njit(cache=True, error_model="numpy")
def _bernoulli_quantile(g: float, p: float, parameters: Floats) -> float:
    """Return the smaller of the two norms if its probability reaches p, else the larger."""
    jumped, stayed = abs(g + parameters[0]), abs(g + parameters[1])
    if jumped < stayed:
        return jumped if parameters[2] >= p - 1e-15 else stayed
    if stayed < jumped:
        return stayed if 1 - parameters[2] >= p - 1e-15 else jumped
    return jumped


@njit(cache=True, error_model="numpy")
def _fill_gradient(gradient: Floats, x: Floats, centre: Floats, spectrum: Floats, wells: bool, axes: int):  # noqa: ANN202
    """Write the full gradient at x; return its squared norm, and the part of it in coordinates without noise."""
    square = 0.0
    for j in range(x.size):
        u = x[j] - centre[j]
        gradient[j] = spectrum[j] * (2 * u / (1 + u * u) ** 2 if wells else u)
        square += gradient[j] ** 2
    rest = 0.0
    for j in range(axes, x.size):
        rest += gradient[j] ** 2
    return square, rest


@njit(cache=True, error_model="numpy")
def _threshold(solver, level, last, gradient, square, rest, parameters, table, table_box) -> float:
    """Return the threshold of a step; ``last`` is that of the step before."""
    if solver == THRESHOLD:
        return level
    if solver == TABLE:
        return _read(table, table_box[0], table_box[1], table_box[2], np.sqrt(square), np.log1p(-level))
    if solver == PARETO:
        guess = np.sqrt(max(last**2 - rest, 0.0))
        return np.sqrt(_pareto_quantile(gradient[0], level, parameters, guess) ** 2 + rest)
    return np.sqrt(_bernoulli_quantile(gradient[0], level, parameters) ** 2 + rest)


@njit(cache=True, error_model="numpy")
def _sum_clipped(update: Floats, gradient: Floats, rest: float, xi: Floats, count: int, tau: float) -> int:
    """Write the sum of ``count`` clipped per-example gradients; return how many of them were not clipped."""
    dim, axes = update.size, xi.shape[1]
    kept = 0
    for j in range(dim):
        update[j] = 0.0
    for n in range(count):
        norm = rest
        for j in range(axes):
            norm += (gradient[j] + xi[n, j]) ** 2
        norm = np.sqrt(norm)
        factor = 1.0
        if norm > tau:
            factor = tau / norm
        if norm <= tau * (1 + SAME_NORM):
            kept += 1
        for j in range(axes):
            update[j] += factor * (gradient[j] + xi[n, j])
        for j in range(axes, dim):
            update[j] += factor * gradient[j]
    return kept


@njit(cache=True, parallel=True, error_model="numpy")
def _run_chunk(
    x, weighted, tau, spectrum, centre, wells, gammas, levels, xi, counts, noise, noise_scale, batch_size,
    solver, parameters, table, table_box, offsets, record_x, record_tau, record_unclipped, record_weighted,
) -> None:  # fmt: skip
    steps, seeds = counts.shape
    dim, axes = x.shape[1], xi.shape[3]
    for s in prange(seeds):
        gradient, update = np.empty(dim), np.empty(dim)
        row = 0
        for i in range(steps):
            square, rest = _fill_gradient(gradient, x[s], centre, spectrum, wells, axes)
            tau[s] = _threshold(solver, levels[i], tau[s], gradient, square, rest, parameters, table, table_box)
            kept = _sum_clipped(update, gradient, rest, xi[i, s], counts[i, s], tau[s])

            if row < offsets.size and offsets[row] == i:
                record_x[row, s] = x[s]
                record_tau[row, s] = tau[s]
                record_unclipped[row, s] = kept / counts[i, s] if counts[i, s] > 0 else np.nan
                record_weighted[row, s] = weighted[s]
                row += 1
            weighted[s] += gammas[i] * square
            for j in range(dim):
                step = update[j] / batch_size
                if noise_scale > 0:
                    step += noise_scale * tau[s] * noise[i, s, j]
                x[s, j] -= gammas[i] * step
