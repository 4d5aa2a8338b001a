"""Only a released gradient can be applied, and only once."""

import sys

import pytest
import torch
from torch import nn

from qclip.training.guard import Guard

RAW = r"weight.grad is a raw gradient, not one that qclip released.* training.loss\(outputs, targets\)\.backward\(\)"
APPLIED = r"weight.grad was applied already: call optimizer.zero_grad\(\) after"
CHANGED = r"weight.grad was changed after its release: .* clip_grad_norm_"


@pytest.fixture
def model():
    return nn.Linear(2, 1)


@pytest.fixture(params=[torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def optimizer(model, request):
    return request.param(model.parameters(), lr=0.1)


@pytest.fixture
def guard(model, optimizer):
    return Guard(dict(model.named_parameters()), [optimizer])


def ones(model):
    return {name: torch.ones_like(p) for name, p in model.named_parameters()}


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def moved(model, before):
    return any(not torch.equal(a, b) for a, b in zip(values(model), before, strict=True))


def test_a_released_gradient_is_applied_once(model, optimizer, guard):
    before = values(model)
    guard.write(ones(model))
    optimizer.step()
    assert moved(model, before)
    before = values(model)
    with pytest.raises(ValueError, match=APPLIED):
        optimizer.step()
    assert not moved(model, before)
    guard.write(ones(model))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def test_no_gradient_is_no_step(model, optimizer, guard):
    before = values(model)
    optimizer.step()
    assert not moved(model, before)


def test_a_habitual_backward_is_refused(model, optimizer, guard):
    before = values(model)
    model(torch.ones(3, 2)).sum().backward()
    with pytest.raises(ValueError, match=RAW):
        optimizer.step()
    assert not moved(model, before)
    with pytest.raises(ValueError, match=RAW):
        guard.clear()


THEIRS, OURS = "transformers.trainer", "qclip.integrations.transformers.trainer"


@pytest.mark.parametrize(("loaded", "is_named"), [([], False), ([THEIRS], True), ([THEIRS, OURS], False)])
def test_under_another_trainer_the_private_one_is_named(model, optimizer, guard, monkeypatch, loaded, is_named):
    for name in THEIRS, OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in loaded:
        monkeypatch.setitem(sys.modules, name, None)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="raw gradient") as refusal:
        optimizer.step()
    assert ("take qclip.integrations.transformers.PrivateTrainer" in str(refusal.value)) == is_named


def test_a_raw_gradient_after_an_applied_one_is_told_apart(model, optimizer, guard):
    guard.write(ones(model))
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    with pytest.raises(ValueError, match=RAW):
        optimizer.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model(torch.ones(3, 2)).sum().backward(),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: model.weight.grad.zero_(),
    ],
)
def test_a_changed_gradient_is_refused(model, optimizer, guard, change):
    guard.write(ones(model))
    change(model)
    with pytest.raises(ValueError, match=CHANGED):
        optimizer.step()


def test_a_replaced_gradient_is_refused(model, optimizer, guard):
    guard.write(ones(model))
    model.weight.grad = model.weight.grad.clone()
    with pytest.raises(ValueError, match=RAW):
        optimizer.step()


def test_one_refused_parameter_stops_them_all(model, optimizer, guard):
    guard.write(ones(model))
    model.bias.grad = torch.ones(1)
    before = values(model)
    with pytest.raises(ValueError, match=r"bias\.grad"):
        optimizer.step()
    assert not moved(model, before)
    model.bias.grad = None
    optimizer.step()


@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_is_refused(model, optimizer, guard, keyword):
    def closure():
        raise AssertionError("it must not run")

    with pytest.raises(ValueError, match=r"with a closure, which would .* without clipping or noise: call training"):
        optimizer.step(closure=closure) if keyword else optimizer.step(closure)


def test_what_was_applied_is_let_go(model, optimizer, guard):
    import weakref

    grads = ones(model)
    held = [weakref.ref(grad) for grad in grads.values()]
    guard.write(grads)
    del grads
    optimizer.step()
    optimizer.zero_grad()
    assert all(ref() is None for ref in held)


def test_each_optimizer_answers_for_its_own(model):
    first, second = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    guard = Guard(dict(model.named_parameters()), [first, second])
    guard.write(ones(model))
    first.step()
    second.step()
    with pytest.raises(ValueError, match=APPLIED):
        first.step()
    guard.clear()
    assert model.weight.grad is None


def test_the_latest_guard_stands_alone(model, optimizer, guard):
    second = Guard(dict(model.named_parameters()), [optimizer])
    second.write(ones(model))
    optimizer.step()
    guard.write(ones(model))
    with pytest.raises(ValueError, match=RAW):
        optimizer.step()


def test_an_optimizer_that_calls_the_one_it_is_made_from(model):
    """torch then runs the hooks of a step twice."""

    class Own(torch.optim.Adam):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.Adam([nn.Parameter(torch.ones(1))])  # from here on its step runs hooks itself
    optimizer = Own(model.parameters(), lr=0.1)
    guard = Guard(dict(model.named_parameters()), [optimizer])
    guard.write(ones(model))
    before = values(model)
    optimizer.step()
    assert moved(model, before)
    with pytest.raises(ValueError, match=APPLIED):
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_released_gradient_that_was_thrown_away_is_not_waited_for(model, optimizer, guard, set_to_none):
    guard.write(ones(model))
    assert guard.pending
    optimizer.zero_grad(set_to_none)
    assert not guard.pending
    before = values(model)
    model(torch.ones(3, 2)).sum().backward()
    with pytest.raises(ValueError, match=RAW if set_to_none else CHANGED):
        optimizer.step()
    assert not moved(model, before)


def test_part_of_a_gradient_is_waited_for(model):
    first, second = (torch.optim.SGD([parameter], lr=0.1) for parameter in (model.weight, model.bias))
    guard = Guard(dict(model.named_parameters()), [first, second])
    guard.write(ones(model))
    first.zero_grad()
    assert guard.pending
    second.step()
    assert not guard.pending
