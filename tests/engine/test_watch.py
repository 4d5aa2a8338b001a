"""The ordinary loop: the user calls the model, and the engine makes the same clipped sum of the loss of its outputs."""

import collections
from dataclasses import dataclass, replace
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.cases import MODELS, STRUCTURE, WIRING, Net
from engine.cases.case import D, P, param, squared
from engine.compare import assert_same, distance, quiet
from qclip.engine import Engine, Refusal, clipped_gradients, oracle
from qclip.engine.driver import call
from shards import every

pytestmark = quiet

B = 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def mlp(*middle, out=3):
    return nn.Sequential(nn.Linear(D, P), nn.Tanh(), *middle, nn.Linear(P, out))


def batch():
    return torch.randn(B, D), torch.randn(B)


def watching(model, batch_size=B, **options):
    engine = Engine(model, **options)
    engine.watch(lambda: batch_size)
    return engine


@pytest.mark.parametrize("case", every(3, STRUCTURE + WIRING + MODELS[:1], name=attrgetter("id")))
def test_both_doors_give_the_same(case):
    """A row that one door may refuse, the other may."""
    problem = case.build()
    engine = watching(problem.model)
    try:
        torch.manual_seed(1)
        outputs = call(problem.model, problem.inputs)
        found = engine.finish(outputs, problem.targets, problem.loss, 0.7)
    except Refusal:
        if case.may_refuse:
            pytest.skip("refused")
        raise
    torch.manual_seed(1)
    expected = clipped_gradients(problem.model, problem.loss, problem.inputs, problem.targets, 0.7)
    assert_same(found, expected, rtol=1e-6)


# What is passed as outputs


Pair = collections.namedtuple("Pair", "logits hidden")


@dataclass
class Record:
    logits: Tensor
    hidden: Tensor


@pytest.mark.parametrize(
    ("pack", "pick"),
    [
        (lambda out, h: out, lambda outputs: outputs),
        (lambda out, h: (out, h), lambda outputs: outputs[0]),
        (lambda out, h: [h, {"out": out}], lambda outputs: outputs[1]["out"]),
        (lambda out, h: {"logits": out, "hidden": h}, lambda outputs: outputs["logits"]),
        (Pair, lambda outputs: outputs.logits),
        (Record, lambda outputs: outputs.logits),
    ],
    ids=["tensor", "tuple", "nest", "dict", "named tuple", "dataclass"],
)
@pytest.mark.parametrize("whole", [False, True], ids=["part", "whole"])
def test_outputs_as_they_are_or_a_part_of_them(pack, pick, whole):
    def forward(n, x):
        h = n.one(x).tanh()
        return pack(n.two(h), h)

    model, (x, targets) = Net(forward, one=nn.Linear(D, P), two=nn.Linear(P, 3)), batch()
    picked = lambda outputs, targets: squared(pick(outputs), targets)  # noqa: E731
    engine = watching(model)
    outputs = model(x)
    found = engine.finish(outputs if whole else pick(outputs), targets, picked if whole else squared, 0.5)
    assert_same(found, oracle.clipped_gradients(model, picked, x, targets, 0.5), rtol=2e-5)


def test_outputs_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model, words, targets = transformers.GPT2LMHeadModel(config).train(), torch.randint(11, (B, 3)), torch.randn(B)
    expected = clipped_gradients(
        model, lambda outputs, targets: squared(outputs.logits, targets), {"input_ids": words}, targets, 0.5
    )
    engine = watching(model)
    for pick in (lambda outputs: outputs.logits, lambda outputs: outputs["logits"], lambda outputs: outputs[0]):
        found = engine.finish(pick(model(input_ids=words)), targets, squared, 0.5)
        assert_same(found, expected, rtol=2e-5)


def test_an_object_as_a_whole():
    model, (x, targets) = Net(lambda n, x: SimpleNamespace(logits=n.one(x)), one=nn.Linear(D, P)), batch()
    loss = lambda outputs, targets: squared(outputs.logits, targets)  # noqa: E731
    engine = watching(model)
    found = engine.finish(model(x), targets, loss, 0.5)
    assert_same(found, oracle.clipped_gradients(model, loss, x, targets, 0.5), rtol=2e-5)


CHANGES = {
    "squeezed": lambda outputs: outputs[:, :1].squeeze(1),
    "sliced": lambda outputs: outputs[:, 1:],
    "one column": lambda outputs: outputs[:, 0],
    "transposed": lambda outputs: outputs.unsqueeze(-1).transpose(1, 2),
    "viewed": lambda outputs: outputs.view(len(outputs), 3, 1),
    "cast": lambda outputs: outputs.double(),
}


