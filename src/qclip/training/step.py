"""One private step, as a pure function: no loader, no optimizer, no files.

With parameters x, the expected batch size B, the noise multipliers z and z', and N a standard normal vector:

    tau   = the clip norm that the threshold has learnt from the releases of earlier steps         ask
    raw   = the sum of clip(grad f_i(x), tau) over the sampled examples i, and in a second         raw_sums, added up
            sum how many of their norms lie where the threshold asks
    noisy = (raw + z tau N) / B; the counts get z' times their own bound                           release
    tau'  = the threshold, moved by the noisy counts

Raw sums become releases in `qclip.training.noise.release` and nowhere else. The noise of the two sums is chosen such
that both together cost one Gaussian release at the noise multiplier of the run: what the accountant charges for a step.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qclip.accounting import Split
from qclip.engine import ClippedGradients
from qclip.thresholds import Answer, Threshold
from qclip.thresholds.threshold import Grid
from qclip.training import noise
from qclip.training.sums import BoundedSum, ClipNorms, Key, NoisySum, Query, RawSums, alone, raw_sums


@dataclass(frozen=True)
class StepRule:
    """The public constants of every step of a run."""

    threshold: Threshold[Any]
    members: Mapping[Key, int]
    """The group of each gradient."""
    dims: tuple[int, ...]
    """The number of coordinates of each group."""
    dtypes: Mapping[Key, torch.dtype]
    """The precision of each released gradient: that of its parameter."""
    batch_size: int
    """B, the expected number of examples."""
    noise: Split
    """z and z', the noise multipliers of gradient and counts."""
    rescale_to_unit_norm: bool = False
    """Whether the released gradient is also divided by the clip norm of all groups together."""


@dataclass(frozen=True)
class StepState:
    """Where a run stands: the number of steps done, and what the threshold has learnt from their releases."""

    step: int
    threshold: Any


@dataclass(frozen=True)
class StepRelease:
    """What a step releases, and the state after it: noisy or public, all of it."""

    noisy_gradient: dict[str, Tensor]
    clip_norms: tuple[float, ...]
    noisy_unclipped: tuple[float, ...]
    """The fraction of unclipped examples in each group; empty where the threshold does not ask."""
    scale: float
    """What the gradient was divided by besides the batch size."""
    state: StepState


def private_step(
    state: StepState,
    batch: Iterable[Any],
    *,
    clip: Callable[[Any, ClipNorms], tuple[ClippedGradients, int]],
    rule: StepRule,
    source: noise.NoiseSource,
    reduce: Callable[[BoundedSum], BoundedSum] = alone,
) -> StepRelease:
    """Take one private step. `qclip.PrivateTraining` makes the same calls, one physical batch at a time.

    Args:
        state: Where the run stands.
        batch: The physical batches of the step, at least one: together the sampled examples, each once.
        clip: Returns the clipped gradients of a physical batch at the given norms, and its number of examples.
        rule: The public constants.
        source: The random numbers of the noise.
        reduce: Adds up the sums of several ranks or clients: the one place where they meet.

    Returns:
        The noisy gradient, what else was released, and the state for the next step.
    """
    query = ask(state, rule)
    first, *others = batch
    raw = raw_sums(*clip(first, query.clip_norms), query)
    for physical in others:
        raw += raw_sums(*clip(physical, raw.clip_norms), query)
    return release(state, raw.reduced(reduce), query, rule, source)


def ask(state: StepState, rule: StepRule, dataset_norms: Callable[[], np.ndarray] | None = None) -> Query:
    """Ask the threshold where to clip and what to count; only one that is not private sees raw norms."""
    threshold, members, dims = rule.threshold, dict(rule.members), list(rule.dims)
    question = threshold.ask(state.threshold, state.step)
    private = threshold.private
    if not private and threshold.raw_access != "dataset":

        def chosen(raw_norms: Tensor) -> tuple[float, ...]:
            return threshold.clip_norms(state.threshold, state.step, raw_norms.cpu().numpy())

        return Query(chosen, question, members, rule.dims, keep_norms=True)
    raw_norms = None if private or dataset_norms is None else dataset_norms()
    clip_norms = threshold.clip_norms(state.threshold, state.step, raw_norms)
    coefficients = () if question.slack is None else question.slack.coefficients(clip_norms)
    for k, row in enumerate(coefficients):
        members[Key("slack", k)] = k
        dims[k] += len(row)
    return Query(clip_norms, question, members, tuple(dims), coefficients, keep_norms=not private)


def release(state: StepState, raw: RawSums, query: Query, rule: StepRule, source: noise.NoiseSource) -> StepRelease:
    """Add noise to the two sums of a step, and move the threshold by what comes out."""
    scale = raw.gradient.l2_bound if rule.rescale_to_unit_norm else 1.0  # public, like all that it depends on
    divisor = rule.batch_size * scale
    noisy = noise.release(raw.gradient, rule.noise.gradient, source, divisor=divisor, dtypes=rule.dtypes)
    counts = None if raw.counts is None else noise.release(raw.counts, rule.noise.counts, source)
    answer = _answer(noisy, counts, raw, query, rule.batch_size)
    step, before, threshold = state.step, state.threshold, rule.threshold
    return StepRelease(
        {str(key.owner): noisy.tensors[key] for key in rule.members},
        raw.clip_norms,
        threshold.unclipped(before, step, answer),
        scale,
        StepState(step + 1, threshold.update(before, step, answer)),
    )


def _answer(noisy: NoisySum, counts: NoisySum | None, raw: RawSums, query: Query, B: int) -> Answer:
    """Return what the threshold learns: fractions of the batch size, each with the size of its noise."""
    bins: Grid = ()
    if counts is not None and query.question.count is not None:
        fractions = counts.tensors[Key("counts")] / B + query.question.count.centre
        bins = tuple(map(tuple, fractions.tolist()))
    within: Grid = ()
    within_std: Grid = ()
    if query.coefficients:
        slack = torch.stack([noisy.tensors[Key("slack", k)] for k in range(len(noisy.stds))]).tolist()
        rows = list(zip(slack, query.coefficients, noisy.stds, strict=True))
        within = tuple(tuple(x * noisy.divisor / a / B for x, a in zip(xs, row, strict=True)) for xs, row, _ in rows)
        within_std = tuple(tuple(std / a / B for a in row) for _, row, std in rows)
    bins_std = 0.0 if counts is None else counts.stds[0] / B
    raw_norms = np.concatenate(raw.norms) if query.keep_norms else None
    return Answer(bins, within, raw_norms, bins_std, within_std, B, raw.clip_norms)
