"""One private step, as a pure function: no loader, no optimizer, no files.

With parameters x, the expected batch size B, noise multipliers z and z', and a standard normal vector N:

    tau   = the clip norm, from the releases of earlier steps                                 ask
    raw   = sum of clip(grad f_i(x), tau) over the sampled i; counts of their norms in bins   LogicalStep.add
    noisy = (raw + z tau N) / B; the noise of the counts is z' times their own bound          release
    tau'  = the threshold, updated with the noisy counts

Only `qclip.training.noise.release` turns raw sums into releases. z and z' are chosen so that both releases together
cost one Gaussian release at the noise multiplier of the run, which is what the accountant charges for a step.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qclip.accounting import Split
from qclip.engine import ClippedGradients
from qclip.thresholds import Threshold
from qclip.thresholds.threshold import Counted
from qclip.training import noise
from qclip.training.answer import answer
from qclip.training.sums import ClipNorms, Key, LogicalStep, NoisySum, Place, Query, RawSums


@dataclass(frozen=True)
class StepRule:
    """The public constants of every step of a run."""

    threshold: Threshold[Any]
    members: Mapping[Key, int]
    """The group of each gradient."""
    dims: tuple[int, ...]
    """The number of coordinates of each group."""
    dtypes: Mapping[Key, torch.dtype]
    """The dtype of each released gradient: that of its parameter."""
    batch_size: int
    """B, the expected number of examples."""
    noise: Split
    """z and z', the noise multipliers of gradient and counts."""
    rescale_to_unit_norm: bool = False
    """Whether the released gradient is also divided by the clip norm of all groups together."""
    places: Mapping[Key, Place] = field(default_factory=dict)
    """Where the sums of this process lie in the whole gradients, if they are parts."""
    mechanism: Callable[..., NoisySum] | None = None
    """What makes releases of sums instead of `qclip.training.noise.release`: a recording, in an audit."""


@dataclass(frozen=True)
class StepState:
    """The state of a run between steps: the number of steps done, and the state of the threshold."""

    step: int
    threshold: Any


@dataclass(frozen=True)
class StepRelease:
    """The release of a step and the state after it. Every field is noisy or public."""

    noisy_gradient: dict[str, Tensor]
    clip_norms: tuple[float, ...]
    noise_power: tuple[float, ...]
    """The expected squared norm of the noise on each group's mean gradient, over its squared clip norm."""
    noisy_unclipped: tuple[float, ...]
    """The fraction of unclipped examples in each group; empty if the threshold does not estimate it."""
    counted: tuple[Counted, ...]
    """What clipping takes in each group at most, counted without a bias; empty if it is not counted."""
    clipped_length: tuple[float, ...]
    """The mean length that clipping takes from a gradient, over the clip norm; empty if not estimated."""
    scale: float
    """The divisor of the gradient besides the batch size."""
    state: StepState


def private_step(
    state: StepState,
    batch: Iterable[Any],
    *,
    clip: Callable[[Any, ClipNorms], tuple[ClippedGradients, int]],
    rule: StepRule,
    source: noise.NoiseSource,
    reduce: Callable[[RawSums], RawSums] | None = None,
) -> StepRelease:
    """Take one private step. `qclip.PrivateTraining` makes the same calls, one physical batch at a time.

    Args:
        state: The state before the step.
        batch: The physical batches of the step, at least one. Together they hold each sampled example once.
        clip: Returns the clipped gradients of a physical batch at the given clip norms, and its number of examples.
        rule: The public constants of the run.
        source: The random numbers of the noise.
        reduce: Adds up the sums of several ranks or clients; None for a single one. No other call combines them.

    Returns:
        The noisy gradient, the other released values, and the state for the next step.
    """
    logical = LogicalStep(ask(state, rule))
    for physical_batch in batch:
        logical.add(*clip(physical_batch, logical.clip_norms))
    assert logical.raw is not None, "a step has at least one physical batch"
    return release(state, logical.raw.reduced(reduce), logical.query, rule, source)


def ask(state: StepState, rule: StepRule, dataset_norms: Callable[[], np.ndarray] | None = None) -> Query:
    """Return the clip norms and the counts that the threshold wants; only non-private thresholds see raw norms."""
    threshold, members, dims = rule.threshold, dict(rule.members), list(rule.dims)
    question = threshold.ask(state.threshold, state.step)
    if not (private := threshold.private) and threshold.raw_access != "dataset":

        def choose(raw_norms: Tensor) -> tuple[float, ...]:
            return threshold.clip_norms(state.threshold, state.step, raw_norms.cpu().numpy())

        return Query(choose, question, members, rule.dims, keep_norms=True)
    raw_norms = None if private or dataset_norms is None else dataset_norms()
    clip_norms = threshold.clip_norms(state.threshold, state.step, raw_norms)
    coefficients = () if question.slack is None else question.slack.coefficients(clip_norms)
    for k, row in enumerate(coefficients):
        members[Key("slack", k)] = k
        dims[k] += len(row)
    return Query(clip_norms, question, members, tuple(dims), coefficients, keep_norms=not private)


def release(state: StepState, raw: RawSums, query: Query, rule: StepRule, source: noise.NoiseSource) -> StepRelease:
    """Add noise to the two sums of a step, and update the threshold with the result."""
    scale = raw.gradient.l2_bound if rule.rescale_to_unit_norm else 1.0  # public: it depends on clip norms only
    divisor = rule.batch_size * scale
    places, dtypes = rule.places, rule.dtypes
    mechanism = rule.mechanism or noise.release
    noisy = mechanism(raw.gradient, rule.noise.gradient, source, divisor=divisor, dtypes=dtypes, places=places)
    counts = None if raw.counts is None else mechanism(raw.counts, rule.noise.counts, source)
    answered = answer(noisy, counts, raw, query, dims=rule.dims, batch_size=rule.batch_size)
    updated = rule.threshold.update(state.threshold, state.step, answered)
    return StepRelease(
        {str(key.owner): noisy.tensors[key] for key in rule.members},
        raw.clip_norms,
        answered.noise_power,
        rule.threshold.unclipped(state.threshold, state.step, answered),
        rule.threshold.counted(state.threshold, state.step, answered),
        rule.threshold.clipped_length(updated),
        scale,
        StepState(state.step + 1, updated),
    )
