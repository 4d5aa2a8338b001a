"""Claims about Lemmas 1 and 2, at exact quantiles and exact moments."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure
from scipy import integrate

from qclip import theory
from qclip._validate import Floats
from qclip.apps.experiments.claim import Effort, Outcome, bars, claim
from qclip.apps.experiments.suite import SuiteCase, cases, points
from qclip.apps.report.style import label, new_figure
from qclip.simulation.problems import Bernoulli, HeavyTailedQuadratic, Logistic, Problem, TwoPoint
from qclip.simulation.simulate import simulate
from qclip.theory import Assumptions

FRACTIONS = np.geomspace(0.01, 0.95, 25)  # h = 1 - p


def _unit_gap(problem: Problem, q: float) -> Assumptions:
    return Assumptions(problem.L, problem.sigma(q), q, 1.0)


Ratio = Callable[[Problem, Floats, float, list[float]], float]


def _ratios(case: SuiteCase, rng: np.random.Generator, count: int, ratio: Ratio) -> Floats:
    """Return the largest ratio of the two sides over moments and points, for each clipped fraction."""
    x = points(case, rng, count)
    return np.array([ratio(case.problem, x, 1 - h, case.moments()) for h in FRACTIONS])


def _threshold_ratio(problem: Problem, x: Floats, p: float, qs: list[float]) -> float:
    tau, G = problem.quantile(x, p), np.linalg.norm(problem.grad(x), axis=-1)
    assumptions = [_unit_gap(problem, q) for q in qs]
    return max(t / theory.lemma1_threshold(a, p, g) for a in assumptions for t, g in zip(tau, G, strict=True))


def _bias_ratio(problem: Problem, x: Floats, p: float, qs: list[float]) -> float:
    moments = problem.clip_moments(x, problem.quantile(x, p))
    bias = np.linalg.norm(moments.mean - moments.mean_factor[..., None] * problem.grad(x), axis=-1)
    return max(bias.max() / theory.lemma1_bias(_unit_gap(problem, q), p) for q in qs)


def _extremal_threshold(h: float) -> float:
    """Return the ratio at a minimiser with noise of ±1 with probability just above h, else 0.

    The quantile is 1 and sigma^2 is that probability.
    """
    mass = h * (1 + 1e-9)
    a = Assumptions(1.0, mass**0.5, 2.0, 1.0)
    values, probabilities = np.array([0.0, 1.0]), np.array([1 - mass, mass])
    quantile = values[np.argmax(np.cumsum(probabilities) >= 1 - h)]
    return float(quantile) / theory.lemma1_threshold(a, 1 - h, 0.0)


def _extremal_bias(h: float) -> float:
    """Return the ratio for a jump with probability h (at most 1/2), where the other gradient vanishes.

    Clipping removes the jump entirely.
    """
    mass = min(h, 0.5)
    problem = HeavyTailedQuadratic(1, Bernoulli(1.0, mass))
    return _bias_ratio(problem, np.full((1, 1), mass), 1 - h, [2.0])


def _lemma1(effort: Effort, ratio: Ratio, extremal: Callable[[float], float], side: str) -> Outcome:
    rng = effort.rng()
    curves = {case.name: _ratios(case, rng, effort.pick(8, 40), ratio) for case in cases(rng)}
    edge = np.array([extremal(h) for h in FRACTIONS])
    worst = max(curve.max() for curve in curves.values())

    def draw() -> Figure:
        figure, (ax,) = new_figure(width=7.6)
        for name, curve in curves.items():
            ax.semilogx(FRACTIONS, curve, label=name, linewidth=1.2)
        ax.semilogx(FRACTIONS, edge, "k--", label="extremal distribution, q = 2", linewidth=1)
        ax.axhline(1, color="k", linewidth=0.6)
        label(ax, "clipped fraction h = 1 - p", f"{side} / bound", "Lemma 1: largest ratio over x and q", legend=False)
        ax.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        return figure

    return Outcome(
        expected="ratio of the two sides at most 1 everywhere, and close to 1 for an extremal distribution",
        measured=f"largest ratio {worst:.4f} over {len(curves)} problems; extremal distribution {edge.max():.4f}",
        printed=bool(max(worst, edge.max()) <= 1 + 1e-4 and edge.max() > 0.98),
        error="quadrature: a few 1e-5 at worst; 1e-4 allowed",
        values={"largest_ratio": float(worst), "extremal_ratio": float(edge.max())},
        draw=draw,
    )


@claim("lemma1-threshold", "The p-quantile of ||g|| is at most ||grad f|| + sigma (1-p)^(-1/q)", "Lemma 1, eq. 6")
def lemma1_threshold(effort: Effort) -> Outcome:
    """Compare exact quantiles with the bound."""
    return _lemma1(effort, _threshold_ratio, _extremal_threshold, "threshold")


@claim("lemma1-bias", "||E[clipped g] - E[alpha] grad f|| is at most sigma (1-p)^(1-1/q)", "Lemma 1, eq. 7")
def lemma1_bias(effort: Effort) -> Outcome:
    """Compare exact clipped means with the bound."""
    return _lemma1(effort, _bias_ratio, _extremal_bias, "bias")


@claim("lemma2-recursion", "One step of QC-SGD decreases f by at least what Lemma 2 says", "Lemma 2, eq. 8")
def lemma2_recursion(effort: Effort) -> Outcome:
    """Compare the expected decrease at the states of runs with the lemma, on the quadratics and the finite sum.

    For a non-flat spectrum the smoothness bound replaces the decrease: the lemma must hold for it too.
    """
    rng = effort.rng()
    points = []  # actual change and limit, over gamma (G^2 + sigma^2)
    for case in cases(rng):
        problem = case.problem
        if not isinstance(problem, HeavyTailedQuadratic | TwoPoint | Logistic):
            continue
        for p, beta in ((0.5, 0.4), (0.9, 0.6)):
            gamma = 0.1 / problem.L
            steps = effort.pick(15, 150)
            run = simulate(
                problem, step_size=gamma, p=p, steps=steps, x0=case.x0, seeds=1, record=range(steps), seed=rng
            )
            states = run.x[:-1, 0]
            change = _expected_change(problem, states, p, gamma)
            factors = problem.clip_moments(states, problem.quantile(states, p)).mean_factor
            norms = np.linalg.norm(problem.grad(states), axis=-1)
            for q in case.moments():
                a = _unit_gap(problem, q)
                for actual, factor, G in zip(change, factors, norms, strict=True):
                    limit = theory.lemma2_descent(a, gamma, p, float(G), beta=beta, mean_factor=float(factor))
                    points.append(np.array([actual, limit]) / (gamma * (G**2 + a.sigma**2)))
    actual, limit = np.array(points).T
    excess = float((actual - limit).max())

    def draw() -> Figure:
        figure, (ax,) = new_figure()
        ax.plot(limit, actual, ".", markersize=3)
        ax.plot([actual.min(), limit.max()], [actual.min(), limit.max()], "k-", linewidth=0.8)
        label(
            ax, "Lemma 2's limit / γ(G² + σ²)", "expected change of f / γ(G² + σ²)", "below the line: the lemma holds"
        )
        return figure

    return Outcome(
        expected="E f(x_(t+1)) - f(x_t) at most the right-hand side at every step",
        measured=f"largest excess, relative to gamma (G^2 + sigma^2): {excess:.3f} ({len(points)} steps)",
        printed=bool(excess <= 1e-4),
        error="quadrature: a few 1e-5 at worst; 1e-4 allowed",
        values={"largest_excess": excess, "steps_checked": float(len(points))},
        draw=draw,
    )


def _expected_change(problem: Problem, x: Floats, p: float, gamma: float) -> Floats:
    """Return ``E f(x - gamma clip(g)) - f(x)``: exact for a finite sum, by smoothness for a quadratic.

    For a quadratic the smoothness inequality with ``L`` is exact when the spectrum is flat, an upper bound otherwise.
    """
    tau = problem.quantile(x, p)
    if isinstance(problem, Logistic):
        n = len(problem.labels)
        g = problem.example_gradients(x, np.broadcast_to(np.arange(n), (len(x), n)))
        factor = np.minimum(1, tau[:, None] / np.linalg.norm(g, axis=-1))
        return problem.loss(x[:, None] - gamma * factor[..., None] * g).mean(-1) - problem.loss(x)
    moments = problem.clip_moments(x, tau)
    along = (problem.grad(x) * moments.mean).sum(-1)
    return -gamma * along + gamma**2 * problem.L / 2 * moments.second_moment


@claim(
    "lemma1-proof-step",
    "P(|delta| > Q) <= (E|delta| / Q)^q, as the proof of Lemma 1 has it",
    "erratum E",
    how="evaluated",
)
def lemma1_proof_step(effort: Effort) -> Outcome:  # noqa: ARG001  (exact: the same at any effort)
    """Evaluate a counterexample: |delta| = 0 with probability .85, else uniform on [1, 1.01]; p = .9, q = 2."""
    Q = 1 + 0.01 * 0.05 / 0.15  # the .9-quantile: .05 of the mass .15 lies below it
    tail = 0.15 * (1.01 - Q) / 0.01
    mean = 0.15 * integrate.quad(lambda u: u / 0.01, 1, 1.01)[0]
    square = 0.15 * integrate.quad(lambda u: u**2 / 0.01, 1, 1.01)[0]
    step, repair = (mean / Q) ** 2, square / Q**2
    return Outcome(
        expected="P(|delta| > Q) at most (E|delta|/Q)^q; with E|delta|^q/Q^q instead, Markov's inequality",
        measured=f"P = {tail:.4f}, (E|delta|/Q)^q = {step:.4f}, E|delta|^q/Q^q = {repair:.4f}",
        printed=tail <= step,
        repaired=tail <= repair,
        error="exact",
        values={"probability": tail, "printed": step, "repaired": repair},
        draw=lambda: bars(
            {"P(|δ| > Q)": tail, "(E|δ|/Q)^q, printed": step, "E|δ|^q/Q^q, Markov": repair}, "probability"
        ),
    )
