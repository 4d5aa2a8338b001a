"""Every refusal of the engine: what it names, and what it says to do instead. Nothing is ever left half done.

Errors of `groups`, `clip_norm`, `mask` and of batches are also in test_groups.py and test_batch.py, one by one.
"""

import copy
import itertools
import math
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from engine.cases import Net
from engine.cases.case import D, P, V, frozen, ids, param, squared
from engine.cases.hidden import Product
from engine.compare import assert_same
from qclip.engine import Dense, Engine, Outer, Refusal, clipped_gradients, explain, oracle, register_rule
from qclip.engine.capture.checks import running_state_remedy
from qclip.engine.gradients.rules import unregister_rule
from qclip.engine.proof.perturbation import perturbed

B = 4


@pytest.fixture(autouse=True)
def _seed():
    seed(0)


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 models may draw from the global generator


def inputs(*shape, batch_size=B):
    return torch.randn(batch_size, *(shape or (D,)))


def says(refusal, *parts):
    """Whether the message has all of the parts."""
    message = str(refusal.value)
    assert all(part in message for part in parts), f"{parts} are not all in: {message}"


def refuse(model, *parts, x=None, targets=None, loss=squared, **options):
    """The call is refused with all of the parts in the message, and nothing is left behind."""
    x = inputs() if x is None else x
    targets = torch.randn(B) if targets is None else targets
    with pytest.raises(Refusal) as refusal:
        clipped_gradients(model, loss, x, targets, 1.0, **options)
    says(refusal, *parts)
    assert all(p.grad is None for p in model.parameters())
    assert not torch.overrides._get_current_function_mode_stack()
    return str(refusal.value)


def outcome(function):
    """What the function returns, or the message of its refusal."""
    try:
        return function(), ""
    except Refusal as refusal:
        return None, str(refusal)


def accept(model, x, *, shared_forward=False, loss=squared, **options):
    """The call is answered, and the answer is the oracle's on a copy of the model."""
    targets, twin = torch.randn(len(x)), copy.deepcopy(model)
    seed(1)
    expected = oracle.clipped_gradients(twin, loss, x, targets, 1.0, shared_forward=shared_forward)
    seed(1)
    assert_same(clipped_gradients(model, loss, x, targets, 1.0, **options), expected, rtol=2e-5)


# Models as a whole


def test_data_parallel():
    refuse(nn.DataParallel(nn.Linear(D, P)), "DataParallel", "pass the module inside it (model.module)")


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel():
    model = nn.parallel.DistributedDataParallel(nn.Linear(D, P))
    refuse(model, "DistributedDataParallel", "raw gradients", "model.module")
    accept(model.module, inputs())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_fully_sharded(part):
    """No module is inside such a one: `fully_shard` changes its class."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(D, P), nn.Linear(P, 2))
    fully_shard(model[1] if part else model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(Refusal) as refusal:
        Engine(model)
    says(refusal, "'1' (FSDPLinear)" if part else "the model (FSDPSequential)", "sharded", "without fully_shard")
    assert "model.module" not in str(refusal.value)


@pytest.mark.usefixtures("process_group")
def test_replicated():
    from torch.distributed._composable.replicate import replicate

    with pytest.raises(Refusal) as refusal:
        Engine(replicate(nn.Linear(D, P)))
    says(refusal, "the model (DDPLinear)", "raw gradients", "without replicate")


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
def test_fully_sharded_by_a_wrapper():
    """The module inside holds one flat parameter."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(D, P), device_id=torch.device("cpu"))
    with pytest.raises(Refusal) as refusal:
        Engine(model)
    says(refusal, "FullyShardedDataParallel", "without FullyShardedDataParallel")
    assert "model.module" not in str(refusal.value)


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def test_scripted_module():
    refuse(scripted(nn.Linear(D, P)), "ScriptModule", "pass the module it was scripted from")


def test_scripted_part():
    """It hides its parameters, so they are clipped by running the whole model again, or refused."""
    accept(nn.Sequential(scripted(nn.Linear(D, P)), nn.Linear(P, 2)), inputs())


