"""Models that do what they were not seen to do at first: refused or proven anew, never wrong in silence."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from engine.cases import Net
from engine.cases.case import D, P, T, param, squared
from engine.compare import assert_same
from qclip.engine import Engine, Refusal, clipped_gradients, oracle
from qclip.engine.proof.perturbation import perturbed

B = 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:data decide which rows of the batch go where:UserWarning"),
    pytest.mark.filterwarnings("ignore:examples are run through the model one at a time:UserWarning"),
]


def assert_right(model, *batches, loss=squared, rtol=1e-4):
    """Every batch in turn equals the oracle, or the engine refuses it."""
    for inputs, targets in batches:
        try:
            found = clipped_gradients(model, loss, inputs, targets, 0.5)
        except Refusal:
            return
        assert_same(found, oracle.clipped_gradients(model, loss, inputs, targets, 0.5), rtol=rtol)


def layers():
    return {"one": nn.Linear(D, P), "two": nn.Linear(P, 2)}


# The first batch does not show it


def test_mixing_that_is_drawn_at_random():
    model = Net(
        lambda n, x: n.two(n.one(x if torch.rand(()) < 0.5 else 0.6 * x + 0.4 * x.roll(1, 0)).tanh()), **layers()
    )
    x, targets = torch.randn(B, D), torch.randn(B)
    outcomes = set()
    for seed in range(8):
        torch.manual_seed(seed)
        mixes = bool(torch.rand(()) >= 0.5)
        torch.manual_seed(seed)
        try:
            clipped_gradients(model, squared, x, targets, 0.5)
            outcomes.add((mixes, "taken"))
        except Refusal:
            outcomes.add((mixes, "refused"))
    assert outcomes == {(True, "refused"), (False, "taken")}


def test_sorted_by_length():
    def forward(n, x, lengths):
        order = lengths.argsort()
        return n.two(n.one(x[order]).tanh()[order.argsort()])

    model = Net(forward, **layers())
    sorted_first = torch.tensor([1, 2, 3, 4]), torch.tensor([4, 1, 3, 2])
    assert_right(model, *[((torch.randn(B, D), lengths), torch.randn(B)) for lengths in sorted_first])


def test_routed_to_experts():
    def forward(n, x, choice):
        flat, out = x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], 2)
        for k, expert in enumerate((n.first, n.second)):
            where = (choice.flatten() == k).nonzero().squeeze(1)
            out = out.index_add(0, where, expert(flat[where]))
        return out.view(len(x), -1)

    model = Net(forward, first=nn.Linear(D, 2), second=nn.Linear(D, 2))
    even = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    uneven = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]])
    assert_right(model, *[((torch.randn(2, 4, D), choice), torch.randn(2)) for choice in (even, uneven)])


def routed(listed):
    """Each token goes to the expert on its side of a plane that is a parameter."""

    def forward(n, x):
        flat, out = x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], 2)
        side = flat @ n.plane > 0
        for expert, chosen in ((n.first, side), (n.second, ~side)):
            where = chosen.nonzero().squeeze(1)
            out = out.index_add(0, where, expert(flat[where.tolist() if listed else where]))
        return out.view(*x.shape[:2], 2)

    torch.manual_seed(0)
    return Net(forward, plane=param(D), first=nn.Linear(D, 2), second=nn.Linear(D, 2))


@pytest.mark.parametrize("listed", [False, True], ids=["by a tensor", "by a list"])
def test_routed_otherwise_at_the_parameters_of_the_proof(listed):
    """There each expert gets as many rows, but one of each example instead of both of one: each is run by itself."""
    model = routed(listed)
    with perturbed(model.parameters()):
        moved = model.plane.detach().clone()
    planes = torch.stack([model.plane.detach(), moved])
    sides = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])  # now, and in the proof
    tokens = torch.randn(4, D)
    tokens = tokens + (sides - tokens @ planes.T) @ torch.linalg.pinv(planes).T
    assert torch.equal((tokens @ planes.T).sign(), sides)
    x, targets = tokens.view(2, 2, D), torch.randn(2)
    with pytest.warns(UserWarning, match=r"first\.weight: data and parameters decide .*set_experts_implementation"):
        found = clipped_gradients(model, squared, x, targets, 0.5)
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.5), rtol=2e-5)


def test_routed_as_in_the_proof():
    """Tokens far from the plane, one of each example on either side; an example that is not finite does not matter."""
    model = routed(listed=False)
    normal = F.normalize(model.plane.detach(), dim=0)
    tokens = torch.randn(2, 2, D)
    tokens = tokens + (torch.tensor([[5.0, -5.0], [-5.0, 5.0]]) - tokens @ normal)[..., None] * normal
    assert_same(*(each(model, squared, tokens, torch.ones(2), 0.5) for each in ENGINE_AND_ORACLE), rtol=2e-5)
    found = clipped_gradients(model, squared, tokens, torch.tensor([1.0, torch.nan]), 0.5)
    alone = oracle.clipped_gradients(model, squared, tokens[:1], torch.ones(1), 0.5)
    assert found.norms[1] == torch.inf
    for name, total in alone.sums.items():
        torch.testing.assert_close(found.sums[name], total)


ENGINE_AND_ORACLE = (clipped_gradients, oracle.clipped_gradients)


def test_a_loss_over_the_tokens_of_the_batch():
    def loss(outputs, mask):
        return (outputs.square().mean(-1) * mask).sum(1) / mask.sum()

    with pytest.raises(Refusal, match="depends on the batch size"):
        clipped_gradients(nn.Linear(D, 2), loss, torch.randn(B, T, D), torch.ones(B, T), 1.0)


def test_a_flag_that_turns_the_layout():
    def forward(n, x):
        if n.time_first:
            return n.two(n.one(x.transpose(0, 1)).tanh()).transpose(0, 1)
        return n.two(n.one(x).tanh())

    model = Net(forward, **layers())
    for model.time_first in (False, True, False):
        assert_right(model, (torch.randn(B, B, D), torch.randn(B)))


def test_a_layout_that_two_readings_admit():
    def forward(n, x, lengths):
        return n.two(n.one(x.transpose(0, 1)).tanh()[lengths - 1, torch.arange(len(x))])

    model = Net(forward, **layers())
    lengths = torch.arange(1, B + 1), torch.full((B,), B)
    assert_right(model, *[((torch.randn(B, B, D), length), torch.randn(B)) for length in lengths])


def test_a_branch_on_the_batch():
    def forward(n, x):
        h = n.one(x).tanh()
        return n.two(h) if h.mean() > 0 else n.two(2 * h)

    model = Net(forward, **layers())
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(B, D)
        with torch.no_grad():
            sign = model.one(x).tanh().mean(1).sign()
        if abs(sign.sum()) == B:  # alone, each example would take the same branch
            assert_right(model, (x, torch.randn(B)))


def rows_by(take):
    def forward(n, x, lengths):
        order = lengths.argsort(stable=True)
        return n.two(take(n.one(take(x, order)).tanh(), order.argsort()))

    return forward


def written(order):
    index = torch.zeros(len(order), dtype=torch.long)
    index[:] = order
    return index


@pytest.mark.parametrize(
    "take",
    [
        lambda x, order: torch.stack([x[i] for i in order]),
        lambda x, order: F.embedding(order, x),
        lambda x, order: torch.cat([x.narrow(0, i, 1) for i in order]),
        lambda x, order: x.gather(0, order[:, None].expand_as(x)),
        lambda x, order: x[order.numpy()],
        lambda x, order: x[torch.as_tensor(order.numpy())],
        lambda x, order: x[torch.tensor([float(i) + 1 for i in order]).long() - 1],
        lambda x, order: x[written(order)],
    ],
    ids=["one by one", "embedding", "narrow", "gather", "array", "of an array", "of floats", "written"],
)
def test_rows_put_in_order_by_data(take):
    model = Net(rows_by(take), **layers())
    lengths = torch.full((B,), 3), torch.full((B,), 3), torch.tensor([4, 1, 3, 2])
    assert_right(model, *[((torch.randn(B, D), each), torch.randn(B)) for each in lengths])


def test_rows_put_in_order_by_an_attribute():
    """It is set before every step, as some training loops do."""

    def forward(n, x):
        return n.two(n.one(x[n.order]).tanh()[n.order.argsort()])

    model = Net(forward, **layers())
    for model.order in (torch.arange(B), torch.arange(B), torch.tensor([1, 0, 3, 2])):
        assert_right(model, (torch.randn(B, D), torch.randn(B)))


def test_rows_repeated_by_data():
    def forward(n, x, counts):
        owners = torch.arange(len(x)).repeat_interleave(counts)
        return torch.zeros(len(x), 2).index_add(0, owners, n.two(n.one(x.repeat_interleave(counts, 0)).tanh()))

    model = Net(forward, **layers())
    counts = torch.full((B,), 2), torch.full((B,), 2), torch.tensor([1, 3, 2, 2])
    assert_right(model, *[((torch.randn(B, D), each), torch.randn(B)) for each in counts])


@pytest.mark.parametrize(
    "turn", [lambda x, d: x.roll((1,), (d,)), lambda x, d: x.permute((1, 0, 2) if d else (0, 1, 2))]
)
def test_whole_numbers_inside_a_tuple(turn):
    model = Net(lambda n, x: n.two(n.one(turn(x, n.dim)).tanh()).sum(1), **layers())
    for model.dim in (1, 1, 0):
        assert_right(model, (torch.randn(B, B, D), torch.randn(B)))


def test_a_term_that_is_switched_on():
    def forward(n, x):
        h = n.one(x)
        return h + n.beta * (h - h.mean(0))

    model = Net(forward, one=nn.Linear(D, P))
    for model.beta in (0.0, 0.0, 5.0):
        assert_right(model, (torch.randn(B, D), torch.randn(B)))


# No value or no gradient shows it


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: squared(o, t) / len(t),
        lambda o, t: squared(o, t) * squared(o, t).detach().softmax(0),
        lambda o, t: (v := squared(o, t)).detach() + (v - v.detach()) * v.detach().softmax(0),
    ],
    ids=["divided by the batch", "weighted by the batch", "weighted behind a detach"],
)
def test_losses_that_look_at_the_batch(loss):
    with pytest.raises(Refusal, match=r"examples mix|depends on the batch size"):
        clipped_gradients(nn.Linear(D, P), loss, torch.randn(B, D), torch.randn(B), 1.0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: (v := squared(o, t)) - v.detach(),
        lambda o, t: (v := squared(o, t)) / v.detach(),
        lambda o, t: squared(o, t) + 1e6,
    ],
    ids=["always zero", "always one", "hidden by a constant"],
)
def test_mixing_that_the_losses_hide(loss):
    model = Net(lambda n, x: n.two(n.one(x - x.mean(0)).tanh()), **layers())
    with pytest.raises(Refusal, match="examples mix"):
        clipped_gradients(model, loss, torch.randn(B, D), torch.randn(B), 1.0)


def test_a_loss_divided_by_the_batch_behind_random_numbers():
    def forward(n, x):
        noise = torch.randn_like(x)  # in evaluation mode too
        return n.two(n.one(x + noise).tanh())

    model, x, targets = Net(forward, **layers()), torch.randn(8, D), torch.randn(8)
    clipped_gradients(model, squared, x, targets, 1.0)
    with pytest.raises(Refusal, match="depends on the batch size"):
        clipped_gradients(model, lambda o, t: squared(o, t) / len(t), x, targets, 1.0)


def test_rounding_that_depends_on_the_batch_size():
    """Kernels for other sizes round differently: here a near tie sends the gradient of every example another way."""

    def forward(n, x):
        rounding = torch.finfo(x.dtype).eps * (-1) ** len(x)
        return n.two(torch.where(x[:, :1] + rounding > 0, n.one(x), n.one(2 * x)).tanh())

    model, x, targets = Net(forward, **layers()), torch.randn(9, D), torch.randn(9)
    x[:, 0] *= 1e-10  # less than float32 rounds by, more than float64 does
    found = clipped_gradients(model, squared, x, targets, 0.5)
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.5), rtol=1e-4)
    with pytest.raises(Refusal, match="depends on the batch size"):
        clipped_gradients(model, lambda o, t: squared(o, t) / len(t), x, targets, 0.5)


def test_mixing_in_the_backward_pass_alone():
    def forward(n, x):
        h = n.one(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda grad: grad / grad.norm())
        return n.two(h)

    with pytest.raises(Refusal, match=r"examples mix|depends on the batch size"):
        clipped_gradients(Net(forward, **layers()), squared, torch.randn(B, D), torch.randn(B), 1.0)


def test_inputs_that_cannot_be_told_apart():
    @dataclass
    class Inputs:
        x: torch.Tensor

    model = Net(lambda n, inputs: n.one(inputs.x - inputs.x.mean(0)), one=nn.Linear(D, P))
    with pytest.raises(Refusal, match="the batch holds a Inputs"):
        clipped_gradients(model, squared, (Inputs(torch.randn(B, D)),), torch.randn(B), 1.0)
    numpy = Net(lambda n, x: n.one(torch.as_tensor(x)), one=nn.Linear(D, P))
    with pytest.raises(Refusal, match="the batch holds a ndarray"):
        clipped_gradients(numpy, squared, (torch.randn(B, D).numpy(),), torch.randn(B), 1.0)
    with pytest.raises(Refusal, match="to_dense"):
        clipped_gradients(nn.Linear(D, P), squared, torch.eye(D).to_sparse(), torch.randn(D), 1.0)


def test_outputs_mixed_by_the_user():
    model, x, targets = nn.Linear(D, P), torch.randn(B, D), torch.randn(B)
    engine = Engine(model)
    engine.watch(lambda: B)
    outputs = model(x)
    with pytest.raises(Refusal, match="must be what the model just returned"):
        engine.finish(outputs - outputs.mean(0).detach(), targets, squared, 1.0)


# Gradients that go elsewhere


def test_a_value_kept_from_before():
    model = Net(lambda n, x: x * n.kept, p=param(D))
    model.kept = model.p.exp()
    with pytest.raises(Refusal, match="'p'"):
        clipped_gradients(model, squared, torch.randn(B, D), torch.randn(B), 1.0)


def test_a_cached_parametrisation():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(D, P))
    x, targets = torch.randn(B, D), torch.randn(B)
    with parametrize.cached():
        model(x)
        try:
            found = clipped_gradients(model, squared, x, targets, 1.0)
        except Refusal:
            return
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 1.0), rtol=1e-4)


def test_a_hook_on_a_parameter():
    model, x, targets = nn.Linear(D, P), torch.randn(B, D), torch.randn(B)
    clipped_gradients(model, squared, x, targets, 1.0)
    model.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(Refusal, match="'weight' has a gradient hook"):
        clipped_gradients(model, squared, x, targets, 1.0)


# What must work


def test_float32_and_float64_side_by_side():
    model = Net(lambda n, x: n.one(x).double() * n.p, one=nn.Linear(D, P), p=nn.Parameter(torch.randn(P).double()))
    assert_same(
        clipped_gradients(model, squared, (x := torch.randn(B, D)), (y := torch.randn(B)), 0.5),
        oracle.clipped_gradients(model, squared, x, y, 0.5),
        rtol=2e-5,
    )


def test_a_small_positive_parameter_stays_positive():
    def forward(n, x):
        return torch.distributions.Normal(n.one(x), n.sigma).rsample((1,))[0]

    model = Net(forward, one=nn.Linear(D, P), sigma=nn.Parameter(torch.full((P,), 0.01)))
    torch.manual_seed(0)
    found = clipped_gradients(model, squared, (x := torch.randn(B, D)), (y := torch.randn(B)), 0.5)
    assert found.norms.isfinite().all()
    assert x.shape == (B, D)
    assert y.shape == (B,)


def test_a_counter_declared_data_independent_counts_once():
    def forward(n, x):
        n.steps.add_(1)
        return n.one(x)

    model = Net(forward, one=nn.Linear(D, P), steps=nn.Buffer(torch.zeros(())))
    for k in range(3):
        clipped_gradients(model, squared, torch.randn(B, D), torch.randn(B), 1.0, data_independent_buffers=["steps"])
        assert model.steps == k + 1


def test_an_unused_layer_does_not_cost_a_proof_at_every_step():
    calls = []

    def forward(n, x):
        calls.append(0)
        n.two(n.one(x))
        return n.one(x)

    model, loss = Net(forward, **layers()), lambda o, t: squared(o, t)  # noqa: PLW0108 - an object of its own
    for _ in range(3):
        calls.clear()
        clipped_gradients(model, loss, torch.randn(B, D), torch.randn(B), 1.0)
    assert len(calls) == 1


def test_a_lambda_made_anew_is_the_same_loss():
    calls = []

    def forward(n, x):
        calls.append(0)
        return n.one(x)

    model = Net(forward, one=nn.Linear(D, P))
    for _ in range(3):
        calls.clear()
        clipped_gradients(model, lambda o, t: squared(o, t), torch.randn(B, D), torch.randn(B), 1.0)  # noqa: PLW0108
    assert len(calls) == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_a_parameter_expanded_to_several_rows_per_example(rows):
    def forward(n, x):
        return n.one(x + n.p.expand(rows * len(x), 1, D).unflatten(0, (len(x), rows)).sum(1))

    model = Net(forward, one=nn.Linear(D, P), p=param(1, 1, D))
    assert_taken(model, torch.randn(B, T, D))


@pytest.mark.parametrize("heads", [B, 2 * B, 3])
def test_a_parameter_expanded_for_something_else(heads):
    model = Net(lambda n, x: n.one(x + n.p.expand(heads, 1, D).square().sum(0)), one=nn.Linear(D, P), p=param(1, 1, D))
    assert_taken(model, torch.randn(B, T, D))


def assert_taken(model, x):
    targets = torch.randn(len(x))
    found = clipped_gradients(model, squared, x, targets, 0.5)
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.5), rtol=2e-5)


def test_bert_without_token_types():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertModel(config)
    inputs = {"input_ids": torch.randint(20, (B, 5)), "attention_mask": torch.ones(B, 5, dtype=torch.long)}
    inputs["attention_mask"][0, 3:] = 0
    loss = lambda outputs, targets: squared(outputs.last_hidden_state, targets)  # noqa: E731
    assert_same(
        clipped_gradients(model, loss, inputs, (y := torch.randn(B)), 0.5),
        oracle.clipped_gradients(model, loss, inputs, y, 0.5),
        rtol=1e-4,
    )


def test_one_example_with_a_shared_table():
    model = Net(lambda n, x, table: n.one(x + table), one=nn.Linear(D, P))
    inputs, targets = (torch.randn(1, T, D), torch.randn(T, D)), torch.randn(1)
    found = clipped_gradients(model, squared, inputs, targets, 0.5)
    assert_same(found, oracle.clipped_gradients(model, squared, inputs, targets, 0.5), rtol=2e-5)


def test_inputs_in_a_mapping():
    from collections import UserDict

    model, x, targets = Net(lambda n, x: n.one(x), one=nn.Linear(D, P)), torch.randn(B, D), torch.randn(B)
    found = clipped_gradients(model, squared, UserDict(x=x), targets, 0.5)
    assert_same(found, oracle.clipped_gradients(model, squared, {"x": x}, targets, 0.5), rtol=2e-5)


def test_autocast_remembers_no_perturbed_parameters():
    model, x = nn.Linear(D, P), torch.randn(B, D)
    expected = F.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        clipped_gradients(model, squared, x, torch.randn(B), 1.0)
        assert torch.equal(model(x), expected)


# What shows no gradient at first


def gated(turned):
    """A branch that data switch on; with as many positions as examples, sizes do not show the owners of its rows."""

    def forward(n, x, gate):
        branch = n.branch(x.transpose(0, 1)).transpose(0, 1) if turned else n.branch(x)
        return n.out(x + gate.view(-1, 1, 1) * branch)

    torch.manual_seed(0)
    return Net(forward, branch=nn.Linear(D, D), out=nn.Linear(D, P))


def steps(model, gates, shape=(B, B, D)):
    """Clip a batch for each gate; return the number of proofs after each."""
    engine, proofs = Engine(model), []
    for gate in gates:
        inputs, targets = (torch.randn(shape), gate * torch.tensor([0.0, 1.0, 0.0, 2.0])), torch.randn(B)
        found = engine.clipped(lambda batch: squared(model(*batch[0]), batch[1]), (inputs, targets), 0.5)
        assert_same(found, oracle.clipped_gradients(model, squared, inputs, targets, 0.5), rtol=2e-5)
        proofs.append(engine.proofs)
    return proofs


@pytest.mark.parametrize("turned", [False, True])
def test_a_branch_that_data_switch_on(turned):
    assert steps(gated(turned), (0, 0, 0, 1, 1, 1)) == [1, 2, 2, 3, 4, 4]


def test_experts_that_drop_what_exceeds_their_capacity():
    """An expert takes 6 rows of a batch: whose row is dropped depends on the others, in batches that exceed it."""

    def forward(n, x):
        flat = x.reshape(-1, D)
        chosen = F.one_hot((flat @ n.plane > 0).long(), 2)
        fits = (chosen * (chosen.cumsum(0) <= 6)).to(flat.dtype)
        return (fits[:, :1] * n.one(flat) + fits[:, 1:] * n.two(flat)).view(*x.shape[:2], P)

    model = Net(forward, plane=torch.eye(D)[0], one=nn.Linear(D, P), two=nn.Linear(D, P))
    engine, x, targets = Engine(model), torch.randn(B, 2, D), torch.randn(B)

    def clipped(first):
        x[..., 0] = torch.tensor(first).view(B, 2)
        return engine.clipped(lambda pair: squared(model(pair[0]), pair[1]), (x, targets), 0.5)

    with pytest.warns(UserWarning, match=r"every step.*cumsum of a tensor of shape \[8, 2\] counts over several"):
        found = [clipped([3.0, -3.0] * 4) for _ in range(6)]
    assert_same(found[-1], oracle.clipped_gradients(model, squared, x, targets, 0.5), rtol=1e-4)
    assert engine.proofs == 6
    with pytest.raises(Refusal, match="examples mix"):
        clipped([3.0] * 7 + [-3.0])


def test_a_branch_that_mixes_and_that_data_switch_on():
    model = Net(
        lambda n, x, gate: n.out(x) + gate[:, None] * n.branch(x).roll(1, 0),
        branch=nn.Linear(D, P),
        out=nn.Linear(D, P),
    )
    assert steps(model, (0, 0, 0), (B, D)) == [1, 2, 2]
    with pytest.raises(Refusal, match="examples mix"):
        steps(model, (0, 0, 0, 1), (B, D))


def test_a_branch_that_data_switch_on_and_off_is_proven_with_a_warning(monkeypatch):
    """As if no proof ever saw a gradient there."""
    monkeypatch.setattr("qclip.engine.driver._WAKES", 1)
    with pytest.warns(UserWarning, match=r"proven at every step.* gradient at .*linear with branch"):
        steps(gated(turned=False), (0, 0, 1))


def test_what_no_batch_can_prove_is_proven_at_every_step_with_a_warning():
    model = nn.Linear(D, P)
    engine = Engine(model)

    def clipped():
        batch = torch.randn(B, D), torch.full((B,), torch.nan)
        engine.clipped(lambda batch: squared(model(batch[0]), batch[1]), batch, 0.5)
        return engine.proofs

    assert [clipped(), clipped()] == [1, 2]
    with pytest.warns(UserWarning, match=r"proven at every step.* no example has a finite gradient"):
        assert clipped() == 3
