"""What a graph freezes makes another graph when it changes, and everything else is read anew at each step."""

import random
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.cases import Net, squared
from engine.compare import assert_same
from engine.driven import Pair, as_traced, batch
from qclip._validate import Refusal
from qclip.engine import CostModel, Outer
from qclip.engine.compiled import driver as compiled

B, D, P = 7, 6, 5


@pytest.fixture(autouse=True)
def _as_traced(monkeypatch):
    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)


@pytest.fixture
def traces(monkeypatch):
    """One entry for each trace of a step that is to be compiled."""
    found = []
    trace = compiled.trace

    def counted(*args):
        found.append(args)
        return trace(*args)

    monkeypatch.setattr(compiled, "trace", counted)
    return found


def mlp(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), *middle, nn.Linear(8, P))


def agree(pair, *data, rtol=2e-5, **options):
    assert_same(pair.compiled(*data, **options), pair.expected(*data, **options), rtol)


# What is frozen


def test_the_same_kind_of_batch_uses_the_same_graph(traces):
    pair = Pair(mlp())
    for seed in range(20):  # over the proofs of the 2nd and the 16th
        agree(pair, *batch(B, D, seed=seed), clip_norm=0.1 * (seed + 1))
    assert len(traces) == 1


def test_masks_and_limits_are_no_part_of_it(traces):
    pair = Pair(mlp(), groups="per-layer")
    for k in range(5):
        agree(pair, *batch(B, D), clip_norm=[0.1 + k, 0.2], mask=torch.arange(B) % 5 != k)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda x, y: (x[:4], y[:4]), id="fewer examples"),
        pytest.param(lambda x, y: (x[:, None].expand(B, 3, D).contiguous(), y), id="more positions"),
        pytest.param(lambda x, y: (x, y.double()), id="another dtype"),
        pytest.param(lambda x, y: ((x,), y), id="another nest"),
    ],
)
def test_another_kind_of_batch_makes_another_graph(traces, other):
    pair, data = Pair(mlp()), batch(B, D)
    agree(pair, *data)
    agree(pair, *other(*data))
    assert len(traces) == 2
    agree(pair, *data)
    agree(pair, *other(*data))
    assert len(traces) == 2


def test_another_layout_of_the_parameters_makes_another_graph(traces):
    torch.manual_seed(0)
    pair, data = Pair(nn.Conv2d(3, 5, 3)), batch(B, 3, 6, 5)
    agree(pair, *data)
    pair.model.to(memory_format=torch.channels_last)
    agree(pair, *data)
    assert len(traces) == 2


def test_a_number_in_the_batch_is_frozen(traces):
    pair = Pair(Net(lambda n, x, scale: n.one(x) * scale, one=nn.Linear(D, P)))
    x, y = batch(B, D)
    for scale in (2.0, 3.0, 2.0):
        agree(pair, (x, scale), y)
    agree(pair, (x, 2), y)  # equal, and of another type
    assert len(traces) == 3


def test_the_training_flag_of_one_module_makes_another_graph(traces):
    inner = Net(lambda n, x: x * 2 if n.training else x)
    pair, data = Pair(mlp(inner)), batch(B, D)
    agree(pair, *data)
    inner.eval()
    agree(pair, *data)
    inner.train()
    agree(pair, *data)
    assert len(traces) == 2


def test_autocast_makes_another_graph(traces):
    pair, data = Pair(mlp()), batch(B, D)
    contexts = [
        nullcontext(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", enabled=False),
    ]
    for context in contexts:
        with context:
            agree(pair, *data, rtol=2e-2 if context is contexts[1] else 1e-2)
    assert len(traces) == 2
    exact = pair.compiled(*data).norms
    with contexts[1]:
        assert not torch.equal(pair.compiled(*data).norms, exact)
    assert len(traces) == 2


def test_settings_that_torch_compiles_for_make_another_graph(traces):
    pair, data = Pair(mlp()), batch(B, D)
    agree(pair, *data)
    torch.use_deterministic_algorithms(True)
    try:
        agree(pair, *data)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(traces) == 2
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        agree(pair, *data)
    finally:
        torch.set_num_threads(threads)
    assert len(traces) == 3


def test_other_trainable_parameters_are_refused(traces):
    pair, data = Pair(mlp()), batch(B, D)
    agree(pair, *data)
    pair.model[0].bias.requires_grad_(False)
    with pytest.raises(Refusal, match="set of trainable parameters has changed"):
        pair.compiled(*data)


def test_another_loss_makes_another_graph(traces):
    pair, data = Pair(mlp()), batch(B, D)
    agree(pair, *data)
    other = Pair(pair.model, loss=lambda outputs, targets: 3 * squared(outputs, targets))
    found = pair.driver.clipped(other.evaluate, data, 1.0)
    assert_same(found, other.expected(*data), 2e-5)
    assert len(traces) == 2


# What is not


def test_parameters_are_read_anew(traces):
    pair, data = Pair(mlp()), batch(B, D)
    first = pair.compiled(*data)
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.5)
    for p in pair.model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.allclose(pair.compiled(*data).norms, first.norms, rtol=1e-2)
    agree(pair, *data)
    torch.manual_seed(5)
    pair.model.load_state_dict(nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, P)).state_dict())
    agree(pair, *data)
    assert len(traces) == 1


