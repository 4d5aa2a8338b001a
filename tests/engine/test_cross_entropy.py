"""Cross entropy in a step's graph: where it is found, two operators take its place and nothing else changes.

The rewrite is for GPUs; here it runs on graphs that the driver traces on a CPU, where the operators run their twins.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from engine.compare import assert_same
from engine.driven import Pair
from qclip.engine.capture import capture
from qclip.engine.compiled import rewrites
from qclip.engine.compiled.cross_entropy import one_pass_cross_entropy
from shards import every

B, T, D, V = 7, 5, 6, 11
IGNORED = -100
BOTH = ["qclip::cross_entropy", "qclip::cross_entropy_gradients"]
PLAIN = [
    "aten::_log_softmax",
    "aten::_log_softmax_backward_data",
    "aten::nll_loss_backward",
    "aten::nll_loss_forward",
]


def names(graph, words=("cross_entropy", "log_softmax", "nll_loss")):
    """Of its operations that have to do with cross entropy, sorted."""
    schemas = [getattr(node.target, "_schema", None) for node in graph.nodes]
    found = [schema.name for schema in schemas if schema is not None]
    return sorted(name for name in found if any(word in name for word in words))


@pytest.fixture
def rewritten(monkeypatch):
    """Every traced step is rewritten, and runs as it is; gives the graphs."""
    return rewriting(monkeypatch, 4)


def rewriting(monkeypatch, most_classes):
    """A list to which every traced step adds its operations before and after."""
    graphs = []

    def compile(graph, inputs, options):
        before = names(graph.graph)
        one_pass_cross_entropy(graph.graph, most_classes)
        graph.graph.lint()
        graph.recompile()
        graphs.append((before, names(graph.graph)))
        return graph

    monkeypatch.setattr("qclip.engine.compiled.driver.machine_code", compile)
    return graphs


def widen(monkeypatch):
    monkeypatch.setattr(capture, "is_ragged", lambda input, weight, bias=None: weight.shape[0] % 8 > 0)


def cross_entropy(scores, targets, **options):
    """One loss per example, however many positions it has."""
    classes = scores.shape[-1]
    losses = F.cross_entropy(scores.reshape(-1, classes), targets.reshape(-1), reduction="none", **options)
    return losses.view(targets.shape).flatten(1).mean(1) if targets.dim() > 1 else losses


def converted(scores, targets, **options):
    return cross_entropy(scores.float(), targets, **options)


def model(dtype=torch.float32, classes=V):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, classes)).to(dtype)


def data(*positions, dtype=torch.float32, classes=V):
    """Inputs, and targets of which some are ignored, among them all of the second example's."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, *positions, D, generator=generator).to(dtype)
    y = torch.randint(classes, (B, *positions), generator=generator)
    y[1] = IGNORED
    if positions:
        y[3, :2] = IGNORED
    return x, y


def check(pair, graphs, x, y, rtol=2e-5, **options):
    """Equal to the eager engine, by a graph that has the two operators and none of those they stand for."""
    found, expected = pair.compiled(x, y, **options), pair.expected(x, y, **options)
    assert graphs == [(PLAIN, BOTH)]
    assert_same(found, expected, rtol)
    return found


SETTINGS = itertools.product(
    [False, True], [(), (T,), (2, 3)], [torch.float32, torch.bfloat16], [cross_entropy, converted]
)


@pytest.mark.parametrize(("wide", "positions", "dtype", "loss"), every(5, SETTINGS))
def test_the_two_operators_take_the_place_of_cross_entropy(wide, positions, dtype, loss, rewritten, monkeypatch):
    if wide:
        widen(monkeypatch)
    pair, (x, y) = Pair(model(dtype), loss), data(*positions, dtype=dtype)
    # In 16 bits the scores' gradients are rounded, once here and several times there.
    found = check(pair, rewritten, x, y, 2e-5 if dtype == torch.float32 else 2e-2, clip_norm=0.3)
    assert found.losses[1] == 0
    assert found.norms[1] == 0


