"""Cross entropy in a compiled step: however it is written, two operators compute it, and nothing else changes.

The override is for GPUs and many classes. Here it is made on a CPU and for few, by the twins of the kernels.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.cases import Net
from engine.compare import assert_same
from engine.driven import Pair
from qclip.engine import oracle
from qclip.engine.capture import overrides
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
def graphs(monkeypatch):
    """Every traced step is run as it is; gives the graphs. Five classes are many."""
    found = []
    monkeypatch.setattr(
        "qclip.engine.compiled.driver.compile_graph", lambda graph, *_: found.append(graph.graph) or graph
    )
    monkeypatch.setattr(overrides, "has_many_classes", lambda scores: scores.shape[1] > 4)
    return found


def widen(monkeypatch):
    monkeypatch.setattr(overrides, "is_ragged", lambda input, weight, bias=None: weight.shape[0] % 8 > 0)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, V)).to(dtype)


def data(*positions, dtype=torch.float32):
    """Inputs, and targets of which some are ignored, among them all of the second example's."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, *positions, D, generator=generator).to(dtype)
    y = torch.randint(V, (B, *positions), generator=generator)
    y[1] = IGNORED
    if positions:
        y[3, :2] = IGNORED
    return x, y


def entropy(scores, targets, **options):
    return F.cross_entropy(scores, targets, reduction=options.pop("reduction", "none"), **options)


def flattened(scores, targets, **options):
    """One loss per example, however many positions it has."""
    losses = entropy(scores.reshape(-1, V), targets.reshape(-1), **options)
    return losses.view(targets.shape).flatten(1).mean(1) if targets.dim() > 1 else losses


def by_example(loss):
    """A loss with a reduction of its own, called for every example."""
    return lambda scores, targets: torch.stack([loss(s, y) for s, y in zip(scores, targets, strict=True)])


def hugging_face(scores, targets):
    """The steps of `transformers`, with a loss per example: converted, labels shifted, flattened."""
    scores = scores.float()
    targets = F.pad(targets, (0, 1), value=IGNORED)[..., 1:].contiguous()
    losses = entropy(scores.view(-1, V), targets.view(-1).to(scores.device), ignore_index=IGNORED)
    return losses.view(len(targets), -1).sum(1)


def hugging_face_of_each(scores, targets):
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    return by_example(lambda s, y: loss_utils.ForCausalLMLoss(s[None], y[None], V, num_items_in_batch=5))(
        scores, targets.clamp_min(0)
    )


def shifted_scores(scores, targets):
    """The older steps of `transformers`."""
    scores, targets = scores.float()[..., :-1, :].contiguous(), targets[..., 1:].contiguous()
    losses = nn.CrossEntropyLoss(reduction="none")(scores.view(-1, V), targets.view(-1))
    return losses.view(len(targets), -1).mean(1)


SPELLINGS = {
    "flattened": flattened,
    "float": lambda s, y: flattened(s.float(), y),
    "to": lambda s, y: flattened(s.to(torch.float32), y),
    "to-keyword": lambda s, y: flattened(s.to(dtype=torch.float32), y),
    "type": lambda s, y: flattened(s.type(torch.float32), y),
    "flattened-first": lambda s, y: entropy(s.flatten(0, -2).float(), y.flatten()).view(len(y), -1).mean(1),
    "hugging-face": hugging_face,
    "hugging-face-of-each": hugging_face_of_each,
    "shifted-scores": shifted_scores,
    "transposed": lambda s, y: entropy(s.float().transpose(1, 2), y).mean(1),
    "transposed-first": lambda s, y: entropy(s.mT.float(), y).mean(1),
    "moved": lambda s, y: entropy(s.movedim(-1, 1), y).mean(1),
    "permuted": lambda s, y: entropy(s.float().permute(0, 2, 1).contiguous(), y).mean(1),
    "two-dimensions-of-positions": lambda s, y: (
        entropy(s.float().unsqueeze(1).permute(0, 3, 1, 2), y.unsqueeze(1)).flatten(1).mean(1)
    ),
    "last-position": lambda s, y: entropy(s[:, -1].float(), y[:, -1]),
    "module": lambda s, y: nn.CrossEntropyLoss(reduction="none")(s.float().mT, y).sum(1),
    "smoothed": lambda s, y: flattened(s.float(), y, label_smoothing=0.2),
    "smoothed-and-transposed": lambda s, y: entropy(s.float().mT, y, label_smoothing=0.2).mean(1),
    "ignored-class": lambda s, y: flattened(s.float(), y.clamp_min(3), ignore_index=3),
    "sum": by_example(lambda s, y: F.cross_entropy(s.float(), y, reduction="sum")),
    "mean": by_example(lambda s, y: F.cross_entropy(s.float(), y.clamp_min(0))),
    "mean-of-the-counted": by_example(lambda s, y: F.cross_entropy(s.float(), y.clamp(0, 9), ignore_index=9)),
    "mean-and-smoothed": by_example(lambda s, y: F.cross_entropy(s.float(), y.clamp_min(0), label_smoothing=0.1)),
    "positional": lambda s, y: (
        F.cross_entropy(s.float().mT, y.clamp_min(3), None, None, 3, None, "none", 0.1).mean(1)
    ),
    "in-two-steps": lambda s, y: F.nll_loss(
        s.float().log_softmax(-1).view(-1, V), y.flatten(), reduction="none"
    ).view(y.shape).mean(1),
    "no-gradient-of-the-target": lambda s, y: entropy(s.float().mT, y.float().long()).mean(1),
}  # fmt: skip


