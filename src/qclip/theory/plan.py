"""The step size and the quantile that minimise the bound, and the number of steps that a target takes."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import minimize

from qclip import _validate as check
from qclip._validate import Floats
from qclip.theory.assumptions import Assumptions
from qclip.theory.bounds import (
    Bound,
    Sampling,
    TheoremForm,
    assemble,
    best_beta_constant,
    bound_private,
    contraction_line,
    max_step_private,
    private_form,
)
from qclip.theory.rates import rates

MOST_STEPS = 10**12
BUDGET_STEPS = (50, 1_000, 20_000, 400_000)


@dataclass(frozen=True)
class Privacy:
    """A privacy budget: ``epsilon`` and ``delta`` for a data set of ``examples``, whatever the number of steps."""

    epsilon: float
    delta: float
    examples: int

    def noise_multiplier(self, batch_size: float, steps: int) -> float:
        """Return the noise multiplier with which ``steps`` steps at this batch size meet the budget."""
        from qclip import accounting  # dp-accounting takes a second to import: only plans with a budget wait

        rate = batch_size / self.examples
        return accounting.noise_multiplier(epsilon=self.epsilon, delta=self.delta, sample_rate=rate, steps=steps)


@dataclass(frozen=True)
class CoupledPlan:
    """Constants for a run of unknown length, and their bound at the planned length.

    ``gamma_t = step_size (t+1)^(theta-1)``; ``1 - p_t = clipped_fraction (t+1)^nu``, or constant when ``constant_p``
    (in private runs: p_t -> 1 would let the threshold, and with it the noise, grow).
    """

    step_size: float
    clipped_fraction: float
    step_exponent: float
    clipped_exponent: float
    bound: Bound

    @property
    def constant_p(self) -> bool:
        """Whether the quantile is constant."""
        return self.clipped_exponent == 0


@dataclass(frozen=True)
class Move:
    """The effect of a change on the optimum: factors on the step size, the clipped fraction and the bound."""

    change: str
    step_size: float
    clipped_fraction: float
    bound: float


@dataclass(frozen=True)
class Plan:
    """The constant step size and quantile that minimise the sharp bound, with the inputs of the minimisation."""

    assumptions: Assumptions
    steps: int
    batch_size: float
    noise_multiplier: float
    dim: int
    sampling: Sampling
    privacy: Privacy | None
    gamma: float
    p: float
    bound: Bound

    @property
    def max_step(self) -> float:
        """The step size above which the theorem does not hold for this quantile."""
        return max_step_private(self.assumptions, self.p, **self._public())

    @property
    def at_edge(self) -> bool:
        """Whether p is at its limit of one clipped example in the run, so that the bound favours no clipping."""
        return bool(1 - self.p < 1.001 * _least_clipped(self.steps, self.batch_size))

    def coupled(self) -> CoupledPlan:
        """Return the best coupled schedules for an unknown horizon, tuned at this plan's number of steps."""
        return _plan_coupled(self)

    def moves(self) -> list[Move]:
        """Return how the optimum moves when the run, the noise or the problem changes by a factor of 2."""
        again = partial(plan, batch_size=self.batch_size, dim=self.dim, sampling=self.sampling)
        noise: dict[str, Any] = {"noise_multiplier": self.noise_multiplier}
        budget: dict[str, Any] = noise if self.privacy is None else {"privacy": self.privacy}
        a = self.assumptions
        changed = {
            "twice the steps": again(a, steps=2 * self.steps, **budget),
            "twice the gradient noise sigma": again(replace(a, sigma=2 * a.sigma), steps=self.steps, **noise),
            "twice the gap f(x0) - inf f": again(replace(a, gap=2 * a.gap), steps=self.steps, **noise),
        }
        if self.privacy is not None:
            larger = replace(self.privacy, examples=2 * self.privacy.examples)
            changed["twice the examples"] = again(a, steps=self.steps, privacy=larger)
        elif self.noise_multiplier > 0:
            changed["twice the noise multiplier"] = again(
                a, steps=self.steps, noise_multiplier=2 * self.noise_multiplier
            )
        return [
            Move(name, new.gamma / self.gamma, (1 - new.p) / (1 - self.p), new.bound.total / self.bound.total)
            for name, new in changed.items()
        ]

    def _public(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "noise_multiplier": self.noise_multiplier,
            "dim": self.dim,
            "sampling": self.sampling,
        }


