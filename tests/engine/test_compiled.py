"""The compiled driver equals the oracle on every row, or says that it runs eager and is right all the same.

Tracing, proofs on a few examples, padding and repair are what can go wrong here, and torch's compiler is not: most
tests run the traced graph as it is, on every eighth row, and on all rows where slow tests are run. Two rows go through
the compiler too; some more, and all models, where slow tests are run.
"""

import gc
import math
import weakref
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from scipy.stats import ks_2samp
from torch import nn
from torch.nn.utils import parametrizations

from engine.cases import CASES, LAYERS, MODELS, OPERATIONS, PARAMETERS, STRUCTURE, WIRING, Net
from engine.cases.case import D, P, T, V
from engine.compare import assert_same, distance, middle, patterns, quiet, slow, usual
from engine.driven import Pair, as_traced, batch
from engine.row import SHIELDED
from qclip._validate import Refusal
from qclip.engine import Engine
from qclip.engine import batch as batches
from qclip.engine.capture import overrides
from qclip.engine.compiled.driver import Compiled
from qclip.engine.compiled.rewrites import clip_early
from qclip.engine.driver import call
from qclip.engine.proof.few import NUM_PROVEN
from shards import every, named

pytestmark = quiet

B = 7
"""More than the kind of batch is proven on."""
ALONE = "examples are run one at a time"
ROUTED = "data decide which rows"
NOT_SHOWN = "could not attribute rows to examples"
EAGER = {
    "embedding-indexed-columns": "gradients of the whole model",
    "embedding-bag-offsets": "looks at values",
    "embedding-bag-ragged": ROUTED,
    "frozen-times-zero": NOT_SHOWN,
    "executed-checkpointed-dropout": "random numbers of the forward pass",
    "executed-custom-function-of-a-parameter": ALONE,
    "executed-custom-function-behind-a-layer": ALONE,
    "executed-custom-function-with-dropout": ALONE,
    "recurrent-lstm-packed": ALONE,
    "rows-routed-experts": ALONE,
    "interface-all-labels-ignored": NOT_SHOWN,
    "model-mixture-of-experts": ROUTED,
    "model-vision-language": ROUTED,
    "model-wav2vec2": "looks at values",
    "model-whisper": "looks at values",
}
"""Rows that run eager, and why."""


@pytest.fixture
def traced(monkeypatch):
    """The traced graph runs as it is."""
    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)


class Driven:
    """A row's problem and the compiled driver for it; every loss is multiplied by a factor of the batch."""

    def __init__(self, case, problem, **options):
        self.case, self.problem = case, problem
        self.count = batches.size_of_pair(problem.inputs, problem.targets)
        slots = options.pop("slots", None)
        self.driver = Compiled(Engine(problem.model, **options), slots=slots)

    def evaluate(self, batch):
        inputs, targets, factors = batch
        return self.problem.loss(call(self.problem.model, inputs), targets) * factors

    def clipped(self, clip_norm, *, factors=None, mask=None, keep=None):
        """Of the whole batch, or of some of its examples; a row that may be refused is skipped when it is."""
        factors = torch.ones(self.count) if factors is None else factors
        batch = self.problem.inputs, self.problem.targets, factors
        count = self.count
        if keep is not None:
            batch, count = batches.select(batch, keep, count), len(keep)
        mask = torch.ones(count, dtype=torch.bool) if mask is None else mask
        torch.manual_seed(1)
        try:
            return self.driver.clipped(self.evaluate, batch, clip_norm, mask=mask)
        except ValueError as refusal:
            if not self.case.may_refuse:
                raise
            return pytest.skip(f"refused: {refusal}")


def first(case, driven, clip_norm, **options):
    """The first answer; the row says that it runs eager where it is expected to, and only there."""
    if case.id not in EAGER:
        return driven.clipped(clip_norm, **options)
    with pytest.warns(UserWarning, match=f"not compiled, runs eager: .*{EAGER[case.id]}"):
        return driven.clipped(clip_norm, **options)


