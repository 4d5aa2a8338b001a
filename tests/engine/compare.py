"""Runs a row through the engine and the oracle, and says whether they agree."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cases import Case, Problem
from qclip.engine import ClippedGradients, clipped_gradients, oracle
from qclip.engine.groups import partition

quiet = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:data decide which rows of the batch go where:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]
"""What torch itself says about some rows."""


def fast(case: Case, problem: Problem, clip_norm: Any = 1.0, **options: Any) -> ClippedGradients:
    """The engine's answer; a row that may be refused is skipped when it is."""
    torch.manual_seed(1)
    try:
        return clipped_gradients(problem.model, problem.loss, problem.inputs, problem.targets, clip_norm, **options)
    except ValueError as refusal:
        if not case.may_refuse:
            raise
        return pytest.skip(f"refused: {refusal}")


def slow(case: Case, problem: Problem, clip_norm: Any = 1.0, **options: Any) -> ClippedGradients:
    """The oracle's answer; models that draw random numbers share the batch's forward pass, from the same state."""
    torch.manual_seed(1)
    arguments = (problem.model, problem.loss, problem.inputs, problem.targets, clip_norm)
    return oracle.clipped_gradients(*arguments, **options, shared_forward=case.random)


def patterns(problem: Problem) -> dict[str, Any]:
    """Two groups that take turns, so that they part the weight of a layer from its bias."""
    names = list(trainable(problem))
    return {"even": names[::2], "odd": "*"} if len(names) > 1 else {"all": "*"}


def trainable(problem: Problem) -> dict[str, Tensor]:
    """The parameters that the engine must answer for."""
    return {name: p for name, p in problem.model.named_parameters() if p.requires_grad}


def middle(case: Case, problem: Problem, groups: Any = "flat", **options: Any) -> Any:
    """Thresholds at the median norm of each group, in the form that suits the groups: half the examples are clipped.

    A group without gradient, but for rounding, gets 1.
    """
    found = slow(case, problem, groups=groups, **options)
    counted = found.group_norms[found.mask & found.norms.isfinite()]
    medians = counted.quantile(0.5, dim=0) if len(counted) else torch.ones(counted.shape[1])
    noise = 1e-5 * float(medians.norm())
    values = [float(median) if median > noise else 1.0 for median in medians]
    if isinstance(groups, dict):
        return dict(zip(partition(trainable(problem), groups).names, values, strict=True))
    return values[0] if groups == "flat" else values


@functools.cache
def usual(case: Case, batch_size: int) -> float:
    """The median norm of the row's examples; every build with this batch size has the same ones."""
    return middle(case, case.build(batch_size))


def assert_same(found: ClippedGradients, expected: ClippedGradients, rtol: float, noise: float = 2e-7) -> None:
    """Equal field by field; each sum relative to its largest entry, and never finer than ``noise`` of the whole."""
    whole = float(expected.norms[expected.norms.isfinite()].clamp_max(expected.l2_bound).sum())
    assert list(found.sums) == list(expected.sums), "the sums have other names or another order"
    for name, sum_ in expected.sums.items():
        atol = rtol * float(sum_.abs().max() if sum_.numel() else 0.0) + noise * whole
        torch.testing.assert_close(
            found.sums[name], sum_, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    atol = noise * float(expected.norms[expected.norms.isfinite()].sum())
    torch.testing.assert_close(found.group_norms, expected.group_norms, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.norms, expected.norms, rtol=rtol, atol=atol)
    torch.testing.assert_close(
        found.losses[found.mask], expected.losses[found.mask], rtol=rtol, atol=1e-6, equal_nan=True
    )
    assert torch.equal(found.mask, expected.mask), "the masks differ"
    assert found.l2_bound == pytest.approx(expected.l2_bound, rel=1e-12)


def scaled(problem: Problem, factors: Tensor | Sequence[float]) -> Problem:
    """The same problem with each example's loss multiplied by a factor, such as NaN."""
    return replace(
        problem,
        targets=(problem.targets, torch.as_tensor(factors)),
        loss=lambda outputs, targets: problem.loss(outputs, targets[0]) * targets[1],
    )


def distance(one: ClippedGradients, other: ClippedGradients) -> float:
    """Euclidean distance between the two vectors of all sums."""
    parts = [(one.sums[name].double() - other.sums[name].double()).square().sum() for name in one.sums]
    return float(torch.stack(parts).sum().sqrt())
