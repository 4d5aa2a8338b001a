"""QC-SGD, DP-QC-SGD, clipped SGD and plain SGD on problems with exact oracles, many seeds at once.

Two loops run the same steps on the same random draws: a plain numpy one for any problem (`_numpy_loop`), and a
compiled one for additive noise (`qclip.simulation._compiled`, when numba is installed). Their equality is a test.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from qclip import _validate as check
from qclip._validate import Floats
from qclip.schedules import values
from qclip.simulation.problems import Problem
from qclip.simulation.problems.noise import clip_factor
from qclip.theory.bounds import PerStep

CHUNK_BYTES = 32 * 2**20
SAME_NORM = 1e-9  # relative: an example whose norm is the threshold, up to rounding, counts as unclipped


@dataclass(frozen=True)
class Trajectories:
    """What was recorded, at ``steps`` (rows) for each seed (columns).

    Values belong to the state before the step: entry t holds x_t and what step t then did with it. The last entry is
    the final state, at which no step was made (its tau and unclipped fraction are NaN).
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
    """The gamma-weighted mean of ``||grad f||^2`` over the steps before t: what the theorems bound."""
    x: Floats
    """x_t, [records, seeds, d]."""
    loop: str
    """Which loop ran: "numpy" or "compiled"."""

    @property
    def final(self) -> Floats:
        """The last x, [seeds, d]."""
        return self.x[-1]

    def mean(self) -> float:
        """The gamma-weighted mean of ``||grad f||^2`` over the whole run, averaged over the seeds."""
        return float(self.mean_grad_norm2[-1].mean())

    def standard_error(self) -> float:
        """The standard error of `mean` over the seeds."""
        last = self.mean_grad_norm2[-1]
        return float(last.std(ddof=1) / math.sqrt(last.size)) if last.size > 1 else math.nan

    def upper(self, standard_errors: float = 3.0) -> float:
        """`mean` plus some standard errors: what is compared with a bound (for clipped runs, whose tails are light)."""
        return self.mean() + standard_errors * self.standard_error()


@dataclass(frozen=True)
class Run:
    """A simulation's settings, resolved: what both loops read."""

    problem: Problem
    gamma: Floats  # [steps]
    level: Floats  # [steps]: the quantile, the threshold or infinity, as kind says
    kind: Literal["quantile", "threshold"]
    batch_size: int
    poisson: bool
    noise_multiplier: float


@dataclass
class State:
    """Where the seeds are, between chunks of steps."""

    x: Floats  # [seeds, d]
    weighted: Floats  # [seeds]: sum of gamma ||grad f||^2


@dataclass(frozen=True)
class Draws:
    """All the randomness of some consecutive steps; leading axes [steps, seeds]."""

    examples: Any  # [steps, seeds, n, ...]
    counts: np.ndarray  # [steps, seeds]: how many of the n are in the batch
    noise: Floats  # [steps, seeds, d], or [0, 0, 0] without noise


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
    loop: Literal["auto", "numpy", "compiled"] = "auto",
    progress: Callable[[int], None] | None = None,
) -> Trajectories:
    """Run ``seeds`` independent copies of a method and record them.

    ``p``: QC-SGD, at the exact p-quantile of the gradient norms at x_t (DP-QC-SGD with ``noise_multiplier``); ``tau``:
    SGD clipped at a threshold of your choosing; neither: plain SGD. ``step_size``, ``p`` and ``tau`` are numbers,
    schedules, or one value per step. ``record``: the steps to record, or how many (spread geometrically); the last
    state is always recorded. ``sampling="poisson"`` makes the batch sizes Poisson with mean ``batch_size``, which still
    divides the sum. ``progress`` is called with the number of steps done. A run that diverges is refused in words.

    >>> from qclip.problems import HeavyTailedQuadratic, Gaussian
    >>> run = simulate(HeavyTailedQuadratic(2, Gaussian(0.1)), step_size=0.1, p=0.5, steps=200, x0=[1.0, 1.0])
    >>> bool(run.grad_norm2[-1].mean() < 0.01 < run.grad_norm2[0].mean())
    True
    """
    steps = check.count("steps", steps)
    seeds = check.count("seeds", seeds)
    start = problem.point(x0, "x0")
    if start.ndim > 2 or start.shape[:-1] not in ((), (1,), (seeds,)):
        bound = f"[{problem.dim}] or [{seeds}, {problem.dim}]"
        raise check.refuse("x0", f"array of shape {start.shape}", bound, "give one start, or one per seed")
    start = np.broadcast_to(start, (seeds, problem.dim)).copy()
    run = _resolve(problem, step_size, steps, p, tau, batch_size, noise_multiplier, sampling)
    marks = _marks(record, steps)
    execute = _choose_loop(run, loop)

    state = State(start, np.zeros(seeds))
    shape = (marks.size, seeds)
    x, tau_t, unclipped, weighted = (np.full(s, np.nan) for s in ((*shape, problem.dim), shape, shape, shape))
    rng = np.random.default_rng(seed)
    for first, draws in _chunks(run, seeds, rng):
        size = draws.counts.shape[0]
        inside = (marks >= first) & (marks < first + size)
        with np.errstate(over="ignore", invalid="ignore"):  # a run that diverges is reported in words, below
            recorded = execute(run, state, draws, first, marks[inside] - first)
        _check_finite(state, first + size)
        x[inside], tau_t[inside], unclipped[inside], weighted[inside] = recorded
        if progress is not None:
            progress(first + size)
    x[-1], weighted[-1] = state.x, state.weighted

    grad_norm2 = (problem.grad(x) ** 2).sum(-1)
    travelled = np.concatenate([[0.0], np.cumsum(run.gamma)])[marks, None]  # the sum of the step sizes before each
    # Before the first step the mean is of nothing: the value there stands in.
    mean = np.where(travelled > 0, weighted / np.maximum(travelled, 1e-300), grad_norm2)
    used = "numpy" if execute is _numpy_loop else "compiled"
    return Trajectories(marks, grad_norm2, problem.loss(x), tau_t, unclipped, mean, x, used)