def test_buffers_and_frozen_parameters_are_read_anew(traces):
    model = Net(lambda n, x: n.one(x * n.scale) + n.two(x), one=nn.Linear(D, P), two=nn.Linear(D, P))
    model.scale = nn.Buffer(torch.ones(D))
    model.two.requires_grad_(False)
    pair, data = Pair(model), batch(B, D)
    first = pair.compiled(*data)
    with torch.no_grad():
        model.scale.mul_(3)
        model.two.weight.mul_(2)
    assert not torch.allclose(pair.compiled(*data).norms, first.norms, rtol=1e-2)
    agree(pair, *data)
    assert len(traces) == 1


def test_nothing_is_left_behind():
    """No gradient, no change of the model, the batch or any generator."""
    pair, (x, y) = Pair(mlp()), batch(B, D)
    before = [p.detach().clone() for p in pair.model.parameters()]
    states = torch.get_rng_state(), random.getstate()
    result = pair.compiled(x, y)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(pair.model.parameters(), before, strict=True))
    assert all(p.requires_grad for p in pair.model.parameters())
    assert torch.equal(x, batch(B, D)[0])
    assert not any(value.requires_grad for value in result.sums.values())
    assert not result.norms.requires_grad
    assert not result.losses.requires_grad


def test_a_layer_in_two_places_keeps_its_parameters():
    torch.manual_seed(0)
    layer = nn.Linear(D, D)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    before = dict(layer.named_parameters())
    pair = Pair(model)
    for _ in range(3):
        agree(pair, *batch(B, D))
        assert all(layer._parameters[name] is p for name, p in before.items())


# Random numbers


def dropped():
    return mlp(nn.Dropout(0.5))


def test_every_step_draws_its_own_masks(traces):
    pair, data = Pair(dropped()), batch(B, D)
    torch.manual_seed(1)
    first, second = pair.compiled(*data), pair.compiled(*data)
    assert not torch.allclose(first.norms, second.norms, rtol=1e-2)
    torch.manual_seed(1)
    for before in (first, second):
        again = pair.compiled(*data)
        assert torch.equal(again.norms, before.norms)
        assert all(torch.equal(again.sums[name], before.sums[name]) for name in again.sums)
    assert len(traces) == 1


def test_masks_are_those_of_the_eager_step():
    pair, data = Pair(dropped()), batch(B, D)
    for seed in range(3):
        torch.manual_seed(seed)
        found, after = pair.compiled(*data), torch.get_rng_state()
        torch.manual_seed(seed)
        assert_same(found, pair.expected(*data), 2e-5)
        assert torch.equal(torch.get_rng_state(), after)


def test_an_example_that_is_not_finite_leaves_the_masks_of_others_alone():
    """Else removing it would change what everyone adds."""
    pair, (x, y) = Pair(dropped()), batch(B, D)
    x[2] = torch.nan
    torch.manual_seed(1)
    found, after = pair.compiled(x, y, 0.5), torch.get_rng_state()
    torch.manual_seed(1)
    expected = pair.expected(x, y, 0.5)
    for name, value in expected.sums.items():
        torch.testing.assert_close(found.sums[name], value)
    assert torch.equal(torch.get_rng_state(), after)
    assert found.norms[2] == torch.inf


def test_the_bound_holds_with_dropout():
    pair, data = Pair(dropped()), batch(B, D)
    for gone in range(B):
        torch.manual_seed(gone)
        full = pair.compiled(*data, clip_norm=0.3)
        torch.manual_seed(gone)
        less = pair.compiled(*data, clip_norm=0.3, mask=torch.arange(B) != gone)
        moved = sum((full.sums[name] - less.sums[name]).square().sum() for name in full.sums) ** 0.5
        assert 0 < moved <= 0.3 * (1 + 1e-5)


def test_dropout_that_the_backward_pass_draws_again_runs_eager():
    block = mlp(nn.Dropout(0.5))
    pair = Pair(Net(lambda n, x: checkpoint(n.block, x, use_reentrant=False), block=block))
    data = batch(B, D)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="runs eager: .*random numbers of the forward pass would have to be drawn"):
        found = pair.compiled(*data)
    torch.manual_seed(1)
    assert_same(found, pair.expected(*data), 2e-5)


def test_dropout_inside_a_function_without_a_rule_runs_eager():
    """Its gradient comes from running it again, example by example."""

    def attend(n, x):
        return F.scaled_dot_product_attention(n.query, x, x, dropout_p=0.3)

    torch.manual_seed(0)
    pair = Pair(Net(attend, query=nn.Parameter(torch.randn(1, 3, D))))
    data = batch(B, 3, D)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="not compiled, runs eager: "):
        found = pair.compiled(*data)
    torch.manual_seed(1)
    assert_same(found, pair.expected(*data), 2e-5)


@pytest.mark.parametrize("groups", ["flat", "per-layer"])
def test_a_step_that_keeps_less_than_its_proof_could_agrees_with_it(groups, monkeypatch, traces):
    """Where factors are rounded a lot, gradients that are not kept are clipped more: the proof must do so, too."""
    monkeypatch.setattr(Outer, "scaling_error", 0.05)
    costs = CostModel(kept_bytes=4 * 8 * 64, overhead=1e-3)  # of one layer and eight examples
    pair = Pair(nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)]), costs=costs, groups=groups)
    for count in (6, 32):
        data = batch(count, 24, 8)
        found, expected = pair.compiled(*data), pair.expected(*data)
        torch.testing.assert_close(found.group_norms, expected.group_norms)
        if groups == "flat":  # else a compiled step has memory for each layer
            assert_same(found, expected, rtol=2e-5)
    assert len(traces) == 2