def plan(
    a: Assumptions,
    *,
    steps: int | None = None,
    target: float | None = None,
    batch_size: float = 1,
    dim: int = 1,
    noise_multiplier: float = 0.0,
    privacy: Privacy | None = None,
    sampling: Sampling | None = None,
) -> Plan:
    """Choose the constant step size and quantile with the least bound; beta and c follow.

    >>> p = plan(Assumptions(L=1, sigma=1, q=2, gap=1), steps=10_000)
    >>> round(p.bound.total, 4), p.bound.dominant
    (0.0155, 'optimisation')
    >>> plan(Assumptions(L=1, sigma=1, q=2, gap=1), target=0.0156).steps < 10_000
    True

    The quantile is at most 1 - 1/(steps batch_size): beyond it the run would clip less than one example, which is
    plain SGD.

    Args:
        a: The assumptions on the problem.
        steps: Number of steps.
        target: Instead of ``steps``, a value of the mean of ``E ||grad f||^2``; the plan takes the fewest steps whose
            bound reaches it.
        batch_size: Expected batch size.
        dim: Number of trainable parameters.
        noise_multiplier: Standard deviation of the noise on the clipped sum, relative to the threshold.
        privacy: Instead of ``noise_multiplier``, a budget that the noise must meet.
        sampling: "poisson" or "iid"; "poisson" for private runs when left out.

    Raises:
        Refusal: An argument is out of bounds, or no number of steps reaches the target.
    """
    if (steps is None) == (target is None):
        raise check.Refusal(f"steps = {steps!r} and target = {target!r} do not give one length; pass one of them")
    if privacy is not None and noise_multiplier:
        raise check.Refusal(f"noise_multiplier = {noise_multiplier!r} was given with privacy; pass one of them")
    batch_size = check.positive("batch_size", batch_size, "it is the expected number of examples a step")
    check.positive("gap", a.gap, "a run that starts at the minimum needs no plan")
    if privacy is not None:
        _check_budget(privacy, batch_size)
    private = privacy is not None or noise_multiplier > 0
    sampling = sampling or ("poisson" if private else "iid")

    def noise_for(steps: int) -> float:
        return privacy.noise_multiplier(batch_size, steps) if privacy else noise_multiplier

    public: dict[str, Any] = {"batch_size": batch_size, "dim": dim, "sampling": sampling}
    if steps is not None:
        steps = check.count("steps", steps, "a plan needs at least 2 steps", least=2)
        return _plan_steps(a, steps, noise_for(steps), privacy, public)
    target = check.positive("target", target, "it is a value of the mean of E||grad f||^2")
    return _plan_target(a, target, noise_for, privacy, public)


def _check_budget(privacy: Privacy, batch_size: float) -> None:
    check.positive("epsilon", privacy.epsilon, "it is the privacy budget; 1 to 10 is usual")
    check.between("delta", privacy.delta, 0, 1, "well below 1/(dataset size), such as 1e-5")
    examples = check.count("examples", privacy.examples, "it is the size of the dataset")
    if privacy.delta >= 1 / examples:
        message = (
            f"delta = {privacy.delta:g} is not below 1/examples = {1 / examples:g}: it allows revealing whole examples"
        )
        warnings.warn(message, stacklevel=3)
    if batch_size > examples:
        raise check.refuse("batch_size", batch_size, f"at most examples = {examples}", "lower the batch size")


def _plan_steps(a: Assumptions, steps: int, noise_multiplier: float, privacy: Privacy | None, public: dict) -> Plan:
    rule = private_form(a, noise_multiplier=noise_multiplier, form="sharp", **public)

    def total(share: Floats, h: Floats) -> Floats:
        # The step size as a share of the largest one, so that the search box does not depend on h.
        return constant_total(rule, a, share * rule.largest_step(1 - h), h, steps)

    share, h = _minimise(total, (1e-9, 1 - 1e-9), (_least_clipped(steps, public["batch_size"]), 1 - 1e-6))
    limit = max_step_private(a, 1 - h, noise_multiplier=noise_multiplier, **public)
    best = bound_private(a, share * limit, 1 - h, steps=steps, noise_multiplier=noise_multiplier, **public)
    return Plan(
        assumptions=a, steps=steps, noise_multiplier=noise_multiplier, privacy=privacy,
        gamma=share * limit, p=1 - h, bound=best, **public,
    )  # fmt: skip


def _least_clipped(steps: int, batch_size: float) -> float:
    """Return the clipped fraction at which a run clips one example in all: below it QC-SGD is plain SGD."""
    return min(0.5, 1 / (steps * batch_size))


def constant_total(rule: TheoremForm, a: Assumptions, gamma_L: Floats, h: Floats, steps: float) -> Floats:
    """Return the sharp bound at constant parameters and the best beta, over arrays; infinite where it does not hold."""
    p = 1 - h
    fixed = a.gap * a.L / (gamma_L * steps) + a.sigma**2 * gamma_L * rule.variance(h, h)
    # Without a bias any beta serves, the smaller the better; a beta above 0 keeps the quotients finite.
    bias = np.maximum(a.sigma**2 / 2 * rule.bias(p), 1e-300)
    at_zero, slope = contraction_line(rule, gamma_L, p)
    beta = best_beta_constant(np.maximum(at_zero, 1e-300), slope, fixed, bias, p)
    left = at_zero - slope * beta
    return np.where((left > 0) & (gamma_L <= rule.step_cap), (fixed + bias / beta) / np.maximum(left, 1e-300), np.inf)


