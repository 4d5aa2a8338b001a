"""Schedules: do the coupled ones converge, as fast as predicted, and which exponents are better?"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from qclip import schedules, theory
from qclip._validate import Floats
from qclip.experiments.claim import Effort, Outcome, Slope, claim, fit_slope
from qclip.problems import HeavyTailedQuadratic, Pareto, TwoPoint
from qclip.simulate import simulate
from qclip.theory import Form

STEP_SIZE, CLIPPED = 0.5, 0.3


@dataclass(frozen=True)
class Measured:
    """One schedule on one problem: the running mean at each recorded length, and its exponent."""

    lengths: Floats
    means: Floats
    slope: Slope
    bound_slope: float
    bound: Floats
    rate: float


@lru_cache
def measure(q: float, form: Form, effort: Effort) -> Measured:
    """Skewed Pareto noise with barely more than q moments, where the clipping bias is as large as Lemma 1 allows."""
    problem = HeavyTailedQuadratic(1, Pareto(q + 0.05, one_sided=True))
    x0 = np.array([problem.sigma(q)])
    steps = effort.pick(10**5, 10**6)
    gamma, p = schedules.coupled(q, STEP_SIZE, CLIPPED, form)
    run = simulate(
        problem, step_size=gamma, p=p, steps=steps, x0=x0, seeds=effort.pick(16, 32), record=60, seed=effort.seed
    )
    wanted = run.steps >= steps // 1000  # three decades
    lengths = run.steps[wanted].astype(float)
    slope = fit_slope(lengths, run.mean_grad_norm2[wanted], effort.rng())
    a = problem.assumptions(x0, q)
    all_gamma, all_p = schedules.values(gamma, steps), schedules.values(p, steps)
    at = np.unique(np.geomspace(steps // 1000, steps, 7).astype(int))
    bounds = np.array([theory.bound(a, all_gamma[:T], all_p[:T], form=form).total for T in at])
    bound_slope = float(np.polyfit(np.log(at), np.log(bounds), 1)[0])
    means = run.mean_grad_norm2[wanted].mean(1)
    return Measured(lengths, means, slope, bound_slope, np.stack([at, bounds]), theory.rates(q, form).rate)


def _rate(q: float, effort: Effort) -> Outcome:
    m = measure(q, "printed", effort)

    def draw():  # noqa: ANN202
        from qclip.report.style import label, new_figure

        figure, (ax,) = new_figure()
        ax.loglog(m.lengths, m.means, label=f"measured, exponent {m.slope.value:.3f}")
        ax.loglog(m.lengths, m.means[-1] * (m.lengths / m.lengths[-1]) ** -m.rate, "k--", linewidth=0.8,
                  label=f"T^-{m.rate:.3f}")  # fmt: skip
        ax.loglog(*m.bound, ":", label="bound (printed form)")
        label(ax, "steps T", "weighted mean of ||∇f||²", f"the paper's schedule, q = {q:g}")
        return figure

    return Outcome(
        expected=f"exponent -{m.rate:.4f}; the bound's own over these lengths, its log T included, {m.bound_slope:.3f}",
        measured=f"exponent {m.slope} over {np.log10(m.lengths[-1] / m.lengths[0]):.0f} decades of T",
        # No slower than the theorem says, and not so fast that the problem would not be testing it.
        printed=bool(m.slope.high <= m.bound_slope and m.slope.value >= -m.rate - 0.1),
        error="95 % interval, resampled over seeds",
        values={"slope": m.slope.value, "low": m.slope.low, "high": m.slope.high, "predicted": -m.rate},
        draw=draw,
    )


@claim("schedule-rate-q2", "gamma_t ~ t^(-2/3), 1-p_t ~ t^(-1/3) gives the rate T^(-1/3) for q = 2", "time-varying")
def schedule_rate_q2(effort: Effort) -> Outcome:
    """The exponent of the paper's schedule under bounded variance."""
    return _rate(2.0, effort)


@claim("schedule-rate-q1.5", "theta = 1/4, nu = -3/8 gives the rate T^(-1/4) for q = 1.5", "time-varying")
def schedule_rate_q15(effort: Effort) -> Outcome:
    """The exponent of the paper's schedule under heavier tails."""
    return _rate(1.5, effort)


def _sharp_rate(q: float, effort: Effort) -> Outcome:
    sharp, printed = measure(q, "sharp", effort), measure(q, "printed", effort)

    def draw():  # noqa: ANN202
        from qclip.report.style import label, new_figure

        figure, (ax,) = new_figure()
        for m, name in ((printed, "the paper's schedule"), (sharp, "the sharp schedule")):
            ax.loglog(m.lengths, m.means, label=f"{name}: {m.slope.value:.3f} (predicted {-m.rate:.3f})")
            ax.loglog(m.lengths, m.means[-1] * (m.lengths / m.lengths[-1]) ** -m.rate, "k--", linewidth=0.7)
        label(ax, "steps T", "weighted mean of ||∇f||²", f"q = {q:g}: measured exponents")
        return figure

    faster = sharp.slope.high < printed.slope.low and sharp.means[-1] < printed.means[-1]
    return Outcome(
        expected=f"exponent -{sharp.rate:.4f} instead of -{printed.rate:.4f}, and a smaller value",
        measured=f"exponent {sharp.slope} against {printed.slope}; "
        f"value {sharp.means[-1]:.3g} against {printed.means[-1]:.3g}",
        printed=bool(faster and sharp.slope.high <= sharp.bound_slope and sharp.slope.value >= -sharp.rate - 0.1),
        error="95 % interval, resampled over seeds",
        values={
            "sharp_slope": sharp.slope.value,
            "printed_slope": printed.slope.value,
            "sharp_value": float(sharp.means[-1]),
            "printed_value": float(printed.means[-1]),
        },
        draw=draw,
    )