def shown(found, finite):
    """What is compared of a result with examples that are not finite."""
    norms, by_group = found.norms.where(finite, 0), found.group_norms.where(finite[:, None], 0)
    return replace(found, norms=norms, group_norms=by_group, mask=finite)


@pytest.mark.parametrize(
    "case",
    every(12, CASES, name=attrgetter("id"), always=lambda case: case.id in EAGER and case not in MODELS),
)
def test_equals_the_oracle(case, traced):
    """One graph serves the batch whole, masked, with examples that are not finite, and in part."""
    problem = case.build(B)
    driven = Driven(case, problem, slots=B)
    clip_norm = middle(case, problem)
    assert_same(first(case, driven, clip_norm), slow(case, problem, clip_norm), case.rtol)
    assert all(p.grad is None for p in problem.model.parameters())

    mask = torch.arange(B) % 3 != 1
    found = driven.clipped(clip_norm, factors=torch.ones(B).where(mask, torch.nan), mask=mask)
    assert_same(found, slow(case, problem, clip_norm, mask=mask), case.rtol)

    factors = torch.tensor([1.0, torch.nan, torch.inf, 1.0, 1.0, 1.0, -torch.inf])
    finite = factors.isfinite()
    found = driven.clipped(clip_norm, factors=factors)
    if case.id not in SHIELDED:
        assert (found.norms[~finite] == torch.inf).all()
        assert (found.group_norms[~finite] == torch.inf).all()
    assert_same(shown(found, finite), slow(case, problem, clip_norm, mask=finite), case.rtol)

    if not case.random:
        keep = torch.tensor([4, 1, 6])
        some = replace(problem, inputs=batches.select(problem.inputs, keep, B))
        some = replace(some, targets=batches.select(problem.targets, keep, B))
        assert_same(driven.clipped(clip_norm, keep=keep), slow(case, some, clip_norm), case.rtol)


@pytest.mark.parametrize("grouping", ["per-layer", "patterns"])
@pytest.mark.parametrize("case", every(3, (OPERATIONS + LAYERS)[::9] + PARAMETERS[::8], name=attrgetter("id")))
def test_groups(case, grouping, traced):
    problem = case.build(B)
    groups = patterns(problem) if grouping == "patterns" else grouping
    clip_norm = middle(case, problem, groups)
    found = first(case, Driven(case, problem, groups=groups), clip_norm)
    assert_same(found, slow(case, problem, clip_norm, groups=groups), case.rtol)


@pytest.mark.filterwarnings(f"ignore:not compiled, runs eager. .*{NOT_SHOWN}")  # one example may show little
@pytest.mark.parametrize("count", [1, T])
@pytest.mark.parametrize(
    "case",
    every(9, [case for case in (STRUCTURE + WIRING)[::5] + LAYERS[::9] if case.id not in EAGER], name=attrgetter("id")),
)
def test_few_examples(case, count, traced):
    """Fewer than a kind is proven on: one alone, and as many as there are positions."""
    problem, clip_norm = case.build(count), 0.7 * usual(case, count)
    assert_same(Driven(case, problem).clipped(clip_norm), slow(case, problem, clip_norm), case.rtol)


# Through torch's compiler

COMPILED = [
    "linear-3d",
    "conv-2d",
    "tied-by-module",
    "norm-layer-functional",
    "attention-encoder-layer",
    "recurrent-lstm",
    "embedding-gather",
]
rows = {case.id: case for case in CASES}


@pytest.mark.parametrize("name", named(("linear-3d", "conv-2d"), COMPILED))
def test_compiled(name):
    case = rows[name]
    problem = case.build(B)
    driven, clip_norm = Driven(case, problem, slots=B), middle(case, problem)
    assert_same(driven.clipped(clip_norm), slow(case, problem, clip_norm), case.rtol)
    factors = torch.ones(B).index_fill(0, torch.tensor(2), torch.nan)
    found, finite = driven.clipped(clip_norm, factors=factors), factors.isfinite()
    assert_same(shown(found, finite), slow(case, problem, clip_norm, mask=finite), case.rtol)


