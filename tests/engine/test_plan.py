"""Plans are proofs: whatever two examples mix is found, whatever hides it, and what was not proven is not believed."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.cases import Net
from engine.cases.case import D, P, T, ids, param, squared
from engine.cases.hidden import Scale, ScaleForVmap
from engine.compare import assert_same
from qclip.engine import Engine, Refusal, clipped_gradients, explain, oracle
from qclip.engine import batch as batches
from qclip.engine.gradients.layouts import Axis, Flat
from qclip.engine.proof.perturbation import perturbed
from qclip.engine.proof.separation import separating_subsets
from qclip.engine.proof.traces import project
from qclip.engine.randomness import SameDraws

MIXED = r"examples mix|cannot be attributed"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def plan_of(model, x, loss=squared):
    """The plan that the engine makes, with its sites."""
    engine, count = Engine(model), len(x)
    batch = (x, torch.randn(count))
    evaluate = lambda pair: loss(model(pair[0]), pair[1])  # noqa: E731
    run = engine.record(evaluate, batch, count)
    run, plan, _ = engine.parts(run, batches.full_mask(count, None, engine.device), evaluate, batch)
    return plan, run.capture.sites


def mixes(model, x, loss=squared, **options):
    with pytest.raises(Refusal, match=MIXED):
        clipped_gradients(model, loss, x, torch.randn(len(x)), 1.0, **options)


# Any two examples


def leak(h, pair, detached):
    """The first of the pair gets a little of the second."""
    rows = h.detach() if detached else h
    return h.index_add(0, torch.tensor(pair[:1]), 0.1 * rows[[pair[1]]])


@pytest.mark.parametrize(
    ("B", "count"), [(2, 2), (3, 3), (4, 4), (6, 4), (7, 5), (10, 5), (11, 6), (32, 7), (126, 9), (127, 10), (256, 11)]
)
def test_of_any_two_examples_some_half_has_the_one_and_not_the_other(B, count):
    found = torch.stack(separating_subsets(B, torch.zeros(B, dtype=torch.float64)))
    assert found.shape == (count, B)
    assert found.dtype == torch.float64
    assert set(found.unique().tolist()) == {0, 1}
    assert (found.sum(1) > 0).all()
    assert (found.sum(1) < B).all()
    only_one = found.T @ (1 - found)
    assert (only_one + torch.eye(B) > 0).all()


@pytest.mark.parametrize("detached", [False, True], ids=["by gradient", "by value"])
@pytest.mark.parametrize("B", range(2, 10))
def test_any_two_examples_that_mix_are_told_apart(B, detached):
    """In either direction."""
    for pair in itertools.permutations(range(B), 2):
        if pair[0] > pair[1] and B > 5:
            continue  # the subsets of the batch know no order
        model = Net(lambda n, x, pair=pair: leak(n.one(x), pair, detached), one=nn.Linear(3, 2))
        mixes(model, torch.randn(B, 3))


@pytest.mark.parametrize("B", [2, 3, 6])
def test_any_two_losses_that_mix_are_told_apart(B):
    for pair in itertools.permutations(range(B), 2):
        loss = lambda outputs, targets, pair=pair: leak(squared(outputs, targets)[:, None], pair, True)[:, 0]  # noqa: E731
        mixes(nn.Linear(3, 2), torch.randn(B, 3), loss=loss)


@pytest.mark.parametrize("B", [16, 33])
def test_larger_batches(B):
    for pair in [(0, B - 1), (B - 1, 0), (7, 8), (B // 2, B // 2 - 1)]:
        mixes(Net(lambda n, x, pair=pair: leak(n.one(x), pair, False), one=nn.Linear(3, 2)), torch.randn(B, 3))


@pytest.mark.parametrize("shape", [(T, D), (2, T, D)], ids=str)
def test_mixing_at_one_position(shape):
    def forward(n, x):
        h = n.one(x)
        return torch.cat([h[:, :-1], h[:, -1:].roll(1, 0)], 1) + h

    mixes(Net(forward, one=nn.Linear(D, P)), torch.randn(4, *shape))


def test_the_batch_that_is_as_long_as_the_sequence():
    """Attention over the wrong dimension looks right by sizes alone."""

    def forward(n, x):
        return n.one(x).softmax(0) * n.one(x)

    mixes(Net(forward, one=nn.Linear(D, P)), torch.randn(T, T, D))
    right = Net(lambda n, x: n.one(x).softmax(1) * n.one(x), one=nn.Linear(D, P))
    clipped_gradients(right, squared, torch.randn(T, T, D), torch.randn(T), 1.0)


@pytest.mark.filterwarnings("ignore:examples are run through the model one at a time:UserWarning")
def test_copies_of_one_example():
    """Equal examples that mix are run one at a time, each among its own copies; others show that they mix."""
    same, targets = torch.randn(1, D).expand(4, D).contiguous(), torch.randn(4)
    model = Net(lambda n, x: leak(n.one(x), (0, 1), False), one=nn.Linear(D, P))
    found = clipped_gradients(model, squared, same, targets, 0.1)
    assert_same(found, oracle.clipped_gradients(model, squared, same, targets, 0.1, shared_forward=True), rtol=2e-5)
    with pytest.raises(Refusal, match=MIXED):
        clipped_gradients(model, squared, torch.randn(4, D), targets, 0.1)


# What could hide it


def test_a_layer_that_starts_at_zero_hides_nothing():
    """Behind it no gradient flows at first, so nothing would be proven about what is there."""

    def forward(n, x):
        return n.head(leak(n.body(x), (0, 1), False))

    model = Net(forward, body=nn.Linear(D, P), head=nn.Linear(P, 2))
    nn.init.zeros_(model.head.weight)
    mixes(model, torch.randn(4, D))


def test_a_gate_that_starts_closed_hides_nothing():
    """As in residual layers with a scale of zero: value and gradient vanish at first."""
    model = Net(
        lambda n, x: n.body(x) + n.gate * n.other(x).softmax(0),
        body=nn.Linear(D, P), other=nn.Linear(D, P), gate=nn.Parameter(torch.zeros(())),
    )  # fmt: skip
    mixes(model, torch.randn(4, D))


def test_adapters_at_the_start():
    model = Net(
        lambda n, x: n.base(x) + (x - x.mean(0)) @ n.a @ n.b,
        base=nn.Linear(D, P), a=param(D, 2), b=nn.Parameter(torch.zeros(2, P)),
    )  # fmt: skip
    model.base.requires_grad_(False)
    mixes(model, torch.randn(4, D))


def test_everything_zero():
    """Parameters that are all zero are moved as well."""
    model = Net(lambda n, x: n.two(leak(n.one(x).tanh(), (1, 2), False)), one=nn.Linear(D, P), two=nn.Linear(P, 2))
    for p in model.parameters():
        nn.init.zeros_(p)
    mixes(model, torch.randn(4, D))


def test_dead_units_hide_nothing_for_long():
    """Where no gradient shows, nothing was proven, and the proof is made again at the next batch."""

    def forward(n, x):
        return n.two(leak(F.relu(n.one(x)), (0, 1), False))

    model = Net(forward, one=nn.Linear(D, P), two=nn.Linear(P, 2))
    nn.init.constant_(model.one.bias, -100.0)
    targets = torch.randn(4)
    clipped_gradients(model, squared, torch.randn(4, D), targets, 1.0)
    with pytest.raises(Refusal, match=MIXED):
        clipped_gradients(
            model, squared, 200 * torch.rand(4, D) * model.one.weight.detach().sum(0).sign(), targets, 1.0
        )


@pytest.mark.filterwarnings("ignore:examples are run through the model one at a time:UserWarning")
@pytest.mark.parametrize("bad", [[0], [0, 1], [0, 2, 3], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_first_batch_with_examples_that_are_not_finite(bad, value):
    """It proves what it can; what it cannot is proven later."""
    model = Net(lambda n, x: leak(n.one(x), (1, 0), False), one=nn.Linear(D, P))
    x, targets = torch.randn(4, D), torch.randn(4)
    x[bad] = value
    with contextlib.suppress(Refusal):
        clipped_gradients(model, squared, x, targets, 1.0)
    mixes(model, torch.randn(4, D))


@pytest.mark.parametrize("bad", [[0], [0, 2], [0, 1, 2, 3]], ids=str)
def test_a_healthy_model_whose_first_batch_is_not_finite(bad):
    model = nn.Sequential(nn.Linear(D, P), nn.LayerNorm(P), nn.Linear(P, 2))
    x, targets = torch.randn(4, D), torch.randn(4)
    x[bad] = torch.nan
    first = clipped_gradients(model, squared, x, targets, 1.0)
    assert (first.norms[bad] == torch.inf).all()
    assert all(sum_.isfinite().all() for sum_ in first.sums.values())
    x = torch.randn(4, D)
    found = clipped_gradients(model, squared, x, targets, 1.0)
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 1.0), rtol=2e-5)


def test_a_finite_loss_with_a_gradient_that_is_not():
    """The square root at zero: loss 0, gradient inf."""
    model = Net(lambda n, x: (n.one(x) * x[:, :1]).abs().sqrt(), one=nn.Linear(D, 1))
    x, targets = torch.rand(4, D), torch.zeros(4)
    x[2, 0] = 0
    loss = lambda outputs, targets: outputs[:, 0] + targets  # noqa: E731
    found = clipped_gradients(model, loss, x, targets, 1.0)
    keep = torch.arange(4) != 2
    expected = oracle.clipped_gradients(model, loss, x, targets, 1.0, mask=keep)
    for name, sum_ in expected.sums.items():
        torch.testing.assert_close(found.sums[name], sum_)


def test_masked_examples_mix_too():
    """A padded example must not reach the others either."""
    model = Net(lambda n, x: leak(n.one(x), (0, 3), False), one=nn.Linear(D, P))
    mixes(model, torch.randn(4, D), mask=torch.tensor([True, True, True, False]))


@pytest.mark.parametrize("B", [2, 3, 4, 7])
@pytest.mark.parametrize("where", ["model", "loss"])
def test_a_gradient_that_depends_on_how_many_others_there_are(where, B):
    """Removing one example would change all."""
    share = lambda h: h / len(h)  # noqa: E731
    model = Net(lambda n, x: share(n.one(x)) if where == "model" else n.one(x), one=nn.Linear(D, P))
    loss = lambda o, t: share(squared(o, t)) if where == "loss" else squared(o, t)  # noqa: E731
    with pytest.raises(Refusal, match=r"depends on the batch size.*Reduce over each example only"):
        clipped_gradients(model, loss, torch.randn(B, D), torch.randn(B), 1.0)


@pytest.mark.parametrize("where", ["model", "loss"])
def test_a_batch_of_another_size_that_cannot_be_run(where):
    """Nothing can be said about it then: refused, with what went wrong."""
    labels = torch.rand(4)
    model = Net(lambda n, x: n.one(x.view(4, -1) if where == "model" else x), one=nn.Linear(D, P))
    loss = lambda o, t: squared(o, t) * (labels if where == "loss" else 1.0)  # noqa: E731
    with pytest.raises(Refusal, match="could not be run again with some examples replaced or left out"):
        clipped_gradients(model, loss, torch.randn(4, D), torch.randn(4), 1.0)


def test_a_model_that_returns_something_else_in_evaluation():
    """Such as auxiliary heads in training only, with dropout: the proof must not need its evaluation mode."""

    def forward(n, x):
        h = n.one(F.dropout(x, 0.3, n.training))
        return (h, 2 * h) if n.training else h

    model, x, targets = Net(forward, one=nn.Linear(D, P)), torch.randn(4, D), torch.randn(4)
    loss = lambda outputs, targets: squared(outputs[0], targets) + squared(outputs[1], targets)  # noqa: E731
    torch.manual_seed(1)
    found = clipped_gradients(model, loss, x, targets, 1.0)
    torch.manual_seed(1)
    expected = oracle.clipped_gradients(model, loss, x, targets, 1.0, shared_forward=True)
    assert_same(found, expected, rtol=2e-5)


def test_evaluation_mode_is_left_as_it_was():
    """The proof of a model with dropout looks at its evaluation mode, too."""
    model = nn.Sequential(nn.Linear(D, P), nn.Dropout(0.5), nn.Sequential(nn.Linear(P, P), nn.Dropout(0.5)))
    model[2].eval()
    before = [module.training for module in model.modules()]
    clipped_gradients(model, squared, torch.randn(4, D), torch.randn(4), 1.0)
    assert [module.training for module in model.modules()] == before


# When it is proven


class Switched(nn.Module):
    """A model that mixes when it is told to."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(D, P)
        self.mixing = False

    def forward(self, x):
        return leak(self.one(x), (0, 1), False) if self.mixing else self.one(x)


