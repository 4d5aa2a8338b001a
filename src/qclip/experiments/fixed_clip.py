"""Clipping at a constant threshold, beside clipping at a quantile."""

from typing import Any

import numpy as np

from qclip import theory
from qclip.experiments.claim import Effort, Outcome, claim, fit_slope
from qclip.problems import HeavyTailedQuadratic, Pareto, ShiftedQuadratic
from qclip.simulate import simulate


@claim(
    "fixed-clip-fixed-point",
    "SGD clipped at tau stands still at x = -p tau/(1-p) for gradients x + a Bernoulli(p)",
    "Koloskova et al.",
)
def fixed_clip_fixed_point(effort: Effort) -> Outcome:
    """Simulated against the closed form."""
    rows = []
    for probability, tau in ((0.25, 1.0), (0.1, 2.0), (0.4, 0.5), (0.7, 1.5)):
        problem = ShiftedQuadratic(10, probability)
        gamma = 0.002
        run = simulate(
            problem, step_size=gamma, tau=tau, steps=effort.pick(20_000, 100_000), x0=problem.minimiser, seeds=64,
            record=[], seed=effort.rng(),
        )  # fmt: skip
        error = run.final.std() / 8
        rows.append((problem.fixed_point(tau), float(run.final.mean()), float(error)))
    deviations = [abs(found - exact) / error for exact, found, error in rows]
    return Outcome(
        expected=", ".join(f"{exact:.4f}" for exact, _, _ in rows),
        measured=", ".join(f"{found:.4f}" for _, found, _ in rows),
        printed=max(deviations) < 4.5,
        error="standard errors " + ", ".join(f"{e:.4f}" for *_, e in rows) + "; 4.5 allowed (1 in 10^5)",
        values={"largest_deviation_in_standard_errors": max(deviations)},
    )


def _growing(problem: HeavyTailedQuadratic, lam: float, lengths: np.ndarray, effort: Effort) -> np.ndarray:
    """||grad f||^2 where runs with gamma = T^(-1/2) and tau = T^lam end, [lengths, seeds]."""

    def final(T: int) -> np.ndarray:
        gamma, tau = T**-0.5, float(T) ** lam
        run = simulate(problem, step_size=gamma, tau=tau, steps=T, x0=[2.0], seeds=256, record=[], seed=effort.rng())
        return run.grad_norm2[-1]

    return np.stack([final(int(T)) for T in lengths])


@claim(
    "fixed-clip-growing-threshold",
    "With gamma ~ T^(-1/2) and tau ~ T^lambda, lambda > 0, clipped SGD converges; with a constant tau it does not",
    "fixed clipping, eq. 12",
)
def fixed_clip_growing_threshold(effort: Effort) -> Outcome:
    """Skewed noise, thresholds constant and growing."""
    problem = HeavyTailedQuadratic(1, Pareto(2.05, one_sided=True))
    lengths = np.geomspace(1e2, effort.pick(10**5, 10**6), 7).astype(int)
    means = {lam: _growing(problem, lam, lengths, effort) for lam in (0.0, 0.125, 0.25)}
    slopes = {lam: fit_slope(lengths[3:], means[lam][3:], effort.rng()) for lam in means}
    curves = {lam: values.mean(1) for lam, values in means.items()}
    left = {lam: float(curve[-1] / curve[0]) for lam, curve in curves.items()}

    def draw():  # noqa: ANN202
        from qclip.report.style import label, new_figure

        figure, (ax,) = new_figure()
        for lam, curve in curves.items():
            ax.loglog(lengths, curve, "o-", markersize=3, label=f"λ = {lam:g}: exponent {slopes[lam].value:.2f}")
        label(ax, "steps T", "final ||∇f||²", "γ = T^(-1/2), τ = T^λ")
        return figure

    return Outcome(
        expected="where runs end falls steadily towards 0 for lambda = 1/8 and 1/4, and stays for lambda = 0",
        measured="; ".join(
            f"lambda = {lam:g}: {left[lam]:.2f} of the first value, exponent {slopes[lam]}" for lam in means
        ),
        printed=bool(
            left[0.0] > 0.8 and all((np.diff(curves[lam]) < 0).all() and left[lam] < 1 / 4 for lam in (0.125, 0.25))
        ),
        error="95 % intervals, resampled over 256 seeds",
        values={f"slope, lambda = {lam:g}": slopes[lam].value for lam in means},
        draw=draw,
    )


