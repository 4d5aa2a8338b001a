"""Claims about the rates of the coupled schedules.

A rate is a statement about the worst problem of a class. Three problems with the same L = 1, sigma_q and gap each make
one term of the bound as large as possible: noise-free descent (optimisation), symmetric noise with barely more than q
moments (variance), and the two-point distribution whose minority is exactly the clipped fraction (bias). For each
length T the constants ``gamma = g T^(theta-1)``, ``1 - p = h T^nu`` are run on all three. The worst of them must decay
with the predicted exponent, and none of the three more slowly.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from qclip import schedules, theory
from qclip._validate import Floats
from qclip.apps.experiments.claim import Effort, Outcome, Slope, claim, fit_slope
from qclip.apps.report.style import label, new_figure
from qclip.simulation.problems import AdditiveNoise, Gaussian, HeavyTailedQuadratic, Pareto, TwoPoint
from qclip.simulation.simulate import simulate
from qclip.theory import Assumptions, Form

STEP_SIZE, CLIPPED = 0.5, 0.3
TUNED_STEP_SIZE = 1.0  # of the runs with constants tuned to their length


def optimisation_problem(gamma: float, h: float, steps: int, seeds: int, rng: np.random.Generator) -> Floats:
    """Return the mean of ||grad f||^2 over a run without noise, from a gap of 1/2, [seeds]."""
    problem = HeavyTailedQuadratic(1, Gaussian(0.0))
    run = simulate(problem, step_size=gamma, p=1 - h, steps=steps, x0=[1.0], seeds=seeds, record=[], seed=rng)
    return run.mean_grad_norm2[-1]


def variance_problem(q: float, gamma: float, h: float, steps: int, seeds: int, rng: np.random.Generator) -> Floats:
    """Return the mean over the second half of a run from the minimiser, for symmetric noise with sigma_q = 1."""
    noise = Gaussian(1.0) if q == 2 else Pareto(q + 0.05, 1 / Pareto(q + 0.05).sigma(q, 1))
    return _settled(HeavyTailedQuadratic(1, noise), gamma, h, steps, seeds, rng)


def bias_problem(q: float, gamma: float, h: float, steps: int, seeds: int, rng: np.random.Generator) -> Floats:
    """Return the same mean for two points, the likelier one with probability 1 - h, with sigma_q = 1."""
    r = 1 / TwoPoint(1.0, 1 - h).sigma(q)
    return _settled(TwoPoint(r, 1 - h), gamma, h, steps, seeds, rng)


def _settled(
    problem: AdditiveNoise, gamma: float, h: float, steps: int, seeds: int, rng: np.random.Generator
) -> Floats:
    half = steps // 2
    run = simulate(
        problem, step_size=gamma, p=1 - h, steps=steps, x0=problem.minimiser, seeds=seeds, record=[half], seed=rng
    )
    first, whole = run.mean_grad_norm2
    return (steps * whole - half * first) / (steps - half)


@dataclass(frozen=True)
class Measured:
    """The three problems at a pair of exponents: the means [lengths] of each, and of the worst with its exponent."""

    lengths: Floats
    means: dict[str, Floats]
    worst: Floats
    slope: Slope
    late: dict[str, float]  # the exponent of each over the later half of the lengths
    largest_ratio: float  # of the worst to the bound

    def decays(self, rate: float) -> bool:
        """Return whether the worst decays with this exponent, none more slowly, and all stay below the bound."""
        slowest = max(self.late.values())
        return bool(abs(self.slope.value + rate) <= NEAR and slowest <= -rate + NEAR and self.largest_ratio <= 1)

    def exponents(self) -> str:
        """Return the late exponents as text."""
        return ", ".join(f"{name} {value:.3f}" for name, value in self.late.items())


def measure(q: float, step_form: Form, quantile_form: Form, effort: Effort) -> Measured:
    """Run the step sizes of one form with the quantiles of the same form, or of another as a control."""
    rng, seeds = effort.rng(), effort.pick(16, 32)
    theta, nu = theory.rates(q, step_form).theta, theory.rates(q, quantile_form).nu
    lengths = np.geomspace(100, effort.pick(10**5, 10**6), effort.pick(7, 9)).astype(int)
    rows: dict[str, list[Floats]] = {"optimisation": [], "variance": [], "bias": []}
    ratios = []
    a = Assumptions(L=1, sigma=1, q=q, gap=0.5)
    for T in map(int, lengths):
        gamma, h = TUNED_STEP_SIZE * T ** (theta - 1), CLIPPED * T**nu
        rows["optimisation"].append(optimisation_problem(gamma, h, T, 2, rng).repeat(seeds // 2))
        rows["variance"].append(variance_problem(q, gamma, h, T, seeds, rng))
        rows["bias"].append(bias_problem(q, gamma, h, T, seeds, rng))
        limit = theory.bound(a, gamma, 1 - h, steps=T, form=step_form).total
        ratios.append(max(row[-1].mean() for row in rows.values()) / limit)
    samples = np.array(list(rows.values()))  # [problems, lengths, seeds]
    worst = samples[samples.mean(2).argmax(0), np.arange(len(lengths))]
    means = {name: np.array(row).mean(1) for name, row in rows.items()}
    half = len(lengths) // 2
    late = {name: float(np.polyfit(np.log(lengths[half:]), np.log(row[half:]), 1)[0]) for name, row in means.items()}
    return Measured(lengths, means, worst.mean(1), fit_slope(lengths, worst, rng), late, float(max(ratios)))


NEAR = 0.04  # how far a fitted exponent may lie from the predicted one: terms of lower order over these lengths


def _rate(q: float, effort: Effort) -> Outcome:
    rate = theory.rates(q, "printed").rate
    m = measure(q, "printed", "printed", effort)

    def draw() -> Figure:
        figure, (ax,) = new_figure()
        _draw_measured(ax, m, rate, f"the paper's exponents, q = {q:g}")
        return figure

    return Outcome(
        expected=f"the worst problem decays with exponent -{rate:.4f} (within {NEAR}), none of the three more slowly, "
        "all below the bound",
        measured=f"exponent {m.slope} over {_decades(m)} decades of T (late: {m.exponents()}); "
        f"at most {m.largest_ratio:.2f} of the bound",
        printed=m.decays(rate),
        error="95 % interval over seeds; it leaves out the terms of lower order",
        values={"slope": m.slope.value, "low": m.slope.low, "high": m.slope.high, "predicted": -rate},
        draw=draw,
    )


def _decades(m: Measured) -> int:
    return round(np.log10(m.lengths[-1] / m.lengths[0]))


def _draw_measured(ax, m: Measured, rate: float, title: str) -> None:
    for name, means in m.means.items():
        ax.loglog(m.lengths, means, "o-", markersize=2.5, linewidth=1, label=f"hard for {name}")
    guide = m.worst[-1] * (m.lengths / m.lengths[-1]) ** -rate
    ax.loglog(m.lengths, guide, "k--", linewidth=0.9, label=f"T^-{rate:.3f}")
    label(ax, "steps T", "mean of ||∇f||²", f"{title}: worst {m.slope.value:.3f}")


@claim("schedule-rate-q2", "gamma ~ T^(-2/3), 1-p ~ T^(-1/3) gives the rate T^(-1/3) for q = 2", "time-varying")
def schedule_rate_q2(effort: Effort) -> Outcome:
    """Measure the paper's exponents under bounded variance."""
    return _rate(2.0, effort)