@pytest.mark.parametrize("watched", [False, True])
def test_compiled_model_is_unwrapped(watched):
    model = nn.Sequential(nn.Linear(D, P), nn.Tanh(), nn.Linear(P, 2))
    x, targets = inputs(), torch.randn(B)
    expected = clipped_gradients(model, squared, x, targets, 1.0)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    if watched:
        engine = Engine(compiled)
        engine.watch(lambda: B)
        found = engine.finish(engine.model(x), targets, squared, 1.0)
    else:
        found = clipped_gradients(compiled, squared, x, targets, 1.0)
    assert_same(found, expected, rtol=1e-6)


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
def test_compiled_model_called_in_an_ordinary_loop(in_place, called_before):
    """It works, or the refusal says that it is the compilation."""
    model = nn.Sequential(nn.Linear(D, P), nn.Tanh(), nn.Linear(P, 2))
    x, targets = inputs(), torch.randn(B)
    expected = clipped_gradients(model, squared, x, targets, 1.0)
    if in_place:
        model.compile(backend="eager")
    compiled = model if in_place else torch.compile(model, backend="eager")
    if called_before:
        compiled(x)

    def step():
        engine = Engine(compiled)
        engine.watch(lambda: B)
        return engine.finish(compiled(x), targets, squared, 1.0)

    found, message = outcome(step)
    if found is None:
        assert "compil" in message
    else:
        assert_same(found, expected, rtol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_part_runs_uncompiled(in_place):
    model = nn.Sequential(nn.Linear(D, P), nn.Tanh(), nn.Linear(P, 2))
    x, targets = inputs(), torch.randn(B)
    expected = clipped_gradients(model, squared, x, targets, 1.0)
    if in_place:
        model[0].compile(backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    model(x)
    found = clipped_gradients(model, squared, x, targets, 1.0)
    assert torch.equal(found.norms, expected.norms)
    for one, other in zip(found.sums.values(), expected.sums.values(), strict=True):
        assert torch.equal(one, other)


def test_compiled_loss_runs_uncompiled():
    model, x, targets = nn.Linear(D, P), inputs(), torch.randn(B)
    found = clipped_gradients(model, torch.compile(squared, backend="eager"), x, targets, 1.0)
    assert_same(found, clipped_gradients(model, squared, x, targets, 1.0), rtol=1e-6)


# Parameters


def test_no_trainable_parameters():
    refuse(frozen(nn.Linear(D, P)), "no trainable parameters", "requires_grad=True")


def test_no_parameters():
    refuse(nn.Tanh(), "no trainable parameters")


def test_float16():
    model = nn.Sequential(nn.Linear(D, P), nn.Linear(P, 2).half())
    refuse(model, "parameter '1.weight' is float16", "bfloat16 or float32")


def test_autocast_to_float16():
    model = nn.Sequential(nn.Linear(D, P), nn.Linear(P, 2))
    with torch.autocast("cpu", torch.float16):
        refuse(model, "torch.nn.functional.linear with 0.bias, 0.weight computes in float16", "autocast to bfloat16")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_kinds_of_numbers(dtype):
    model = Net(lambda n, x: x * n.p.abs(), p=nn.Parameter(torch.randn(D).to(dtype)))
    refuse(model, "parameter 'p' is", str(dtype), "real floating-point")


def test_frozen_parameters_of_other_kinds_do_not_matter():
    model = Net(lambda n, x: n.one(x) + n.steps, one=nn.Linear(D, P), steps=nn.Parameter(torch.tensor(3), False))
    accept(model, inputs())


def test_lazy_parameters():
    model = nn.Sequential(nn.LazyLinear(P))
    refuse(model, "parameter '0.weight' has no shape yet", "run one batch")
    model(inputs())
    accept(model, inputs())


@pytest.mark.parametrize("change", ["frozen", "unfrozen", "added"])
def test_trainable_parameters_changed_since(change):
    model = Net(lambda n, x: n.two(n.one(x)), one=nn.Linear(D, P), two=nn.Linear(P, 2))
    model.one.bias.requires_grad_(False)
    engine = Engine(model)
    if change == "added":
        model.extra = param(3)
    else:
        (model.two.bias if change == "frozen" else model.one.bias).requires_grad_(change != "frozen")
    with pytest.raises(Refusal) as refusal:
        engine.clipped(lambda batch: squared(model(batch[0]), batch[1]), (inputs(), torch.randn(B)), 1.0)
    says(refusal, "trainable parameters has changed", "make a new one")


# State


class _BatchNormAct(nn.BatchNorm2d):
    """As in libraries of image models: torch's own layer, with something behind it."""

    def forward(self, x):
        return super().forward(x).relu()


RUNNING = {
    "1d": (lambda: nn.BatchNorm1d(D), (D,), "GroupNorm"),
    "2d": (lambda: nn.BatchNorm2d(D), (D, 3, 4), "GroupNorm"),
    "3d": (lambda: nn.BatchNorm3d(D), (D, 2, 3, 4), "GroupNorm"),
    "cumulative": (lambda: nn.BatchNorm1d(D, momentum=None), (D,), "GroupNorm"),
    "subclass": (lambda: _BatchNormAct(D), (D, 3, 4), "GroupNorm"),
    "instance-1d": (lambda: nn.InstanceNorm1d(D, track_running_stats=True), (D, 7), "track_running_stats=False"),
    "instance-2d": (lambda: nn.InstanceNorm2d(D, track_running_stats=True), (D, 3, 4), "track_running_stats=False"),
    "observer": (torch.ao.quantization.FakeQuantize, (D,), "after private training"),
}


@pytest.mark.parametrize("declared", [(), ("*",), ("norm.num_batches_tracked",)], ids=["plain", "all", "counter"])
@pytest.mark.parametrize(("make", "shape", "remedy"), RUNNING.values(), ids=list(RUNNING))
def test_running_statistics(make, shape, remedy, declared):
    """The refusal names the layer and what to use instead; no declaration makes its statistics independent of data."""
    norm = make()
    model = Net(lambda n, x: n.one(n.norm(x).flatten(1)), norm=norm, one=nn.Linear(math.prod(shape), P))
    message = refuse(
        model, f"'norm' ({type(norm).__name__})", remedy, x=inputs(*shape), data_independent_buffers=declared
    )
    assert "data_independent" not in message
    assert "num_batches_tracked" not in message


def test_synchronised_batch_norm():
    """It runs on a GPU only, in training mode; its refusal is the same."""
    assert "GroupNorm" in running_state_remedy(nn.SyncBatchNorm(D), "running_mean")
    assert "GroupNorm" in running_state_remedy(nn.LazyBatchNorm2d(), "num_batches_tracked")
    assert running_state_remedy(nn.BatchNorm1d(D), "weight") is None


def test_batch_norm_as_the_model():
    assert "data_independent" not in refuse(nn.BatchNorm1d(D), "the model (BatchNorm1d)", "GroupNorm")


def test_batch_norm_with_fixed_statistics():
    """What the refusal offers: evaluation mode for this layer alone."""
    model = nn.Sequential(nn.Linear(D, P), nn.BatchNorm1d(P))
    message = refuse(model, "'1' (BatchNorm1d)", "without noise", "call eval() on it after every train()")
    assert "data_independent" not in message
    model.train()
    model[1].eval()
    accept(model, inputs())


def test_batch_norm_without_running_statistics():
    model = nn.Sequential(nn.Linear(D, P), nn.BatchNorm1d(P, track_running_stats=False))
    refuse(model, "examples mix", "BatchNorm by GroupNorm")


def test_batch_norm_without_anything_to_train():
    model = nn.Sequential(nn.BatchNorm1d(D, track_running_stats=False, affine=False), nn.Linear(D, P))
    refuse(model, "examples mix", "at or before torch.nn.functional.linear with 1.bias, 1.weight")


@pytest.mark.parametrize("batch_size", [1, B])
def test_running_statistics_of_a_batch_norm_of_ones_own(batch_size):
    """torch's batch_norm moves them without counting up their version."""

    def forward(n, x):
        h = n.conv(x)
        F.batch_norm(h.detach(), n.mean, n.variance, training=True)
        return F.batch_norm(h, n.zeros, n.ones)

    buffers = {"mean": torch.zeros(P), "variance": torch.ones(P), "zeros": torch.zeros(P), "ones": torch.ones(P)}
    model = Net(forward, conv=nn.Conv2d(3, P, 2), **{name: nn.Buffer(x) for name, x in buffers.items()})
    x = inputs(3, 4, 4, batch_size=batch_size)
    refuse(model, "'mean'", "changed in the forward pass", x=x, targets=torch.randn(batch_size))


def test_batch_norm_of_one_example():
    """One example mixes with nobody, but its statistics stay in the model."""
    model = Net(
        lambda n, x: F.batch_norm(n.conv(x), n.mean, n.variance, training=True),
        conv=nn.Conv2d(3, P, 2),
        mean=nn.Buffer(torch.zeros(P)),
        variance=nn.Buffer(torch.ones(P)),
    )
    refuse(model, "'mean'", "changed in the forward pass", x=inputs(3, 4, 4, batch_size=1), targets=torch.randn(1))


def test_instance_norm_with_running_statistics():
    model = nn.Sequential(nn.InstanceNorm1d(D, affine=True, track_running_stats=True))
    refuse(model, "'0' (InstanceNorm1d)", "track_running_stats=False", x=inputs(D, 7))
    accept(model.eval(), inputs(D, 7))


@pytest.mark.parametrize("declared", [(), ("*weight",)], ids=["plain", "declared"])
@pytest.mark.parametrize("tied", [False, True], ids=["alone", "tied"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embedding_with_max_norm(kind, tied, declared):
    """The rows that a batch looks up are rescaled in place; a layer that shares the table is not to blame."""
    model = Net(lambda n, x: n.head(n.table(x)), head=nn.Linear(D, V), table=kind(V, D, max_norm=0.1))
    if tied:
        model.head.weight = model.table.weight
    message = refuse(
        model, f"'table' ({kind.__name__})", "max_norm=None", x=ids(B, 3), data_independent_buffers=declared
    )
    assert "data_independent" not in message


def counting(forward=None):
    """A model that counts its calls, and how it forwards besides."""

    def count(n, x):
        n.calls.add_(1)
        return n.one(x)

    return Net(forward or count, one=nn.Linear(D, P), calls=nn.Buffer(torch.zeros(())))


def test_buffer_written_in_place():
    refuse(counting(), "'calls' (Net) changed in the forward pass", "data_independent_buffers=['calls']")


def test_buffer_assigned():
    def forward(n, x):
        n.calls = n.calls + x.mean()
        return n.one(x)

    refuse(counting(forward), "'calls' (Net) changed in the forward pass")


def test_buffer_added():
    def forward(n, x):
        n.register_buffer("cache", x.mean())
        return n.one(x)

    refuse(counting(forward), "'cache' (Net) changed in the forward pass")


def test_parameter_written_in_place():
    def forward(n, x):
        n.one.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            n.one.weight.mul_(0.5)
        return n.one(x)

    refuse(counting(forward), "'one.weight' (Linear) changed in the forward pass")


@pytest.mark.parametrize("pattern", ["calls", "c*"])
def test_declared_data_independent(pattern):
    accept(counting(), inputs(), data_independent_buffers=[pattern])


def test_declaring_one_buffer_says_nothing_about_another():
    def forward(n, x):
        n.calls.add_(1)
        n.mean.copy_(x.mean())
        return n.one(x)

    model = counting(forward)
    model.mean = nn.Buffer(torch.zeros(()))
    refuse(model, "'mean' (Net)", data_independent_buffers=["calls"])


def test_a_declared_buffer_moves_once_for_each_call():
    """The proof's own forward passes do not count."""
    model, x, targets = counting(), inputs(), torch.randn(B)
    for step in range(3):
        clipped_gradients(model, squared, x, targets, 1.0, data_independent_buffers=["calls"])
        assert model.calls == step + 1


def test_spectral_norm():
    model = parametrizations.spectral_norm(nn.Linear(D, P))
    refuse(model, "'parametrizations.weight.0._u' (_SpectralNorm)", "data_independent_buffers=")


def test_spectral_norm_declared():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(D, P)), nn.Tanh(), nn.Linear(P, 2))
    power = model[0].parametrizations.weight[0]
    for _ in range(3):  # far from the limit of the power iteration, where each further pass would be another function
        power._u.copy_(F.normalize(torch.randn_like(power._u), dim=0))
        accept(model, inputs(), shared_forward=True, data_independent_buffers=["*._u", "*._v"])


# Paths that are not seen


class _HiddenFromCaptureOnly(torch.autograd.Function):
    """The same, of the sort that vmap understands."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return Product.backward(ctx, grad)


def hidden(function=Product, after=None):
    def forward(n, x):
        h = function.apply(n.one(x), n.w)
        return h if after is None else after(h)

    return Net(forward, one=nn.Linear(D, P), w=param(P, 3))


def one_at_a_time(model, *parts, x=None, **options):
    """The call is answered, exactly, by running one example at a time, and a warning has all of the parts."""
    with pytest.warns(UserWarning, match="examples are run through the model one at a time") as said:
        accept(model, inputs() if x is None else x, **options)
    message = str(said[0].message)
    assert all(part in message for part in parts), f"{parts} are not all in: {message}"


def test_parameter_in_a_custom_autograd_function():
    one_at_a_time(hidden(), "4 forward", "no exact way to clip 'w'", "qclip.register_rule", "freeze the parameter")


def mixing_gradients():
    """Alone, examples have the same losses, but other gradients."""
    return hidden(after=lambda h: h + 0.1 * (h.mean(0) - h.mean(0).detach()))


def test_examples_that_mix_are_not_run_one_at_a_time():
    parts = "no exact way to clip 'one.bias'", "one example at a time failed too", "do not add up to autograd's"
    refuse(mixing_gradients(), *parts)


def test_a_loss_that_fails_alone():
    """It takes a batch of one for no batch: examples run among their copies."""
    one_at_a_time(hidden(), loss=lambda out, targets: squared(out, targets).squeeze(), shared_forward=True)


def test_parameter_in_a_custom_function_that_vmap_understands():
    accept(hidden(_HiddenFromCaptureOnly), inputs())


def test_parameter_in_a_custom_function_with_dropout():
    accept(hidden(_HiddenFromCaptureOnly, after=lambda h: F.dropout(h, 0.5)), inputs(), shared_forward=True)


def test_whole_model_gives_other_losses():
    """Noise drawn with the examples last is other noise by vmap; an example among its copies draws its own column."""
    model = hidden(_HiddenFromCaptureOnly)
    forward = model.function
    model.function = lambda n, x: forward(n, x) + (torch.randn(3, len(x)).T if n.training else 0)
    one_at_a_time(model, "no exact way to clip 'w'", "qclip.register_rule", shared_forward=True)


def test_hidden_parameter_behind_a_site_of_another():
    """Its weight is made from the data."""

    def forward(n, x, factor):
        return F.linear(x, n.v * Product.apply(factor * x.mean(0).expand(P, -1), n.w))

    parts = {"w": param(D, D), "v": param(D)}
    refuse(Net(lambda n, x: forward(n, x, 1.0), **parts), "examples mix")
    one_at_a_time(Net(lambda n, x: forward(n, x, 0.0), **parts), "'w'")


def test_parameters_of_a_custom_function_without_data():
    model = Net(lambda n, x: F.linear(x, n.v * Product.apply(n.u, n.w)), u=param(P, 3), w=param(3, D), v=param(D))
    accept(model, inputs())


def test_hook_on_a_parameter():
    """It would see, and change, a gradient that is nobody's."""
    model = nn.Linear(D, P)
    model.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    refuse(model, "parameter 'weight' has a gradient hook", "remove it")


class _OwnBackward(torch.autograd.Function):
    """Runs its part of the model again and calls backward on it, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


def test_backward_within_backward():
    """No graph leads to the layer inside; its raw gradient would just appear."""
    model = Net(lambda n, x: _OwnBackward.apply(n.one(x), n.two), one=nn.Linear(D, P), two=nn.Linear(P, 2))
    refuse(model, "'two.", "backward()")


def test_reentrant_checkpointing():
    model = Net(lambda n, x: n.two(checkpoint(n.one, n.zero(x), use_reentrant=True)))
    model.zero, model.one, model.two = nn.Linear(D, P), nn.Linear(P, P), nn.Linear(P, 2)
    refuse(model, "use_reentrant=True hides its graph", "use_reentrant=False")


def test_packed_sequences():
    def forward(n, x):
        lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(n.rnn(packed)[0], batch_first=True, total_length=3)[0]

    model = Net(forward, rnn=nn.LSTM(D, P, batch_first=True))
    parts = "torch.lstm with rnn.bias_hh_l0", "packed sequence", "padded ones"
    one_at_a_time(model, *parts, x=inputs(3, D))


def test_a_packed_batch():
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, D) for n in (3, 1, 2, 3)], enforce_sorted=False)
    model = Net(lambda n, x: n.rnn(x)[1][0][-1], rnn=nn.LSTM(D, P))
    refuse(model, "holds a PackedSequence", "pack them inside of the model", x=packed)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("lengths", [(2, 3, 1, 3), (1, 1, 1, 1)])
def test_offsets_of_bags(mode, lengths):
    """The ids of all examples in one list are not rows of the batch, even if there are as many."""
    lengths = torch.tensor(lengths)
    x = ids(int(lengths.sum())), lengths.cumsum(0) - lengths
    refuse(nn.EmbeddingBag(V, D, mode=mode), "embedding_bag", "no row per example", "pad the ids to [B, n]", x=x)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_scaled_by_frequency(layer):
    model = nn.Sequential(layer(V, D, scale_grad_by_freq=True))
    refuse(model, "with 0.weight", "scale_grad_by_freq=True", "turn it off", x=ids(B, 3))


def changed_hidden(n, x):
    h = n.zero(x)
    out = n.one(h)
    h.add_(1)
    return out + h.sum(1, keepdim=True)


def changed_data(n, x):
    h = 2 * n.zero(x).detach()
    out = n.one(h)
    h.add_(1)
    return out * h.sum(1, keepdim=True)


@pytest.mark.parametrize("forward", [changed_hidden, changed_data])
def test_input_changed_in_place_after_use(forward):
    """Plain autograd refuses these models too, without naming a layer."""
    model = Net(forward, zero=nn.Linear(D, D), one=nn.Linear(D, P))
    refuse(model, "changed in place after it was used", "linear with", "x = x + y")


def changed_after(n, x):
    out = n.one(x)
    x.add_(1)
    return out


@pytest.mark.parametrize(
    ("forward", "part"),
    [(lambda n, x: n.one(x.mul_(2)), "the model changes its input in place"), (changed_after, "in place")],
    ids=["before use", "after use"],
)
def test_batch_changed_in_place(forward, part):
    """It could not be run again as it was."""
    model = Net(forward, one=nn.Linear(D, P))
    refuse(model, part, "new tensor")


def test_batch_changed_in_place_in_an_ordinary_loop():
    model = Net(lambda n, x: n.one(x.mul_(2)), one=nn.Linear(D, P))
    engine = watching(model)
    finish_refused(engine, model(inputs()), "changes its input in place")


def test_not_the_same_sites_twice():
    def forward(n, x):
        n.turn = not n.turn
        return n.one(x) if n.turn else n.one(n.one(x))

    model = Net(forward, one=nn.Linear(D, D))
    model.turn = False
    refuse(
        model,
        "two runs of the model on the same batch differ",
        "nothing but its inputs, its parameters and",
        "random numbers",
    )


def test_other_rows_at_the_parameters_of_the_proof():
    """The model does the same twice; how many rows an expert gets depends on its parameters."""

    def forward(n, x):
        chosen = (x @ n.plane > 0).nonzero().squeeze(1)
        return n.shared(x).index_add(0, chosen, n.expert(x[chosen]))

    model = Net(forward, plane=param(D), shared=nn.Linear(D, P), expert=nn.Linear(D, P))
    with perturbed(model.parameters()):
        moved = model.plane.detach().clone()
    x, planes = inputs(), torch.stack([model.plane.detach(), moved])
    sides = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]])  # now, and in the proof
    x = x + (sides - x @ planes.T) @ torch.linalg.pinv(planes).T
    one_at_a_time(model, "expert.weight", "data and parameters decide which rows", "grouped_mm", x=x)


def mixtral(implementation):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=V, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(implementation)
    return model


def logits_loss(outputs, targets):
    return squared(outputs.logits, targets)


def test_experts_of_transformers_in_a_loop():
    words = {"input_ids": ids(B, 3), "attention_mask": (torch.arange(3) < torch.tensor([[3], [2], [3], [1]])).long()}
    problem = (mixtral("eager"), logits_loss, words, torch.randn(B), 0.1)
    remedy = r'one at a time.*experts.*rows.*set_experts_implementation\("grouped_mm"\)'
    with pytest.warns(UserWarning, match=remedy):
        found = clipped_gradients(*problem)
    assert_same(found, oracle.clipped_gradients(*problem), rtol=2e-5)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("training", [True, False])
def test_the_way_out_for_experts_of_transformers(training, implementation):
    words = {"input_ids": ids(B, 3), "attention_mask": (torch.arange(3) < torch.tensor([[3], [2], [3], [1]])).long()}
    problem = (mixtral(implementation).train(training), logits_loss, words, torch.randn(B), 0.1)
    assert_same(clipped_gradients(*problem), oracle.clipped_gradients(*problem), rtol=2e-5)


def test_not_the_same_values_twice():
    """Numbers from a generator of one's own cannot be drawn again."""
    numbers = random.Random(0)
    model = Net(lambda n, x: n.one(x) * numbers.random(), one=nn.Linear(D, P))
    refuse(model, "two runs of the model on the same batch differ", "random numbers")


@pytest.mark.parametrize(
    "draw", [random.random, np.random.random, lambda: torch.rand(()).item()], ids=["python", "numpy", "torch"]
)
def test_random_numbers_that_can_be_drawn_again(draw):
    accept(Net(lambda n, x: n.one(x) * (1 + draw()), one=nn.Linear(D, P)), inputs(), shared_forward=True)


# Mixing


def test_attention_across_the_batch():
    model = Net(lambda n, x: (n.one(x) @ n.one(x).T).softmax(1) @ n.two(x), one=nn.Linear(D, P), two=nn.Linear(D, 2))
    refuse(model, "examples mix", "attention or contrast across the batch")


def test_contrastive_loss():
    def contrast(outputs, targets):
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")

    refuse(nn.Linear(D, P), "examples mix", "contrast across the batch", loss=contrast)


def test_values_that_mix_without_gradient():
    model = Net(lambda n, x: n.one(x - x.detach().mean(0)), one=nn.Linear(D, P))
    refuse(model, "examples mix", "at or before torch.nn.functional.linear with one.bias, one.weight")


def test_values_that_mix_in_the_loss():
    def centred(outputs, targets):
        losses = squared(outputs, targets)
        return losses * losses.detach().mean()

    refuse(nn.Linear(D, P), "examples mix", loss=centred)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
def test_values_that_mix_beside_an_example_with_a_large_loss(scale):
    """The first example's loss depends on the second; the third's is so large that theirs are nothing beside it."""

    def forward(n, x):
        h = n.one(x)
        return h + F.pad(h.detach()[1:2], (0, 0, 0, len(h) - 1))

    def scaled(outputs, targets):
        return outputs.square().sum(1) * targets

    targets = torch.tensor([1.0, 1.0, scale, 1.0])
    refuse(Net(forward, one=nn.Linear(D, P)), "examples mix", loss=scaled, targets=targets)


@pytest.mark.parametrize("pair", list(itertools.combinations(range(B), 2)), ids=str)
def test_experts_with_a_capacity(pair):
    """An expert takes its two best examples, so whether it takes one depends on the others."""

    def forward(n, x):
        gate = n.router(x).sigmoid()
        best = gate[:, 0].topk(2).indices
        return n.expert(x) * gate * torch.zeros(len(x), 1).index_fill(0, best, 1.0)

    model = Net(forward, router=nn.Linear(D, 1), expert=nn.Linear(D, P))
    x = inputs()
    x[list(pair)] += 5 * model.router.weight.detach() / model.router.weight.detach().norm()
    refuse(model, "with expert.bias, expert.weight", x=x)


def test_loss_divided_by_the_batch():
    def share(outputs, targets):
        return squared(outputs, targets) / targets.sum()

    refuse(nn.Linear(D, P), "examples mix", loss=share, targets=torch.rand(B))


def test_values_that_mix_behind_an_object_the_engine_cannot_open():
    """Its tensors cannot be exchanged for others', so nothing about them would be proven."""
    model = Net(lambda n, batch: n.one(batch.x - batch.x.mean(0)), one=nn.Linear(D, P))
    refuse(model, "SimpleNamespace", "tuples, lists or dicts", x=SimpleNamespace(x=inputs()))


def test_arrays():
    model = Net(lambda n, x: n.one(torch.from_numpy(x)), one=nn.Linear(D, P))
    refuse(model, "ndarray", "torch.from_numpy", x=inputs().numpy())


def test_sparse_inputs():
    model = Net(lambda n, x: n.one(x.to_dense()), one=nn.Linear(D, P))
    refuse(model, "sparse", "to_dense()", x=inputs().to_sparse())


# Losses


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        (lambda outputs, targets: outputs.sum(), ["shape []", "must be [4]", "reduction='none'"]),
        (lambda outputs, targets: outputs.sum(-1), ["shape [4, 3]", "must be [4]", "losses.flatten(1).mean(1)"]),
        (lambda outputs, targets: outputs.sum(-1).flatten(), ["shape [12]", "must be [4]", "one value per example"]),
        (lambda outputs, targets: outputs.sum((1, 2))[1:], ["shape [3]", "must be [4]"]),
        (lambda outputs, targets: outputs.sum((1, 2))[:, None], ["shape [4, 1]", "must be [4]"]),
        (lambda outputs, targets: outputs.sum().item(), ["the loss is a float", "tensor of 4 losses"]),
        (lambda outputs, targets: list(outputs.sum((1, 2))), ["the loss is a list", "tensor of 4 losses"]),
        (lambda outputs, targets: None, ["the loss is a NoneType"]),
        (lambda outputs, targets: outputs.sum((1, 2)).detach(), ["does not depend on any trainable", "detach()"]),
        (lambda outputs, targets: targets, ["does not depend on any trainable", "requires_grad"]),
        (lambda outputs, targets: outputs.sum((1, 2)).half(), ["losses are float16", "use bfloat16"]),
    ],
    ids=[
        "scalar", "per position", "flattened", "one short", "two-dimensional", "float", "list", "none", "detached",
        "targets", "float16",
    ],
)  # fmt: skip
def test_loss_that_is_not_one_value_per_example(loss, parts):
    refuse(nn.Linear(D, P), *parts, x=inputs(3, D), loss=loss)


