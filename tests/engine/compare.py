"""Runs a problem through the engine and the oracle, and says whether they agree as far as float32 can know.

Two float32 computations of the same gradient differ by rounding, and where a gradient is what is left of larger terms
(a layer norm of width 2, a difference of nearly equal positions) by much more than its own size times 1e-7; how much
depends on the CPU. So a comparison that misses its tolerance is made once more, with the oracle in float64: then the
error may be a few times that of the oracle in float32, measured at nearby points.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.cases import Case, Problem
from qclip.engine import ClippedGradients, clipped_gradients, oracle
from qclip.engine.groups import partition

quiet = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:data decide which rows of the batch go where:UserWarning"),
    pytest.mark.filterwarnings("ignore:examples are run through the model one at a time:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]
"""What torch itself says about some rows."""

NEARBY = 6
"""Points at which the error of float32 is measured."""
BFLOAT16 = 0.02
"""Tolerance of models in bfloat16."""
ROOM = 4.0
"""How many times the largest error of float32 that was measured is allowed."""


@dataclass(frozen=True)
class Known:
    """The gradients in float64, and how far the oracle in float32 is from them at worst."""

    exact: ClippedGradients
    errors: dict[str, Tensor]


@dataclass(frozen=True)
class Expected(ClippedGradients):
    """What the oracle says; where that is not enough, ``known()`` says what float32 can know."""

    known: Callable[[], Known] | None = None


def fast(case: Case, problem: Problem, clip_norm: Any = 1.0, **options: Any) -> ClippedGradients:
    """The engine's answer; a row that may be refused is skipped when it is."""
    torch.manual_seed(1)
    try:
        return clipped_gradients(problem.model, problem.loss, problem.inputs, problem.targets, clip_norm, **options)
    except ValueError as refusal:
        if not case.may_refuse:
            raise
        return pytest.skip(f"refused: {refusal}")


def slow(case: Case, problem: Problem, clip_norm: Any = 1.0, **options: Any) -> Expected:
    """The oracle's answer; models that draw random numbers share the batch's forward pass, from the same state."""

    def ask(problem: Problem) -> ClippedGradients:
        torch.manual_seed(1)
        arguments = (problem.model, problem.loss, problem.inputs, problem.targets, clip_norm)
        return oracle.clipped_gradients(*arguments, **options, shared_forward=case.random)

    return expected(ask(problem), None if case.random else lambda: known(problem, ask))


def expected(found: ClippedGradients, known: Callable[[], Known] | None) -> Expected:
    """The oracle's answer with what is known of it."""
    return Expected(**{field.name: getattr(found, field.name) for field in fields(found)}, known=known)


def known(problem: Problem, ask: Callable[[Problem], ClippedGradients]) -> Known:
    """The answer in float64, and the largest errors of float32 over some points near the problem."""
    errors: dict[str, Tensor] = {}
    for seed in range(NEARBY):
        near = nudged(problem, seed)
        single, double = (values(ask(each)) for each in (near, doubled(near)))
        for name, value in double.items():
            error = (single[name].double() - value).abs().nan_to_num()
            errors[name] = torch.maximum(errors[name], error) if name in errors else error
    return Known(ask(doubled(problem)), errors)


