"""The answer of a step to its threshold: released sums as fractions of the batch size, with the size of their noise."""

import numpy as np
import torch

from qclip.thresholds import Answer
from qclip.thresholds.threshold import Grid
from qclip.training.sums import Key, NoisySum, Query, RawSums


def answer(
    noisy: NoisySum,
    counts: NoisySum | None,
    raw: RawSums,
    query: Query,
    *,
    dims: tuple[int, ...],
    batch_size: int,
) -> Answer:
    """Return the input of a threshold's update.

    Args:
        noisy: The released gradient sum, with the slack of each group.
        counts: The released counts; None if the threshold pays for none.
        raw: The raw sums: their clip norms are public, their norms are passed on to non-private thresholds only.
        query: The question of the threshold.
        dims: The number of parameters of each group, without the slack.
        batch_size: The expected batch size.
    """
    B = batch_size
    bins: Grid = ()
    if counts is not None and query.question.count is not None:
        bins = tuple(map(tuple, (counts.tensors[Key("counts")] / B + query.question.count.centre).tolist()))
    within: Grid = ()
    within_std: Grid = ()
    if query.coefficients:
        slack = torch.stack([noisy.tensors[Key("slack", k)] for k in range(len(noisy.stds))]).tolist()
        rows = list(zip(slack, query.coefficients, noisy.stds, strict=True))
        within = tuple(tuple(x * noisy.divisor / a / B for x, a in zip(xs, row, strict=True)) for xs, row, _ in rows)
        within_std = tuple(tuple(std / a / B for a in row) for _, row, std in rows)
    groups = zip(dims, noisy.stds, raw.clip_norms, strict=True)
    return Answer(
        noisy_bins=bins,
        noisy_within=within,
        raw_norms=np.concatenate(raw.norms) if query.keep_norms else None,
        bins_std=0.0 if counts is None else counts.stds[0] / B,
        within_std=within_std,
        batch_size=B,
        clip_norms=raw.clip_norms,
        noise_power=tuple(dim * (std / B / tau) ** 2 for dim, std, tau in groups),
    )