def test_inference_mode():
    with torch.inference_mode():
        refuse(nn.Linear(D, P), "inference_mode")


# Rules


@pytest.fixture
def addcmul_rule():
    """Registers a rule for addcmul that is forgotten at the end."""
    yield register_rule(torch.addcmul)
    unregister_rule(torch.addcmul)


def scaled_by(x, p):
    return torch.addcmul(x, p, x)


def test_wrong_rule(addcmul_rule):
    @addcmul_rule
    def twice_too_much(grad, input, tensor1, tensor2, *, value=1):
        return {"tensor1": Dense((2 * grad * tensor2).sum(1))}

    model = Net(lambda n, x: scaled_by(n.one(x), n.p), one=nn.Linear(D, P), p=param(P))
    refuse(model, "gradients of 'p' do not add up", "rule for torch.addcmul with p", "qclip.engine.oracle")


def test_rule_that_forgets_an_argument(addcmul_rule):
    """The function is run again instead."""

    @addcmul_rule
    def nothing(grad, input, tensor1, tensor2, *, value=1):
        return {}

    accept(Net(lambda n, x: scaled_by(x, n.p), p=param(D)), inputs())


def test_rule_whose_form_is_not_of_the_parameters_shape(addcmul_rule):
    @addcmul_rule
    def outer(grad, input, tensor1, tensor2, *, value=1):
        return {"tensor1": Outer(grad.unsqueeze(1), tensor2.unsqueeze(1), tensor1.shape)}

    model, targets = Net(lambda n, x: scaled_by(x, n.p), p=param(D)), torch.randn(B)
    x = inputs()
    found, message = outcome(lambda: clipped_gradients(model, squared, x, targets, 1.0))
    if found is None:
        assert "addcmul" in message
    else:
        assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 1.0), rtol=2e-5)


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm = 0.0 must be > 0"),
        ({"clip_norm": [1.0, 2.0]}, "clip_norm = '2 values' must be 1 values"),
        ({"groups": "layers"}, "groups = 'layers' must be one of"),
        ({"groups": {"biases": "*bias"}}, "'weight' has no group"),
        ({"groups": {"all": "*", "head": "head.*"}}, "'head' takes no parameter"),
        ({"mask": torch.ones(3)}, "mask = '3 flags' must be as long as the batch"),
        ({"mask": torch.ones(B, 1)}, r"mask = \(4, 1\) must be one flag per example"),
        ({"inputs": "words", "targets": None}, "inputs = 'no tensors' must be a batch with at least one tensor"),
    ],
)
def test_arguments_are_checked_before_the_model_runs(options, message):
    def never(n, x):
        raise AssertionError("the model was called")

    model = Net(never, weight=param(D))
    arguments = {"inputs": inputs(), "targets": torch.randn(B), "clip_norm": 1.0} | options
    with pytest.raises(ValueError, match=message):
        clipped_gradients(model, squared, **arguments)