@pytest.mark.slow
def test_compiled_in_autocast():
    case = rows["linear-two-layers"]
    problem = case.build(B)
    with torch.autocast("cpu", torch.bfloat16):
        found = Driven(case, problem).clipped(1.0)
        expected = slow(case, problem, 1.0)
    assert_same(found, expected, 2e-2)
    assert not torch.allclose(found.norms, slow(case, problem, 1.0).norms, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.id)
def test_compiled_models(case):
    problem = case.build(B)
    driven, clip_norm = Driven(case, problem), middle(case, problem)
    found = first(case, driven, clip_norm)
    if case.random:  # compiled code draws other numbers than torch's own operations, as often
        batch = problem.inputs, problem.targets, torch.ones(B)
        compiled, eager = (
            torch.stack([driver.clipped(driven.evaluate, batch, clip_norm).norms for _ in range(300)])
            for driver in (driven.driver, driven.driver.engine)
        )
        for mine, expected in zip(compiled.T, eager.T, strict=True):  # 7 tests: 1 of 1000 seeds would fail
            assert ks_2samp(mine, expected).pvalue > 1e-3 / B
        return
    assert_same(found, slow(case, problem, clip_norm), case.rtol)


# What cannot be traced, and what is refused


def mlp(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), *middle, nn.Linear(8, P))


def branching(n, x):
    return n.one(x) if x.sum() > -1e9 else n.one(2 * x)


def counting(n, x):
    return n.one(x) * (x.shape[0] / max(int((x != 0).sum().item()) / D, 1))


def routed(n, x):
    return n.one(x)[x[:, 0].argsort()][x[:, 0].argsort().argsort()]


@pytest.mark.parametrize(
    ("function", "reason"),
    [(branching, "looks at values"), (counting, "looks at values"), (routed, "data decide which")],
)
def test_what_data_decide_runs_eager_and_says_so_once(function, reason, traced):
    torch.manual_seed(0)
    pair, data = Pair(Net(function, one=nn.Linear(D, P))), batch(B, D)
    with pytest.warns(UserWarning, match=rf"not compiled, runs eager: .*({reason})"):
        found = pair.compiled(*data)
    assert_same(found, pair.expected(*data), 2e-5)
    assert_same(pair.compiled(*data), found, 2e-5)  # a second warning would be an error


def test_a_threshold_chosen_from_the_norms_runs_eager(traced):
    pair, data = Pair(mlp()), batch(B, D)
    choose = lambda norms: float(norms.median())  # noqa: E731
    with pytest.warns(UserWarning, match="runs eager: the threshold looks at the batch's norms"):
        found = pair.compiled(*data, clip_norm=choose)
    assert_same(found, pair.expected(*data, clip_norm=choose), 2e-5)


def test_models_that_mix_examples_are_refused(traced):
    for model in (mlp(nn.BatchNorm1d(8)), Net(lambda n, x: n.one(x - x.mean(0)), one=nn.Linear(D, P))):
        with pytest.raises(Refusal, match=r"BatchNorm|buffer|examples mix"):
            Pair(model).compiled(*batch(B, D))


def rolled(x):
    return x + x.roll(8, 0)


def last_ones(x):
    return torch.cat([x[:8], x[8:] + x[:2]])


def signed(x):
    return x * x.sum().sign()


@pytest.mark.filterwarnings("ignore:not compiled, runs eager")  # the eager driver then refuses it
@pytest.mark.parametrize("mixed", [rolled, last_ones, signed])
def test_models_that_mix_only_in_larger_batches_are_refused(mixed, traced):
    """The proof sees few examples; the traced step is tried on all of them."""
    count = 2 * NUM_PROVEN
    # A bias would be left alone by the sign, and a loss that is linear has the norm of its negative.
    pair = Pair(
        Net(lambda n, x: n.one(mixed(x) if len(x) > 8 else x), one=nn.Linear(D, P, bias=False)),
        loss=lambda outputs, targets: outputs.sum(1),
    )
    x, y = batch(count, D)
    with pytest.raises(Refusal, match="examples mix"):
        pair.compiled(x, y)


