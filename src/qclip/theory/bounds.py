"""Theorems 1 and 2 and our sharper theorem: bounds on the gamma-weighted mean of ``E ||grad f||^2``.

Every form of the theorem has one shape. With h = 1 - p, for steps that leave the contraction

    c_t(beta) = w [ p_t - beta/2 - gamma_t L (drag + curvature p_t (p_t - beta)) ]  >=  c  >  0

it says

    (c/Gamma) sum gamma_t E||grad f||^2
        <=  (w/Gamma) [ gap + sigma^2 sum gamma_t ( bias(p_t)/(2 beta) + gamma_t L v(h_t) ) ]

so a form is six facts: w, drag, curvature, the largest gamma L, the bias and v (`TheoremForm`). docs/theory.md proves
each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from scipy.optimize import minimize_scalar

from qclip import _validate as check
from qclip._validate import Floats
from qclip.theory.assumptions import Assumptions
from qclip.theory.lemmas import squared_bias
from qclip.theory.rates import FORMS, Form

Sampling = Literal["poisson", "iid"]
PerStep = float | Sequence[float] | Floats | Callable[[int], float]
"""A number, one number per step, or a schedule: a function of the step."""


@dataclass(frozen=True)
class Bound:
    """A bound on the gamma-weighted mean of ``E ||grad f||^2``, term by term, already divided by c.

    Attributes:
        optimisation: The term that shrinks with the number of steps.
        variance: The term that shrinks with the step size.
        bias: The term that shrinks with the clipped fraction.
        beta: The constant of the theorem that the bound was evaluated at.
        c: The contraction that the bound was evaluated at.
    """

    optimisation: float
    variance: float
    bias: float
    beta: float = 0.0
    c: float = 1.0

    @property
    def total(self) -> float:
        """The bound: the sum of its three terms."""
        return self.optimisation + self.variance + self.bias

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(("optimisation", "variance", "bias"), key=lambda term: getattr(self, term))

    def one_run(self, confidence: float = 0.95) -> float:
        """Return a bound on a single run that holds with this probability, by Markov's inequality on the expectation.

        For a `certificate`, whose value depends on the record, see the condition in its docstring.
        """
        return self.total / (1 - check.between("confidence", confidence, 0, 1, "0.95 is usual"))


@dataclass(frozen=True)
class TheoremForm:
    """One form of the theorem; the module's docstring shows where each field enters."""

    weight: float
    drag: float
    curvature: float
    step_cap: float  # gamma L is at most this
    variance: Callable[[Floats, Floats], Floats]  # v(h_lo, h_hi): 1 - p_lo, and 1 - p_hi in negative powers
    bias: Callable[[Floats], Floats]  # of p_lo: a bound on the squared bias of clipping, over sigma^2

    def contraction(self, gamma_L: Floats, p: Floats, beta: float | Floats) -> Floats:
        """Return the contraction c_t(beta) of each step."""
        return self.weight * (p - beta / 2 - gamma_L * (self.drag + self.curvature * p * (p - beta)))

    def largest_step(self, p: Floats, beta: float = 0.0, c: float = 0.0) -> Floats:
        """Return the largest gamma L whose contraction is at least c."""
        drag = self.drag + self.curvature * p * (p - beta)
        with np.errstate(divide="ignore"):  # without drag only the cap is left
            return np.minimum(self.step_cap, (p - beta / 2 - c / self.weight) / drag)


def _lemma1_squared(a: Assumptions) -> Callable[[Floats], Floats]:
    return lambda p: (1 - p) ** (2 - 2 / a.q)


def _theorem1(a: Assumptions) -> TheoremForm:
    return TheoremForm(2, 1, 0, np.inf, lambda _, h: h ** (-2 / a.q), _lemma1_squared(a))


def _theorem2(a: Assumptions, batch_size: float, noise_multiplier: float) -> TheoremForm:
    # sigma_DP is relative to the mean of the batch, hence noise_multiplier / batch_size (erratum B).
    S = 1 / batch_size + (noise_multiplier / batch_size) ** 2
    return TheoremForm(1, 2 * S, 0, np.inf, lambda _, h: 2 * S * h ** (-2 / a.q), _lemma1_squared(a))