# The ordinary loop


def watching(model):
    engine = Engine(model)
    engine.watch(lambda: B)
    return engine


def finish_refused(engine, outputs, *parts, targets=None, loss=squared):
    with pytest.raises(Refusal) as refusal:
        engine.finish(outputs, torch.randn(B) if targets is None else targets, loss, 1.0)
    says(refusal, *parts)


def test_no_forward_pass():
    engine = watching(nn.Linear(D, P))
    finish_refused(engine, torch.randn(B, P), "no forward pass", "call the model", "gradients enabled")


def test_not_watched():
    model = nn.Linear(D, P)
    finish_refused(Engine(model), model(inputs()), "no forward pass")


def test_loss_of_one_forward_pass_twice():
    model = nn.Linear(D, P)
    engine = watching(model)
    outputs = model(inputs())
    engine.finish(outputs, torch.randn(B), squared, 1.0)
    finish_refused(engine, outputs, "no forward pass")


def test_forward_pass_without_gradients():
    model = nn.Linear(D, P)
    engine = watching(model)
    with torch.no_grad():
        outputs = model(inputs())
    finish_refused(engine, outputs, "no forward pass", "gradients enabled")


JUST_RETURNED = ("must be what the model just returned, or a part of it", "put what is computed from it into the loss")


@pytest.mark.parametrize("choose", [lambda old, new: old, lambda old, new: old + new], ids=["first", "both"])
def test_outputs_of_an_earlier_forward_pass(choose):
    model = nn.Linear(D, P)
    engine = watching(model)
    old = model(inputs())
    outputs = choose(old, model(inputs()))
    finish_refused(engine, outputs, *JUST_RETURNED)


