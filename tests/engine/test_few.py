"""Texts of other lengths: the third and later proofs of the same calls take few examples, and miss nothing."""

import pytest
import torch
from torch import nn

from engine.cases import Net
from engine.cases.case import D, P, squared
from engine.compare import assert_same
from qclip.engine import Dense, Engine, Refusal, oracle, register_rule
from qclip.engine.gradients.rules.registry import unregister_rule

B = 20


def encoder(mix=lambda n, x: x, **layers):
    """A mean over the positions of a text, of any length."""
    return Net(
        lambda n, x: n.out(n.inner(mix(n, x) + n.place[: x.shape[1]]).tanh().mean(1)),
        inner=nn.Linear(D, P),
        out=nn.Linear(P, 2),
        place=nn.Parameter(torch.randn(64, D)),
        **layers,
    )


class Steps:
    """Clips batches by one engine, and counts the examples that went through the model."""

    def __init__(self, model):
        self.model, self.engine, self.examples = model, Engine(model), 0
        model.register_forward_pre_hook(self.count)

    def count(self, _, args):
        self.examples += len(args[0])

    def clip(self, length, batch_size=B):
        batch = torch.randn(batch_size, length, D), torch.randn(batch_size)
        before = self.examples
        found = self.engine.clipped(lambda batch: squared(self.model(batch[0]), batch[1]), batch, 0.5)
        taken = self.examples - before
        assert_same(found, oracle.clipped_gradients(self.model, squared, *batch, 0.5), rtol=1e-4)
        return taken


@pytest.mark.parametrize("length", [B, 2 * B, 5, 9])  # as long as the batch, a multiple of it, as long as the few
def test_another_length_is_proven_on_few_examples(length):
    steps = Steps(encoder())
    assert steps.clip(4) == steps.clip(7) > 9 * B
    assert steps.clip(length) < 6 * B


def test_one_example_proves_nothing():
    steps = Steps(encoder())
    for length in 4, 5, 6:
        steps.clip(length, batch_size=1)
    assert steps.clip(7) > 9 * B


def test_small_batches_are_proven_as_they_are():
    steps = Steps(encoder())
    proofs = [steps.clip(length, batch_size=8) for length in (4, 5, 6)]
    assert proofs[0] == proofs[1] == proofs[2]


def test_new_shapes_are_said_with_a_hint_after_the_third(caplog):
    steps = Steps(encoder())
    for length in 4, 4, 6, 4, 7, 6, 9, 11:
        steps.clip(length, batch_size=B if length == 4 else B - 1)
    said = [row.getMessage() for row in caplog.records if row.levelname == "WARNING"]
    assert [text.split("batches, ")[1].split(".")[0] for text in said] == [str((B - 1, k, D)) for k in (6, 7, 9)]
    assert ["bucketed_lengths" in text for text in said] == [False, False, True]


def test_a_first_proof_that_takes_long_is_said(caplog, monkeypatch):
    monkeypatch.setattr("qclip.engine.driver._PATIENCE", 0.0)
    steps = Steps(encoder())
    for _ in range(3):
        steps.clip(4)
    assert caplog.text.count("proving that the first batch does not mix examples took") == 1


def longer(n, x):
    return torch.where(n.mixed[x.shape[1]], x.roll(1, 0), x)


def many(n, x):
    return torch.where(n.mixed[len(x)], x.roll(1, 0), x)


@pytest.mark.parametrize(("mix", "from_where", "length"), [(longer, 8, 9), (many, 15, 9)])
def test_mixing_that_earlier_proofs_could_not_see(mix, from_where, length):
    """In long texts, or in batches of more examples than are proven; by the same calls."""
    model = encoder(mix, mixed=nn.Buffer(torch.arange(64) >= from_where))
    steps = Steps(model)
    for short in 4, 7:
        steps.clip(short, batch_size=12)
    with pytest.raises(Refusal, match="examples mix"):
        steps.clip(length)


def test_a_rule_that_is_wrong_for_many_examples():
    """The totals of the whole batch show it."""

    def addcmul(grad, input, tensor1, tensor2, *, value=1):
        return {"tensor1": Dense((1 + (len(grad) > 15)) * (grad * tensor2).flatten(1, -2).sum(1))}

    register_rule(torch.addcmul)(addcmul)
    try:
        steps = Steps(encoder(lambda n, x: torch.addcmul(x, n.scale, x), scale=nn.Parameter(torch.randn(D))))
        for short in 4, 7:
            steps.clip(short, batch_size=12)
        with pytest.raises(Refusal, match="do not add up"):
            steps.clip(9)
    finally:
        unregister_rule(torch.addcmul)
