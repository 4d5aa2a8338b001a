"""The last rung: examples are run through the model one at a time, where their gradients cannot be told apart."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.cases import Net
from engine.cases.case import D, P, linear, param, squared
from engine.cases.hidden import Product
from engine.compare import assert_same
from qclip.engine import Engine, Refusal, clipped_gradients, explain, oracle
from qclip.engine.randomness import NoDropout, RandomState

B, T = 4, 3
pytestmark = [
    pytest.mark.filterwarnings("ignore:examples are run through the model one at a time:UserWarning"),
    pytest.mark.filterwarnings("ignore:data decide which rows of the batch go where:UserWarning"),
]


def routed(n, x):
    """Each row goes to one expert, with dropout inside: which numbers a row draws depends on the rows of others."""
    flat = x.reshape(-1, D)
    choice = (flat @ n.plane > 0).long()
    out = flat.new_zeros(len(flat), P)
    for e, expert in enumerate((n.one, n.two)):
        rows = (choice == e).nonzero().squeeze(1)
        out = out.index_add(0, rows, F.dropout(expert(flat[rows]), 0.5, n.training))
    return out.view(*x.shape[:2], P)


def experts(after=None):
    torch.manual_seed(0)
    function = routed if after is None else lambda n, x: after(routed(n, x))
    return Net(function, plane=param(D), one=linear()(), two=linear()())


def batch(size=B):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, T, D, generator=generator), torch.randn(size, generator=generator)


def clipped(model, x, targets, clip_norm, engine=None, **options):
    torch.manual_seed(2)
    engine = engine or Engine(model)
    return engine.clipped(lambda pair: squared(model(pair[0]), pair[1]), (x, targets), clip_norm, **options)


def test_dropout_of_routed_rows():
    """Every example draws numbers of its own, whatever the others are: its norm stays when they are replaced."""
    model, (x, targets) = experts(), batch()
    engine = Engine(model)
    found = clipped(model, x, targets, 0.1, engine)
    assert engine.own_draws
    for i in range(B):
        others = torch.randn_like(x).index_copy(0, torch.tensor([i]), x[i : i + 1])
        again = clipped(model, others, targets, 0.1, engine)
        torch.testing.assert_close(again.norms[i], found.norms[i], rtol=1e-6, atol=0)
        left_out = clipped(model, x, targets, 0.1, engine, mask=torch.arange(B) != i)
        apart = [(found.sums[name] - left_out.sums[name]).square().sum() for name in found.sums]
        assert sum(apart).sqrt() <= found.l2_bound * (1 + 1e-5)


def test_dropout_of_routed_rows_left_out():
    """The oracle's sums, where nothing is drawn."""
    model, (x, targets) = experts(), batch()
    with NoDropout():
        expected = oracle.clipped_gradients(model, squared, x, targets, 0.1)
        assert_same(clipped_gradients(model, squared, x, targets, 0.1), expected, rtol=2e-5)


def test_draws_of_its_own_differ_between_examples():
    """Equal examples have unequal masks, and so do two steps; the generator moves as in a plain step."""
    model = experts()
    engine = Engine(model)
    clipped(model, *batch(), 1.0, engine)
    x, targets = batch()[0][:1].expand(B, T, D), torch.zeros(B)
    assert len(set(clipped(model, x, targets, 1.0, engine).norms.tolist())) == B
    after = RandomState.now()
    torch.manual_seed(2)
    model(x)
    assert torch.equal(after.cpu, torch.get_rng_state())


def test_mixing_behind_dropout_of_routed_rows():
    """Dropout is no excuse for batch statistics."""
    with pytest.raises(Refusal, match=r"one example at a time failed too"):
        clipped(experts(lambda h: h - h.mean(0).detach()), *batch(), 1.0)


def test_the_warning_comes_once_and_explain_says_it():
    model = Net(lambda n, x: Product.apply(n.one(x), n.w), one=nn.Linear(D, P), w=param(P, 2))
    x, targets = torch.randn(B, D), torch.randn(B)
    engine = Engine(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            clipped(model, x, targets, 1.0, engine)
        rows = explain(model, x, loss=squared, targets=targets).parameters
    assert sum("one at a time" in str(each.message) for each in said) == 2  # of the engine, and of explain
    assert {row.strategy for row in rows} == {"one example at a time"}
    assert all("'w'" in row.detail for row in rows)


def test_rows_that_go_elsewhere_are_not_proven_again():
    """The gradients of examples that run alone need no proof that rows stay apart."""
    model, (x, targets) = experts().eval(), batch()
    engine = Engine(model)
    clipped(model, x, targets, 0.1, engine)
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn_like(x)
        expected = oracle.clipped_gradients(model, squared, x, targets, 0.1)
        assert_same(clipped(model, x, targets, 0.1, engine), expected, rtol=2e-5)
    assert engine.proofs <= 3


def test_declared_buffers_move_once():
    """In the forward pass of the batch, not in those of its examples."""

    def forward(n, x):
        n.steps += 1
        return Product.apply(n.one(x), n.w)

    model = Net(forward, one=nn.Linear(D, P), w=param(P, 2), steps=nn.Buffer(torch.zeros(())))
    engine = Engine(model, data_independent_buffers=["steps"])
    x, targets = torch.randn(B, D), torch.randn(B)
    for k in range(1, 4):
        clipped(model, x, targets, 1.0, engine)
        assert model.steps == k


def test_a_watched_model():
    """In an ordinary loop, the loss comes after the forward pass."""
    model, (x, targets) = experts().eval(), batch()
    engine = Engine(model)
    engine.watch(lambda: B)
    for _ in range(3):
        found = engine.finish(model(x), targets, squared, 0.1)
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.1), rtol=2e-5)


def test_no_dropout():
    """In attention, too; whatever else is drawn stays."""
    x = torch.randn(2, 3, 4)
    with NoDropout():
        assert F.dropout(x, 0.9) is x
        assert nn.Dropout(0.9)(x) is x
        assert F.dropout2d(input=x, p=0.9) is x
        for options in ({"dropout_p": 0.9}, {}):
            attention = F.scaled_dot_product_attention(x, x, x, **options)
            torch.testing.assert_close(attention, (x @ x.mT / 2).softmax(-1) @ x)
        torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x, None, 0.9), attention)
        assert torch.rand(3).unique().numel() == 3


def test_seeded_states():
    """They follow from the state and the number, and leave the generators alone."""
    torch.manual_seed(0)
    state = RandomState.now()
    draws = []
    for number in (0, 1, 0):
        with state.seeded(number):
            draws.append(torch.rand(2).tolist())
    assert draws[0] == draws[2] != draws[1]
    assert state.unmoved()
    with replace(state, cpu=torch.Generator().manual_seed(7).get_state()).seeded(0):
        assert torch.rand(2).tolist() != draws[0]