@pytest.mark.parametrize("how", ["switch", "batch size", "shape", "training", "autocast", "loss", "frozen", "dtype"])
def test_every_kind_of_batch_is_proven(how):
    model, x, loss = Switched(), torch.randn(4, T, D), squared
    for _ in range(3):  # the first two are proven in any case
        clipped_gradients(model, loss, x, torch.randn(4), 1.0)
    model.mixing = True
    enabled = False
    if how == "batch size":
        x = torch.randn(5, T, D)
    elif how == "shape":
        x = torch.randn(4, T + 1, D)
    elif how == "training":
        model.eval()
    elif how == "autocast":
        enabled = True
    elif how == "loss":
        loss = lambda outputs, targets: 2 * squared(outputs, targets)  # noqa: E731
    elif how == "frozen":
        model.one.bias.requires_grad_(False)
    elif how == "dtype":
        model, x = model.double(), x.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled), pytest.raises(Refusal, match=MIXED):
        clipped_gradients(model, loss, x, torch.randn(len(x)), 1.0)


def test_an_engine_with_another_evaluation_is_proven_anew():
    """What holds for one loss says nothing about another."""
    model, batch = nn.Linear(D, P), (torch.randn(4, D), torch.randn(4))
    engine = Engine(model)
    for _ in range(3):
        engine.clipped(lambda pair: squared(model(pair[0]), pair[1]), batch, 1.0)
    with pytest.raises(Refusal, match=MIXED):
        engine.clipped(lambda pair: squared(leak(model(pair[0]), (0, 1), False), pair[1]), batch, 1.0)


