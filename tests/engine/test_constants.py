"""Buffers, frozen parameters and a criterion's own tensors: part of what is proven, and proven again if they move."""

import warnings

import pytest
import torch
from torch import nn

from engine.cases import Net
from engine.cases.case import D, P, squared
from engine.compare import assert_same
from qclip.engine import Engine, Refusal, clipped_gradients, oracle
from qclip.engine.capture.constants import Snapshot, same, values
from qclip.engine.compiled.driver import Compiled
from qclip.engine.proof.perturbation import movable, perturbed

B = 6


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, D, generator=generator), torch.randn(B, generator=generator)


def centring(weight, *, where=False):
    """Centres the hidden layer by as much as ``weight`` says, or where it is above a half."""

    def forward(n, x):
        h = n.one(x).tanh()
        centred = h - h.detach().mean(0)
        return n.two(torch.where(n.weight > 0.5, centred, h) if where else h - n.weight * h.detach().mean(0))

    model = Net(forward, one=nn.Linear(D, P), two=nn.Linear(P, 3))
    model.weight = weight
    return model


CONSTANTS = {
    "buffer": lambda value: nn.Buffer(torch.tensor(value)),
    "buffer of 16 bits": lambda value: nn.Buffer(torch.tensor(value, dtype=torch.bfloat16)),
    "frozen parameter": lambda value: nn.Parameter(torch.tensor(value), requires_grad=False),
}
PARTS = pytest.mark.parametrize("make", CONSTANTS.values(), ids=CONSTANTS)


@PARTS
def test_a_term_whose_weight_is_still_zero(make):
    """It would mix the examples from the step on at which someone switches it on."""
    with pytest.raises(Refusal, match=r"other values of buffers and frozen parameters \('weight'\), .* examples mix"):
        clipped_gradients(centring(make(0.0)), squared, *batch(), 0.5)


def test_only_a_python_number_waits_until_it_is_switched_on():
    model = centring(0.0)
    engine = Engine(model)

    def step():
        return engine.clipped(lambda pair: squared(model(pair[0]), pair[1]), batch(), 0.5)

    for _ in range(3):
        step()
    model.weight = 1.0
    with pytest.raises(Refusal, match="examples mix"):
        step()


class Training:
    """Steps of one engine, eager or compiled."""

    def __init__(self, model, *, compiled=False, loss=squared):
        self.model, self.loss = model, loss
        self.engine = Engine(model, criterion=loss if isinstance(loss, nn.Module) else None)
        self._driver = Compiled(self.engine, "default") if compiled else self.engine

    def evaluate(self, pair):
        return self.loss(self.model(pair[0]), pair[1])

    def step(self, seed=0):
        return self._driver.clipped(self.evaluate, batch(seed), 0.5)

    def proofs_of(self, change):
        before = self.engine.proofs
        change()
        self.step()
        return self.engine.proofs - before


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("write", ["in place", "through .data", "replaced"])
@pytest.mark.parametrize("kind", [float, int], ids=["float", "int"])
def test_a_switch_in_a_buffer(compiled, write, kind):
    """What a proof at nearby values cannot show is proven when the value is there."""
    training = Training(centring(nn.Buffer(torch.tensor(kind(0))), where=True), compiled=compiled)
    for seed in range(3):
        training.step(seed)
    if write == "in place":
        training.model.weight.fill_(1)
    elif write == "through .data":
        training.model.weight.data.fill_(1)
    else:
        training.model.weight = nn.Buffer(torch.tensor(kind(1)))
    with pytest.raises(Refusal, match="examples mix"):
        training.step()


def scaled(weight):
    return Net(lambda n, x: n.two(n.weight * n.one(x).tanh()), one=nn.Linear(D, P), two=nn.Linear(P, 3), weight=weight)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_only_a_change_beyond_what_was_proven_costs_a_proof(compiled):
    model = scaled(nn.Buffer(torch.tensor(1.0)))
    training = Training(model, compiled=compiled)
    for seed in range(3):
        training.step(seed)
    assert training.proofs_of(lambda: None) == 0
    assert training.proofs_of(lambda: model.weight.fill_(1.4)) == 0
    assert training.proofs_of(lambda: model.weight.fill_(0.6)) == 0
    assert training.proofs_of(lambda: model.weight.fill_(3.0)) == 1
    assert training.proofs_of(lambda: model.weight.fill_(2.0)) == 0
    assert_same(training.step(), oracle.clipped_gradients(model, squared, *batch(), 0.5), rtol=2e-5)


