"""Every row of the table keeps every promise: the oracle's sums, bounded sensitivity, precision.

The checks of a row share one model, so that its proofs are paid for once. Slow tests give each check a model of its
own: then every check is also the first use of a model, with a proof.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engine.cases import CASES, LAYERS, OPERATIONS, PARAMETERS, Problem
from engine.cases.case import B, T, param
from engine.compare import (
    assert_nearly,
    assert_same,
    distance,
    fast,
    floating,
    middle,
    patterns,
    quiet,
    slow,
    trainable,
)
from engine.row import SHIELDED, Row
from qclip.engine import ClippedGradients
from qclip.engine import batch as batches
from qclip.engine.driver import call

pytestmark = quiet

ROUNDING = 1 + 1e-5
"""Of a sum against its bound."""


# Exactness


def as_long_as_the_sequence(row: Row) -> None:
    """Sizes alone cannot tell examples from positions here."""
    clip_norm = row.middle(T)
    assert_same(row.found(T, clip_norm), row.expected(T, clip_norm), row.case.rtol)


def equals_the_oracle(row: Row) -> None:
    """For every way of grouping."""
    problem = row.problem(B)
    for groups in ("flat", "per-layer", patterns(problem)):
        clip_norm = row.middle(B, groups)
        found = row.found(B, clip_norm, groups=groups)
        assert_same(found, row.expected(B, clip_norm, groups=groups), row.case.rtol)
        assert all(p.grad is None for p in problem.model.parameters())
        for name, parameter in trainable(problem).items():
            assert found.sums[name].shape == parameter.shape
            assert found.sums[name].dtype == torch.promote_types(parameter.dtype, torch.float32)
            assert not found.sums[name].requires_grad


def one_example(row: Row) -> None:
    clip_norm = 0.5 * row.middle(1)
    assert_same(row.found(1, clip_norm), row.expected(1, clip_norm), row.case.rtol)


def no_examples(row: Row) -> None:
    found = row.found(0)
    assert found.norms.shape == found.losses.shape == found.mask.shape == (0,)
    assert found.group_norms.shape == (0, 1)
    assert found.l2_bound == 1.0
    for name, parameter in trainable(row.problem(0)).items():
        assert torch.equal(found.sums[name], torch.zeros_like(parameter))


def the_plain_gradient_when_nobody_is_clipped(row: Row) -> None:
    """The one check here that needs no oracle."""
    if row.case.id == "embedding-scaled-by-frequency":
        return  # the plain gradient of the batch counts the words of other examples
    problem, found = row.problem(B), row.found(B, 1e6)
    assert (found.norms < 1e6).all()
    torch.manual_seed(1)
    losses = problem.loss(call(problem.model, problem.inputs), problem.targets)
    parameters = trainable(problem)
    plain = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    for (name, parameter), grad in zip(parameters.items(), plain, strict=True):
        expected = torch.zeros_like(parameter) if grad is None else grad.to_dense()
        atol = row.case.rtol * float(expected.abs().max()) + 1e-6 * float(found.norms.sum())
        torch.testing.assert_close(found.sums[name], expected, rtol=0, atol=atol)


def masked_examples_count_for_nothing(row: Row) -> None:
    """Whatever they hold, NaN included."""
    mask = torch.tensor([True, False, True, True])
    clip_norm = row.middle(B, mask=mask)
    found = row.found(B, clip_norm, factors=torch.ones(B).where(mask, torch.nan), mask=mask)
    assert_same(found, row.expected(B, clip_norm, mask=mask), row.case.rtol)
    assert found.norms[1] == 0


def non_finite_examples_add_zero_and_count_as_clipped(row: Row) -> None:
    """As if they were masked, with an infinite norm."""
    factors = torch.tensor([1.0, torch.nan, torch.inf])
    finite = factors.isfinite()
    clip_norm = 0.5 * row.middle(T)
    found = row.found(T, clip_norm, factors=factors)
    if row.case.id not in SHIELDED:
        assert (found.norms[~finite] == torch.inf).all()
        assert (found.group_norms[~finite] == torch.inf).all()
    shown = {"norms": found.norms.where(finite, 0), "group_norms": found.group_norms.where(finite[:, None], 0)}
    assert_same(replace(found, **shown, mask=finite), row.expected(T, clip_norm, mask=finite), row.case.rtol)


def twice_gives_the_same(row: Row) -> None:
    """Nothing that a call leaves behind changes the next one."""
    assert_same(row.found(B), row.found(B), rtol=1e-6)


def behind_a_trainable_input(row: Row) -> None:
    """The same layers when their input has a gradient too."""
    problem = row.case.build()
    if row.case not in OPERATIONS + LAYERS or not isinstance(problem.inputs, Tensor):
        return
    if not problem.inputs.is_floating_point():
        return
    problem = replace(problem, model=Scaled(problem.model, problem.inputs.shape[-1]))
    clip_norm = middle(row.case, problem)
    assert_same(fast(row.case, problem, clip_norm), slow(row.case, problem, clip_norm), row.case.rtol)


class Scaled(nn.Module):
    """A model behind a trainable scale of its input."""

    def __init__(self, model, width):
        super().__init__()
        self.model, self.scale = model, param(width)

    def forward(self, x):
        return self.model(x * self.scale)


# Sensitivity: removing any one example changes the vector of all sums by at most the declared bound.


def removed(row: Row, problem: Problem, index: int, clip_norm: float, **options) -> ClippedGradients:
    """The answer without an example: left out of the batch, or masked where dropout would draw other numbers."""
    keep = torch.arange(T) != index
    if row.case.random:
        return fast(row.case, problem, clip_norm, mask=keep, **options)
    inputs, targets = batches.select((problem.inputs, problem.targets), keep, T)
    return fast(row.case, replace(problem, inputs=inputs, targets=targets), clip_norm, **options)


def assert_bounded(row: Row, problem: Problem, clip_norm: float, indices=range(T), **options) -> ClippedGradients:
    """The sums are finite, and no example counts for more than the bound."""
    full = fast(row.case, problem, clip_norm, **options)
    assert all(sum_.isfinite().all() for sum_ in full.sums.values())
    for i in indices:
        assert distance(full, removed(row, problem, i, clip_norm, **options)) <= full.l2_bound * ROUNDING
    return full


def bounded_at_the_median_norm(row: Row) -> None:
    assert_bounded(row, row.problem(T), row.middle(T))


def bounded_at_a_tiny_threshold_for_each_layer(row: Row) -> None:
    assert_bounded(row, row.problem(T), 1e-6, indices=[0], groups="per-layer")


def bounded_with_an_absurd_loss(row: Row) -> None:
    """Infinity and NaN: above."""
    if row.case in OPERATIONS + PARAMETERS:
        assert_bounded(row, row.with_factors(T, [1.0, 1e30, 1.0]), row.middle(T), indices=[1])


def bounded_with_inputs_that_are_not_finite(row: Row) -> None:
    """And it costs nobody else: the sum is the oracle's, which runs each example alone."""
    problem, clip_norm = row.poisoned(0, torch.nan), row.middle(T)
    if problem is None:
        return
    full = assert_bounded(row, problem, clip_norm, indices=[0])
    if not row.case.random:
        assert distance(full, slow(row.case, problem, clip_norm)) <= 1e-4 * full.l2_bound