def any_shape(outputs, targets):
    flat = outputs.reshape(len(outputs), -1).float()
    return (flat - targets[:, None]).square().sum(1)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("batch_size", [3, 4], ids=["as many as columns", "more"])
def test_outputs_are_changed_in_the_loss(change, batch_size):
    """What is computed between model and loss could mix examples unseen: it belongs into the loss."""
    model, x, targets = mlp(), torch.randn(batch_size, D), torch.randn(batch_size)
    engine = watching(model, batch_size)
    with pytest.raises(Refusal, match="what the model just returned, or a part of it; put what is computed"):
        engine.finish(change(model(x)), targets, any_shape, 0.5)
    loss = lambda outputs, targets: any_shape(change(outputs), targets)  # noqa: E731
    found = engine.finish(model(x), targets, loss, 0.5)
    assert_same(found, oracle.clipped_gradients(model, loss, x, targets, 0.5), rtol=2e-5)


OVERWRITTEN = {
    "centred": lambda outputs: outputs.sub_(outputs.mean(0)),
    "scaled": lambda outputs: outputs.div_(outputs.detach().abs().max()),
    "a row": lambda outputs: outputs[0].zero_(),
    "without gradient": lambda outputs: outputs.detach().sub_(20 * outputs.detach().mean(0)),
}


@pytest.mark.parametrize("change", OVERWRITTEN.values(), ids=OVERWRITTEN)
@pytest.mark.parametrize("pack", [lambda out: out, lambda out: {"logits": out}], ids=["tensor", "dict"])
def test_outputs_overwritten_before_the_loss(change, pack):
    """The proof runs the model again, without what was done to its outputs afterwards."""
    model, (x, targets) = Net(lambda n, x: pack(n.one(x).tanh()), one=nn.Linear(D, P)), batch()
    engine = watching(model)
    outputs = model(x)
    (out,) = outputs.values() if isinstance(outputs, dict) else [outputs]
    change(out)
    with pytest.raises(Refusal, match="changed in place after the model returned them; put what changes them into"):
        engine.finish(out, targets, squared, 0.5)
    returned = model(x)
    engine.finish(returned if out is outputs else returned["logits"], targets, squared, 0.5)


def test_groups_thresholds_and_masks():
    model, (x, targets) = mlp(), batch()
    mask = torch.tensor([True, False, True, True])
    engine = watching(model, groups={"biases": "*bias", "rest": "*"})
    found = engine.finish(model(x), targets, squared, {"biases": 0.1, "rest": 0.4}, mask=mask)
    expected = oracle.clipped_gradients(
        model, squared, x, targets, [0.1, 0.4], groups={"biases": "*bias", "rest": "*"}, mask=mask
    )
    assert_same(found, expected, rtol=2e-5)
    assert found.norms[1] == 0


# Other forward passes


def test_evaluation_between_forward_pass_and_loss():
    model, (x, targets) = mlp(nn.Dropout(0.5)), batch()
    engine = watching(model)
    torch.manual_seed(1)
    outputs = model(x)
    model.eval()
    with torch.no_grad():
        model(torch.randn(9, D))
    model.train()
    found = engine.finish(outputs, targets, squared, 0.5)
    torch.manual_seed(1)
    expected = oracle.clipped_gradients(model, squared, x, targets, 0.5, shared_forward=True)
    assert_same(found, expected, rtol=2e-5)


def test_evaluation_between_steps():
    model, (x, targets) = mlp(), batch()
    engine = watching(model)
    expected = clipped_gradients(model, squared, x, targets, 0.5)
    for _ in range(3):
        assert_same(engine.finish(model(x), targets, squared, 0.5), expected, rtol=1e-6)
        model.eval()
        with torch.inference_mode():
            model(torch.randn(7, D))
        model.train()


def test_the_last_of_two_forward_passes():
    model, (x, targets) = mlp(), batch()
    engine = watching(model)
    model(torch.randn(B, D))
    found = engine.finish(model(x), targets, squared, 0.5)
    assert_same(found, clipped_gradients(model, squared, x, targets, 0.5), rtol=1e-6)


