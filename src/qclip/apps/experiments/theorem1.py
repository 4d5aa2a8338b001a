"""Claims about Theorem 1 and Corollary 1: QC-SGD on every problem, against the printed bound."""

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import minimize_scalar

from qclip import schedules, theory
from qclip._validate import Floats
from qclip.apps.experiments.bounded import BoundCheck, against_bound, probes
from qclip.apps.experiments.claim import Effort, Outcome, claim
from qclip.apps.experiments.suite import cases
from qclip.apps.report.style import label, new_figure
from qclip.simulation.problems import Problem, TwoPoint
from qclip.simulation.simulate import simulate


@claim("theorem1-constant", "Theorem 1 bounds the mean of E||grad f||^2 at constant gamma and p", "Theorem 1, eq. 10")
def theorem1_constant(effort: Effort) -> Outcome:
    """Run random quantiles and step sizes on every problem and moment, at the best beta and c; and the probes."""
    rng = effort.rng()
    rows = []
    for case in cases(rng):
        for q in case.moments((1.5, 2.0)):
            a = case.problem.assumptions(case.x0, q)
            for _ in range(effort.pick(2, 12)):
                p, steps = rng.uniform(0.2, 0.95), effort.pick(200, 1000)
                gamma = rng.uniform(0.1, 0.9) * theory.max_step(a, p, form="printed")
                run = simulate(case.problem, step_size=gamma, p=p, steps=steps, x0=case.x0, seed=rng, record=[])
                rows.append(BoundCheck.of(case.name, run, theory.bound(a, gamma, p, steps=steps, form="printed")))
    for probe in probes(private=False):
        run = simulate(
            probe.problem, step_size=probe.gamma, p=probe.p, steps=probe.steps, x0=probe.x0, seed=rng, record=[]
        )
        a = probe.problem.assumptions(probe.x0)
        limit = theory.bound(a, probe.gamma, probe.p, probe.beta, steps=probe.steps, form="printed")
        rows.append(BoundCheck.of(probe.name, run, limit))
    return against_bound(rows, "constant gamma and p")


@claim("theorem1-varying", "Theorem 1 holds for any gamma_t and p_t that meet its condition", "Theorem 1, eq. 10")
def theorem1_varying(effort: Effort) -> Outcome:
    """Run the coupled schedules and random sequences on every problem and moment; and the probes, jittered."""
    rng = effort.rng()
    rows = []

    def compare(
        name: str, problem: Problem, x0: Floats, q: float, gamma: Floats, p: Floats, beta: float | None = None
    ) -> None:
        run = simulate(problem, step_size=gamma, p=p, steps=gamma.size, x0=x0, seed=rng, record=[])
        limit = theory.bound(problem.assumptions(x0, q), gamma, p, beta, form="printed")
        rows.append(BoundCheck.of(name, run, limit))

    steps = effort.pick(200, 2000)
    for case in cases(rng):
        for q in case.moments((1.5, 2.0)):
            a = case.problem.assumptions(case.x0, q)
            coupled = schedules.coupled(q, 0.5 / a.L, 0.5, "printed", assumptions=a)
            gamma, p = schedules.values(coupled.gamma, steps), schedules.values(coupled.p, steps)
            compare(case.name, case.problem, case.x0, q, gamma, p)
            p = rng.uniform(0.4, 0.95, steps)
            gamma = rng.uniform(0.2, 0.95, steps) * [theory.max_step(a, level, form="printed") for level in p]
            compare(case.name, case.problem, case.x0, q, gamma, p)
    for probe in probes(private=False):
        gamma = probe.gamma * rng.uniform(0.5, 1, probe.steps)
        p = 1 - (1 - probe.p) * rng.uniform(1.0, 1.2, probe.steps)  # never above the probe's own quantile
        compare(probe.name, probe.problem, probe.x0, 2.0, gamma, p, probe.beta)
    return against_bound(rows, "coupled and random schedules")


@claim(
    "corollary-bias-floor",
    "At a fixed quantile a floor can remain as gamma -> 0; plain SGD's vanishes",
    "Corollary 1, eq. 11, term 3",
)
def corollary_bias_floor(effort: Effort) -> Outcome:
    """Run the two-point problem at a fixed product gamma T."""
    problem = TwoPoint(2, 0.7)
    gammas = np.geomspace(0.3, 0.3e-2 if effort.quick else 0.3e-3, 7)
    final = {"QC-SGD, p = 0.6": [], "plain SGD": []}
    for gamma in gammas:
        for name, p in zip(final, (0.6, None), strict=True):
            run = simulate(
                problem, step_size=gamma, p=p, steps=int(30 / gamma), x0=[1.0], seeds=256, record=[], seed=effort.rng()
            )
            last = (problem.grad(run.final) ** 2).sum(-1)
            final[name].append((last.mean(), last.std() / 16))
    quantile, plain = (np.array(values) for values in final.values())
    floor = float(problem.grad(np.array([-problem.r]))[0] ** 2)
    slope = float(np.polyfit(np.log(gammas), np.log(plain[:, 0]), 1)[0])
    promised = problem.sigma(2) ** 2 * 0.4 / 0.6**2  # the least that term 3 can promise at p = .6: sigma^2 h / p^2
    reached = floor <= promised and abs(quantile[-1, 0] - floor) <= 3 * quantile[-1, 1] + 0.02 * floor

    def draw() -> Figure:
        figure, (ax,) = new_figure()
        for name, values in final.items():
            ax.errorbar(
                gammas, [v for v, _ in values], [3 * e for _, e in values], marker="o", markersize=3, label=name
            )
        ax.axhline(floor, color="k", linestyle="--", linewidth=0.8, label="r²(1-ω)², exact")
        ax.set_xscale("log")
        ax.set_yscale("log")
        label(ax, "step size γ, with γT fixed", "final ||∇f||²", "a fixed quantile leaves a bias")
        return figure

    return Outcome(
        expected=f"QC-SGD tends to {floor:.4g} (exact), below the bound's {promised:.3g}; plain SGD falls like gamma",
        measured=f"QC-SGD {quantile[-1, 0]:.4f}, plain SGD {plain[-1, 0]:.2e}, growing as gamma^{slope:.2f}",
        printed=bool(reached and 0.8 < slope < 1.2),
        error=f"standard error {quantile[-1, 1]:.1e}",
        values={"floor": floor, "quantile": float(quantile[-1, 0]), "plain": float(plain[-1, 0]), "slope": slope},
        draw=draw,
    )