@pytest.mark.parametrize("wide", [False, True], ids=["plain", "widened"])
def test_heads_in_groups_of_their_own(wide, rewritten, monkeypatch):
    if wide:
        widen(monkeypatch)
    check(Pair(model(), cross_entropy, groups="per-layer"), rewritten, *data(T), clip_norm=[0.3, 0.2])


def test_the_gradient_is_as_wide_as_the_layer(monkeypatch):
    """The zeros beyond the classes are written with it."""
    widen(monkeypatch)
    counts = []

    def compile(graph, inputs, options):
        counts.append(len(names(graph.graph, ["slice_backward"])))
        one_pass_cross_entropy(graph.graph, 4)
        counts.append(len(names(graph.graph, ["slice_backward"])))
        graph.recompile()
        return graph

    monkeypatch.setattr("qclip.engine.compiled.driver.machine_code", compile)
    pair, (x, y) = Pair(model(), cross_entropy), data(T)
    assert_same(pair.compiled(x, y, 0.3), pair.expected(x, y, 0.3), 2e-5)
    assert counts == [1, 0]


@pytest.mark.parametrize("ignored", [0, 3, -1])
def test_any_class_can_be_ignored(ignored, rewritten):
    x, y = data(T)
    y[y == IGNORED] = ignored
    pair = Pair(model(), lambda scores, y: cross_entropy(scores, y, ignore_index=ignored))
    assert check(pair, rewritten, x, y, clip_norm=0.3).norms[1] == 0


def test_masked_examples_do_not_count(rewritten):
    x, y = data(T)
    mask = torch.arange(B) != 4
    found = check(Pair(model(), cross_entropy), rewritten, x, y, clip_norm=0.3, mask=mask)
    assert not found.mask[4]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("target", [2, IGNORED], ids=["counted", "ignored"])
def test_an_example_that_is_not_finite_is_left_out(target, masked, value, rewritten):
    """Also where its target is ignored, and whether it is masked or not."""
    x, y = data()
    x[4, 0], y[4] = value, target
    linear = nn.Sequential(nn.Linear(D, V))  # nothing that makes inf a number again
    pair = Pair(linear, cross_entropy)
    mask = torch.arange(B) != 4 if masked else None
    found = check(pair, rewritten, x, y, clip_norm=0.3, mask=mask)
    assert masked or found.norms[4] == torch.inf
    assert all(value.isfinite().all() for value in found.sums.values())


def test_scores_masked_out_with_minus_infinity(rewritten):
    def loss(scores, y):
        banned = torch.arange(V) % 3 == 1
        return cross_entropy(scores.masked_fill(banned, -torch.inf), y)

    x, y = data(T)
    y[y > 0] -= y[y > 0] % 3
    found = check(Pair(model(), loss), rewritten, x, y, clip_norm=0.3)
    assert found.losses.isfinite().all()


def test_scores_are_used_elsewhere_too(rewritten):
    """Their gradient is then one summand."""

    def loss(scores, y):
        return cross_entropy(scores, y) + 0.1 * scores.logsumexp(-1).square().mean(-1)

    check(Pair(model(), loss), rewritten, *data(T), clip_norm=0.3)