def test_other_calls_on_a_larger_batch_run_eager(traced):
    torch.manual_seed(0)
    net = Net(lambda n, x: n.one(x[:, None])[:, 0] if len(x) > 6 else n.one(x), one=nn.Linear(D, D))
    pair, data = Pair(net), batch(B, D)
    with pytest.warns(UserWarning, match="makes other calls on a batch of another size"):
        found = pair.compiled(*data)
    assert_same(found, pair.expected(*data), 2e-5)


def test_a_wrong_step_is_not_used(monkeypatch):
    """Norms that differ from the eager ones, or sums that do."""
    data = batch(B, D)

    def off(place):
        def compile(graph, inputs, options):
            def run(*inputs):
                *sums, norms, losses, finite = graph(*inputs)
                if place == "norms":
                    return *sums, norms * 0.9, losses, finite
                return *[1.1 * value for value in sums], norms, losses, finite

            return run

        return compile

    for place in ("norms", "sums"):
        monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", off(place))
        pair = Pair(mlp())
        with pytest.warns(UserWarning, match="does not give what the eager one gives"):
            found = pair.compiled(*data)
        assert_same(found, pair.expected(*data), 2e-5)


def test_a_step_that_draws_and_is_not_finite_is_not_used(monkeypatch):
    """Masks cannot be compared; what is finite can."""

    def compile(graph, inputs, options):
        def run(*inputs):
            *sums, norms, losses, finite = graph(*inputs)
            return *sums, norms + torch.inf, losses, finite & False

        return run

    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", compile)
    pair, data = Pair(mlp(nn.Dropout(0.5))), batch(B, D)
    with pytest.warns(UserWarning, match="does not give what the eager one gives"):
        found = pair.compiled(*data)
    assert found.norms.isfinite().all()


@pytest.mark.parametrize("place", ["norms", "sums"])
@pytest.mark.parametrize("model", [lambda: mlp(nn.Dropout(0.5)), mlp], ids=["draws", "does-not"])
def test_a_graph_that_was_rewritten_wrongly_is_not_used(model, place, monkeypatch, traced):
    """Also where random numbers are drawn."""

    def spoil(whole, *ends):
        clip_early(whole, *ends)
        out = whole.output_node()
        *sums, norms, losses, finite = out.args[0]
        with whole.inserting_before(out):
            if place == "norms":
                norms = whole.call_function(torch.ops.aten.mul.Tensor, (norms, 0.9))
            else:
                sums = [whole.call_function(torch.ops.aten.mul.Tensor, (value, 1.1)) for value in sums]
        out.args = ((*sums, norms, losses, finite),)

    monkeypatch.setattr("qclip.engine.compiled.graph.clip_early", spoil)
    pair, data = Pair(model()), batch(B, D)
    with pytest.warns(UserWarning, match="does not give what the eager one gives"):
        pair.compiled(*data)


# Results


def test_a_result_goes_when_nothing_uses_it(traced):
    """Not when Python next looks for cycles: it holds sums as large as the model."""
    pair = Pair(mlp())
    pair.compiled(*batch(B, D))
    gc.collect()
    gc.disable()
    try:
        for spoilt in (False, True):
            x, y = batch(B, D)
            if spoilt:
                x[0] = torch.nan
            result = pair.compiled(x, y, wait=False)
            held = [weakref.ref(value) for value in (*result.sums.values(), *result.resolve().sums.values())]
            del result
            assert all(each() is None for each in held)
    finally:
        gc.enable()


def test_a_result_is_settled_when_it_is_asked_for(traced):
    pair, (x, y) = Pair(mlp(), slots=9), batch(B, D)
    clean = pair.compiled(x, y, wait=False)
    assert clean.all_finite is not None
    assert bool(clean.all_finite)
    assert_same(clean.resolve(), pair.expected(x, y), 2e-5)
    x[[0, 3]] = torch.tensor([[torch.nan], [torch.inf]])  # the first one also fills up
    spoilt = pair.compiled(x, y, wait=False)
    assert not bool(spoilt.all_finite)
    assert not all(value.isfinite().all() for value in spoilt.sums.values())
    settled = spoilt.resolve()
    assert (settled.all_finite, settled.recompute) == (None, None)
    assert settled.resolve() is settled
    assert_same(settled, pair.expected(x, y), 2e-5)
    assert torch.equal(settled.norms, spoilt.norms)


