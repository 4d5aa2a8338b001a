"""Costs: the cheapest way within the memory, overridable, and never another answer."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine.cases import Net
from engine.cases.case import squared
from engine.compare import assert_same
from qclip.engine import CostModel, Dense, Engine, Outer, clipped_gradients, explain, oracle
from qclip.engine.gradients import convolutions
from qclip.engine.gradients.clipping import squared_norms, weighted_sum
from qclip.engine.gradients.convolutions import Geometry, Windows
from qclip.engine.gradients.parts import Part, prepare

METHODS = ("gram", "direct", "kept")


def outer(B, T, M, N, groups=1):
    """A form of these sizes that takes no memory."""
    left, right = torch.zeros(1).expand(B, groups, T, M), torch.zeros(1).expand(B, groups, T, N)
    return Outer(left, right, torch.Size((groups * M, N)))


sizes = st.sampled_from([1, 2, 3, 8, 50, 400, 3000])


@given(sizes, sizes, sizes, st.floats(0, 100), st.floats(1, 3))
def test_the_cheapest_is_chosen(T, M, N, traffic, overhead):
    """By the formulas of docs/engine.md, ties aside."""
    form = outer(4, T, M, N)
    product = T * M * N
    costs = {
        "gram": overhead * T * T * (M + N) + traffic * T * T + product,
        "direct": overhead * product + traffic * M * N + product,
        "kept": overhead * product + traffic * M * N,
    }
    model = CostModel(traffic=traffic, overhead=overhead)
    assert costs[model.choose(form, float("inf"))] == pytest.approx(min(costs.values()))
    del costs["kept"]
    assert costs[model.choose(form, 0)] == pytest.approx(min(costs.values()))


def test_few_positions_and_a_large_weight():
    assert CostModel().choose(outer(32, 4, 512, 512), 2**28) == "gram"


def test_many_positions_and_a_small_weight():
    assert CostModel().choose(outer(32, 1024, 16, 16), 2**28) == "kept"
    assert CostModel().choose(outer(32, 1024, 16, 16), 0) == "direct"


def test_cutting_out_windows_counts():
    """A convolution pays for its windows before a Gram product, and a linear layer of the same sizes does not."""
    geometry = Geometry((1, 1), (0, 0), (1, 1), 1)
    images, grads = torch.zeros(1).expand(4, 64, 6, 10), torch.zeros(1).expand(4, 32, 4, 8)
    conv = Windows(images, grads, 4, torch.Size((32, 64, 3, 3)), geometry)
    linear = outer(4, conv.dims.positions, *conv.dims.sides)
    model = CostModel(traffic=40, overhead=1.3)
    assert conv.dims.unfolded > linear.dims.unfolded == 0
    assert model.choose(linear, 0) == "gram"
    assert model.choose(conv, 0) == "direct"


def test_kernels_keep_gradients_or_form_them_twice(monkeypatch):
    monkeypatch.setattr(convolutions, "is_native", lambda x: True)
    geometry, model = Geometry((1, 1), (1, 1), (1, 1), 1), CostModel()

    def form_of(side):
        images, grads = (torch.zeros(1).expand(4, 64, side, side) for _ in range(2))
        return Windows(images, grads, 4, torch.Size((64, 64, 3, 3)), geometry)

    assert form_of(16).in_kernels
    assert model.choose(form_of(16), float("inf")) == "kept"
    assert model.choose(form_of(16), 0) == "direct"
    form = form_of(2)
    assert model.choose(form, float("inf")) == "direct"  # quicker to form than to write
    grouped = replace(form, geometry=geometry._replace(groups=2), shape=torch.Size((64, 32, 3, 3)))
    assert not grouped.in_kernels
    assert model.choose(grouped, 0) == "gram"  # few positions


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", [outer(2, 3, 4, 5), outer(2, 300, 4, 5), outer(2, 3, 400, 500)], ids=str)
def test_override(method, form):
    assert CostModel(method=method).choose(form, 0) == method


@given(st.integers(1, 64), sizes, sizes, st.integers(1, 3))
def test_kept_gradients_are_counted(B, M, N, groups):
    form = outer(B, 7, M, N, groups)
    assert CostModel.kept_bytes_of(form) == 4 * B * groups * M * N
    assert CostModel().choose(form, CostModel.kept_bytes_of(form) - 1) != "kept"


def test_kept_gradients_in_double_precision_take_twice_as_much():
    form = Outer(torch.zeros(3, 1, 7, 4).double(), torch.zeros(3, 1, 7, 5).double(), torch.Size((4, 5)))
    assert CostModel.kept_bytes_of(form) == form.dense().untyped_storage().nbytes()


# On models


def transformer_like():
    """Linear layers with positions, a tie, a convolution, a norm."""
    torch.manual_seed(0)
    return Net(
        lambda n, i: F.linear(n.norm(n.conv(n.one(n.words(i)).tanh().mT).mT), n.words.weight),
        words=nn.Embedding(9, 6),
        one=nn.Linear(6, 6),
        conv=nn.Conv1d(6, 6, 3, padding=1, groups=2),
        norm=nn.LayerNorm(6),
    )


def images():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 2, stride=2, groups=2), nn.Flatten(), nn.Linear(54, 2)
    )


MODELS = {
    "sequence": (transformer_like, lambda B: torch.randint(9, (B, 5))),
    "images": (images, lambda B: torch.randn(B, 3, 6, 6)),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), lambda B: torch.randn(B, 7, 6)),
}

models = pytest.mark.parametrize(("build", "inputs"), MODELS.values(), ids=MODELS)


@pytest.mark.parametrize("method", [*METHODS, None])
@pytest.mark.parametrize("groups", ["flat", "per-layer"])
@models
def test_every_way_gives_the_same(build, inputs, method, groups):
    model = build()
    x, targets = inputs(4), torch.randn(4)
    found = clipped_gradients(model, squared, x, targets, 0.3, groups=groups, costs=CostModel(method=method))
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.3, groups=groups), rtol=2e-5)


@pytest.mark.parametrize("method", METHODS)
@models
def test_an_example_that_is_not_finite(build, inputs, method):
    """Kept or not, it adds nothing."""
    model = build()
    x, factors = inputs(4), torch.tensor([1.0, torch.nan, 1.0, torch.inf])
    loss = lambda outputs, targets: outputs.flatten(1).square().sum(1) * targets  # noqa: E731
    found = clipped_gradients(model, loss, x, factors, 0.3, costs=CostModel(method=method))
    keep = factors.isfinite()
    expected = clipped_gradients(model, loss, x, torch.ones(4), 0.3, mask=keep, costs=CostModel(method=method))
    assert (found.norms[~keep] == torch.inf).all()
    for name, sum_ in expected.sums.items():
        torch.testing.assert_close(found.sums[name], sum_)


@pytest.mark.parametrize("method", METHODS)
def test_the_override_is_what_happens(method):
    explanation = explain(MODELS["positions"][0](), torch.randn(4, 7, 6), costs=CostModel(method=method))
    details = [row.detail for row in explanation.parameters if row.name.endswith("weight")]
    assert all(("kept gradients" if method == "kept" else f"7 positions, {method}") in detail for detail in details)


def kept_bytes(model, x, costs):
    """How much the gradients that are kept take."""
    rows = explain(model, x, costs=costs).parameters
    kept = [torch.Size(row.shape).numel() for row in rows if "kept gradients" in row.detail]
    return 4 * len(x) * sum(kept), len(kept)


def test_the_memory_is_shared_by_all_layers():
    """However much there is, the kept gradients of one step fit; the rest is done another way."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.randn(3, 100, 8)
    each = 4 * 3 * 64
    for layers in range(5):
        used, count = kept_bytes(model, x, CostModel(kept_bytes=layers * each + each // 2))
        assert count == layers
        assert used <= layers * each + each // 2


def test_each_stretch_has_the_memory_to_itself():
    def parts():
        sides = torch.randn(3, 1, 100, 8), torch.randn(3, 1, 100, 8)
        return {name: [Part(Outer(*sides, torch.Size((8, 8))))] for name in "abcd"}

    def kept(**options):
        found = parts()
        prepare(found, CostModel(kept_bytes=4 * 3 * 64), **options)
        return [part.method == "kept" for (part,) in found.values()]

    assert kept() == [True, False, False, False]
    assert kept(memory_phases={"a": 0, "b": 1, "c": 1, "d": 2}) == [True, True, False, True]


def test_gradients_that_are_not_kept_can_be_formed_when_needed():
    """With the method of those that are kept, so that both round alike."""
    form = outer(3, 40, 6, 5)
    kept, formed = {"w": [Part(form)]}, {"w": [Part(form, method="kept")]}
    prepare(kept, CostModel(method="kept"))
    assert isinstance(kept["w"][0].form, Dense)
    assert formed["w"][0].form is form
    factors, parameters = torch.tensor([0.5, 0.0, 2.0]), {"w": torch.zeros(6, 5)}
    for find in (
        lambda parts: squared_norms(parts["w"]).norms,
        lambda parts: weighted_sum("w", parts["w"], factors, None, parameters),
        lambda parts: weighted_sum("w", parts["w"], factors, factors > 0, parameters),
    ):
        assert torch.equal(find(formed), find(kept))


@pytest.mark.parametrize("budget", [0, 1000, 10**9])
def test_the_budget_does_not_change_the_answer(budget):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    x, targets = torch.randn(4, 50, 6), torch.randn(4)
    found = clipped_gradients(model, squared, x, targets, 0.3, costs=CostModel(kept_bytes=budget))
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.3), rtol=2e-5)


def test_chosen_anew_for_another_shape():
    """Few positions: Gram. Many: not."""
    model = nn.Linear(24, 24)
    few, many = (explain(model, torch.randn(2, T, 24)).parameters[0].detail for T in (2, 400))
    assert "2 positions, gram" in few
    assert "gram" not in many


def test_one_position_needs_no_choice():
    detail = explain(nn.Linear(6, 5), torch.randn(4, 6), costs=CostModel(method="kept")).parameters[0].detail
    assert "1 position" in detail
    assert "kept" not in detail


def test_an_engine_keeps_its_costs():
    torch.manual_seed(0)
    model, x, targets = nn.Linear(6, 5), torch.randn(4, 7, 6), torch.randn(4)
    results = []
    for method in METHODS:
        engine = Engine(model, costs=CostModel(method=method))
        results.append(engine.clipped(lambda batch: squared(model(batch[0]), batch[1]), (x, targets), 0.3))
    for one, other in itertools.pairwise(results):
        assert_same(one, other, rtol=2e-5)
