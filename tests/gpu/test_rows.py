"""Every row of the engine's suite on the GPU: the oracle's answer, in groups, in 16 bits, and within its bound."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from engine.cases import CASES, MODELS, OPERATIONS, STRUCTURE
from engine.compare import assert_same, distance, fast, floating, middle, quiet, slow
from engine.row import SHIELDED
from engine.test_rows import NOT_IN_BFLOAT16
from gpu.device import DEVICE, ON_GPU, cuda_only, placed
from qclip.engine import batch as batches
from qclip.engine import torch_settings
from qclip.engine.driver import call

pytestmark = [pytest.mark.gpu, *quiet]

RTOL, NOISE = (1e-4, 2e-6) if ON_GPU else (0.0, 2e-7)
"""A GPU's convolutions may go by Winograd or FFT, and sums in any order; noise is what is left of zero."""
HALF_RTOL = 0.05
"""In 16 bits the oracle rounds every gradient, one example runs by other kernels than all, and what is clipped is
clipped a little more."""
SLACK = 1 + 1e-5

NOT_IN_HALF = {*NOT_IN_BFLOAT16, "embedding-bag-learned-weights"}
"""torch has no gradient in bfloat16, on a GPU, for the weights of an embedding bag."""
SAMPLE = [case for case in [*OPERATIONS[::6], *STRUCTURE[::8], *MODELS[::5]] if case.id not in SHIELDED]
IN_HALF = [case for case in SAMPLE if case.id not in NOT_IN_HALF]
"""A test takes several proofs for each of these rows."""


def by_id(cases):
    return pytest.mark.parametrize("case", dict.fromkeys(cases), ids=lambda case: case.id)


@contextmanager
def _without_cudnn():
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def same_draws(case):
    """The dropout inside a recurrent layer of cuDNN draws numbers of its own: the oracle must do without cuDNN."""
    return _without_cudnn() if case.random and case.id.startswith("recurrent") else nullcontext()


def assert_the_oracle(case, groups):
    problem = placed(case.build())
    with same_draws(case):
        clip_norm = middle(case, problem, groups)
        found = fast(case, problem, clip_norm, groups=groups)
        expected = slow(case, problem, clip_norm, groups=groups)
    assert {x.device.type for x in (*found.sums.values(), found.norms, found.losses)} == {DEVICE.type}
    assert_same(found, expected, max(case.rtol, RTOL), NOISE)


@by_id(CASES)
def test_equals_the_oracle(case):
    assert_the_oracle(case, "flat")


@by_id([*CASES[1::6], *MODELS[::2]])
def test_equals_the_oracle_in_groups_per_layer(case):
    assert_the_oracle(case, "per-layer")


@by_id(SAMPLE)
def test_one_example(case):
    problem = placed(case.build(batch_size=1))
    with same_draws(case):
        clip_norm = 0.5 * middle(case, problem)
        found, expected = fast(case, problem, clip_norm), slow(case, problem, clip_norm)
    assert_same(found, expected, max(case.rtol, RTOL), NOISE)


def half(case):
    problem = case.build()
    return placed(
        replace(problem, model=problem.model.to(torch.bfloat16), inputs=floating(torch.Tensor.bfloat16, problem.inputs))
    )


@by_id([case for case in [*CASES[::5], *MODELS[::2]] if case.id not in NOT_IN_HALF])
def test_bfloat16(case):
    """CUDA only: products of native 16-bit numbers, and the kernels for them."""
    problem = half(case)
    with same_draws(case):
        clip_norm = middle(case, problem)
        found, expected = fast(case, problem, clip_norm), slow(case, problem, clip_norm)
    size = sum(float(x.double().square().sum()) for x in expected.sums.values()) ** 0.5
    assert distance(found, expected) <= HALF_RTOL * size + 1e-6
    torch.testing.assert_close(found.norms, expected.norms, rtol=HALF_RTOL, atol=1e-6)
    assert {x.dtype for x in (*found.sums.values(), found.norms)} == {torch.float32}


def assert_bounded(case, problem, clip_norm):
    """The batch goes through the model as it is, so that others' numbers are rounded alike without the example."""
    count = batches.size_of_pair(problem.inputs, problem.targets, None)
    full = fast(case, problem, clip_norm)
    assert all(x.isfinite().all() for x in full.sums.values())
    assert (full.norms > clip_norm).any()  # else nothing would be tested
    for i in range(count):
        keep = torch.arange(count, device=DEVICE) != i
        assert distance(full, fast(case, problem, clip_norm, mask=keep)) <= full.l2_bound * SLACK


@by_id(SAMPLE)
def test_no_example_counts_for_more_than_the_bound(case):
    problem = placed(case.build())
    assert_bounded(case, problem, 0.9 * middle(case, problem))


@by_id(IN_HALF)
def test_no_example_counts_for_more_than_the_bound_in_bfloat16(case):
    """CUDA only: factors are rounded together with the numbers they scale."""
    problem = half(case)
    assert_bounded(case, problem, 0.4 * middle(case, problem))


@cuda_only("TF32")
@by_id(SAMPLE)
def test_no_example_counts_for_more_than_the_bound_with_tf32(case):
    problem = placed(case.build())
    with torch_settings.fp32_precision("tf32"):
        assert_bounded(case, problem, 0.9 * middle(case, problem))


@by_id([case for case in SAMPLE if not case.random])
def test_an_example_that_is_not_finite_costs_nobody_else(case):
    problem = placed(case.build())
    count = batches.size_of_pair(problem.inputs, problem.targets, None)
    weights = torch.ones(count, device=DEVICE)

    def weighted(outputs, targets):
        return problem.loss(outputs, targets[0]) * targets[1]

    def given(last):
        changed = weights.clone()
        changed[-1] = last
        return replace(problem, targets=(problem.targets, changed), loss=weighted)

    clip_norm = middle(case, problem)
    keep = torch.arange(count, device=DEVICE) != count - 1
    found, expected = fast(case, given(torch.nan), clip_norm), fast(case, given(1.0), clip_norm, mask=keep)
    assert distance(found, expected) <= 1e-5 * found.l2_bound
    assert found.norms[-1] == torch.inf


class Placeless(TorchFunctionMode):
    """Notes what makes a tensor without saying where."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            self.made.append(func.__name__)
        return func(*args, **kwargs)


@pytest.mark.skipif(ON_GPU, reason="for rehearsals: on a GPU the tests above would fail")
@by_id(CASES)
def test_the_row_computes_where_its_batch_lies(case):
    """Else it could not run on a GPU at all. Models of others draw a number on the CPU to skip layers, at most."""
    problem = case.build()
    with Placeless() as mode:
        problem.loss(call(problem.model, problem.inputs), problem.targets)
    assert set(mode.made) <= ({"rand"} if case in MODELS else set())