def test_all_examples_may_be_bad(traced):
    pair, (x, y) = Pair(mlp()), batch(B, D)
    agree = pair.compiled(x, y)
    assert all(value.any() for value in agree.sums.values())
    found = pair.compiled(torch.full_like(x, torch.nan), y)
    assert (found.norms == torch.inf).all()
    assert all(not value.any() for value in found.sums.values())


def test_a_bad_first_batch_does_not_decide_for_all(traced):
    """Nothing can be proven on it: it runs eager, and the next one is compiled."""
    pair, (x, y) = Pair(mlp()), batch(B, D)
    with pytest.warns(UserWarning, match=NOT_SHOWN):
        found = pair.compiled(torch.full_like(x, torch.nan), y)
    assert all(not value.any() for value in found.sums.values())
    assert pair.compiled(x, y, wait=False).all_finite is not None


def test_a_bad_batch_at_a_proof_keeps_the_step(traced):
    pair, (x, y) = Pair(mlp()), batch(B, D)
    pair.compiled(x, y)
    bad = x.clone()
    bad[:NUM_PROVEN] = torch.nan
    assert pair.compiled(bad, y, wait=False).all_finite is not None  # the second use is a proof
    assert pair.compiled(x, y, wait=False).all_finite is not None


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_whatever_masked_examples_hold(value, traced):
    pair, (x, y) = Pair(mlp()), batch(B, D)
    mask = torch.arange(B) % 2 == 0
    expected = pair.expected(x, y, mask=mask)
    x[~mask] = value
    found = pair.compiled(x, y, mask=mask)
    assert_same(found, expected, 2e-5)
    assert (found.norms[~mask] == 0).all()


def test_nobody_counts(traced):
    pair, (x, y) = Pair(mlp()), batch(B, D)
    for data in (x, torch.full_like(x, torch.nan)):
        found = pair.compiled(data, y, mask=torch.zeros(B, dtype=torch.bool))
        assert all(not value.any() for value in found.sums.values())
        assert (found.norms == 0).all()


def test_no_examples(traced):
    pair, (x, y) = Pair(mlp(), slots=4, groups="per-layer"), batch(0, D)
    found = pair.compiled(x, y)
    assert found.norms.shape == (0,)
    assert found.group_norms.shape == (0, 2)
    assert all(not value.any() for value in found.sums.values())


@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_padding_is_not_seen(count, traced):
    pair, data = Pair(mlp(), slots=8), batch(count, D)
    found = pair.compiled(*data, clip_norm=0.5)
    assert_same(found, pair.expected(*data, clip_norm=0.5), 2e-5)
    assert len(found.norms) == len(found.losses) == len(found.mask) == len(found.group_norms) == count


def test_the_mask_says_how_many_examples_there_are(traced):
    """Something longer than the batch that all examples share comes first."""
    net = Net(lambda n, table, x: n.one(x + table.sum(0)), one=nn.Linear(D, P))
    pair, (x, y) = Pair(net), batch(B, D)
    mask = torch.ones(B, dtype=torch.bool)
    inputs = (torch.ones(3 * B + 1, D), x)
    assert_same(pair.compiled(inputs, y, mask=mask), pair.expected(inputs, y, mask=mask), 2e-5)


def test_inference_mode_is_refused(traced):
    pair, data = Pair(mlp()), batch(B, D)
    with torch.inference_mode(), pytest.raises(Refusal, match="inference mode"):
        pair.compiled(*data)


def test_without_gradients_around_it(traced):
    pair, data = Pair(mlp()), batch(B, D)
    expected = pair.expected(*data)
    with torch.no_grad():
        assert_same(pair.compiled(*data), expected, 2e-5)


def test_bad_modes_are_refused():
    with pytest.raises(ValueError, match="compile"):
        Compiled(Engine(mlp()), "fastest")


# Buffers that move


