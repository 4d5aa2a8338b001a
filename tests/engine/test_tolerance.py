"""How little mixing a proof can see: the tolerance, in float32 whatever the precision of the model."""

import pytest
import torch
from torch import nn

from engine.cases import Net
from engine.cases.case import D, P, squared
from qclip.engine import Engine, Refusal, clipped_gradients
from qclip.engine.single_precision import in_single_precision

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
    with in_single_precision([model]):
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
    with in_single_precision([model]):
        assert model(torch.randn(3, 2, D))[0].dtype == torch.float32
    assert model(torch.randn(3, 2, D, dtype=torch.bfloat16))[0].dtype == torch.bfloat16
