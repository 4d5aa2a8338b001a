"""QC-SGD, DP-QC-SGD, clipped SGD and plain SGD on problems with exact oracles, many seeds at once.

Two loops run the same steps on the same random draws: one in numpy for any problem, and a compiled one for additive
noise, when numba is installed. A test compares them.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from qclip import _validate as check
from qclip._validate import Floats
from qclip.schedules import values
from qclip.simulation._numpy_loop import numpy_loop
from qclip.simulation._types import Draws, Loop, Records, Setup, SimulationState
from qclip.simulation.problems import Problem
from qclip.theory.bounds import PerStep

__all__ = ["Trajectories", "simulate"]

CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Trajectories:
    """Recorded values at ``steps`` (rows) for each seed (columns).

    Values belong to the state before the step: entry t holds x_t and what step t then did with it. The last entry is
    the final state, from which no step was taken (its tau and unclipped fraction are NaN).
    """

    steps: np.ndarray
    grad_norm2: Floats
    """``||grad f(x_t)||^2``."""
    loss: Floats
    """f(x_t)."""
    tau: Floats
    """The threshold of step t; infinite for plain SGD."""
    unclipped: Floats
    """The fraction of step t's batch that was not clipped; NaN for an empty (Poisson) batch."""
    mean_grad_norm2: Floats
    """The gamma-weighted mean of ``||grad f||^2`` over the steps before t, which the theorems bound."""
    x: Floats
    """x_t, [records, seeds, d]."""
    loop: str
    """The loop that ran: "numpy" or "compiled"."""

    @property
    def final(self) -> Floats:
        """The last x, [seeds, d]."""
        return self.x[-1]

    def mean(self) -> float:
        """Return the gamma-weighted mean of ``||grad f||^2`` over the whole run, averaged over the seeds."""
        return float(self.mean_grad_norm2[-1].mean())

    def standard_error(self) -> float:
        """Return the standard error of `mean` over the seeds; NaN for a single seed."""
        last = self.mean_grad_norm2[-1]
        return float(last.std(ddof=1) / math.sqrt(last.size)) if last.size > 1 else math.nan

    def upper(self, standard_errors: float = 3.0) -> float:
        """Return `mean` plus some standard errors, to compare with a bound; meant for clipped runs, of light tails."""
        return self.mean() + standard_errors * self.standard_error()


def simulate(
    problem: Problem,
    *,
    step_size: PerStep,
    steps: int,
    x0: ArrayLike,
    p: PerStep | None = None,
    tau: PerStep | None = None,
    seeds: int = 64,
    batch_size: int = 1,
    noise_multiplier: float = 0.0,
    sampling: Literal["iid", "poisson"] = "iid",
    record: int | Sequence[int] = 100,
    seed: int | np.random.Generator = 0,
    error_feedback: bool = False,
    loop: Literal["auto", "numpy", "compiled"] = "auto",
    progress: Callable[[int], None] | None = None,
) -> Trajectories:
    """Run independent copies of a method on a problem and record them.

    With ``p`` the method is QC-SGD (DP-QC-SGD with ``noise_multiplier``), with ``tau`` it is SGD clipped at a given
    threshold, and with neither it is plain SGD.

    >>> from qclip import problems
    >>> problem = problems.HeavyTailedQuadratic(2, problems.Gaussian(0.1))
    >>> run = simulate(problem, step_size=0.1, p=0.5, steps=200, x0=[1.0, 1.0])
    >>> bool(run.grad_norm2[-1].mean() < 0.01 < run.grad_norm2[0].mean())
    True

    Args:
        problem: The problem, with exact oracles.
        step_size: A number, a schedule, or one value per step.
        steps: Number of steps.
        x0: Initial point, [d], or one per seed, [seeds, d].
        p: Clip at the exact p-quantile of the gradient norms at x_t; a number, a schedule, or one value per step.
        tau: Clip at this threshold instead; a number, a schedule, or one value per step.
        seeds: Number of independent copies.
        batch_size: Examples per step; the expected number with Poisson sampling, which still divides the sum.
        noise_multiplier: Standard deviation of the noise on the clipped sum, relative to the threshold.
        sampling: "iid" for batches of one size, "poisson" for Poisson batch sizes.
        record: The steps to record, or how many, spaced geometrically. The final state is always recorded.
        seed: Seed or generator of all random draws.
        error_feedback: Whether what clipping takes is kept and added, clipped too, to later steps: it removes the bias
            (docs/theory.md, section 22). Not with noise: the memory holds unclipped gradients. Runs in numpy.
        loop: "compiled" needs numba and additive noise; "auto" takes it where it can.
        progress: Called with the number of steps done, after each chunk.

    Returns:
        The recorded values.

    Raises:
        Refusal: An argument is out of bounds, or the run diverges.
    """
    steps = check.count("steps", steps)
    seeds = check.count("seeds", seeds)
    start = problem.point(x0, "x0")
    if start.ndim > 2 or start.shape[:-1] not in ((), (1,), (seeds,)):
        bound = f"[{problem.dim}] or [{seeds}, {problem.dim}]"
        raise check.refuse_shape("x0", start.shape, bound, "give one start, or one per seed")
    start = np.broadcast_to(start, (seeds, problem.dim)).copy()
    setup = _resolve(problem, step_size, steps, p, tau, batch_size, noise_multiplier, sampling)
    if error_feedback:
        if noise_multiplier:
            remedy = "leave error_feedback out: its memory holds unclipped gradients, which this noise does not protect"
            raise check.refuse("noise_multiplier", noise_multiplier, "0 with error feedback", remedy)
        setup = replace(setup, error_feedback=True)
    marks = _marks(record, steps)
    execute = _choose_loop(setup, loop)

    state = SimulationState(start, np.zeros(seeds), np.zeros_like(start))
    records = Records.blank(marks.size, seeds, problem.dim)
    rng = np.random.default_rng(seed)
    for first, draws in _chunks(setup, seeds, rng):
        size = draws.counts.shape[0]
        inside = (marks >= first) & (marks < first + size)
        with np.errstate(over="ignore", invalid="ignore"):  # require_finite reports a run that diverges
            chunk = execute(setup, state, draws, first, marks[inside] - first)
        state.require_finite(first + size)
        for column, part in zip(records, chunk, strict=True):
            column[inside] = part
        if progress is not None:
            progress(first + size)
    records.x[-1], records.weighted[-1] = state.x, state.weighted

    grad_norm2 = (problem.grad(records.x) ** 2).sum(-1)
    travelled = np.concatenate([[0.0], np.cumsum(setup.gamma)])[marks, None]  # the sum of the step sizes before each
    # Before the first step there is nothing to average: the value there stands in.
    mean = np.where(travelled > 0, records.weighted / np.maximum(travelled, 1e-300), grad_norm2)
    used = "numpy" if execute is numpy_loop else "compiled"
    return Trajectories(
        marks, grad_norm2, problem.loss(records.x), records.tau, records.unclipped, mean, records.x, used
    )