def test_a_watched_model_with_another_loss_is_proven_anew():
    model, x, targets = nn.Linear(D, P), torch.randn(4, D), torch.randn(4)
    engine = Engine(model)
    engine.watch(lambda: 4)
    for _ in range(3):
        engine.finish(model(x), targets, squared, 1.0)
    with pytest.raises(Refusal, match=MIXED):
        engine.finish(model(x), targets, lambda o, t: squared(leak(o, (0, 1), False), t), 1.0)


def test_rules_registered_later_are_used():
    """A warning says to register a rule; the same model must then be tried anew."""
    from qclip.engine import Dense, register_rule
    from qclip.engine.gradients.rules import unregister_rule

    @torch.overrides.wrap_torch_function(lambda x, w: (x, w))
    def scale(x, w):
        return Scale.apply(x, w)

    model, x, targets = (
        Net(lambda n, x: scale(n.one(x), n.w), one=nn.Linear(D, P), w=param(P)),
        torch.randn(4, D),
        torch.randn(4),
    )
    with pytest.warns(UserWarning, match=r"one at a time.*register_rule"):
        slow = clipped_gradients(model, squared, x, targets, 1.0)
    try:
        register_rule(scale)(lambda grad, x, w: {"w": Dense((grad * x).sum(1))})
        found = clipped_gradients(model, squared, x, targets, 1.0)
    finally:
        unregister_rule(scale)
    assert_same(found, slow, rtol=2e-5)
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 1.0), rtol=2e-5)