def _minimise(
    f: Callable[[Floats, Floats], Floats], box_x: tuple[float, float], box_y: tuple[float, float]
) -> tuple[float, float]:
    """Return the minimiser of f over a box, by a logarithmic grid that zooms in on its best cell."""
    x_low, x_high, y_low, y_high = np.log([*box_x, *box_y])
    box = (x_low, x_high, y_low, y_high)
    x = y = 0.0
    for _ in range(40):
        xs, ys = np.linspace(x_low, x_high, 65), np.linspace(y_low, y_high, 65)
        values = f(np.exp(xs)[:, None], np.exp(ys)[None, :])
        i, j = np.unravel_index(int(np.argmin(values)), values.shape)
        x, y = float(xs[i]), float(ys[j])
        wide_x, wide_y = (x_high - x_low) / 8, (y_high - y_low) / 8
        if max(wide_x, wide_y) < 1e-9:
            break
        x_low, x_high = max(box[0], x - wide_x), min(box[1], x + wide_x)
        y_low, y_high = max(box[2], y - wide_y), min(box[3], y + wide_y)
    return math.exp(x), math.exp(y)


def _plan_target(
    a: Assumptions, target: float, noise_for: Callable[[int], float], privacy: Privacy | None, public: dict
) -> Plan:
    """Return the plan of the fewest steps that reach the target, by doubling and then bisection.

    Calibrating the noise to a budget takes seconds, so the search interpolates a few values (the noise multiplier is a
    smooth function of the steps) and checks only its result exactly.
    """
    rough = _interpolated(noise_for) if privacy else noise_for
    most = BUDGET_STEPS[-1] if privacy else MOST_STEPS

    def reached(steps: int) -> bool:
        return _plan_steps(a, steps, rough(steps), privacy, public).bound.total <= target

    def unreachable(steps: int) -> ValueError:
        least = _plan_steps(a, steps, rough(steps), privacy, public).bound.total
        remedy = "raise the target or the batch size"
        if privacy:
            remedy = f"at a fixed privacy budget the noise grows with the steps: {remedy}, or use more examples"
        return check.refuse("target", target, f"above {least:.4g}, the bound at {steps:,} steps", remedy)

    low, high = 1, 2
    while not reached(high):
        if high >= most:
            raise unreachable(most)
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    exact = _plan_steps(a, high, noise_for(high), privacy, public)
    while exact.bound.total > target:
        high = math.ceil(1.01 * high)
        if high > most:
            raise unreachable(most)
        exact = _plan_steps(a, high, noise_for(high), privacy, public)
    return exact


def _interpolated(noise_for: Callable[[int], float]) -> Callable[[int], float]:
    """Interpolate ``noise_for`` through a few exact values, in logarithms of both."""
    noise = PchipInterpolator(np.log(BUDGET_STEPS), np.log([noise_for(steps) for steps in BUDGET_STEPS]))
    # Fewer steps need less noise, so the first value serves for all shorter runs.
    return lambda steps: float(np.exp(noise(np.log(max(steps, BUDGET_STEPS[0])))))


def _plan_coupled(base: Plan) -> CoupledPlan:
    """Return the constants of ``gamma_t = g (t+1)^(theta-1)``, ``h_t = h (t+1)^nu`` of least bound at ``base.steps``.

    p_t rises and gamma_t falls, so the step-size condition is hardest at the first step.
    """
    a = base.assumptions
    exponents = rates(a.q)
    private = base.noise_multiplier > 0
    step_exponent = -0.5 if private else exponents.theta - 1
    clipped_exponent = 0.0 if private else exponents.nu
    rule = private_form(a, form="sharp", **base._public())
    times, counts = _time_grid(base.steps)
    least = math.log(_least_clipped(base.steps, base.batch_size))

    def constants(point: Floats) -> tuple[float, float]:
        share, h = 1 / (1 + math.exp(-point[0])), math.exp(point[1])
        return share * max_step_private(a, 1 - h, **base._public()), h

    def evaluate(point: Floats) -> Bound:
        step_size, h = constants(point)
        p = 1 - np.maximum(h * times**clipped_exponent, 1e-15)  # below 1, whatever the rounding
        return assemble(rule, a, step_size * times**step_exponent, p, p, counts)

    minimum = minimize(
        lambda point: math.log(evaluate(point).total),
        x0=[-2.0, max(-1.0, least)],
        bounds=[(-30, 30), (least, -1e-9)],
        method="Nelder-Mead",
    )
    return CoupledPlan(*constants(minimum.x), step_exponent, clipped_exponent, evaluate(minimum.x))


def _time_grid(steps: int) -> tuple[Floats, Floats]:
    """Return times in 1..steps and the number of steps each stands for: early ones singly, later ones in groups."""
    edges = np.concatenate([np.arange(1, 200), np.geomspace(200, steps + 1, 600).round()]) if steps > 800 else None
    edges = np.arange(1, steps + 2) if edges is None else np.unique(edges)
    counts = np.diff(edges).astype(np.float64)
    return edges[:-1] + (counts - 1) / 2, counts
