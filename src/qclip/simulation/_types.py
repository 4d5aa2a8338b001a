"""The settings, state, randomness and records that both loops of the simulator share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.simulation.problems import Problem

SAME_NORM = 1e-9
"""Relative rounding margin: an example whose norm equals the threshold up to rounding counts as unclipped."""


@dataclass(frozen=True)
class Setup:
    """The settings of a simulation, checked and expanded to one value per step."""

    problem: Problem
    gamma: Floats  # [steps]
    level: Floats  # [steps]: a quantile, or a threshold (infinite for plain SGD), as kind says
    kind: Literal["quantile", "threshold"]
    batch_size: int
    poisson: bool
    noise_multiplier: float
    error_feedback: bool = False


@dataclass
class SimulationState:
    """The state of all seeds between chunks of steps."""

    x: Floats  # [seeds, d]
    weighted: Floats  # [seeds]: sum of gamma ||grad f||^2
    memory: Floats  # [seeds, d]: what clipping took, with error feedback

    def require_finite(self, step: int) -> None:
        """Refuse a state that has diverged by this step."""
        lost = ~(np.abs(self.x) < 1e150).all(1)  # beyond, squares overflow; a NaN is lost too
        if lost.any():
            raise check.Refusal(
                f"x diverged in {int(lost.sum())} of {len(self.x)} seeds by step {step} and is not finite; "
                "lower the step size (theory.max_step gives its limit)"
            )


@dataclass(frozen=True)
class Draws:
    """All the randomness of some consecutive steps; leading axes [steps, seeds]."""

    examples: Any  # [steps, seeds, n, ...]
    counts: np.ndarray  # [steps, seeds]: how many of the n examples are in the batch
    noise: Floats  # [steps, seeds, d], or [0, 0, 0] without noise


class Records(NamedTuple):
    """The recorded values of some steps, [records, seeds] each and [records, seeds, d] for x."""

    x: Floats
    tau: Floats
    unclipped: Floats
    weighted: Floats

    @classmethod
    def blank(cls, records: int, seeds: int, dim: int) -> "Records":
        """Return records that are NaN everywhere."""
        shape = (records, seeds)
        return cls(*(np.full(each, np.nan) for each in ((*shape, dim), shape, shape, shape)))


Loop = Callable[[Setup, SimulationState, Draws, int, np.ndarray], Records]
"""Advance the state over a chunk of steps that begins at a given step; return the records at some offsets into it."""
