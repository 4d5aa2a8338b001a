"""Claims about Example 1: the fixed points of QC-SGD on the two-point problem."""

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import root_scalar

from qclip.apps.experiments.claim import Effort, Outcome, claim
from qclip.apps.report.style import label, new_figure
from qclip.simulation.problems import TwoPoint
from qclip.simulation.simulate import simulate

PROBLEM = TwoPoint(r=2, omega=0.7)


def mean_step(x: float, p: float) -> float:
    """Return the exact expected clipped gradient at x."""
    point = np.array([x])
    return float(PROBLEM.clip_moments(point, PROBLEM.quantile(point, p)).mean[0])


def stable_root(p: float) -> float:
    """Return the root of the expected step, which is negative left of the two minima and positive right of them."""
    return root_scalar(lambda x: mean_step(x, p), bracket=(-1.5 * PROBLEM.r, -1e-6)).root


@claim("two-point-printed", "QC-SGD at the median stands still at x = -omega/(1-omega)", "Example 1; erratum A")
def two_point_printed(effort: Effort) -> Outcome:  # noqa: ARG001  (exact: the same at any effort)
    """Compare the root of the expected step, by bracketing, with the printed and the corrected one."""
    root, printed, actual = stable_root(0.5), PROBLEM.printed_fixed_point(), PROBLEM.fixed_points(0.5)[0]
    return Outcome(
        expected=f"printed {printed:.4f}; corrected {actual:.4f}",
        measured=f"root of the expected step {root:.4f}; at the printed point it is {mean_step(printed, 0.5):.3f}",
        printed=abs(root - printed) < 1e-6,
        repaired=abs(root - actual) < 1e-6,
        error="bracketing, 1e-12",
        values={"printed": printed, "root": root, "corrected": actual},
        draw=_draw_steps,
    )


def _draw_steps() -> Figure:
    figure, (ax,) = new_figure()
    x = np.linspace(-3, 1, 801)
    for p in (0.3, 0.5, 0.9):
        ax.plot(x, [mean_step(float(v), p) for v in x], label=f"p = {p}")
    ax.axhline(0, color="k", linewidth=0.6)
    ax.plot([PROBLEM.printed_fixed_point()], [0], "kx", label="printed root")
    ax.plot([PROBLEM.minimiser[0]], [0], "k*", label="minimiser")
    label(ax, "x", "expected clipped gradient", "r = 2, ω = 0.7")
    return figure


@claim(
    "two-point-actual",
    "QC-SGD goes to -r for p <= omega, to the minimiser -r omega for p > omega; 0 attracts x > 0 for p <= 1 - omega",
    "erratum A, corrected",
)
def two_point_actual(effort: Effort) -> Outcome:
    """Run long with a small step size from two starts, for quantiles on both sides of every switch."""
    levels = (0.3, 0.5, 0.7, 0.71, 0.9)
    rows = []
    for p in levels:
        for start in (-0.5, 1.0):
            run = simulate(
                PROBLEM, step_size=0.002, p=p, steps=effort.pick(10_000, 40_000), x0=[start], seeds=64, record=[],
                seed=effort.rng(),
            )  # fmt: skip
            roots = PROBLEM.fixed_points(p)
            expected = roots[-1] if start > 0 else roots[0]
            rows.append((p, start, expected, float(run.final.mean()), float(run.final.std() / 8)))
    worst = max(abs(final - expected) - 4.5 * error for _, _, expected, final, error in rows)
    ended = next(final for p, _, _, final, _ in rows if p == PROBLEM.omega)
    floor = float(PROBLEM.grad(np.array([ended]))[0] ** 2)
    tight = PROBLEM.sigma(2) ** 2 * (1 - PROBLEM.omega) / PROBLEM.omega

    def draw() -> Figure:
        figure, (ax,) = new_figure()
        for start, marker in ((-0.5, "o"), (1.0, "s")):
            chosen = [row for row in rows if row[1] == start]
            ax.plot([r[0] for r in chosen], [r[3] for r in chosen], marker, label=f"from x = {start:g}", markersize=5)
        ps = np.linspace(0.05, 0.95, 400)
        ax.plot(ps, [PROBLEM.fixed_points(p)[0] for p in ps], "k-", linewidth=0.8, label="fixed point from below")
        ax.plot(ps, [PROBLEM.fixed_points(p)[-1] for p in ps], "k:", linewidth=1, label="fixed point from x > 0")
        ax.axhline(PROBLEM.printed_fixed_point(), color="#c23b3b", linewidth=0.8, linestyle="--", label="printed")
        label(ax, "quantile p", "final x of QC-SGD", "two points, r = 2, ω = 0.7: minimiser -1.4")
        return figure

    return Outcome(
        expected="; ".join(f"p = {p:g}: {PROBLEM.fixed_points(p)}" for p in levels)
        + f"; at p = omega G^2 = {tight:.4f}",
        measured="; ".join(f"p = {p:g} from {s:g}: {final:.4f}" for p, s, _, final, _ in rows) + f"; G^2 = {floor:.4f}",
        printed=bool(worst <= 1e-3 and abs(floor - tight) < 5e-3),
        error="4.5 standard errors and 1e-3 of remaining transient allowed",
        values={"largest_excess": float(worst), "floor": floor},
        draw=draw,
    )