def test_stale_outputs_are_refused_and_the_next_step_works():
    model, (x, targets) = mlp(), batch()
    engine = watching(model)
    stale = model(torch.randn(B, D))
    model(x)
    with pytest.raises(Refusal, match="what the model just returned"):
        engine.finish(stale, targets, squared, 0.5)
    found = engine.finish(model(x), targets, squared, 0.5)
    assert_same(found, clipped_gradients(model, squared, x, targets, 0.5), rtol=1e-6)


def test_outputs_of_before_an_update_are_refused():
    """After a step, the old graph would give gradients of another model."""
    model, (x, targets) = mlp(), batch()
    engine = watching(model)
    outputs = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    with pytest.raises(Refusal, match="changed"):
        engine.finish(outputs, targets, squared, 0.5)


def check_or_refuse(model):
    """The answer is the oracle's, if there is one; and the next model is not disturbed."""
    x, targets = batch()
    engine = watching(model)
    try:
        found = engine.finish(model(x), targets, squared, 0.5)
    except Refusal:
        assert not torch.overrides._get_current_function_mode_stack()
        return
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.5), rtol=2e-5)


def test_a_model_that_calls_itself():
    """The forward pass ends with the outermost call."""

    def forward(n, x, depth=1):
        h = n.one(x).tanh()
        return n.two(n(h, depth - 1)) if depth else h

    check_or_refuse(Net(forward, one=nn.Linear(D, D), two=nn.Linear(D, D)))


def test_a_model_that_is_its_own_teacher():
    def forward(n, x, teach=True):
        if not teach:
            return n.one(x)
        with torch.no_grad():
            target = n(x.flip(-1), teach=False)
        return n.one(x) * target

    check_or_refuse(Net(forward, one=nn.Linear(D, P)))


def test_keyword_arguments():
    model, (x, targets) = Net(lambda n, x, *, scale: n.one(x) * scale, one=nn.Linear(D, P)), batch()
    scale = torch.rand(B, 1)
    engine = watching(model)
    found = engine.finish(model(x, scale=scale), targets, squared, 0.5)
    assert_same(found, oracle.clipped_gradients(model, squared, {"x": x, "scale": scale}, targets, 0.5), rtol=2e-5)


def test_inputs_that_need_gradients():
    """What comes from another model carries its graph along."""
    before, model, (x, targets) = nn.Linear(D, D), mlp(), batch()
    engine = watching(model)
    found = engine.finish(model(before(x)), targets, squared, 0.5)
    assert_same(found, clipped_gradients(model, squared, before(x).detach(), targets, 0.5), rtol=1e-6)
    assert before.weight.grad is None


# How the model runs


def test_dropout():
    """The same masks in norms and sums, with a proof and without."""
    model, (x, targets) = mlp(nn.Dropout(0.5), nn.PReLU()), batch()
    engine = watching(model)
    for seed in (1, 2):
        torch.manual_seed(seed)
        found = engine.finish(model(x), targets, squared, 0.5)
        torch.manual_seed(seed)
        expected = oracle.clipped_gradients(model, squared, x, targets, 0.5, shared_forward=True)
        assert_same(found, expected, rtol=2e-5)


def test_random_numbers_drawn_between_forward_pass_and_loss():
    model, (x, targets) = mlp(nn.Dropout(0.5)), batch()
    engine = watching(model)
    torch.manual_seed(1)
    outputs = model(x)
    torch.rand(17)
    state = torch.get_rng_state()
    found = engine.finish(outputs, targets, squared, 0.5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    expected = oracle.clipped_gradients(model, squared, x, targets, 0.5, shared_forward=True)
    assert_same(found, expected, rtol=2e-5)


@pytest.mark.parametrize("loss_inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.parametrize("middle", [nn.Identity, nn.PReLU], ids=["rules", "fallback"])
def test_autocast(loss_inside, middle):
    """Whether the loss is taken under autocast as well, as torch advises, or after it."""
    model, (x, targets) = mlp(middle()), batch()
    in_float32 = lambda outputs, targets: squared(outputs.float(), targets)  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        expected = oracle.clipped_gradients(model, in_float32, x, targets, 0.5)
    engine = watching(model)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x)
            if loss_inside:
                found = engine.finish(outputs, targets, in_float32, 0.5)
        if not loss_inside:
            found = engine.finish(outputs, targets, in_float32, 0.5)
        torch.testing.assert_close(found.norms, expected.norms, rtol=0.02, atol=1e-6)
        assert distance(found, expected) <= 0.02 * expected.l2_bound
        assert found.norms.dtype == torch.float32


def test_with_and_without_autocast_in_turn():
    model, (x, targets) = mlp(), batch()
    engine = watching(model)
    plain = clipped_gradients(model, squared, x, targets, 0.5)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            rough = engine.finish(model(x), targets, lambda o, t: squared(o.float(), t), 0.5)
        assert_same(engine.finish(model(x), targets, squared, 0.5), plain, rtol=1e-6)
        assert distance(rough, plain) <= 0.02 * plain.l2_bound


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradient_checkpointing(dropout):
    block = nn.Sequential(nn.Linear(D, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, D))
    model = Net(lambda n, x: n.out(checkpoint(n.block, x, use_reentrant=False)), block=block, out=nn.Linear(D, P))
    x, targets = batch()
    engine = watching(model)
    for seed in (1, 2):
        torch.manual_seed(seed)
        found = engine.finish(model(x), targets, squared, 0.5)
        torch.manual_seed(seed)
        expected = oracle.clipped_gradients(model, squared, x, targets, 0.5, shared_forward=True)
        assert_same(found, expected, rtol=2e-5)


def test_raw_parameters_and_fallbacks():
    model = Net(lambda n, x: torch.lerp(n.one(x), n.one(x).square(), n.gate), one=nn.Linear(D, P), gate=param(P))
    x, targets = batch()
    engine = watching(model)
    found = engine.finish(model(x), targets, squared, 0.5)
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.5), rtol=2e-5)


