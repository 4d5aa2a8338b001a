"""Schedules: functions of the step, counted from 0. A number is accepted wherever a schedule is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.theory import Assumptions, Form, max_step, rates

__all__ = [
    "Capped",
    "Coupled",
    "Polynomial",
    "Schedule",
    "Unclipped",
    "constant",
    "coupled",
    "fixed",
    "polynomial",
    "values",
]

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Polynomial:
    """``initial * ((t + 1 + warm_start) / (1 + warm_start))**power``, kept within [low, high]."""

    initial: float
    power: float
    warm_start: int = 0
    low: float = 0.0
    high: float = np.inf

    def __call__(self, step: int) -> float:
        """Return the value at this step."""
        return float(self.at(np.asarray(step)))

    def at(self, steps: np.ndarray) -> Floats:
        """Return the values at these steps, an array of the same shape."""
        clock = (steps + 1 + self.warm_start) / (1 + self.warm_start)
        return np.clip(self.initial * clock**self.power, self.low, self.high)


@dataclass(frozen=True)
class Unclipped:
    """The quantile ``p_t = 1 - h_t`` for a scheduled clipped fraction ``h_t``."""

    clipped_fraction: Polynomial

    def __call__(self, step: int) -> float:
        """Return the value at this step."""
        return 1 - self.clipped_fraction(step)

    def at(self, steps: np.ndarray) -> Floats:
        """Return the values at these steps, an array of the same shape."""
        return 1 - self.clipped_fraction.at(steps)


@dataclass(frozen=True)
class Capped:
    """A step-size schedule capped at the largest step size that the theorem allows at the quantile of the same step."""

    step_size: Polynomial
    quantile: Unclipped
    assumptions: Assumptions
    beta: float
    c: float
    form: Form

    def __call__(self, step: int) -> float:
        """Return the value at this step."""
        limit = max_step(self.assumptions, self.quantile(step), self.beta, self.c, self.form)
        return min(self.step_size(step), limit)


class Coupled(NamedTuple):
    """A step-size schedule and its quantile schedule."""

    gamma: Polynomial | Capped
    p: Unclipped


def constant(value: float) -> Polynomial:
    """Return a schedule with the same value at every step.

    >>> constant(0.1)(10**6)
    0.1
    """
    return Polynomial(check.real("value", value), 0.0, low=-np.inf)


def polynomial(
    initial: float, power: float, *, warm_start: int = 0, low: float = 0.0, high: float = np.inf
) -> Polynomial:
    """Return the schedule ``initial * (t + 1)**power``.

    >>> polynomial(1.0, -0.5)(3)
    0.5
    >>> polynomial(1.0, -0.5, warm_start=9)(0), polynomial(1.0, -0.5, warm_start=9)(30)
    (1.0, 0.5)

    Args:
        initial: Value at step 0.
        power: Exponent; a negative one decays, a positive one grows.
        warm_start: Step at which the clock starts, which slows the change down; the first value is still ``initial``.
        low: Lower clamp.
        high: Upper clamp.

    Raises:
        Refusal: ``initial`` lies outside [low, high], or a value is out of bounds.
    """
    initial = check.positive("initial", initial, "it is the value at step 0")
    power = check.real("power", power)
    warm_start = check.count("warm_start", warm_start, "it is a number of steps", least=0)
    if not low <= initial <= high:
        raise check.refuse("initial", initial, f"in [{low:g}, {high:g}]", "move the clamps or the first value")
    return Polynomial(initial, power, warm_start, low, high)


def coupled(
    q: float,
    step_size: float,
    clipped_fraction: float,
    form: Form = "sharp",
    *,
    warm_start: int = 0,
    assumptions: Assumptions | None = None,
    beta: float | None = None,
    c: float | None = None,
) -> Coupled:
    """Return the schedules that remove the clipping bias: ``gamma_t ~ (t+1)^(theta-1)``, ``1 - p_t ~ (t+1)^nu``.

    >>> gamma, p = coupled(2, step_size=0.5, clipped_fraction=0.4)
    >>> gamma(99), p(99)  # both exponents are -1/2 at q = 2
    (0.05, 0.96)

    Do not use them in a private run: as p_t nears 1, the threshold and the noise grow. Keep p constant there.

    Args:
        q: The bounded moment, in (1, 2].
        step_size: Step size at step 0.
        clipped_fraction: Clipped fraction at step 0.
        form: The exponents that are best for a bounded q-th moment: the sharp ones, which converge faster, or the
            paper's ("printed").
        warm_start: Step at which the clock starts, which slows the change down.
        assumptions: With these, the step-size condition of the theorem is enforced at every step.
        beta: Constant of that condition; p_0 / 2 when left out.
        c: Contraction of that condition; p_0 / 4 when left out.

    Raises:
        Refusal: A value is out of bounds, or ``beta`` and ``c`` leave no step size at the first quantile.
    """
    exponents = rates(q, form)
    check.quantile("clipped_fraction", clipped_fraction)
    gamma = polynomial(step_size, exponents.theta - 1, warm_start=warm_start)
    p = Unclipped(polynomial(clipped_fraction, exponents.nu, warm_start=warm_start))
    if assumptions is None:
        if beta is not None or c is not None:
            raise check.Refusal(
                f"beta = {beta!r} and c = {c!r} only serve the step-size condition; pass assumptions too, or leave "
                "them out"
            )
        return Coupled(gamma, p)
    beta = p(0) / 2 if beta is None else beta
    c = p(0) / 4 if c is None else c
    max_step(assumptions, p(0), beta, c, form)  # refuses a beta and c that leave no step at the first quantile
    return Coupled(Capped(gamma, p, assumptions, beta, c, form), p)


def fixed(schedule: Schedule | float) -> bool:
    """Return whether the values are fixed before the run, as for numbers and the schedules of this module.

    Any other function may react to the run.

    >>> fixed(0.1), fixed(polynomial(1.0, -0.5)), fixed(lambda step: 0.1)
    (True, True, False)
    """
    if not callable(schedule):
        return True
    return type(schedule) in (Polynomial, Unclipped, Capped) and all(map(fixed, vars(schedule).values()))


def values(schedule: Schedule | float | Sequence[float] | Floats, steps: int) -> Floats:
    """Return the schedule's first values, [steps].

    >>> values(0.5, 3)
    array([0.5, 0.5, 0.5])

    Args:
        schedule: A schedule, a number (a constant schedule), or one value per step.
        steps: Number of values.
    """
    steps = check.count("steps", steps, "it is the number of values", least=0)
    if isinstance(schedule, Polynomial | Unclipped):
        return schedule.at(np.arange(steps))
    if callable(schedule):
        return np.array([schedule(t) for t in range(steps)], dtype=np.float64)
    given = np.asarray(schedule, dtype=np.float64)
    if given.ndim == 0:
        return np.full(steps, float(given))
    if given.shape != (steps,):
        remedy = "give one value per step, a number, or a function of the step"
        raise check.refuse_shape("schedule", given.shape, f"[{steps}]", remedy)
    return given