def _corrected(a: Assumptions, batch_size: float, noise_multiplier: float, dim: int) -> TheoremForm:
    S = 1 / batch_size + dim * (noise_multiplier / batch_size) ** 2

    def variance(h_lo: Floats, h: Floats) -> Floats:
        return S * h ** (-2 / a.q) + h_lo ** (2 - 2 / a.q)

    return TheoremForm(1, 1 + S, 0, np.inf, variance, _lemma1_squared(a))


def _sharp(a: Assumptions, batch_size: float, noise_multiplier: float, dim: int, sampling: Sampling) -> TheoremForm:
    q = a.q
    S_z = dim * (noise_multiplier / batch_size) ** 2
    tail = 2 ** (1 - q) / batch_size  # of Var(clipped) <= (2 tau)^(2-q) sigma^q
    repeat = 1 + 1 / batch_size if sampling == "poisson" else 1.0  # Poisson sums vary with their size too

    def variance(_: Floats, h: Floats) -> Floats:
        return tail * (h ** (1 - 2 / q) + (1 - q / 2) * h ** (2 - 2 / q)) + S_z * h ** (-2 / q)

    return TheoremForm(1, S_z + tail * (1 - q / 2), repeat / 2, 1 / repeat, variance, partial(squared_bias, q))


def _plain_form(a: Assumptions, form: Form) -> TheoremForm:
    """Return the form for QC-SGD: one example a step and no noise."""
    if check.choice("form", form, FORMS) == "printed":
        return _theorem1(a)
    return private_form(a, batch_size=1, noise_multiplier=0, dim=1, form=form, sampling="iid")


def private_form(
    a: Assumptions, *, batch_size: float, noise_multiplier: float, dim: int, form: Form, sampling: Sampling
) -> TheoremForm:
    """Return the form of the theorem for DP-QC-SGD with these public constants."""
    batch_size = check.positive("batch_size", batch_size, "it is the expected number of examples a step")
    noise_multiplier = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    dim = check.count("dim", dim, "it is the number of trainable parameters")
    check.choice("sampling", sampling, ("poisson", "iid"))
    if check.choice("form", form, FORMS) == "printed":
        return _theorem2(a, batch_size, noise_multiplier)
    if form == "corrected":
        return _corrected(a, batch_size, noise_multiplier, dim)
    return _sharp(a, batch_size, noise_multiplier, dim, sampling)


def max_step(
    a: Assumptions, p: float, beta: float | None = None, c: float | None = None, form: Form = "sharp"
) -> float:
    """Return the largest step size for which the theorem on QC-SGD holds at quantile p.

    >>> a = Assumptions(L=2, sigma=1, q=2, gap=1)
    >>> max_step(a, p=0.5, beta=0.2, c=0.3, form="printed")  # (2p - beta - c) / (2L)
    0.125

    Args:
        a: The assumptions on the problem.
        p: Quantile to clip at.
        beta: Constant of the theorem.
        c: Contraction that is left.
        form: Form of the theorem: "sharp", "corrected" or "printed".

    Returns:
        The limit at these constants. Without ``beta`` and ``c`` it is the supremum over them: below it some choice
        works, at it none does (unless the limit is the 1/L of the sharp form).

    Raises:
        Refusal: An argument is out of bounds, or ``beta`` and ``c`` leave no step size.
    """
    return _max_step(_plain_form(a, form), a, p, beta, c)


def max_step_private(
    a: Assumptions,
    p: float,
    beta: float | None = None,
    c: float | None = None,
    *,
    batch_size: float,
    noise_multiplier: float,
    dim: int,
    form: Form = "sharp",
    sampling: Sampling = "poisson",
) -> float:
    """Return the largest step size for which the theorem on DP-QC-SGD holds at quantile p (see `max_step`).

    Args:
        a: The assumptions on the problem.
        p: Quantile to clip at.
        beta: Constant of the theorem.
        c: Contraction that is left.
        batch_size: Expected batch size.
        noise_multiplier: Standard deviation of the noise on the clipped sum, relative to the threshold.
        dim: Number of trainable parameters.
        form: Form of the theorem: "sharp", "corrected" or "printed".
        sampling: "poisson" or "iid".

    Raises:
        Refusal: An argument is out of bounds, or ``beta`` and ``c`` leave no step size.
    """
    rule = private_form(
        a, batch_size=batch_size, noise_multiplier=noise_multiplier, dim=dim, form=form, sampling=sampling
    )
    return _max_step(rule, a, p, beta, c)


