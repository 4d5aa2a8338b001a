"""How little mixing a proof can see: the tolerance, in float32 whatever the precision of the model."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.cases import Net
from engine.cases.case import D, P, squared
from qclip.engine import Engine, Refusal, clipped_gradients
from qclip.engine.gradients.rules import registry
from qclip.engine.proof.precision import in_precision

B = 12


def centred(c):
    """A loss that takes a little of the others' outputs."""
    return lambda outputs, targets: squared(outputs - c * outputs.detach().mean(0), targets)


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, P), nn.ReLU(), nn.Linear(P, 3)).to(dtype)


def batch(dtype=torch.float32):
    return torch.randn(B, D, dtype=dtype), torch.randn(B, dtype=dtype)


@pytest.mark.parametrize("c", [0.3, 1e-2, 1e-3, 1e-4, 1e-5])
def test_a_little_of_the_others_in_float32(c):
    """An outlier that is not in this batch would bring a thousand times as much."""
    with pytest.raises(Refusal, match="examples mix"):
        clipped_gradients(mlp(), centred(c), *batch(), 0.5)


@pytest.mark.parametrize("c", [0.3, 1e-1, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("how", ["autocast", "inside the model", "inside the loss", "bfloat16"])
def test_a_little_of_the_others_in_16_bits(c, how):
    model, (x, targets) = mlp(), batch()
    loss = centred(c)
    if how == "inside the model":
        model = Net(lambda n, x: torch.autocast("cpu", dtype=torch.bfloat16)(n.inner)(x), inner=model)
    if how == "inside the loss":
        loss = torch.autocast("cpu", dtype=torch.bfloat16)(loss)
    if how == "bfloat16":
        model, x, targets = model.bfloat16(), x.bfloat16(), targets.bfloat16()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=how in ("autocast", "inside the loss")),
        pytest.raises(Refusal, match="examples mix"),
    ):
        clipped_gradients(model, loss, x, targets, 0.5)


def test_a_little_of_the_others_where_the_model_was_called_outside():
    model, (x, targets) = mlp(), batch()
    engine = Engine(model)
    engine.watch(lambda: B)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(x)
    with pytest.raises(Refusal, match="examples mix"):
        engine.finish(outputs, targets, centred(0.01), 0.5)


@pytest.mark.parametrize("how", ["float32", "autocast", "bfloat16"])
def test_nothing_of_the_others(how):
    model, (x, targets) = mlp(), batch()
    if how == "bfloat16":
        model, x, targets = model.bfloat16(), x.bfloat16(), targets.bfloat16()
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        clipped_gradients(model, squared, x, targets, 0.5)
    assert all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not model._forward_pre_hooks


def test_indices_in_floats_are_not_enlarged():
    """A GPU would not survive an index that is out of range."""

    def forward(n, x):
        return n.two(n.table(x[:, 0].long()) + n.one(x[:, 1:]))

    model = Net(forward, one=nn.Linear(D, P), two=nn.Linear(P, 3), table=nn.Embedding(4, P))
    x = torch.cat([torch.randint(4, (B, 1)).float(), torch.randn(B, D)], 1)
    seen = []
    model.table.register_forward_pre_hook(lambda _, args: seen.append(int(args[0].max())))
    clipped_gradients(model, squared, x, torch.randn(B), 0.5)
    assert max(seen) < 4


def test_single_precision_is_for_a_while():
    """Nor does it touch the parameters, so that graphs made before still lead to them."""
    model = mlp(torch.bfloat16)
    before = dict(model.named_parameters())
    loss = model(torch.randn(2, D, dtype=torch.bfloat16)).sum()
    with in_precision(torch.float32, [model]):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert all(p.requires_grad for p in model.parameters())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(torch.randn(2, D)).dtype == torch.float32
    assert all(p is before[name] and p.dtype == torch.bfloat16 for name, p in model.named_parameters())
    assert all(bool(grad.any()) for grad in torch.autograd.grad(loss, [before["0.weight"], before["2.bias"]]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.Linear(2, 2)(torch.randn(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_in_single_precision(kind):
    model = kind(D, P).bfloat16()
    with in_precision(torch.float32, [model]):
        assert model(torch.randn(3, 2, D))[0].dtype == torch.float32
    assert model(torch.randn(3, 2, D, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def nearly_cancelling(seed):
    """The positions of an example are nearly the same, and count with either sign."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 1, D, generator=draw) * (1 + 1e-6 * torch.randn(4, 8, 1, generator=draw))
    signs = torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    return Net(lambda n, x: (n.one(x) * signs.to(x)).sum(1), one=nn.LayerNorm(D)), x


def steep(outputs, targets):
    return (1000 * outputs).square().sum(1)


@pytest.mark.parametrize("seed", range(4))
def test_rounding_of_what_nearly_cancels_is_no_wrong_rule(seed):
    model, x = nearly_cancelling(seed)
    assert clipped_gradients(model, steep, x, torch.zeros(4), 1.0).norms.isfinite().all()


def test_a_wrong_rule_is_wrong_in_float64_too(monkeypatch):
    model, x = nearly_cancelling(0)
    entry = registry.find(torch.layer_norm)

    def doubled(grad, *args, **kwargs):
        return entry.rule(2 * grad, *args, **kwargs)

    monkeypatch.setitem(registry._entries, torch.layer_norm, replace(entry, rule=doubled))
    with pytest.raises(Refusal, match="do not add up to autograd's"):
        clipped_gradients(model, steep, x, torch.zeros(4), 1.0)