def _resolve(
    problem: Problem,
    step_size: PerStep,
    steps: int,
    p: PerStep | None,
    tau: PerStep | None,
    batch_size: int,
    noise_multiplier: float,
    sampling: str,
) -> Setup:
    if p is not None and tau is not None:
        raise check.Refusal(
            f"p = {p!r} and tau = {tau!r} were both given; pass p to clip at a quantile, or tau to clip at a threshold"
        )
    check.choice("sampling", sampling, ("iid", "poisson"))
    noise_multiplier = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    if noise_multiplier and p is None and tau is None:
        remedy = "pass p or tau to clip: the noise is relative to the threshold"
        raise check.refuse("noise_multiplier", noise_multiplier, "0 for plain SGD", remedy)
    gamma = check.sequence("step_size", values(step_size, steps), low=0, high=np.inf, remedy="step sizes are positive")
    if p is not None:
        level = check.sequence("p", values(p, steps), low=0, high=1, remedy="it is the unclipped fraction")
    elif tau is not None:
        level = check.sequence("tau", values(tau, steps), low=0, high=np.inf, remedy="a threshold is positive")
    else:
        level = np.full(steps, np.inf)
    kind = "threshold" if p is None else "quantile"
    batch_size = check.count("batch_size", batch_size)
    return Setup(problem, gamma, level, kind, batch_size, sampling == "poisson", noise_multiplier)


def _marks(record: int | Sequence[int], steps: int) -> np.ndarray:
    """Return the steps to record, sorted, the last state included."""
    if isinstance(record, int | np.integer):
        number = check.count("record", int(record))
        chosen = np.unique(np.concatenate([[0], np.geomspace(1, steps, number)]).round().astype(np.int64))
    else:
        given = np.asarray(record)
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise check.refuse("record", list(record), "whole numbers", "steps count from 0")
        chosen = np.unique(given.astype(np.int64))
        if chosen.size and not (chosen[0] >= 0 and chosen[-1] <= steps):
            raise check.refuse("record", list(record), f"steps in [0, {steps}]", "steps count from 0")
    return np.unique(np.append(chosen, steps))


def _chunks(setup: Setup, seeds: int, rng: np.random.Generator) -> Iterator[tuple[int, Draws]]:
    """Yield the first step and the randomness of each chunk, so that a long run needs little memory."""
    steps, dim = setup.gamma.size, setup.problem.dim
    width = setup.batch_size * 2 if setup.poisson else setup.batch_size
    size = max(1, min(steps, CHUNK_BYTES // (8 * seeds * dim * (width + 1))))
    for first in range(0, steps, size):
        shape = (min(size, steps - first), seeds)
        counts = rng.poisson(setup.batch_size, shape) if setup.poisson else np.full(shape, setup.batch_size)
        examples = setup.problem.draw(rng, (*shape, int(counts.max(initial=1) or 1)))
        noise = rng.standard_normal((*shape, dim)) if setup.noise_multiplier else np.zeros((0, 0, 0))
        yield first, Draws(examples, counts, noise)


def _choose_loop(setup: Setup, loop: str) -> Loop:
    check.choice("loop", loop, ("auto", "numpy", "compiled"))
    if setup.error_feedback and loop == "compiled":
        raise check.Refusal("loop = 'compiled' cannot run error feedback; use loop='auto'")
    if loop == "numpy" or setup.error_feedback:
        return numpy_loop
    if importlib.util.find_spec("numba") is None:
        if loop == "auto":
            return numpy_loop
        raise check.Refusal("loop = 'compiled' needs numba, which is not installed; pip install 'qclip[fast]'")
    from qclip.simulation._numba_loop import NumbaLoop, Unsuited

    try:
        return NumbaLoop(setup)
    except Unsuited as reason:
        if loop == "auto":
            return numpy_loop
        raise check.Refusal(f"loop = 'compiled' cannot run: {reason}; use loop='auto'") from None