def test_a_call_in_another_way_than_proven():
    """The same function and shapes, but another kind of index, of which the rule knows nothing."""

    def forward(n, i):
        chosen = torch.zeros(7, dtype=torch.bool).index_fill(0, i, True)
        return n.table[chosen if n.by_mask else i] * (1.0 + i[:, None])

    model, targets = Net(forward, table=param(7, D)), torch.randn(4)
    model.by_mask = False
    for _ in range(3):
        clipped_gradients(model, squared, torch.randperm(7)[:4], targets, 1.0)
    model.by_mask = True
    with pytest.raises(Refusal, match=r"__getitem__ with table|examples mix|cannot be attributed"):
        clipped_gradients(model, squared, torch.randperm(7)[:4], targets, 1.0)


# What is found


@pytest.mark.parametrize("batch_size", [T, 4], ids=["as long", "longer"])
@pytest.mark.parametrize(
    ("turn", "layout"),
    [
        (lambda x: x, Axis(0)),
        (lambda x: x.transpose(0, 1), Axis(1)),
        (lambda x: x.reshape(-1, D), Flat(T)),
        (lambda x: x.transpose(0, 1).reshape(-1, D), Flat(T, interleaved=True)),
    ],
    ids=["batch first", "time first", "flattened", "interleaved"],
)
def test_layouts_are_found(turn, layout, batch_size):
    def forward(n, x):
        h = n.one(turn(x)).tanh()
        if isinstance(layout, Axis):
            return h.transpose(0, layout.axis)
        return h.view(T, len(x), P).transpose(0, 1) if layout.interleaved else h.view(len(x), T, P)

    plan, _ = plan_of(Net(forward, one=nn.Linear(D, P)), torch.randn(batch_size, T, D))
    assert [site.layout for site in plan.sites] == [layout]
    assert plan.proven