def test_two_heads(rewritten):
    def loss(scores, y):
        return cross_entropy(scores[..., : V // 2], y % 5) + cross_entropy(scores[..., V // 2 :], y % 6)

    x, y = data(T)
    pair = Pair(model(), loss)
    found, expected = pair.compiled(x, y, 0.3), pair.expected(x, y, 0.3)
    assert rewritten == [(sorted(2 * PLAIN), sorted(2 * BOTH))]
    assert_same(found, expected, 2e-5)


def test_few_classes_are_left_as_they_are(monkeypatch):
    for most_classes, expected in ((V, PLAIN), (V - 1, BOTH)):
        graphs = rewriting(monkeypatch, most_classes)
        pair, (x, y) = Pair(model(), cross_entropy), data(T)
        assert_same(pair.compiled(x, y, 0.3), pair.expected(x, y, 0.3), 2e-5)
        assert graphs == [(PLAIN, expected)]


def traced(loss, scores, target, most_classes=4):
    """The operations of a graph of losses and their gradient, before and after; it gives what it gave."""

    def step(scores, target):
        losses, *others = loss(scores, target)
        total = (losses * torch.linspace(1, 2, losses.numel(), dtype=losses.dtype).view(losses.shape)).sum()
        total = sum((other.square().sum() for other in others), total)
        return losses.detach(), torch.autograd.grad(total, scores)[0]

    scores = scores.requires_grad_()
    graph = make_fx(step, tracing_mode="fake")(scores, target)
    rewrites.use_recomputed(graph.graph, 0, 0)  # as in a step: nothing is differentiated any more
    graph.recompile()
    expected, before = graph(scores, target), names(graph.graph)
    one_pass_cross_entropy(graph.graph, most_classes)
    graph.graph.lint()
    graph.recompile()
    for found, truth in zip(graph(scores, target), expected, strict=True):
        torch.testing.assert_close(found, truth)
    return before, names(graph.graph)


def entropy(scores, target, **options):
    return F.cross_entropy(scores, target, reduction=options.pop("reduction", "none"), **options)


def written_to(scores, target):
    scores = scores * 1
    losses = entropy(scores, target)
    with torch.no_grad():
        scores.detach().zero_()
    return (losses,)


def written_before(scores, target):
    return (entropy((scores * 1).div_(2), target),)


def copy_written_to(scores, target):
    """Behind the back of a view: what the loss reads is no longer the scores."""
    copy = scores.to(torch.float32, copy=True)
    view = copy.view(6, V)
    copy.div_(2)
    return (entropy(view, target),)


def also_log_probabilities(scores, target):
    logs = scores.log_softmax(1)
    return F.nll_loss(logs, target, reduction="none"), logs


def of_two(scores, target):
    logs = scores.log_softmax(1)
    return (F.nll_loss(logs, target, reduction="none") + F.nll_loss(logs, target.flip(0), reduction="none"),)


def watched(scores, target):
    """Log-probabilities are wanted all the same."""
    logs = scores.log_softmax(1)
    return (F.nll_loss(logs, target, reduction="none") + logs.detach().mean(1),)


def another_watched(scores, target):
    logs = scores.log_softmax(1)
    other = F.nll_loss(logs, target.flip(0), reduction="none").detach()
    return (F.nll_loss(logs, target, reduction="none") + other,)


def converted_scores_used(scores, target):
    """The gradient of the loss is added to before it is rounded."""
    wide = (scores.bfloat16() * 1).float()
    return entropy(wide, target), wide


LEFT = {
    "class-weights": lambda scores, y: (entropy(scores, y, weight=torch.linspace(1, 2, V)),),
    "mean": lambda scores, y: (entropy(scores, y, reduction="mean"),),
    "sum": lambda scores, y: (entropy(scores, y, reduction="sum"),),
    "label-smoothing": lambda scores, y: (entropy(scores, y, label_smoothing=0.1),),
    "log-probabilities-used": also_log_probabilities,
    "log-probabilities-watched": watched,
    "two-losses-of-the-same": of_two,
    "another-loss-watched": another_watched,
    "converted-scores-used": converted_scores_used,
    "written-to-afterwards": written_to,
    "images": lambda scores, y: (entropy(scores.view(2, 3, V).mT, y.view(2, 3)),),
    "written-to-before": written_before,
    "a-copy-written-to": copy_written_to,
    "more-precise": lambda scores, y: (entropy(scores.double(), y),),
    "rounded-on-the-way": lambda scores, y: (entropy(scores.bfloat16().float(), y),),
    "over-rows": lambda scores, y: (F.nll_loss(scores.log_softmax(0), y, reduction="none"),),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_plain_cross_entropy_is_left_as_it_is(name):
    scores, target = torch.randn(6, V), torch.arange(6)
    before, after = traced(LEFT[name], scores, target)
    assert before == after
    assert any("log_softmax" in each for each in before)


REPLACED = {
    "plain": lambda scores, y: (entropy(scores, y),),
    "in-two-steps": lambda scores, y: (F.nll_loss(scores.log_softmax(1), y, reduction="none"),),
    "more-rows": lambda scores, y: (entropy(scores.view(2, 3, V).view(6, V), y),),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_plain_cross_entropy_is_replaced(name):
    assert traced(REPLACED[name], torch.randn(6, V), torch.arange(6))[1] == BOTH
