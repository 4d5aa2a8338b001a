"""Explain: what it says of each parameter is what the engine does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import qclip
from engine.cases import STRUCTURE, Net
from engine.cases.case import D, P, T, V, frozen, ids, param, squared
from engine.cases.hidden import ScaleForVmap
from engine.compare import quiet
from qclip.engine import CostModel, Refusal, clipped_gradients, explain

pytestmark = quiet

B = 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rows(model, x, **options):
    return {row.name: row for row in explain(model, x, **options).parameters}


def test_every_way():
    """A rule, a function run again, a frozen and an unused parameter."""
    model = nn.Sequential(nn.Linear(D, P), nn.PReLU(), frozen(nn.Linear(P, 2)))
    model.spare = param(3)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    found = rows(model, torch.randn(B, D))
    assert {name: row.strategy for name, row in found.items()} == {
        "0.weight": "rule",
        "0.bias": "rule",
        "1.weight": "vmap of the function",
        "2.weight": "frozen",
        "2.bias": "frozen",
        "spare": "unused",
    }
    assert found["0.weight"].shape == (P, D)
    assert found["2.weight"].detail == ""
    assert "does not depend" in found["spare"].detail
    assert found["1.weight"].detail == "torch.nn.functional.prelu"


@pytest.mark.parametrize("with_loss", [True, False], ids=["loss", "no loss"])
def test_the_whole_model(with_loss):
    model = Net(lambda n, x: ScaleForVmap.apply(n.one(x), n.w), one=nn.Linear(D, P), w=param(P))
    options = {"loss": squared, "targets": torch.randn(B)} if with_loss else {}
    row = rows(model, torch.randn(B, D), **options)["w"]
    assert row.strategy == "vmap of the model"
    assert "no torch function shows" in row.detail


def test_how_norms_are_computed():
    model = Net(lambda n, i: n.one(n.words(i)), words=nn.Embedding(V, 24), one=nn.Linear(24, 24))
    found = rows(model, ids(B, 2))
    assert "2 rows" in found["words.weight"].detail
    assert "2 positions, gram" in found["one.weight"].detail
    assert found["one.bias"].detail == "torch.nn.functional.linear"
    assert "1 position" in rows(nn.Linear(D, P), torch.randn(B, D))["weight"].detail


@pytest.mark.parametrize(
    ("method", "said"), [("gram", "gram"), ("direct", "direct"), ("kept", "kept gradients")], ids=str
)
def test_costs(method, said):
    row = rows(nn.Linear(D, P), torch.randn(B, T, D), costs=CostModel(method=method))["weight"]
    assert said in row.detail


def test_a_tie_names_every_use():
    model = Net(lambda n, i: F.linear(n.words(i), n.words.weight), words=nn.Embedding(V, D))
    detail = rows(model, ids(B, T))["words.weight"].detail
    assert "embedding" in detail
    assert "linear" in detail
    assert f"{T} rows" in detail


def test_a_layer_used_twice_is_counted():
    model = Net(lambda n, x: n.one(n.one(x)), one=nn.Linear(D, D))
    assert "2 x torch.nn.functional.linear" in rows(model, torch.randn(B, D))["one.weight"].detail


def test_derived_parameters_say_what_they_are_made_by():
    found = rows(parametrizations.weight_norm(nn.Linear(D, P)), torch.randn(B, D))
    for name in ("parametrizations.weight.original0", "parametrizations.weight.original1"):
        assert found[name].strategy == "rule"
        assert "linear of " in found[name].detail


def test_the_table():
    text = str(explain(nn.Sequential(nn.Linear(D, P), nn.PReLU()), torch.randn(B, D)))
    lines = text.splitlines()
    assert lines[0].split() == ["parameter", "shape", "strategy", "detail"]
    assert [line.split()[0] for line in lines[1:]] == ["0.weight", "0.bias", "1.weight"]
    assert f"{P}x{D}" in lines[1]
    assert len({line.index(word) for line, word in zip(lines[1:], ("rule", "rule", "vmap"), strict=True)}) == 1
    assert not any(line.endswith(" ") for line in lines)


def test_a_scalar_parameter():
    assert "scalar" in str(explain(Net(lambda n, x: n.p * x, p=param()), torch.randn(B, D)))


@pytest.mark.parametrize(
    ("x", "forward"),
    [
        (torch.randn(B, D), lambda n, x: n.one(x)),
        ((torch.randn(B, D), torch.randn(B, D)), lambda n, x, y: n.one(x * y)),
        ({"x": torch.randn(B, D), "scale": torch.randn(B, 1)}, lambda n, *, x, scale: n.one(x) * scale),
        (torch.randn(B, D), lambda n, x: {"logits": n.one(x), "length": 3}),
        (torch.randn(B, D), lambda n, x: (n.one(x), x)),
    ],
    ids=["tensor", "tuple", "dict", "dict out", "tuple out"],
)
def test_inputs_and_outputs_of_every_kind(x, forward):
    found = rows(Net(forward, one=nn.Linear(D, P)), x)
    assert {row.strategy for row in found.values()} == {"rule"}


def test_the_loss_counts_where_it_is_given():
    """A penalty in the loss is a use of the parameter."""
    model = nn.Linear(D, P)
    loss = lambda outputs, targets: squared(outputs, targets) + (model.weight * targets[:, None, None]).sum((1, 2))  # noqa: E731
    assert "mul" not in rows(model, torch.randn(B, D))["weight"].detail
    assert "mul" in rows(model, torch.randn(B, D), loss=loss, targets=torch.randn(B))["weight"].detail


def test_a_loss_that_mixes_is_refused():
    loss = lambda outputs, targets: squared(outputs - outputs.mean(0), targets)  # noqa: E731
    with pytest.raises(Refusal, match="examples mix"):
        explain(nn.Linear(D, P), torch.randn(B, D), loss=loss, targets=torch.randn(B))


def test_exported():
    assert qclip.explain is explain


@pytest.mark.parametrize("case", STRUCTURE, ids=lambda case: case.id)
def test_every_row_is_explained(case):
    """Every parameter of every row is named, in order; what the engine answers, explain explains."""
    problem = case.build()
    try:
        clipped_gradients(problem.model, problem.loss, problem.inputs, problem.targets, 1.0)
    except ValueError as refusal:
        assert case.may_refuse
        pytest.skip(f"refused: {refusal}")
    explanation = explain(problem.model, problem.inputs, loss=problem.loss, targets=problem.targets)
    assert [row.name for row in explanation.parameters] == [name for name, _ in problem.model.named_parameters()]
    ways = {"rule", "vmap of the function", "vmap of the model", "frozen", "unused"}
    for row, (_, parameter) in zip(explanation.parameters, problem.model.named_parameters(), strict=True):
        assert row.strategy in ways
        assert (row.strategy == "frozen") == (not parameter.requires_grad)
        assert row.shape == tuple(parameter.shape)
    assert len(str(explanation).splitlines()) == len(explanation.parameters) + 1