def test_layouts_that_no_gradient_tells_apart():
    """The values do: the branch is time-first, which the sizes alone do not show."""
    branch = lambda n, x: n.out(x + 0 * n.branch(x.transpose(0, 1)).transpose(0, 1))  # noqa: E731
    plan, _ = plan_of(Net(branch, branch=nn.Linear(D, D), out=nn.Linear(D, P)), torch.randn(T, T, D))
    assert plan.sites[0].layout == Axis(1)
    assert plan.silent == {0}


@pytest.mark.parametrize("mixed", [lambda h: h + h.transpose(0, 1), lambda h: leak(h, (0, 2), detached=False)])
def test_a_branch_without_gradient_that_mixes_by_every_layout(mixed):
    forward = lambda n, x: n.out(x + 0 * n.branch(mixed(x)))  # noqa: E731
    mixes(Net(forward, branch=nn.Linear(D, D), out=nn.Linear(D, P)), torch.randn(T, T, D))


@pytest.mark.parametrize("name", ["SiglipVisionModel", "SiglipForImageClassification"])
def test_siglip_at_every_batch_size(name):
    """With 4 patches, 4 examples among them. The one reads its pooling head, the other does not."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**sizes, image_size=4, patch_size=2, num_channels=1)
    if name == "SiglipForImageClassification":
        config = transformers.SiglipConfig(vision_config=config.to_dict(), num_labels=3)
    model = getattr(transformers, name)(config).train()
    loss = lambda outputs, targets: squared(outputs[-1] if "pooler_output" in outputs else outputs[0], targets)  # noqa: E731
    for B in (2, 4, 5):
        problem = (model, loss, {"pixel_values": torch.randn(B, 1, 4, 4)}, torch.randn(B), 0.5)
        assert_same(clipped_gradients(*problem), oracle.clipped_gradients(*problem), rtol=2e-5)


def test_rules_and_fallbacks():
    plan, sites = plan_of(nn.Sequential(nn.Linear(D, P), nn.PReLU()), torch.randn(4, D))
    assert [how.by_rule for how in plan.sites] == [True, False]
    assert len(sites) == 2
    assert not plan.whole
    assert plan.why == ""


@pytest.mark.parametrize("eye", [lambda: torch.eye(D), lambda: torch.ones(D).diag()], ids=["identity", "diagonal"])
def test_a_constant_whose_length_is_a_multiple_of_the_batch(eye):
    """As in DoRA of `peft`. What is computed from it has no gradient, so that nothing shows whose rows it has."""

    def forward(n, x):
        scale = n.scale / (eye() @ n.w).detach().norm(dim=0)
        return x @ n.w * scale

    model = Net(forward, w=param(D, P), scale=param(P))
    for batch_size in (D // 2, D):
        rows = explain(model, torch.randn(batch_size, D)).parameters
        assert {row.strategy for row in rows} == {"rule"}


def test_tables_without_examples_are_no_business_of_a_rows_owner():
    model = Net(
        lambda n, i: n.words(i) + n.places(torch.arange(T)), words=nn.Embedding(7, D), places=nn.Embedding(T, D)
    )
    plan, sites = plan_of(model, ids(T, T, high=7))
    assert all(how is not None for how in plan.sites)
    assert {name for site in sites for name in site.parameters} == {"words.weight", "places.weight"}


def test_the_reasons_are_said():
    plan, _ = plan_of(
        Net(lambda n, x: ScaleForVmap.apply(n.one(x), n.w), one=nn.Linear(D, P), w=param(P)), torch.randn(4, D)
    )
    assert plan.whole == {"w"}
    assert plan.why.startswith("'w': the loss depends on it")


def test_a_site_without_a_gradient_is_expected_to_have_none():
    model = Net(lambda n, x: n.one(x) + 0.0 * n.two(x), one=nn.Linear(D, P), two=nn.Linear(D, P))
    plan, _ = plan_of(model, torch.randn(4, D))
    assert plan.proven
    assert plan.silent == {1}


@pytest.mark.parametrize("mixes", [False, True])
def test_a_gradient_that_perturbed_parameters_hide(mixes):
    """It is proven where it shows, at the parameters as they are."""

    def forward(n, x):
        is_on = (n.flag.detach() == 1).float()  # at no other parameters
        hidden = n.two(x)
        return n.one(x) + n.flag * x.sum(-1, keepdim=True) + is_on * (hidden + mixes * hidden.mean(0))

    model = Net(forward, one=nn.Linear(D, P), two=nn.Linear(D, P), flag=nn.Parameter(torch.ones(())))
    engine = Engine(model)
    for _ in range(5):
        x, targets = torch.randn(4, D), torch.randn(4)

        def evaluate(batch):
            return squared(model(batch[0]), batch[1])

        if mixes:
            with pytest.raises(Refusal):
                engine.clipped(evaluate, (x, targets), 0.5)
            return
        found = engine.clipped(evaluate, (x, targets), 0.5)
        assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.5), rtol=2e-5)
    assert engine.proofs <= 6  # at the first and the second step


def test_perturbed_parameters_are_put_back():
    parameters = [param(3, 4), param(2).bfloat16().detach().requires_grad_(), nn.Parameter(torch.zeros(()))]
    before = [p.detach().clone() for p in parameters]
    with perturbed(parameters):
        assert all(not torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
        assert all(float((p - old).detach().abs().max()) < 1 for p, old in zip(parameters, before, strict=True))
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    with pytest.raises(KeyError), perturbed(parameters):
        raise KeyError
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize(("ties", "refused"), [(1, False), (30, True)])
def test_a_few_examples_may_round_in_another_way_at_another_size(ties, refused):
    class Flips(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            h = self.linear(x)
            first = torch.arange(len(x)) < ties
            # The same value for those that tie, by another path: its gradient differs.
            other = torch.where(torch.tensor(len(x) == 40), h[:, :1], h[:, :1] * 2 - h[:, :1].detach())
            return torch.where(first[:, None], other, h[:, :1])

    model, x, y = Flips(), torch.randn(40, 4), torch.zeros(40, 1)
    loss = nn.MSELoss(reduction="none")
    if refused:
        with pytest.raises(Refusal, match="depends on the batch size"):
            clipped_gradients(model, lambda a, b: loss(a, b).sum(1), x, y, 1.0)
    else:
        clipped_gradients(model, lambda a, b: loss(a, b).sum(1), x, y, 1.0)


def test_draws_of_the_proof_are_not_those_of_the_model():
    """Three rows for a direction in three dimensions are no rows of three examples."""
    row, cpu = torch.randn(1, 3), torch.device("cpu")
    with SameDraws(3, cpu) as first:
        three = project(row.expand(3, 3))
    with SameDraws(4, cpu, first.drawn):
        four = project(row.expand(4, 3))
    torch.testing.assert_close(three[0], four[0])
    torch.testing.assert_close(three[0], project(row)[0])