def floating(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with its floating tensors changed."""
    return pytree.tree_map_only(Tensor, lambda leaf: change(leaf) if leaf.is_floating_point() else leaf, batch)


def doubled(problem: Problem) -> Problem:
    """The same problem in float64."""
    return replace(
        problem,
        model=copy.deepcopy(problem.model).double(),
        inputs=floating(Tensor.double, problem.inputs),
        targets=floating(Tensor.double, problem.targets),
    )


def nudged(problem: Problem, seed: int) -> Problem:
    """The same problem with parameters and inputs moved by some units of rounding: other roundings on the way."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(x: Tensor) -> Tensor:
        return x * (1 + 2**-20 * torch.randn(x.shape, generator=generator)).to(x)

    model = copy.deepcopy(problem.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(nudge(parameter))
    return replace(problem, model=model, inputs=floating(nudge, problem.inputs))


def patterns(problem: Problem) -> dict[str, Any]:
    """Two groups that take turns, so that they part the weight of a layer from its bias."""
    names = list(trainable(problem))
    return {"even": names[::2], "odd": "*"} if len(names) > 1 else {"all": "*"}


def trainable(problem: Problem) -> dict[str, Tensor]:
    """The parameters that the engine must answer for."""
    return {name: p for name, p in problem.model.named_parameters() if p.requires_grad}


def middle(case: Case, problem: Problem, groups: Any = "flat", **options: Any) -> Any:
    """Thresholds at the median norm of each group, in the form that suits the groups: half the examples are clipped."""
    return medians(slow(case, problem, groups=groups, **options), problem, groups)


@functools.cache
def usual(case: Case, batch_size: int) -> float:
    """The median norm of the row's examples; every build with this batch size has the same ones."""
    return middle(case, case.build(batch_size))


def medians(found: ClippedGradients, problem: Problem, groups: Any = "flat") -> Any:
    """The median norm of each group, in the form that suits the groups; 1 where it is rounding alone."""
    counted = found.group_norms[found.mask & found.norms.isfinite()]
    middles = counted.quantile(0.5, dim=0) if len(counted) else torch.ones(counted.shape[1])
    noise = 1e-5 * float(middles.norm())
    thresholds = [float(median) if median > noise else 1.0 for median in middles]
    if isinstance(groups, dict):
        return dict(zip(partition(trainable(problem), groups).names, thresholds, strict=True))
    return thresholds[0] if groups == "flat" else thresholds


def values(result: ClippedGradients) -> dict[str, Tensor]:
    """All that is compared, by name."""
    sums = {f"the sum of {name}": sum_ for name, sum_ in result.sums.items()}
    return sums | {
        "norms of groups": result.group_norms,
        "norms": result.norms,
        "losses": result.losses[result.mask],
    }


def tolerances(expected: ClippedGradients, rtol: float, noise: float) -> dict[str, dict[str, float]]:
    """Of each value; a sum's is relative to its largest entry, and nothing is finer than ``noise`` of the whole."""
    norms = expected.norms[expected.norms.isfinite()]
    rounding = noise * float(norms.clamp_max(expected.l2_bound).sum())
    of_sums = {
        f"the sum of {name}": {
            "rtol": 0,
            "atol": rtol * float(sum_.abs().max() if sum_.numel() else 0.0) + rounding,
        }
        for name, sum_ in expected.sums.items()
    }
    of_norms = {"rtol": rtol, "atol": noise * float(norms.sum())}
    return of_sums | {"norms of groups": of_norms, "norms": of_norms, "losses": {"rtol": rtol, "atol": 1e-6}}


def assert_same(found: ClippedGradients, expected: ClippedGradients, rtol: float, noise: float = 2e-7) -> None:
    """Equal field by field, within rounding: of float32's usual size, or of what it is for this problem."""
    assert list(found.sums) == list(expected.sums), "the sums have other names or another order"
    assert torch.equal(found.mask, expected.mask), "the masks differ"
    assert found.l2_bound == pytest.approx(expected.l2_bound, rel=1e-12)
    try:
        assert_near(found, expected, rtol, noise)
    except AssertionError as too_far:
        assert_known(found, expected, too_far)


def assert_near(found: ClippedGradients, expected: ClippedGradients, rtol: float, noise: float = 2e-7) -> None:
    """Equal within rounding of the usual size."""
    shown, allowed = values(found), tolerances(expected, rtol, noise)
    for name, value in values(expected).items():
        assert_close(shown[name], value, name, **allowed[name])


def assert_known(found: ClippedGradients, expected: ClippedGradients, too_far: AssertionError) -> None:
    """As near to the float64 oracle as float32 can be; ``too_far`` where that cannot be told."""
    if not isinstance(expected, Expected) or expected.known is None or torch.is_autocast_enabled("cpu"):
        raise too_far
    try:
        known = expected.known()
    except (RuntimeError, TypeError, ValueError):  # the problem itself asks for float32
        raise too_far from None
    shown, exact = values(found), values(known.exact)
    for name, value in exact.items():
        error = known.errors[name]
        if name.startswith("the sum"):
            error = error.max() if error.numel() else error
        room = ROOM * error + 1e-6 * value.abs() + 1e-37
        off = ((shown[name].double() - value) / room).nan_to_num(posinf=torch.inf)
        off = off.where(shown[name] != value, 0.0)  # both infinite
        assert_close(off, torch.zeros_like(off), f"{name}, in errors of float32", rtol=0, atol=1.0)


def assert_close(found: Tensor, expected: Tensor, name: str, **tolerance: float) -> None:
    """Torch's comparison, with the name of what is compared."""
    message = lambda text: f"{name}: {text}"  # noqa: E731
    torch.testing.assert_close(found, expected, equal_nan=name == "losses", msg=message, **tolerance)


def assert_nearly(
    found: ClippedGradients, expected: ClippedGradients, exact: Callable[[], ClippedGradients] | None = None
) -> None:
    """Equal within 2 %, for models in bfloat16: the oracle rounds each example's gradient, which is off by up to 1 % on
    most rows of the table, and by up to 0.7 % when only the order of summation changes. Where it rounds more than that,
    what is found must be nearer than the oracle to the ``exact`` result, that of the same numbers in float32.
    """
    total = sum(sum_.double().square().sum() for sum_ in expected.sums.values()) ** 0.5
    off, room = distance(found, expected), BFLOAT16 * float(total) + 1e-6
    if off > room and exact is not None:
        truth = exact()
        off, room = distance(found, truth), distance(expected, truth)
    assert off <= room
    torch.testing.assert_close(found.norms, expected.norms, rtol=BFLOAT16, atol=1e-6)
    assert {sum_.dtype for sum_ in found.sums.values()} == {torch.float32}
    assert found.norms.dtype == found.group_norms.dtype == torch.float32


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