def converts_scores(graph):
    """Whether the scores of all positions are there in float32 before their loss is computed."""
    rows, classes = B * T, (V, V + -V % 8)
    for node in graph.nodes:
        if node.target is torch.ops.qclip.cross_entropy.default:
            return False
        value = node.meta.get("val")
        sized = isinstance(value, torch.Tensor) and value.numel() in [rows * width for width in classes]
        if sized and value.dtype == torch.float32 and set(value.shape) & set(classes):
            return True
    return False


SETTINGS = list(itertools.product(SPELLINGS, ["float32", "bfloat16", "autocast"], [False, True]))


@pytest.mark.parametrize(("name", "precision", "wide"), every(2, SETTINGS))
def test_every_spelling_is_found(name, precision, wide, graphs, monkeypatch):
    """Equal to the oracle, by a graph that has the two operators and none of those they stand for."""
    if wide:
        widen(monkeypatch)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    pair, (x, y) = Pair(model(dtype), SPELLINGS[name]), data(T, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext():
        found = pair.compiled(x, y, 0.3)
        expected = oracle.clipped_gradients(pair.model, pair.loss, x, y, 0.3)
    (graph,) = graphs
    assert set(names(graph)) == set(BOTH)
    assert precision == "float32" or not converts_scores(graph)
    # In 16 bits the scores' gradients are rounded, once here and several times there.
    assert_same(found, expected, 2e-5 if precision == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", [entropy, lambda s, y: entropy(s.float(), y)], ids=["plain", "converted"])
@pytest.mark.parametrize("wide", [False, True], ids=["plain", "widened"])
def test_one_position(wide, loss, dtype, graphs, monkeypatch):
    if wide:
        widen(monkeypatch)
    found = check(Pair(model(dtype), loss), graphs, *data(dtype=dtype), 2e-5 if dtype == torch.float32 else 2e-2)
    assert found.losses[1] == 0
    assert found.norms[1] == 0


def check(pair, graphs, x, y, rtol=2e-5, clip_norm=0.3, **options):
    """Equal to the eager engine, by a graph that has the two operators and none of those they stand for."""
    found, expected = pair.compiled(x, y, clip_norm, **options), pair.expected(x, y, clip_norm, **options)
    assert [names(graph) for graph in graphs] == [BOTH]
    assert_same(found, expected, rtol)
    return found


@pytest.mark.parametrize("wide", [False, True], ids=["plain", "widened"])
def test_heads_in_groups_of_their_own(wide, graphs, monkeypatch):
    if wide:
        widen(monkeypatch)
    check(Pair(model(), flattened, groups="per-layer"), graphs, *data(T), clip_norm=[0.3, 0.2])


@pytest.mark.parametrize("loss", [flattened, lambda s, y: entropy(s.mT, y).mean(1), shifted_scores])
def test_the_gradient_is_as_wide_as_the_layer(loss, graphs, monkeypatch):
    """The zeros beyond the classes are written with it; the wide scores are cut off nowhere."""
    widen(monkeypatch)
    check(Pair(model(), loss), graphs, *data(T))
    sliced = [node for node in graphs[0].nodes if node.target is torch.ops.aten.slice_backward.default]
    assert not any(node.args[2] == 2 for node in sliced)


@pytest.mark.parametrize("ignored", [0, 3, -1])
def test_any_class_can_be_ignored(ignored, graphs):
    x, y = data(T)
    y[y == IGNORED] = ignored
    pair = Pair(model(), lambda scores, y: flattened(scores, y, ignore_index=ignored))
    assert check(pair, graphs, x, y).norms[1] == 0


def test_masked_examples_do_not_count(graphs):
    x, y = data(T)
    found = check(Pair(model(), flattened), graphs, x, y, mask=torch.arange(B) != 4)
    assert not found.mask[4]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("target", [2, IGNORED], ids=["counted", "ignored"])
def test_an_example_that_is_not_finite_is_left_out(target, masked, value, graphs):
    """Also where its target is ignored, and whether it is masked or not."""
    x, y = data()
    x[4, 0], y[4] = value, target
    linear = nn.Sequential(nn.Linear(D, V))  # nothing that makes inf a number again
    mask = torch.arange(B) != 4 if masked else None
    found = check(Pair(linear, flattened), graphs, x, y, mask=mask)
    assert masked or found.norms[4] == torch.inf
    assert all(value.isfinite().all() for value in found.sums.values())


def test_scores_masked_out_with_minus_infinity(graphs):
    def loss(scores, y):
        banned = torch.arange(V) % 3 == 1
        return flattened(scores.masked_fill(banned, -torch.inf), y)

    x, y = data(T)
    y[y > 0] -= y[y > 0] % 3
    assert check(Pair(model(), loss), graphs, x, y).losses.isfinite().all()


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, y: flattened(s, y) + 0.1 * s.logsumexp(-1).square().mean(-1),
        lambda s, y: flattened(s.float(), y) + 0.1 * s.float().logsumexp(-1).square().mean(-1),
        lambda s, y: flattened(s, y) + (0.1 * s.log_softmax(-1)).exp().mean((1, 2)),
    ],
    ids=["scores", "converted", "log-probabilities"],
)
@pytest.mark.parametrize("wide", [False, True], ids=["plain", "widened"])
def test_scores_are_used_elsewhere_too(wide, loss, graphs, monkeypatch):
    """Their gradient is then one summand."""
    if wide:
        widen(monkeypatch)
    pair, (x, y) = Pair(model(), loss), data(T)
    assert_same(pair.compiled(x, y, 0.3), pair.expected(x, y, 0.3), 2e-5)
    assert set(BOTH) <= set(names(graphs[0]))