def test_a_constant_that_keeps_calling_for_proofs_is_named_once():
    model = scaled(nn.Buffer(torch.ones((), dtype=torch.int64)))
    training = Training(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            training.step()
            model.weight.add_(1)
    (said,) = [str(each.message) for each in caught]
    assert said.startswith("'weight' changed between steps 3 times by more than was proven")


@PARTS
def test_what_the_data_do_to_a_constant(make):
    """``.data`` raises no version: the proof compares values."""

    def forward(n, x):
        n.stat.data.copy_(n.stat + x.mean())
        return n.two(n.one(x).tanh())

    model = Net(forward, one=nn.Linear(D, P), two=nn.Linear(P, 3), stat=make(0.0))
    with pytest.raises(Refusal, match=r"'stat' \(Net\) changed in the forward pass"):
        clipped_gradients(model, squared, *batch(), 0.5)


def test_what_the_data_do_to_a_large_constant():
    def forward(n, x):
        n.stat.data[7] += x.mean()
        return n.two(n.one(x).tanh())

    model = Net(forward, one=nn.Linear(D, P), two=nn.Linear(P, 3), stat=nn.Buffer(torch.zeros(10_000)))
    with pytest.raises(Refusal, match=r"'stat' \(Net\) changed in the forward pass"):
        clipped_gradients(model, squared, *batch(), 0.5)


class Centre(nn.Module):
    """A criterion with buffers of its own."""

    def __init__(self, write, weight=0.0):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("weight", torch.tensor(weight))
        self.write = write

    def forward(self, outputs, targets):
        self.write(self.centre, outputs.detach().mean(0))
        return squared(outputs - self.weight * outputs.detach().mean(0), targets)


WRITES = {
    "in place": lambda centre, mean: centre.mul_(0.9).add_(0.1 * mean),
    "through .data": lambda centre, mean: centre.data.copy_(mean),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_criterion_that_keeps_what_the_data_did(write):
    model = nn.Linear(D, 3)
    with pytest.raises(Refusal, match=r"'criterion.centre' \(Centre\) changed in the forward pass"):
        clipped_gradients(model, Centre(write), *batch(), 0.5)


def test_a_criterion_whose_weight_is_still_zero():
    with pytest.raises(Refusal, match=r"'criterion.weight'.* examples mix"):
        clipped_gradients(nn.Linear(D, 3), Centre(lambda centre, mean: None), *batch(), 0.5)


# Honest constants


def test_values_that_the_model_cannot_do_without():
    """Codes in floats, whose neighbours are out of range: the proof is made at the values that they have."""
    codes = nn.Buffer(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]))

    def forward(n, x):
        return n.two(n.one(x).tanh() + n.table(n.codes.long().clamp_min(0) * (n.codes == n.codes.round())).mean(0))

    def strict(n, x):
        index = n.codes.long()
        if not torch.equal(index.double(), n.codes.double()):
            raise IndexError("codes must be whole numbers")
        return n.two(n.one(x).tanh() + n.table(index).mean(0))

    for function in (forward, strict):
        model = Net(function, one=nn.Linear(D, P), two=nn.Linear(P, 3), table=nn.Embedding(6, P), codes=codes)
        expected = oracle.clipped_gradients(model, squared, *batch(), 0.5)
        assert_same(clipped_gradients(model, squared, *batch(), 0.5), expected, rtol=2e-5)


def test_values_that_were_not_moved_are_proven_again_whatever_they_become():
    def strict(n, x):
        if n.scale != n.scale.round():
            raise ValueError("the scale must be a whole number")
        return n.two(n.scale * n.one(x).tanh())

    model = Net(strict, one=nn.Linear(D, P), two=nn.Linear(P, 3), scale=nn.Buffer(torch.tensor(4.0)))
    training = Training(model)
    for seed in range(3):
        training.step(seed)
    assert training.proofs_of(lambda: None) == 0
    assert training.proofs_of(lambda: model.scale.fill_(5.0)) == 1


MASKS = {
    "infinite": torch.tensor([0.0, -torch.inf, 0.0, -torch.inf, 0.0]),
    "least": torch.tensor([0.0, torch.finfo(torch.float32).min, 0.0, 0.0, 0.0]),
    "expanded": torch.zeros(1).expand(P),
    "variance zero": torch.zeros(P),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_honest_buffers(mask):
    def forward(n, x):
        return n.two((n.one(x) + n.mask).softmax(1) / (n.mask.clamp(-1, 1) + 1).sqrt().clamp_min(0.1))

    model = Net(forward, one=nn.Linear(D, P), two=nn.Linear(P, 3), mask=nn.Buffer(mask))
    expected = oracle.clipped_gradients(model, squared, *batch(), 0.5)
    engine = Training(model)
    before = mask.clone()
    for _ in range(4):
        assert_same(engine.step(), expected, rtol=2e-5)
    assert engine.engine.proofs == 2
    assert torch.equal(model.mask, before)


# Parts


def test_perturbed_constants_come_back_bit_by_bit():
    odd = torch.tensor([0.0, 1.0, -2.0, torch.inf, torch.nan])
    largest = torch.full((64,), torch.finfo(torch.float32).max)
    tensors = [odd, torch.zeros(4, 4).T, torch.ones(2).bfloat16(), largest]
    before = [x.clone() for x in tensors]
    with perturbed([], tensors):
        assert all(((x != y) | ~x.isfinite()).all() for x, y in zip(tensors[:3], before, strict=False))
        assert odd[:3].isfinite().all()
        assert (tensors[1] > 0).all()
        assert largest.isfinite().all()
    assert all(same(values(x), values(y)) for x, y in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("x", "can"),
    [
        (torch.zeros(3), True),
        (torch.zeros(3, 4).T[:, ::2], True),
        (torch.zeros(()), True),
        (torch.zeros(1).expand(3), False),
        (torch.zeros(5).as_strided((3, 2), (1, 2)), False),
        (torch.zeros(3, dtype=torch.int64), False),
        (torch.zeros(3, dtype=torch.complex64), False),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), False),
        (torch.zeros(3, 3).to_sparse(), False),
    ],
)
def test_what_can_be_moved(x, can):
    assert movable(x) == can


@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_values_tell_a_change(size, dtype):
    x = torch.zeros(size, dtype=dtype)
    before = values(x)
    assert same(before, values(x))
    x[size // 2] = 1
    assert not same(before, values(x))


def test_a_snapshot_says_what_left_it():
    x, codes = torch.ones(3), torch.arange(3)
    snapshot = Snapshot({"x": x, "codes": codes}, moved=True)
    assert snapshot.left({"x": x, "codes": codes}) == []
    x.mul_(1.2)
    assert snapshot.left({"x": x, "codes": codes}) == []
    codes.data[0] = 9
    x.mul_(-1)
    assert snapshot.left({"x": x, "codes": codes, "new": x}) == ["x", "codes", "new"]
