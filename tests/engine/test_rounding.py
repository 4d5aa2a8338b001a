"""Never more than the bound: in float64, what each single example adds, for thresholds at and around its norm.

Random numbers have fixed seeds; nothing here is allowed for rounding.
"""

import math

import pytest
import torch
from torch import nn

from engine.cases import squared
from engine.driven import Pair, as_traced
from qclip.engine.gradients import clipping
from qclip.engine.gradients.forms import Dense, Outer
from qclip.engine.gradients.parts import Part
from qclip.engine.groups import Groups
from qclip.engine.kernels.products import lengths, square_sums
from qclip.thresholds.threshold import Slack

NEAR = (0.3, 1 - 1e-6, 1 - 1e-7, 1.0, 1 + 1e-7, 1 + 5e-7)
"""Thresholds, over the norm: where it is clipped, and where only rounding says whether it is."""
LONG = [70_000, 3_000_001]
FORMS = {
    "dense": lambda *shape, **options: Dense(drawn(*shape, 30, 50, **options)),
    "long dense": lambda *shape, **options: Dense(drawn(*shape, 200_003, **options)),
    "position": lambda *shape, **options: outer(*shape, 1, 60, 90, **options),
    "long position": lambda *shape, **options: outer(*shape, 1, 3, 70_001, **options),
    "positions": lambda *shape, **options: outer(*shape, 12, 20, 30, **options),
}


def drawn(*shape, seed, dtype):
    """Numbers of one sign: what is added up grows, and rounding with it."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) + 0.1


def outer(count, positions, m, n, *, seed, dtype):
    left, right = (drawn(count, 1, positions, k, seed=seed + k, dtype=dtype) for k in (m, n))
    return Outer(left, right, torch.Size((m, n)))


def length(tensors):
    """In float64."""
    return math.sqrt(sum(float(x.double().square().sum()) for x in tensors))


def added(form, method, limit, dtype):
    """What each example adds to the sum, by itself; and the factors."""
    grads = form.dense()
    norms = clipping.group_norms(
        {"w": [Part(form, method=method)]},
        [],
        Groups(("all",), {"w": 0}),
        {"w": nn.Parameter(torch.zeros(grads.shape[1:], dtype=dtype))},
        torch.ones(len(grads), dtype=torch.bool),
    )
    (factors,) = clipping.clip_factors(norms, torch.tensor([limit], dtype=dtype))
    return [length([form.weighted_sum(alone)]) for alone in factors.diag()], factors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FORMS)
def test_no_example_adds_more_than_its_bound(name, dtype):
    for seed in range(3):
        form = FORMS[name](3, seed=1000 * seed, dtype=dtype)
        norm = length([form.dense()[0]])
        for method in ("gram", "direct") if name == "positions" else (None,):
            for near in NEAR:
                found, _ = added(form, method, near * norm, dtype)
                assert max(found) <= near * norm


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 4e-6), (torch.float64, 1e-14)])
def test_what_is_below_the_bound_is_left_alone(dtype, apart):
    """And what is clipped comes as close to the bound as rounding allows."""
    form = Dense(drawn(3, 30, 50, seed=0, dtype=dtype))
    norm = length([form.grads[0]])
    _, factors = added(form, None, (1 + apart) * norm, dtype)
    assert factors[0] == 1
    found, factors = added(form, None, norm / 2, dtype)
    assert (factors < 1).all()
    assert found[0] >= norm / 2 * (1 - apart)


@pytest.mark.parametrize("value", [0.1, 3.3])
@pytest.mark.parametrize("count", LONG)
def test_long_rows_have_their_norms(count, value):
    """Torch adds the squares of a row up one after the other on a CPU: 3 million equal ones are off by 1e-3."""
    x = torch.full((2, count), value)
    norm = float(x[0, 0].double()) * math.sqrt(count)
    assert square_sums(x).sqrt().tolist() == pytest.approx([norm] * 2, rel=1e-6)
    assert lengths(x).tolist() == pytest.approx([norm] * 2, rel=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (0, 700), (2, 0), (3, 256), (3, 257), (2, 65_792), (4, 3, 300)], ids=str)
def test_norms_of_rows_of_any_length(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(square_sums(x), x.double().flatten(1).square().sum(1).float())
    torch.testing.assert_close(lengths(x), torch.linalg.vector_norm(x.double(), dim=-1).float())


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
@pytest.mark.parametrize("door", ["eager", "compiled"])
def test_a_step_of_either_driver_keeps_to_its_bounds(monkeypatch, door, groups):
    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 1)
    )
    pair = Pair(model, squared, groups=groups)
    run = pair.compiled if door == "compiled" else pair.expected
    x, y = torch.randn(5, 2, 10), 3 * torch.randn(5)
    whole = pair.expected(x, y, 1e6)
    members, count = pair.eager.groups.members, len(pair.eager.groups)
    for b in range(2):
        alone = torch.arange(5) == b
        for near in NEAR:
            bounds = tuple(near * norm for norm in whole.group_norms[b].tolist())
            sums = run(x, y, bounds, mask=alone).sums
            for k in range(count):
                assert length([sums[name] for name in sums if members[name] == k]) <= bounds[k]


def test_what_rides_in_the_slack_keeps_to_the_bound():
    """An example whose norm was rounded down to a radius, with its coordinates in float32, is within the threshold."""
    for tau in (1.0, 0.7, 3e-5):
        for radii in ((0.75,), (0.8, 0.95), (0.8, 0.999)):
            slack = Slack((tuple(r * tau for r in radii),))
            steps = torch.tensor(slack.coefficients((tau,))[0], dtype=torch.float32)
            for k, radius in enumerate(slack.radii[0]):
                true_norm = radius * (1 + 1e-6)
                assert math.hypot(true_norm, *steps[k:].tolist()) <= tau