def test_two_heads(graphs):
    def loss(scores, y):
        first, second = scores[..., : V // 2].flatten(0, 1), scores[..., V // 2 :].flatten(0, 1)
        return (entropy(first, y.flatten() % 5) + entropy(second, y.flatten() % 6)).view(y.shape).mean(1)

    x, y = data(T)
    pair = Pair(model(), loss)
    assert_same(pair.compiled(x, y, 0.3), pair.expected(x, y, 0.3), 2e-5)
    assert [names(graph) for graph in graphs] == [sorted(2 * BOTH)]


@pytest.mark.parametrize("wide", [False, True], ids=["plain", "widened"])
def test_a_checkpointed_head(wide, graphs, monkeypatch):
    """Its scores are computed again in the backward pass, in the same way."""
    if wide:
        widen(monkeypatch)

    def forward(n, x, y):
        return checkpoint(lambda x, y: flattened(n.head(n.body(x)).float(), y), x, y, use_reentrant=False)

    net = Net(forward, body=nn.Sequential(nn.Linear(D, 8), nn.Tanh()), head=nn.Linear(8, V))
    pair, (x, y) = Pair(net, lambda outputs, targets: outputs), data(T)
    assert_same(pair.compiled((x, y), y, 0.3), pair.expected((x, y), y, 0.3), 2e-5)
    assert set(names(graphs[0])) == set(BOTH)


# What is left as it is


def of_another_dimension(scores, y):
    logs = scores.log_softmax(1).flatten(0, 1)
    return F.nll_loss(logs, y.flatten(), reduction="none").view(y.shape).mean(1)


LEFT = {
    "class-weights": lambda s, y: flattened(s, y, weight=torch.linspace(1, 2, V)),
    "class-probabilities": lambda s, y: (
        entropy(s.flatten(0, 1), F.one_hot(y.clamp_min(0).flatten(), V).float()).view(y.shape).mean(1)
    ),
    "more-precise": lambda s, y: flattened(s.double(), y).float(),
    "in-vmap": torch.vmap(lambda s, y: F.cross_entropy(s, y.clamp_min(0))),
    "other-logarithms": lambda s, y: F.nll_loss(s.tanh().mT, y, reduction="none").mean(1),
    "of-another-dimension": of_another_dimension,
    "of-one-class-moved": lambda s, y: F.nll_loss(s.log_softmax(-1).mT, y, reduction="none").mean(1),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_losses_are_left_as_they_are(name, graphs):
    pair, (x, y) = Pair(model(), LEFT[name]), data(T)
    assert_same(pair.compiled(x, y, 0.3), pair.expected(x, y, 0.3), 2e-5)
    assert len(graphs) == 1
    assert not set(names(graphs[0])) & set(BOTH)


@pytest.mark.parametrize(
    ("device", "classes", "answer"), [("cuda", 4097, True), ("cuda", 4096, False), ("cpu", 9999, False)]
)
def test_many_classes_on_a_gpu(device, classes, answer):
    with torch._subclasses.FakeTensorMode():
        scores = torch.empty(2, classes, 3, device=device)
    assert overrides.has_many_classes(scores) is answer


def test_few_classes_are_left_as_they_are(graphs, monkeypatch):
    monkeypatch.setattr(overrides, "has_many_classes", lambda scores: scores.shape[1] > V)
    pair, (x, y) = Pair(model(), flattened), data(T)
    assert_same(pair.compiled(x, y, 0.3), pair.expected(x, y, 0.3), 2e-5)
    assert [names(graph) for graph in graphs] == [PLAIN]


# What changes the scores on the way is seen


def halved_in_place(scores, y):
    wide = scores.float()
    wide.div_(2)
    return flattened(wide, y)


def halved_behind_a_view(scores, y):
    wide = scores.float()
    view = wide.view(-1, V)
    wide.div_(2)
    return entropy(view, y.flatten()).view(y.shape).mean(1)


def halved_before(scores, y):
    scores = scores * 1
    wide = scores.float()
    scores.div_(2)
    return flattened(wide, y) + 0 * scores.float().mean((1, 2))


def hooked(scores, y):
    """The gradient of the loss is halved on its way to the layer."""
    wide = scores.float()
    view = wide.view(-1, V)
    wide.register_hook(lambda grad: grad / 2)
    return entropy(view, y.flatten()).view(y.shape).mean(1)


def without_gradient(scores, y):
    with torch.no_grad():
        constant = scores.float()
    return flattened(constant, y) + scores.float().square().mean((1, 2))


def detached(scores, y):
    return flattened(scores.detach().float(), y) + scores.float().square().mean((1, 2))


def reversed_classes(scores, y):
    return flattened(scores.float()[..., torch.arange(V - 1, -1, -1)], y)


def last_classes(scores, y):
    losses = entropy(scores.float()[..., -6:].flatten(0, 1), y.flatten() % 6)
    return losses.view(y.shape).mean(1)


def rounded(scores, y):
    return flattened((scores.float() * 1.01).bfloat16().float(), y)


CHANGES = [
    halved_in_place, halved_behind_a_view, halved_before, hooked, without_gradient, detached, reversed_classes,
    last_classes, rounded,
]  # fmt: skip


@pytest.mark.parametrize("loss", CHANGES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("wide", [False, True], ids=["plain", "widened"])
def test_scores_changed_on_the_way(wide, loss, graphs, monkeypatch):
    if wide:
        widen(monkeypatch)
    pair, (x, y) = Pair(model(torch.bfloat16), loss), data(T, dtype=torch.bfloat16)
    assert_same(pair.compiled(x, y, 0.3), pair.expected(x, y, 0.3), 2e-2)
    assert set(BOTH) & set(names(graphs[0]))


def test_scores_overwritten_after_their_loss_run_eager(graphs):
    """The kernels read the scores again in the backward pass."""

    def loss(scores, y):
        scores = scores * 1
        losses = flattened(scores, y)
        with torch.no_grad():
            scores.zero_()
        return losses

    pair, (x, y) = Pair(model(), loss), data(T)
    with pytest.warns(UserWarning, match="runs eager: .*modified by an inplace operation"):
        found = pair.compiled(x, y, 0.3)
    assert_same(found, pair.expected(x, y, 0.3), 2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # the compiler's, of its own parts
def test_the_operators_compile(monkeypatch):
    monkeypatch.setattr(overrides, "has_many_classes", lambda scores: scores.shape[1] > 4)
    widen(monkeypatch)
    pair, (x, y) = Pair(model(), lambda s, y: entropy(s.mT, y, label_smoothing=0.1).mean(1)), data(T)
    assert_same(pair.compiled(x, y, 0.3), pair.expected(x, y, 0.3), 2e-5)
