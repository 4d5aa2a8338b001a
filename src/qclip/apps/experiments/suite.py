"""The problems of the claims."""

from dataclasses import dataclass

import numpy as np

from qclip._validate import Floats
from qclip.simulation.problems import (
    Gaussian,
    HeavyTailedQuadratic,
    Logistic,
    NonConvex,
    Pareto,
    Problem,
    StudentT,
    TwoPoint,
)


@dataclass(frozen=True)
class SuiteCase:
    """A problem with its name and an initial point."""

    name: str
    problem: Problem
    x0: Floats

    def moments(self, candidates: tuple[float, ...] = (1.2, 1.5, 2.0)) -> list[float]:
        """Return the candidates q for which the noise has a q-th moment."""
        return [q for q in candidates if np.isfinite(self.problem.sigma(q))]


def cases(rng: np.random.Generator) -> list[SuiteCase]:
    """Return problems of every kind: light and heavy tails, symmetric and skewed, atoms, finite sum, non-convex."""
    spectrum = np.geomspace(0.1, 1, 5)
    problems: dict[str, Problem] = {
        "quadratic, Gaussian": HeavyTailedQuadratic(10, Gaussian(0.3)),
        "quadratic, Student t (2.5)": HeavyTailedQuadratic(5, StudentT(2.5, 0.3), spectrum),
        "quadratic, Pareto (1.7)": HeavyTailedQuadratic(1, Pareto(1.7, 0.5)),
        "quadratic, one-sided Pareto (2.2)": HeavyTailedQuadratic(3, Pareto(2.2, 0.5, one_sided=True)),
        "two points": TwoPoint(2, 0.7),
        "non-convex wells, Student t (3)": NonConvex(3, StudentT(3, 0.3)),
        "logistic, heavy rows": Logistic.generate(120, 4, rng, tail=2.5),
    }
    return [
        SuiteCase(name, problem, problem.minimiser + rng.standard_normal(problem.dim))
        for name, problem in problems.items()
    ]


def points(case: SuiteCase, rng: np.random.Generator, count: int) -> Floats:
    """Return points around the minimiser at distances over several decades, [count, d]."""
    direction = rng.standard_normal((count, case.problem.dim))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return case.problem.minimiser + direction * np.geomspace(1e-2, 1e1, count)[:, None]