@claim(
    "corollary-beta-tradeoff",
    "A larger beta shrinks the neighbourhood but lowers the largest step size",
    "Corollary 1, eqs. 9 and 11",
    how="evaluated",
)
def corollary_beta_tradeoff(effort: Effort) -> Outcome:
    """Sweep beta at p = .8 and compare the best one with the choice of `bound`."""
    a = theory.Assumptions(L=1, sigma=1, q=2, gap=1)
    p, gamma, steps = 0.8, 0.05, 10_000
    betas = np.linspace(0.01, 0.99, effort.pick(200, 5000))
    limits = np.array([theory.max_step(a, p, b, 0.2, "printed") for b in betas])
    rows = [theory.bound(a, gamma, p, float(b), steps=steps, form="printed") for b in betas]
    bias = np.array([row.bias * row.c for row in rows])  # term 3 of the corollary, before the division by c
    total = np.array([row.total for row in rows])
    best = theory.bound(a, gamma, p, steps=steps, form="printed")
    gap = abs(best.beta - betas[total.argmin()])

    def draw() -> Figure:
        figure, (ax,) = new_figure()
        ax.plot(betas, bias, label="term 3: σ²h^(2-2/q)/β")
        ax.plot(betas, limits, label="largest step at c = 0.2, L = 1")
        ax.plot(betas, total, label="bound at γ = 0.05")
        ax.plot([best.beta], [best.total], "ko", markersize=4, label="best β, closed form")
        ax.set_ylim(0, 3)
        label(ax, "β", "", "p = 0.8")
        return figure

    falling = bool((np.diff(bias) < 0).all() and (np.diff(limits) < 0).all())
    return Outcome(
        expected="term 3 and the largest step both fall with beta; the best beta lies inside",
        measured=f"both fall: {falling}; best beta {best.beta:.3f}, by sweep {betas[total.argmin()]:.3f}",
        printed=bool(falling and gap <= 1.01 * (betas[1] - betas[0]) and betas[0] < best.beta < betas[-1]),
        error=f"grid spacing {betas[1] - betas[0]:.1e}",
        values={"best_beta": best.beta, "swept_beta": float(betas[total.argmin()])},
        draw=draw,
    )


@claim(
    "term2-direction",
    "More aggressive clipping (a smaller p) increases term 2",
    "after Corollary 1; erratum F",
    how="evaluated",
)
def term2_direction(effort: Effort) -> Outcome:
    """Evaluate term 2 against p, and the clipped fraction at which terms 2 and 3 together are least."""
    a = theory.Assumptions(L=1, sigma=1, q=1.5, gap=1)
    gamma, beta = 0.002, 0.3
    p = np.linspace(0.3, 0.99, effort.pick(200, 2000))
    rows = [theory.bound(a, gamma, float(v), beta, steps=1000, form="printed") for v in p]
    term2, term3 = (np.array([getattr(row, name) * row.c for row in rows]) for name in ("variance", "bias"))
    h_star = np.sqrt(2 * gamma * a.L * beta / (a.q - 1))
    h_least = minimize_scalar(
        lambda h: 2 * gamma * a.L * h ** (-2 / a.q) + h ** (2 - 2 / a.q) / beta, bounds=(1e-4, 0.9), method="bounded"
    ).x

    def draw() -> Figure:
        figure, (ax,) = new_figure()
        ax.plot(p, term2, label="term 2")
        ax.plot(p, term3, label="term 3")
        ax.plot(p, term2 + term3, label="terms 2 + 3")
        ax.axvline(1 - h_star, color="k", linestyle="--", linewidth=0.8, label="1 - h*")
        label(ax, "quantile p", "", f"γ = {gamma}, β = {beta}, q = {a.q}")
        return figure

    rising = bool((np.diff(term2) > 0).all())
    return Outcome(
        expected="term 2 falls as p rises",
        measured=f"term 2 rises with p: {rising}; terms 2 + 3 least at h = {h_least:.4f}, formula {h_star:.4f}",
        printed=bool((np.diff(term2) < 0).all()),
        repaired=bool(rising and abs(h_least - h_star) < 1e-3),
        error="scalar minimisation; 1e-3 allowed",
        values={"h_star": float(h_star), "h_found": float(h_least)},
        draw=draw,
    )