@pytest.mark.parametrize(
    "change",
    [
        lambda outputs: outputs[:, :1],
        lambda outputs: outputs - outputs.mean(0),
        lambda outputs: outputs - outputs.detach().mean(0),
        lambda outputs: outputs.clone(),
        lambda outputs: (outputs, outputs.sum(1)),
        lambda outputs: None,
    ],
    ids=["sliced", "mixed", "mixed by value", "copied", "one of two", "nothing"],
)
def test_outputs_changed_by_the_user(change):
    """The engine cannot run again what is done between model and loss, so nothing about it would be proven."""
    model = nn.Linear(D, P)
    engine = watching(model)
    finish_refused(engine, change(model(inputs())), *JUST_RETURNED)


def test_state_moved_in_a_watched_forward_pass():
    model = counting()
    engine = watching(model)
    finish_refused(engine, model(inputs()), "'calls' (Net) changed in the forward pass")


def test_layer_called_outside_of_the_model():
    model = Net(lambda n, x: n.body(x), body=nn.Linear(D, P), head=nn.Linear(P, 2))
    engine = watching(model)
    finish_refused(engine, model.head(model(inputs())), *JUST_RETURNED)


def test_parameter_in_the_loss():
    """Seen only when the loss is run, which is after the forward pass: it works, or the parameter is named."""
    model, x, targets = nn.Linear(D, P), inputs(), torch.randn(B)

    def penalised(outputs, targets):
        return squared(outputs, targets) + 0.1 * model.weight.square().sum()

    engine = watching(model)
    found, message = outcome(lambda: engine.finish(model(x), targets, penalised, 1.0))
    if found is None:
        assert "'weight'" in message
    else:
        assert_same(found, oracle.clipped_gradients(model, penalised, x, targets, 1.0), rtol=2e-5)