def bound(
    a: Assumptions,
    gammas: PerStep,
    ps: PerStep,
    beta: float | None = None,
    c: float | None = None,
    *,
    steps: int | None = None,
    form: Form = "sharp",
    p_hi: PerStep | None = None,
) -> Bound:
    """Return the bound of Theorem 1, on QC-SGD with one example a step.

    >>> a = Assumptions(L=1, sigma=1, q=2, gap=1)
    >>> b = bound(a, 0.01, 0.9, beta=0.5, c=1.0, steps=1000, form="printed")
    >>> [round(term, 6) for term in (b.optimisation, b.variance, b.bias, b.total)]  # 2F/gT, 2gLs^2/h, s^2 h/beta
    [0.2, 0.2, 0.2, 0.6]

    Args:
        a: The assumptions on the problem.
        gammas: Step sizes: a number or a schedule with ``steps``, or one value per step.
        ps: Quantiles, in the same forms. With ``p_hi``, lower bounds on ``P(||g|| <= tau_t)``.
        beta: Constant of the theorem; the best one when left out.
        c: Contraction that is left; the largest one when left out.
        steps: Number of steps.
        form: Form of the theorem: "sharp", "corrected" or "printed".
        p_hi: For an inexact quantile, upper bounds on ``P(||g|| < tau_t)``, for a tau_t fixed before the sample.

    Raises:
        Refusal: An argument is out of bounds, or the theorem does not hold at these step sizes.
    """
    return _bound(_plain_form(a, form), a, gammas, ps, beta, c, steps, p_hi)


def bound_private(
    a: Assumptions,
    gammas: PerStep,
    ps: PerStep,
    beta: float | None = None,
    c: float | None = None,
    *,
    batch_size: float,
    noise_multiplier: float,
    dim: int,
    steps: int | None = None,
    form: Form = "sharp",
    sampling: Sampling = "poisson",
    p_hi: PerStep | None = None,
) -> Bound:
    """Return the bound of Theorem 2, on DP-QC-SGD.

    Args:
        a: The assumptions on the problem.
        gammas: Step sizes: a number or a schedule with ``steps``, or one value per step.
        ps: Quantiles, in the same forms. With ``p_hi``, lower bounds on ``P(||g|| <= tau_t)``.
        beta: Constant of the theorem; the best one when left out.
        c: Contraction that is left; the largest one when left out.
        batch_size: Expected batch size.
        noise_multiplier: Standard deviation of the noise on the clipped sum, relative to the threshold, as accountants
            define it; the paper's sigma_DP is ``noise_multiplier / batch_size``. 0 is mini-batch QC-SGD.
        dim: Number of trainable parameters.
        steps: Number of steps.
        form: Form of the theorem: "sharp", "corrected" or "printed". The printed one is false for large batches or
            dimensions (errata C, D).
        sampling: "poisson" or "iid".
        p_hi: For an inexact quantile, upper bounds on ``P(||g|| < tau_t)``, for a tau_t fixed before the sample.

    Raises:
        Refusal: An argument is out of bounds, or the theorem does not hold at these step sizes.
    """
    rule = private_form(
        a, batch_size=batch_size, noise_multiplier=noise_multiplier, dim=dim, form=form, sampling=sampling
    )
    return _bound(rule, a, gammas, ps, beta, c, steps, p_hi)


def _max_step(rule: TheoremForm, a: Assumptions, p: float, beta: float | None, c: float | None) -> float:
    p = check.quantile("p", p)
    beta, c = beta or 0.0, c or 0.0
    _check_constants(rule, p, beta, c)
    return float(rule.largest_step(np.asarray(p), beta, c)) / a.L


def _check_constants(rule: TheoremForm, p: float, beta: float, c: float) -> None:
    """Refuse a beta and c that leave no step size at quantile p, the smallest one of a run."""
    check.between("beta", beta, 0, 1, "beta trades the bias term against the step size", closed="low")
    check.nonnegative("c", c, "c is the contraction that is left; leave it out for the best one")
    if rule.curvature and beta > p:
        raise check.refuse("beta", beta, f"at most p = {p:g}", "lower beta, raise p, or leave beta out")
    if beta / 2 + c / rule.weight > p:
        name, text = ("beta + c", "2p") if rule.weight == 2 else ("beta/2 + c", "p")
        value = rule.weight * (beta / 2 + c / rule.weight)
        raise check.refuse(name, value, f"at most {text} = {rule.weight * p:g}", "lower beta or c, or raise p")