@claim("schedule-rate-q1.5", "theta = 1/4, nu = -3/8 gives the rate T^(-1/4) for q = 1.5", "time-varying")
def schedule_rate_q15(effort: Effort) -> Outcome:
    """Measure the paper's exponents under heavier tails."""
    return _rate(1.5, effort)


def _sharp_rate(q: float, effort: Effort) -> Outcome:
    rate = theory.rates(q).rate
    sharp, printed = measure(q, "sharp", "sharp", effort), measure(q, "printed", "printed", effort)
    crossed = measure(q, "sharp", "printed", effort)  # the sharp step sizes alone must not be enough

    def draw() -> Figure:
        figure, (left, right) = new_figure(2, width=9)
        _draw_measured(left, printed, theory.rates(q, "printed").rate, f"the paper's, q = {q:g}")
        _draw_measured(right, sharp, rate, f"sharp, q = {q:g}")
        low = min(left.get_ylim()[0], right.get_ylim()[0])
        high = max(left.get_ylim()[1], right.get_ylim()[1])
        for ax in (left, right):
            ax.set_ylim(low, high)
        return figure

    faster = sharp.slope.high < printed.slope.low and sharp.worst[-1] < printed.worst[-1]
    needs_both = sharp.slope.high < crossed.slope.low
    return Outcome(
        expected=f"the worst problem decays with exponent -{rate:.4f} (within {NEAR}), none of the three more slowly; "
        "faster than with the paper's exponents, and than with its quantiles alone",
        measured=f"exponent {sharp.slope} (late: {sharp.exponents()}); the paper's {printed.slope}; "
        f"its quantiles, sharp steps {crossed.slope}; "
        f"value {sharp.worst[-1]:.3g} against {printed.worst[-1]:.3g}",
        printed=bool(sharp.decays(rate) and faster and needs_both),
        error="95 % intervals over seeds; they leave out the terms of lower order",
        values={
            "sharp_slope": sharp.slope.value,
            "printed_slope": printed.slope.value,
            "crossed_slope": crossed.slope.value,
            "sharp_value": float(sharp.worst[-1]),
            "printed_value": float(printed.worst[-1]),
            "largest_ratio": sharp.largest_ratio,
        },
        draw=draw,
    )