@claim("fixed-clip-lambda", "lambda in (0, 1/4) is the interval to choose tau ~ T^lambda from", "erratum H")
def fixed_clip_lambda(effort: Effort) -> Outcome:  # noqa: ARG001  (exact: the same at any effort)
    """The exponent of the order-level bound at each lambda: the best, -1/2, needs lambda >= 1/4."""
    a = theory.Assumptions(L=1, sigma=1, q=2, gap=1)
    lambdas = np.round(np.linspace(0.05, 0.5, 10), 3)
    lengths = np.geomspace(1e10, 1e14, 5)

    def exponent(lam: float) -> float:
        totals = [theory.fixed_clip_bound(a, T**-0.5, T**lam, steps=int(T)).total for T in lengths]
        return float(np.polyfit(np.log(lengths), np.log(totals), 1)[0])

    exponents = np.array([exponent(lam) for lam in lambdas])
    inside, edge = lambdas < 0.25, exponents[lambdas == 0.25][0]
    best_inside = exponents[inside].min()
    return Outcome(
        expected="the best exponent, -1/2, reached inside (0, 1/4)",
        measured=f"best inside: {best_inside:.3f}; at 1/4: {edge:.3f}; at 1/2: {exponents[-1]:.3f}",
        printed=bool(best_inside < edge + 0.005),
        repaired=bool(abs(edge + 0.5) < 0.01 and abs(exponents[-1] + 0.5) < 0.01),
        error="the terms of lower order at these T",
        values={"best_inside": float(best_inside), "at_a_quarter": float(edge)},
    )


@claim(
    "fixed-clip-vs-quantile",
    "A quantile follows the scale of the problem; a constant threshold must be tuned to it",
    "section 3.3",
)
def fixed_clip_vs_quantile(effort: Effort) -> Outcome:
    """One problem at five scales, with one quantile and one threshold for all."""
    scales = np.array([0.01, 0.1, 1.0, 10.0, 100.0])
    methods: dict[str, dict[str, Any]] = {
        "quantile, p = 0.9": {"p": 0.9},
        "threshold, τ = 1": {"tau": 1.0},
        "plain SGD": {},
    }
    relative = {name: [] for name in methods}
    for scale in scales:
        problem = HeavyTailedQuadratic(1, Pareto(2.05, scale, one_sided=True))
        for name, how in methods.items():
            run = simulate(
                problem, step_size=0.01, steps=effort.pick(2000, 20_000), x0=[5 * scale], seeds=256, seed=effort.rng(),
                record=[], **how,
            )  # fmt: skip
            relative[name].append(float((problem.grad(run.final) ** 2).mean()) / scale**2)
    spread = {name: max(values) / min(values) for name, values in relative.items()}

    def draw():  # noqa: ANN202
        from qclip.report.style import label, new_figure

        figure, (ax,) = new_figure()
        for name, values in relative.items():
            ax.loglog(scales, values, "o-", markersize=4, label=name)
        label(ax, "scale of the gradients", "final ||∇f||² / scale²", "one setting at five scales")
        return figure

    quantile, threshold = spread["quantile, p = 0.9"], spread["threshold, τ = 1"]
    return Outcome(
        expected="the quantile's result is the same at every scale; the threshold's differs by orders of magnitude",
        measured=f"largest over smallest relative result: quantile {quantile:.6f}, threshold {threshold:.3g}",
        printed=bool(quantile < 1 + 1e-6 and threshold > 100),
        error="same draws at every scale: the quantile's equality is exact up to rounding",
        values={"spread_quantile": quantile, "spread_threshold": threshold},
        draw=draw,
    )