@claim("sharp-rate-q2", "The sharp schedule, gamma_t and 1-p_t ~ t^(-1/2), converges as T^(-1/2) for q = 2", "sharp")
def sharp_rate_q2(effort: Effort) -> Outcome:
    """The better exponents beat the paper's under bounded variance."""
    return _sharp_rate(2.0, effort)


@claim("sharp-rate-q1.5", "The sharp schedule converges as T^(-2/5) for q = 1.5", "sharp")
def sharp_rate_q15(effort: Effort) -> Outcome:
    """The better exponents beat the paper's under heavier tails."""
    return _sharp_rate(1.5, effort)


@claim("schedule-removes-bias", "With p_t -> 1 and gamma_t -> 0 QC-SGD reaches the stationary point", "time-varying")
def schedule_removes_bias(effort: Effort) -> Outcome:
    """Fixed against scheduled quantiles, on a problem with atoms and one with a skewed tail."""
    steps = effort.pick(20_000, 200_000)
    problems = {
        "two points": (TwoPoint(2, 0.7), [1.0], 0.6),
        "one-sided Pareto": (HeavyTailedQuadratic(1, Pareto(2.5, 0.5, one_sided=True)), [1.0], 0.6),
    }
    gamma, p = schedules.coupled(2, STEP_SIZE, 1 - 0.6, "printed")
    curves = {}
    for name, (problem, x0, fixed) in problems.items():
        for how, quantile in (("fixed p", fixed), ("scheduled p", p)):
            curves[name, how] = simulate(problem, step_size=gamma, p=quantile, steps=steps, x0=x0, seed=effort.seed)
    drop = {
        name: float(curves[name, "scheduled p"].grad_norm2[-1].mean() / curves[name, "fixed p"].grad_norm2[-1].mean())
        for name in problems
    }

    def draw():  # noqa: ANN202
        from qclip.report.style import label, new_figure

        figure, axes = new_figure(2, width=8.5)
        for ax, name in zip(axes, problems, strict=True):
            for how in ("fixed p", "scheduled p"):
                run = curves[name, how]
                ax.loglog(run.steps[1:], run.grad_norm2[1:].mean(1), label=how)
            label(ax, "step", "||∇f||²", name)
        return figure

    return Outcome(
        expected="the fixed quantile stalls; the scheduled one falls below a tenth of it and goes on falling",
        measured="; ".join(f"{name}: {value:.2g} of the fixed quantile's" for name, value in drop.items()),
        printed=all(value < 0.1 for value in drop.values()),
        error="means over 64 seeds",
        values={f"ratio, {name}": value for name, value in drop.items()},
        draw=draw,
    )


@claim("log-factor", "The coupled schedule's bound is of order T^(-1/3), with no logarithm", "erratum J")
def log_factor(effort: Effort) -> Outcome:
    """Multiply the bound by T^(1/3): it should stay put; it grows with log T, unless gamma and p are constant."""
    a = theory.Assumptions(L=1, sigma=1, q=2, gap=1)
    r = theory.rates(2, "printed")
    gamma, p = schedules.coupled(2, STEP_SIZE, CLIPPED, "printed")
    lengths = np.unique(np.geomspace(1e3, effort.pick(10**6, 10**7), 9).astype(int))
    all_gamma, all_p = schedules.values(gamma, int(lengths[-1])), schedules.values(p, int(lengths[-1]))
    # beta and c fixed, so that only the schedule moves the bound
    varying = [theory.bound(a, all_gamma[:T], all_p[:T], 0.3, 0.1, form="printed").total * T**r.rate for T in lengths]
    constant = [
        theory.bound(
            a, STEP_SIZE * T ** (r.theta - 1), 1 - CLIPPED * T**r.nu, 0.3, 0.1, steps=int(T), form="printed"
        ).total
        * T**r.rate
        for T in lengths
    ]
    growth = [float(np.polyfit(np.log(lengths), np.array(v) / v[0], 1)[0]) for v in (varying, constant)]

    def draw():  # noqa: ANN202
        from qclip.report.style import label, new_figure

        figure, (ax,) = new_figure()
        ax.semilogx(lengths, varying, "o-", markersize=3, label="γ_t, p_t varying with t")
        ax.semilogx(lengths, constant, "o-", markersize=3, label="γ, p constant, tuned to T")
        label(ax, "steps T", "bound · T^(1/3)", "the varying schedule carries a log T")
        return figure

    return Outcome(
        expected="bound times T^(1/3) constant in T",
        measured=f"grows by {growth[0]:.3f} of its first value per unit of log T; tuned constants: {growth[1]:.1e}",
        printed=bool(abs(growth[0]) < 0.01),
        repaired=bool(growth[0] > 0.01 and abs(growth[1]) < 0.01),
        error="exact sums",
        values={"growth_varying": growth[0], "growth_constant": growth[1]},
        draw=draw,
    )
