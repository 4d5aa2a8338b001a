"""The claim about the threshold that balances noise and bias: no moments, no quantile."""

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import minimize

from qclip._validate import Floats
from qclip.apps.experiments.claim import Effort, Outcome, claim
from qclip.apps.report.style import label, new_figure

LEVELS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


def balanced(norms: Floats, weight: float) -> Floats:
    """Return the minimiser over the norms [..., n] of ``weight tau^2 + (mean excess)^2``, to the grid of the norms."""
    tau = np.sort(norms, axis=-1)
    n = tau.shape[-1]
    beyond = np.cumsum(tau[..., ::-1], axis=-1)[..., ::-1] - tau * np.arange(n, 0, -1)
    best = np.argmin(weight * tau**2 + (beyond / n) ** 2, axis=-1)
    return np.take_along_axis(tau, best[..., None], -1)[..., 0]


def _run(
    atoms: Floats, gamma: float, power: float, steps: int, p: float | None, seeds: int, rng: np.random.Generator
) -> float:
    """Return the mean of G^2 over runs on ``||x - c||^2 / 2``, c one of the atoms [n, d], from a point 2 sd away."""
    n, d = atoms.shape
    x = np.zeros((seeds, d)) + 2 * np.sqrt((atoms**2).sum(1).mean() / d)
    total, B = 0.0, 8
    noise = (power / d) ** 0.5
    for _ in range(steps):
        norms = np.linalg.norm(x[:, None] - atoms, axis=2)
        if p is None:
            tau = balanced(norms, gamma * (1 / B + power))
        else:
            tau = np.quantile(norms, p, axis=1, method="inverted_cdf")
        picked = rng.integers(n, size=(seeds, B))
        g = x[:, None] - atoms[picked]
        factor = np.minimum(1, tau[:, None] / np.maximum(np.take_along_axis(norms, picked, 1), 1e-12))
        total += float((x**2).sum(1).mean()) / steps
        x = x - gamma * ((factor[..., None] * g).mean(1) + noise * tau[:, None] * rng.standard_normal((seeds, d)))
    return total


def _attained(rng: np.random.Generator, restarts: int) -> float:
    """Return the largest ratio of one step's loss to its bound over two-point laws in the plane of the gradient."""

    def negative(v: Floats) -> float:
        w, tau, lam = 1 / (1 + np.exp(-v[2])), np.exp(v[3]), 1 / (1 + np.exp(-v[4]))
        atoms, weights = v[:2], np.array([w, 1 - w])
        grad, norms = weights @ atoms, np.abs(atoms)
        clipped = np.minimum(1, tau / np.maximum(norms, 1e-12)) * atoms
        m, excess = weights @ clipped, weights @ np.maximum(norms - tau, 0)
        left = -grad * m + lam / 2 * m**2 + grad**2 / 2  # E f(x+) - f(x) + gamma G^2/2, over gamma, without noise
        return -left / max(excess**2 / 2, 1e-12)

    return -min(minimize(negative, rng.normal(size=5), method="Nelder-Mead").fun for _ in range(restarts))


@claim(
    "balance-without-moments",
    "(clipped fraction) x (mean excess) = gamma L S tau finds a threshold near that of the best quantile, untuned",
    "section 20",
)
def balance_without_moments(effort: Effort) -> Outcome:
    """Run the rule with exact statistics against eight quantiles on skewed, two-point and symmetric noise."""
    rng = effort.rng()
    steps, seeds, n = effort.pick(300, 600), effort.pick(6, 24), effort.pick(200, 400)
    laws = {
        "skewed": np.column_stack([rng.pareto(2.2, n), 0.3 * rng.standard_normal(n)]),
        "two points": np.column_stack([np.where(np.arange(n) < 0.3 * n, 3.0, 0.0), 0.1 * rng.standard_normal(n)]),
        "symmetric": rng.standard_normal((n, 2)),
    }
    table: dict[str, dict[str, float]] = {}
    for name, atoms in laws.items():
        centred = atoms - atoms.mean(0)
        for power in (0.01, 0.3, 10.0):
            found = {f"p = {p:g}": _run(centred, 0.03, power, steps, p, seeds, rng) for p in LEVELS}
            found["rule"] = _run(centred, 0.03, power, steps, None, seeds, rng)
            best = min(found[f"p = {p:g}"] for p in LEVELS)
            table[f"{name}, S = {power:g}"] = {how: value / best for how, value in found.items()}
    methods = ["rule", *(f"p = {p:g}" for p in LEVELS)]
    worst = {how: max(row[how] for row in table.values()) for how in methods}
    mean = {how: float(np.exp(np.mean([np.log(row[how]) for row in table.values()]))) for how in methods}
    attained = _attained(rng, effort.pick(10, 60))
    rival, worst_rival = (min(values[how] for how in methods[1:]) for values in (mean, worst))

    def draw() -> Figure:
        figure, (ax,) = new_figure()
        ax.plot(range(len(methods)), list(worst.values()), label="worst")
        ax.plot(range(len(methods)), list(mean.values()), label="geometric mean")
        ax.set_yscale("log")
        ax.set_xticks(range(len(methods)), methods, rotation=30, fontsize=8)
        label(ax, "", "mean of ||∇f||² / that of the best quantile", f"{len(table)} settings")
        return figure

    return Outcome(
        expected="over the settings, in units of the best of eight quantiles: the rule at most 1.5 at worst, and below "
        "every fixed quantile both at worst and in the mean; its bound attained in one step (.98 to 1)",
        measured=f"rule {mean['rule']:.2f} in the mean, {worst['rule']:.2f} at worst; the best of the fixed quantiles "
        f"{rival:.2f} and {worst_rival:.2f}; the median {mean['p = 0.5']:.2f} and {worst['p = 0.5']:.2f}; one step "
        f"attained {attained:.4f}",
        printed=bool(worst["rule"] <= min(1.5, worst_rival) and mean["rule"] < rival and 0.98 < attained <= 1 + 1e-6),
        error=f"{seeds} seeds a run; the same problems for all",
        values={"rule": mean["rule"], "rule_worst": worst["rule"], "best_fixed": rival, "attained": attained},
        draw=draw,
    )