def test_buffers_move_as_in_the_eager_step(traced):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, 8)), nn.Tanh(), nn.Linear(8, P))

    patterns = ["*._u", "*._v"]
    mine, theirs = Pair(build(), data_independent_buffers=patterns), Pair(build(), data_independent_buffers=patterns)
    for seed in range(3):
        data = batch(B, D, seed=seed)
        with pytest.warns(UserWarning, match="declared buffers move") if seed == 0 else nullcontext():
            found = mine.compiled(*data)
        assert_same(found, theirs.expected(*data), 1e-4)
        for a, b in zip(mine.model.buffers(), theirs.model.buffers(), strict=True):
            torch.testing.assert_close(a, b)


# Widened layers


@pytest.mark.parametrize("grouping", ["flat", "per-layer", {"last": "3.*", "rest": "*"}], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_widened_layers(bias, grouping, monkeypatch, traced):
    wide = []

    def is_ragged(input, weight, bias=None):
        wide.append(weight.shape[0])
        return weight.shape[0] % 8 > 0

    torch.manual_seed(0)
    one, two, three = (nn.Linear(m, n, bias=bias) for m, n in ((D, 8), (8, 5), (5, 11)))
    model = nn.Sequential(one, nn.Tanh(), two, three)
    pair = Pair(model, groups=grouping)
    for shape in ((D,), (T, D)):
        data = batch(B, *shape)
        expected = pair.expected(*data, clip_norm=0.5)
        monkeypatch.setattr(overrides, "is_ragged", is_ragged)
        assert_same(pair.compiled(*data, clip_norm=0.5), expected, 2e-5)
        monkeypatch.undo()
        monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)
    assert {5, 11} <= set(wide)


@pytest.mark.parametrize("grouping", ["flat", "per-layer"])
def test_a_widened_head_tied_to_an_embedding(grouping, monkeypatch, traced):
    def tied(n, words):
        return n.head(n.words(words) + n.two(n.words(words)).tanh())

    torch.manual_seed(0)
    words, head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
    head.weight = words.weight
    pair = Pair(Net(tied, words=words, two=nn.Linear(D, D), head=head), groups=grouping)
    x, y = torch.randint(V, (B, T)), torch.randn(B)
    expected = pair.expected(x, y, clip_norm=0.5)
    monkeypatch.setattr(overrides, "is_ragged", lambda input, weight, bias=None: weight.shape[0] % 8 > 0)
    assert_same(pair.compiled(x, y, clip_norm=0.5), expected, 2e-5)


# Sensitivity


@pytest.mark.parametrize("case", every(3, (OPERATIONS + STRUCTURE + WIRING)[::9], name=attrgetter("id")))
def test_removing_an_example_moves_the_sum_by_at_most_the_bound(case, traced):
    """Whether it is left out or masked, at the median and far below."""
    driven, clip_norm = Driven(case, case.build(B), slots=B), usual(case, B)
    first(case, driven, clip_norm)
    for threshold in (clip_norm, 1e-3 * clip_norm):
        full = driven.clipped(threshold)
        assert full.l2_bound == pytest.approx(threshold)
        for gone in (0, 3):
            others = torch.arange(B) != gone
            masked = driven.clipped(threshold, mask=others)
            assert distance(full, masked) <= full.l2_bound * (1 + 1e-5)
            if not case.random:
                less = driven.clipped(threshold, keep=others.nonzero().flatten())
                assert distance(full, less) <= full.l2_bound * (1 + 1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30, 1e18, 0.0])
def test_the_bound_holds_for_any_example(value, traced):
    pair, (x, y) = Pair(mlp(), groups="per-layer", slots=9), batch(B, T, D)
    x[4] = value
    full = pair.compiled(x, y, clip_norm=[0.3, 0.4])
    assert math.isclose(full.l2_bound, 0.5)
    less = pair.compiled(x, y, clip_norm=[0.3, 0.4], mask=torch.arange(B) != 4)
    assert distance(full, less) <= 0.5 * (1 + 1e-5)
    assert all(sum_.isfinite().all() for sum_ in full.sums.values())