def bounded_with_inputs_that_overflow(row: Row) -> None:
    """Whether its norm is large or infinite is for float32 to say; the bound holds."""
    problem = row.poisoned(1, -1e30)
    if row.case in OPERATIONS + PARAMETERS and problem is not None:
        assert_bounded(row, problem, row.middle(T), indices=[1])


# bfloat16 and autocast: norms, factors and sums stay in float32.

NOT_IN_BFLOAT16 = {
    "product-cdist-prototypes": "torch has no cdist in bfloat16",
    "parameter-spectral-filter": "torch has no complex bfloat16",
    "embedding-one-hot": "the row itself asks for float32",
    "interface-float64": "the row itself asks for float64",
    "reparametrised-orthogonal": "the parametrisation itself loses its digits",
}
NOT_IN_AUTOCAST = {"interface-float64": "the row itself asks for float64"} | dict.fromkeys(
    [
        "embedding-bag-learned-weights",
        "parameter-custom-function",
        "parameter-lerp",
        "parameter-lerp-end",
        "parameter-mask-token-assigned",
        "reparametrised-orthogonal",
        "rows-routed-experts",
    ],
    "torch itself refuses the two dtypes that meet in this row",
)


def bfloat16_model(row: Row) -> None:
    if row.case.id in NOT_IN_BFLOAT16:
        return
    problem = row.case.build()
    inputs = floating(Tensor.bfloat16, problem.inputs)
    problem = replace(problem, model=problem.model.to(torch.bfloat16), inputs=inputs)
    clip_norm = middle(row.case, problem)

    def exact() -> ClippedGradients:
        same = replace(problem, model=copy.deepcopy(problem.model).float(), inputs=floating(Tensor.float, inputs))
        return slow(row.case, same, clip_norm)

    assert_nearly(fast(row.case, problem, clip_norm), slow(row.case, problem, clip_norm), exact)


def autocast(row: Row) -> None:
    if row.case.id in NOT_IN_AUTOCAST:
        return
    with torch.autocast("cpu", torch.bfloat16):
        problem = row.problem(B)
        clip_norm = middle(row.case, problem)
        assert_nearly(fast(row.case, problem, clip_norm), slow(row.case, problem, clip_norm))


IN_TURN = [behind_a_trainable_input, bfloat16_model, autocast]
"""Checks that need a proof of their own: a row makes one of them, and all of them where slow tests are run."""
CHECKS = [
    as_long_as_the_sequence,
    equals_the_oracle,
    one_example,
    no_examples,
    the_plain_gradient_when_nobody_is_clipped,
    masked_examples_count_for_nothing,
    non_finite_examples_add_zero_and_count_as_clipped,
    twice_gives_the_same,
    bounded_at_the_median_norm,
    bounded_at_a_tiny_threshold_for_each_layer,
    bounded_with_an_absurd_loss,
    bounded_with_inputs_that_are_not_finite,
    bounded_with_inputs_that_overflow,
]


BRIEF = [as_long_as_the_sequence, one_example]


def checked(i):
    """Every third row is checked in full, the others briefly: in full where slow tests are run."""
    return BRIEF if i % 3 else [*CHECKS, IN_TURN[i // 3 % len(IN_TURN)]]


@pytest.mark.parametrize(
    ("case", "checks"),
    [
        pytest.param(case, checked(i), id=case.id, marks=[pytest.mark.smoke] * (i % 4 == 0))
        for i, case in enumerate(CASES)
    ],
)
def test_row(case, checks, subtests):
    row = Row(case)
    for check in checks:
        with subtests.test(check.__name__):
            check(row)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS + IN_TURN, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_row_with_a_model_of_its_own(case, check):
    check(Row(case))
