"""The compiled loop equals the numpy loop on the same draws, and its quantile table is as good as it says."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from qclip import simulate as module
from qclip.schedules import coupled
from qclip.simulation._numba_loop import TABLE_TOLERANCE, QuantileTable, _pareto_quantile, _read
from qclip.simulation.problems import (
    AdditiveNoise,
    Bernoulli,
    Gaussian,
    HeavyTailedQuadratic,
    Logistic,
    NonConvex,
    Pareto,
    ShiftedQuadratic,
    StudentT,
    TwoPoint,
)
from qclip.simulation.simulate import simulate
from shards import every

# Along an axis both loops solve the same closed-form law; noise of uniform direction is read from a table.
LAWS = {
    "gaussian": (Gaussian(0.7), 1e-6),
    "student": (StudentT(3.0, 0.5), 1e-6),
    "pareto": (Pareto(1.5, 0.4), 1e-11),
    "one-sided pareto": (Pareto(1.5, 0.4, one_sided=True), 1e-11),
    "bernoulli": (Bernoulli(2.0, 0.3), 1e-12),
}
GAMMA, P = coupled(1.5, step_size=0.2, clipped_fraction=0.4)
METHODS = {
    "constant p": {"step_size": 0.1, "p": 0.63},
    "scheduled p": {"step_size": GAMMA, "p": P},
    "tau": {"step_size": 0.1, "tau": 0.8},
    "plain": {"step_size": 0.1},
}
BATCHES = {
    "one example": {},
    "batch": {"batch_size": 3},
    "noise": {"batch_size": 3, "noise_multiplier": 0.5},
    "poisson": {"batch_size": 3, "sampling": "poisson"},
    "poisson and noise": {"batch_size": 2, "sampling": "poisson", "noise_multiplier": 0.5},
}
RUNS = [
    (method, batch)
    for method in METHODS
    for batch in BATCHES
    if not (method == "plain" and "noise" in batch)  # noise is scaled by a threshold, and plain SGD has none
]


def assert_loops_agree(problem, tolerance: float, **arguments) -> None:
    runs = [simulate(problem, loop=loop, **arguments) for loop in ("numpy", "compiled")]
    scale = max(1.0, np.abs(runs[0].final).max())
    np.testing.assert_allclose(runs[1].final, runs[0].final, rtol=tolerance, atol=tolerance * scale)
    for name in ("grad_norm2", "loss", "tau", "mean_grad_norm2"):
        one, two = (getattr(run, name) for run in runs)
        np.testing.assert_allclose(two, one, rtol=10 * tolerance, atol=10 * tolerance * scale, err_msg=name)
    np.testing.assert_allclose(runs[1].unclipped, runs[0].unclipped, atol=1e-15)


@pytest.mark.parametrize(
    ("law", "method", "batch"), every(4, [(law, method, batch) for law in LAWS for method, batch in RUNS])
)
def test_the_loops_agree(law, method, batch):
    (noise, tolerance), method, batch = LAWS[law], METHODS[method], BATCHES[batch]
    problem = HeavyTailedQuadratic(spectrum=[1.0, 0.5, 0.1], centre=[0.3, -0.2, 0.0], noise=noise)
    if "p" not in method:
        tolerance = 1e-12
    assert_loops_agree(problem, tolerance, steps=40, x0=[1.0, -1.0, 2.0], seeds=4, record=range(40), **method, **batch)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("dim", [1, 2, 50])
@pytest.mark.parametrize("noise", [Gaussian(0.7), StudentT(3.0, 0.5)])
def test_the_loops_agree_in_any_dimension_at_any_quantile(noise, dim, p):
    problem = HeavyTailedQuadratic(dim, noise)
    assert_loops_agree(problem, 1e-6, step_size=0.1, p=p, steps=20, x0=np.full(dim, 0.5), seeds=3, record=range(20))


@pytest.mark.parametrize(
    "problem",
    [
        NonConvex(spectrum=[1.0, 0.5], centre=[0.3, -0.2], noise=Pareto(1.5, 0.4, one_sided=True)),
        NonConvex(2, Bernoulli(2.0, 0.3)),
        TwoPoint(r=2.0, omega=0.7),
        ShiftedQuadratic(jump=3.0, probability=0.25),
        HeavyTailedQuadratic(1, Pareto(2.5, 0.4)),
        HeavyTailedQuadratic(8, Bernoulli(2.0, 0.3)),
    ],
    ids=["wells, pareto", "wells, bernoulli", "two-point", "shifted", "line, pareto", "bernoulli in 8 dimensions"],
)
@pytest.mark.parametrize("p", [pytest.param(0.3, marks=pytest.mark.smoke), 0.7, 0.95])
def test_the_loops_agree_on_other_problems(problem, p):
    x0 = problem.minimiser + 0.7
    assert_loops_agree(problem, 1e-10, step_size=0.05, p=p, steps=200, x0=x0, seeds=4, record=range(200))


def test_the_loops_agree_across_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 8 * 4 * 3 * 2 * 7)  # 7 steps at a time
    problem = HeavyTailedQuadratic(3, Pareto(1.5, 0.4, one_sided=True))
    assert_loops_agree(problem, 1e-11, step_size=0.1, p=0.8, steps=40, x0=np.ones(3), seeds=4, record=[0, 6, 7, 20, 39])


def test_auto_is_the_compiled_loop_for_additive_noise():
    problem = HeavyTailedQuadratic(3, Gaussian(0.5))
    arguments: dict[str, Any] = {"step_size": 0.1, "p": 0.8, "steps": 20, "x0": np.ones(3), "seeds": 2}
    auto, compiled = (simulate(problem, loop=loop, **arguments) for loop in ("auto", "compiled"))
    np.testing.assert_array_equal(auto.final, compiled.final)


def test_auto_runs_where_the_table_is_refused():
    """A tail so heavy, at quantiles so close to 1, that the table may refuse: "auto" then has another loop."""
    problem = HeavyTailedQuadratic(1, StudentT(1.5))
    arguments: dict[str, Any] = {
        "step_size": 0.1,
        "p": lambda t: (0.6, 0.9999)[t % 2],
        "steps": 4,
        "x0": [1.0],
        "seeds": 2,
    }
    auto, reference = (simulate(problem, loop=loop, **arguments) for loop in ("auto", "numpy"))
    np.testing.assert_allclose(auto.final, reference.final, rtol=1e-5)


def test_the_compiled_loop_is_refused_for_other_problems():
    problem = Logistic.generate(10, 2, np.random.default_rng(0))
    with pytest.raises(
        ValueError, match=r"^loop = 'compiled' cannot run: the compiled loop does not know Logistic.*auto"
    ):
        simulate(problem, step_size=0.1, steps=1, x0=np.zeros(2), loop="compiled")


class Quartic(AdditiveNoise):
    """``sum x^4``: additive noise, but neither a quadratic nor wells."""

    def __init__(self):
        super().__init__(2, Pareto(2.5, 0.1), None, None)
        self.L = 12.0  # within the unit cube

    def loss(self, x):
        return (x**4).sum(-1)

    def grad(self, x):
        return 4 * x**3


@dataclass(frozen=True)
class Wrapped:
    """Another noise law along an axis, by delegation."""

    law: Pareto

    def draw(self, rng, shape, dim):
        return self.law.draw(rng, shape, dim)

    def sigma(self, q, dim):
        return self.law.sigma(q, dim)

    def quantile(self, g, p):
        return self.law.quantile(g, p)

    def clip_moments(self, g, tau):
        return self.law.clip_moments(g, tau)


@pytest.mark.parametrize("problem", [Quartic(), HeavyTailedQuadratic(2, Wrapped(Pareto(2.5, 0.4)))])
def test_a_problem_or_noise_of_ones_own_is_not_mistaken_for_a_known_one(problem):
    arguments: dict[str, Any] = {"step_size": 0.05, "p": 0.7, "steps": 20, "x0": [0.3, 0.9], "seeds": 3}
    auto, reference = (simulate(problem, loop=loop, **arguments) for loop in ("auto", "numpy"))
    np.testing.assert_allclose(auto.final, reference.final, rtol=1e-9)


@pytest.mark.parametrize(("low", "high"), [(0.6, 0.6), (0.1, 0.1), (0.6, 0.99)])
@pytest.mark.parametrize("dim", every(2, [1, 2, 10, 50]))
@pytest.mark.parametrize("noise", [Gaussian(0.7), StudentT(3.0, 0.5)])
def test_the_tables_error_is_below_its_tolerance(noise, dim, low, high):
    table = QuantileTable(noise, dim, low, high)
    assert table.error < TABLE_TOLERANCE
    rng = np.random.default_rng(12)
    G = np.concatenate([[0.0], 10 ** rng.uniform(-6, 5, 60)])
    p = rng.uniform(low, high, G.size)
    g = np.zeros((G.size, dim))
    g[:, -1] = G
    low_h, high_h = table.log_h
    points = zip(G, np.log1p(-p), strict=True)
    read = [_read(table.values, low_h, high_h, table.scale, size, log_h) for size, log_h in points]
    # The table measures its error at 100 points of its own; elsewhere it may be a little worse.
    np.testing.assert_allclose(read, noise.quantile(g, p), atol=3 * TABLE_TOLERANCE * table.scale, rtol=1e-13)


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("tail", [1.1, 2.0, 6.0])
def test_the_compiled_pareto_quantile_from_any_guess(one_sided, tail):
    noise = Pareto(tail, 0.4, one_sided)
    law = np.array([tail, 0.4, noise.shift, 1.0 if one_sided else 0.5])
    rng = np.random.default_rng(13)
    for _ in range(300):
        g, p = rng.normal() * rng.choice([0.01, 1, 100]), rng.uniform(0.01, 0.99)
        expected = float(noise.quantile(np.array([g]), p))
        for guess in (0.0, expected, expected * rng.uniform(0.1, 10), 1e9):
            assert _pareto_quantile(g, p, law, guess) == pytest.approx(expected, rel=1e-11)