@claim(
    "sharp-rate-q2", "The sharp exponents, gamma and 1-p ~ T^(-1/2), converge as T^(-1/2) for q = 2", "sharp theorem"
)
def sharp_rate_q2(effort: Effort) -> Outcome:
    """Compare the sharp exponents with the paper's under bounded variance."""
    return _sharp_rate(2.0, effort)


@claim("sharp-rate-q1.5", "The sharp exponents converge as T^(-2/5) for q = 1.5", "sharp theorem")
def sharp_rate_q15(effort: Effort) -> Outcome:
    """Compare the sharp exponents with the paper's under heavier tails."""
    return _sharp_rate(1.5, effort)


@claim("schedule-removes-bias", "With p_t -> 1 and gamma_t -> 0 QC-SGD reaches the stationary point", "time-varying")
def schedule_removes_bias(effort: Effort) -> Outcome:
    """Compare fixed with scheduled quantiles, on a problem with atoms and one with a skewed tail."""
    steps = effort.pick(20_000, 200_000)
    problems = {
        "two points": (TwoPoint(2, 0.7), [1.0], 0.6),
        "one-sided Pareto": (HeavyTailedQuadratic(1, Pareto(2.5, 0.5, one_sided=True)), [1.0], 0.6),
    }
    gamma, p = schedules.coupled(2, STEP_SIZE, 1 - 0.6, "printed")
    curves = {}
    for name, (problem, x0, fixed) in problems.items():
        for how, quantile in (("fixed p", fixed), ("scheduled p", p)):
            curves[name, how] = simulate(problem, step_size=gamma, p=quantile, steps=steps, x0=x0, seed=effort.rng())
    drop = {
        name: float(curves[name, "scheduled p"].grad_norm2[-1].mean() / curves[name, "fixed p"].grad_norm2[-1].mean())
        for name in problems
    }
    late = {}
    for key, run in curves.items():
        last = run.steps >= steps // 30
        late[key] = fit_slope(run.steps[last], run.grad_norm2[last], effort.rng())

    def draw() -> Figure:
        figure, axes = new_figure(2, width=8.5)
        for ax, name in zip(axes, problems, strict=True):
            for how in ("fixed p", "scheduled p"):
                run = curves[name, how]
                ax.loglog(run.steps[1:], run.grad_norm2[1:].mean(1), label=how)
            label(ax, "step", "||∇f||²", name)
        return figure

    return Outcome(
        expected="late in the run the fixed quantile stands still (exponent above -.05); the scheduled one falls "
        "(below -.2) and is below a tenth of it",
        measured="; ".join(
            f"{name}: exponents {late[name, 'fixed p'].value:.3f} and {late[name, 'scheduled p'].value:.3f}, "
            f"ratio {drop[name]:.2g}"
            for name in problems
        ),
        printed=all(
            late[name, "fixed p"].low > -0.05 and late[name, "scheduled p"].high < -0.2 and drop[name] < 0.1
            for name in problems
        ),
        error="95 % intervals over 64 seeds",
        values={f"ratio, {name}": value for name, value in drop.items()},
        draw=draw,
    )


@claim(
    "log-factor", "The coupled schedule's bound is of order T^(-1/3), with no logarithm", "erratum J", how="evaluated"
)
def log_factor(effort: Effort) -> Outcome:
    """Multiply the bound by T^(1/3): the product grows with log T, unless gamma and p are constant."""
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

    def draw() -> Figure:
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