def _check_finite(state: State, step: int) -> None:
    lost = ~(np.abs(state.x) < 1e150).all(1)  # beyond, squares overflow; a NaN is lost too
    if lost.any():
        bad = int(lost.sum())
        remedy = "lower the step size (theory.max_step says how far)"
        raise check.refuse("x", f"not finite in {bad} of {len(state.x)} seeds by step {step}", "finite", remedy)


def _resolve(
    problem: Problem,
    step_size: PerStep,
    steps: int,
    p: PerStep | None,
    tau: PerStep | None,
    batch_size: int,
    noise_multiplier: float,
    sampling: str,
) -> Run:
    if p is not None and tau is not None:
        raise check.refuse("p, tau", (p, tau), "given one at a time", "p clips at a quantile, tau at a threshold")
    check.choice("sampling", sampling, ("iid", "poisson"))
    noise_multiplier = check.nonnegative("noise_multiplier", noise_multiplier, "0 means no noise")
    if noise_multiplier and p is None and tau is None:
        remedy = "clip, by p or tau: noise is scaled by the threshold"
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
    return Run(problem, gamma, level, kind, batch_size, sampling == "poisson", noise_multiplier)


def _marks(record: int | Sequence[int], steps: int) -> np.ndarray:
    """The steps to record, sorted, the last state included."""
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


def _chunks(run: Run, seeds: int, rng: np.random.Generator) -> Iterator[tuple[int, Draws]]:
    """The randomness of the run, a piece at a time, so that a long run needs little memory."""
    steps, dim = run.gamma.size, run.problem.dim
    width = run.batch_size * 2 if run.poisson else run.batch_size
    size = max(1, min(steps, CHUNK_BYTES // (8 * seeds * dim * (width + 1))))
    for first in range(0, steps, size):
        shape = (min(size, steps - first), seeds)
        counts = rng.poisson(run.batch_size, shape) if run.poisson else np.full(shape, run.batch_size)
        examples = run.problem.draw(rng, (*shape, int(counts.max(initial=1) or 1)))
        noise = rng.standard_normal((*shape, dim)) if run.noise_multiplier else np.zeros((0, 0, 0))
        yield first, Draws(examples, counts, noise)


Loop = Callable[[Run, State, Draws, int, np.ndarray], tuple[Floats, Floats, Floats, Floats]]


def _choose_loop(run: Run, loop: str) -> Loop:
    check.choice("loop", loop, ("auto", "numpy", "compiled"))
    if loop == "numpy":
        return _numpy_loop
    if importlib.util.find_spec("numba") is None:
        if loop == "auto":
            return _numpy_loop
        raise check.refuse("loop", loop, "'numpy' without numba", "install qclip[fast]")
    from qclip.simulation._compiled import CompiledLoop, Unsuited

    try:
        return CompiledLoop(run)
    except Unsuited as reason:
        if loop == "auto":
            return _numpy_loop
        raise check.refuse("loop", loop, f"'numpy': {reason}", "use loop='auto'") from None


def _numpy_loop(
    run: Run, state: State, draws: Draws, first: int, offsets: np.ndarray
) -> tuple[Floats, Floats, Floats, Floats]:
    """The steps of one chunk, one at a time: the reference that reads like the equations."""
    problem, B = run.problem, run.batch_size
    seeds = state.x.shape[0]
    shape = (offsets.size, seeds)
    xs, taus, fractions, weighted = (
        np.empty((*shape, problem.dim)),
        np.empty(shape),
        np.empty(shape),
        np.empty(shape),
    )
    row = 0
    for i in range(draws.counts.shape[0]):
        gamma, level = run.gamma[first + i], run.level[first + i]
        x = state.x
        tau = problem.quantile(x, level) if run.kind == "quantile" else np.full(seeds, level)
        g = problem.example_gradients(x, draws.examples[i])
        norms = np.linalg.norm(g, axis=-1)
        drawn = np.arange(g.shape[1]) < draws.counts[i][:, None]
        factor = clip_factor(norms, tau[:, None]) * drawn
        update = np.einsum("sn,snd->sd", factor, g) / B
        if run.noise_multiplier:
            update = update + run.noise_multiplier / B * tau[:, None] * draws.noise[i]
        if row < offsets.size and offsets[row] == i:
            kept = ((norms <= tau[:, None] * (1 + SAME_NORM)) & drawn).sum(1)
            kept = np.divide(kept, draws.counts[i], out=np.full(seeds, np.nan), where=draws.counts[i] > 0)
            xs[row], taus[row], fractions[row], weighted[row] = x, tau, kept, state.weighted
            row += 1
        state.weighted = state.weighted + gamma * (problem.grad(x) ** 2).sum(-1)
        state.x = x - gamma * update
        _check_finite(state, first + i + 1)
    return xs, taus, fractions, weighted