def per_step(name: str, values: PerStep, steps: int | None, *, high: float, remedy: str) -> Floats:
    """Return the values as an array: one value for a constant, or one per step."""
    if callable(values):
        values = [values(t) for t in range(check.count("steps", steps, f"a schedule {name} needs the number of steps"))]
    return check.sequence(name, values, low=0, high=high, remedy=remedy)


def align(
    gammas: PerStep, ps: PerStep, p_hi: PerStep | None, steps: int | None
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return gamma, p and p_hi as arrays of one length, and the number of steps that each entry stands for."""
    quantile_remedy = "a quantile is the fraction of examples left unclipped, such as 0.5"
    gamma = per_step("gamma", gammas, steps, high=np.inf, remedy="a step size is positive")
    p = per_step("p", ps, steps, high=1, remedy=quantile_remedy)
    upper = p if p_hi is None else per_step("p_hi", p_hi, steps, high=1, remedy=quantile_remedy)
    lengths = {array.size for array in (gamma, p, upper)} - {1}
    if len(lengths) > 1:
        raise check.refuse("lengths of gammas and ps", sorted(lengths), "equal", "give one value per step in each")
    length = lengths.pop() if lengths else 1
    counts = np.ones(length)
    if length == 1:
        remedy = "give the number of steps with these constants, or one value per step"
        counts *= check.count("steps", steps, remedy)
    elif steps is not None and steps != length:
        raise check.refuse("steps", steps, f"{length}, the number of values given", "leave steps out")
    gamma, p, upper = (np.broadcast_to(array, length) for array in (gamma, p, upper))
    if (upper < p).any():
        t = int(np.argmax(upper < p))
        raise check.refuse("p_hi", float(upper[t]), f"at least p = {p[t]:g}", "swap the two, or widen the interval")
    return gamma, p, upper, counts


def _bound(
    rule: TheoremForm,
    a: Assumptions,
    gammas: PerStep,
    ps: PerStep,
    beta: float | None,
    c: float | None,
    steps: int | None,
    p_hi: PerStep | None,
) -> Bound:
    gamma, p, upper, counts = align(gammas, ps, p_hi, steps)
    check_steps(rule, a, gamma * a.L, p, beta, c)
    return assemble(rule, a, gamma, p, upper, counts, beta, c)


def assemble(
    rule: TheoremForm,
    a: Assumptions,
    gamma: Floats,
    p: Floats,
    upper: Floats,
    counts: Floats,
    beta: float | None = None,
    c: float | None = None,
) -> Bound:
    """Return the bound of ``counts[i]`` steps with ``gamma[i]`` and an unclipped fraction in [p[i], upper[i]]."""
    h_lo, h_hi, gamma_L = 1 - p, 1 - upper, gamma * a.L
    length = float(counts @ gamma)
    weights = counts * gamma / length
    optimisation = rule.weight * a.gap / length
    variance = rule.weight * a.sigma**2 * float(weights @ (gamma_L * rule.variance(h_lo, h_hi)))
    bias = rule.weight * a.sigma**2 / 2 * float(weights @ rule.bias(p))
    return divide(rule, gamma_L, p, optimisation, variance, bias, beta, c)


def divide(
    rule: TheoremForm,
    gamma_L: Floats,
    p: Floats,
    optimisation: float,
    variance: float,
    bias: float,
    beta: float | None = None,
    c: float | None = None,
) -> Bound:
    """Return the bound whose terms, before the division by c, are ``optimisation``, ``variance``, ``bias / beta``."""
    if beta is None:
        beta = _best_beta(rule, gamma_L, p, optimisation + variance, bias, c)
    if c is None:
        c = float(rule.contraction(gamma_L, p, beta).min())
    assert c > 0, (beta, c)
    return Bound(optimisation / c, variance / c, bias / (beta * c) if bias else 0.0, beta, c)


def check_steps(
    rule: TheoremForm, a: Assumptions, gamma_L: Floats, p: Floats, beta: float | None, c: float | None
) -> None:
    """Refuse a step size for which the theorem does not hold with these beta and c, or with any."""
    for name, value in (("beta", beta), ("c", c)):
        if value is not None:
            check.positive(name, value, "leave it out for the best one")
    _check_constants(rule, float(p.min()), beta or 0.0, c or 0.0)
    left = rule.contraction(gamma_L, p, beta or 0.0) - (c or 0.0)
    # With c given the condition may hold with equality; rounding must not turn that into a refusal.
    short = left < -1e-12 if c is not None else left <= 0
    bad = short | (gamma_L > rule.step_cap * (1 + 1e-12))
    if bad.any():
        t = int(np.argmax(bad))
        limit = _max_step(rule, a, float(p[t]), beta, c)
        name = "gamma" if gamma_L.size == 1 else f"gamma[{t}]"
        remedy = f"lower the step size{'' if c is None else ', or c'}, or raise p = {p[t]:g} (see max_step)"
        relation = "at most" if c is not None else "below"
        raise check.refuse(name, float(gamma_L[t] / a.L), f"{relation} {limit:.6g} at p = {p[t]:g}", remedy)


def _best_beta(rule: TheoremForm, gamma_L: Floats, p: Floats, fixed: float, bias: float, c: float | None) -> float:
    """Return the beta that minimises ``(fixed + bias/beta) / c(beta)``, where c(beta) is the least contraction.

    The quotient of a convex and a concave positive function is quasi-convex, so there is one minimum.
    """
    if bias == 0:
        return 0.0  # the bias term vanishes for every beta, and the contraction is largest at 0
    at_zero, slope = contraction_line(rule, gamma_L, p)
    ceiling = float(p.min()) if rule.curvature else 1.0
    if c is not None:  # the bound falls with beta: take the largest that leaves c
        largest = float(((at_zero - c) / np.maximum(slope, 1e-300)).min())
        if largest <= 0:
            raise check.refuse(
                "c", c, f"below {at_zero.min():.6g} so that a beta > 0 is left", "lower c or the step size"
            )
        return min(ceiling, largest)
    if p.size == 1:
        return float(best_beta_constant(at_zero, slope, fixed, bias, ceiling)[0])

    def log_bound(log_beta: float) -> float:
        beta = np.exp(log_beta)
        left = float((at_zero - slope * beta).min())
        return float(np.log(fixed + bias / beta) - np.log(left)) if left > 0 else np.inf

    # The best beta of each step taken alone brackets the best beta of all of them; the contraction of every step
    # must stay positive, which ends the bracket where the first of them vanishes.
    alone = best_beta_constant(at_zero, slope, fixed, bias, ceiling)
    vanishes = float((at_zero / np.maximum(slope, 1e-300)).min())
    low, high = np.log(alone.min()), np.log(min(alone.max(), vanishes))
    if high - low < 1e-12:
        return float(alone.min())
    minimum = minimize_scalar(log_bound, bounds=(low, high), method="bounded", options={"xatol": 1e-10})
    return float(np.exp(min((minimum.x, low), key=log_bound)))


def contraction_line(rule: TheoremForm, gamma_L: Floats, p: Floats) -> tuple[Floats, Floats]:
    """Return the contraction as a straight line in beta: its value at 0, and minus its slope."""
    at_zero = rule.contraction(gamma_L, p, 0.0)
    return at_zero, rule.weight * (0.5 - gamma_L * rule.curvature * p)


def best_beta_constant(
    at_zero: Floats, slope: Floats, fixed: float | Floats, bias: float | Floats, ceiling: float | Floats
) -> Floats:
    """Return the minimiser over beta of ``(fixed + bias/beta) / (at_zero - slope beta)``, at most ``ceiling``.

    The derivative vanishes where ``slope fixed beta^2 + 2 slope bias beta = bias at_zero``; this root is written
    so that it neither divides by 0 nor cancels.
    """
    root = np.sqrt((slope * bias) ** 2 + slope * fixed * bias * at_zero)
    with np.errstate(divide="ignore", invalid="ignore"):
        beta = np.where(slope > 0, bias * at_zero / (slope * bias + root), np.inf)
    return np.minimum(beta, ceiling)