def test_outputs_as_they_are_where_the_whole_model_is_needed():
    model, x, targets = hidden(_HiddenFromCaptureOnly), inputs(), torch.randn(B)
    engine = watching(model)
    found = engine.finish(model(x), targets, squared, 1.0)
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 1.0), rtol=2e-5)


def test_part_of_an_output_the_engine_cannot_open():
    model = Net(lambda n, x: SimpleNamespace(logits=n.one(x)), one=nn.Linear(D, P))
    engine = watching(model)
    finish_refused(engine, model(inputs()).logits, *JUST_RETURNED)


# Explaining


@pytest.mark.parametrize(
    ("model", "x", "part"),
    [
        (nn.BatchNorm1d(D), inputs(), "BatchNorm1d"),
        (nn.Embedding(V, D, scale_grad_by_freq=True), ids(B, 3), "scale_grad_by_freq"),
        (mixing_gradients(), inputs(), "no exact way to clip"),
        (frozen(nn.Linear(D, P)), inputs(), "no trainable parameters"),
        (Net(lambda n, x: n.one(x).detach(), one=nn.Linear(D, P)), inputs(), "returns no tensor"),
    ],
    ids=["state", "rule", "unseen", "frozen", "detached"],
)
def test_explain_refuses_what_the_engine_refuses(model, x, part):
    with pytest.raises(Refusal) as refusal:
        explain(model, x)
    says(refusal, part)


def test_refusals_are_value_errors():
    assert issubclass(Refusal, ValueError)