def test_training_by_both_doors_is_the_same():
    doors = []
    for ordinary in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        engine = watching(model)
        for _ in range(5):
            x, targets = batch()
            if ordinary:
                result = engine.finish(model(x), targets, squared, 0.5)
            else:
                result = clipped_gradients(model, squared, x, targets, 0.5)
            for name, p in model.named_parameters():
                p.grad = result.sums[name]
            optimizer.step()
            optimizer.zero_grad()
        doors.append(model.state_dict())
    for name, value in doors[0].items():
        torch.testing.assert_close(doors[1][name], value)


# How many examples


def test_batch_sizes_as_they_come():
    model, sizes = mlp(), iter([4, 2, None, 1, 4])
    engine = Engine(model)
    engine.watch(lambda: next(sizes))
    for size in (4, 2):
        x, targets = torch.randn(size, D), torch.randn(size)
        found = engine.finish(model(x), targets, squared, 0.5)
        assert_same(found, clipped(model, x, targets), rtol=2e-5)
    model(torch.randn(3, D))  # nobody's batch
    for size in (1, 4):
        x, targets = torch.randn(size, D), torch.randn(size)
        found = engine.finish(model(x), targets, squared, 0.5)
        assert_same(found, clipped(model, x, targets), rtol=2e-5)


def clipped(model, x, targets):
    """The oracle, which the model's hooks do not see."""
    with_hooks = model._forward_pre_hooks.copy(), model._forward_hooks.copy()
    model._forward_pre_hooks.clear()
    model._forward_hooks.clear()
    try:
        return oracle.clipped_gradients(model, squared, x, targets, 0.5)
    finally:
        model._forward_pre_hooks.update(with_hooks[0])
        model._forward_hooks.update(with_hooks[1])


def test_a_batch_size_that_is_not_the_losses():
    model, (x, targets) = mlp(), batch()
    engine = watching(model, batch_size=B + 1)
    with pytest.raises(Refusal, match=r"must be \[5\]"):
        engine.finish(model(x), targets, squared, 0.5)


def test_non_finite_examples():
    model, (x, targets) = mlp(), batch()
    x[1] = torch.nan
    engine = watching(model)
    for _ in range(2):
        found = engine.finish(model(x), targets, squared, 0.5)
        assert found.norms[1] == torch.inf
        expected = clipped_gradients(model, squared, x, targets, 0.5, mask=torch.arange(B) != 1)
        shown = {"norms": found.norms.where(expected.mask, 0)}
        shown["group_norms"] = found.group_norms.where(expected.mask[:, None], 0)
        assert_same(replace(found, **shown, mask=expected.mask), expected, rtol=2e-5)


def test_gradients_flow_into_nothing():
    """The graph is used up, no `.grad` is written, and the outputs stay readable."""
    model, (x, targets) = mlp(), batch()
    engine = watching(model)
    outputs = model(x)
    engine.finish(outputs, targets, squared, 0.5)
    assert all(p.grad is None for p in model.parameters())
    assert F.softmax(outputs, 1).detach().shape == (B, 3)
    with pytest.raises(RuntimeError, match="second time"):
        outputs.sum().backward()
