"""Nothing that the engine does shows outside of what it returns, and nothing that it saw outlives the step."""

import copy
import gc
import io
import random
import sys
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cases import Net
from engine.cases.case import D, P, frozen, squared
from engine.cases.hidden import ScaleForVmap
from engine.compare import assert_same
from qclip.engine import Engine, Refusal, clipped_gradients, explain, oracle

B = 4


@pytest.fixture(autouse=True)
def _as_new():
    torch.manual_seed(0)
    yield
    torch.compiler.set_stance("default")


def mlp(*middle):
    return nn.Sequential(nn.Linear(D, P), nn.Tanh(), *middle, nn.Linear(P, 2))


def batch():
    return torch.randn(B, D), torch.randn(B)


def run(model, x, targets, loss=squared, **options):
    return clipped_gradients(model, loss, x, targets, 0.5, **options)


def watching(model, batch_size=B):
    engine = Engine(model)
    return engine, engine.watch(lambda: batch_size)


def modes():
    return torch.overrides._get_current_function_mode_stack()


# What a call leaves behind


def test_nothing_is_left_on_the_model():
    model, (x, targets) = mlp(nn.LayerNorm(P)), batch()
    frozen(model, "0.bias")
    model[3].eval()
    model[0].weight.grad = torch.ones(P, D)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    flags = [p.requires_grad for p in model.parameters()]
    modes_of_modules = [m.training for m in model.modules()]
    attributes = [set(vars(m)) for m in model.modules()]
    for _ in range(3):  # with a proof, and without
        run(model, x, targets)
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert torch.equal(model[0].weight.grad, torch.ones(P, D))
        assert [p._version for p in model.parameters()] == versions
        assert [p.requires_grad for p in model.parameters()] == flags
        assert [m.training for m in model.modules()] == modes_of_modules
        assert [set(vars(m)) for m in model.modules()] == attributes
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert not module._backward_hooks
        assert all(not p._backward_hooks for p in model.parameters())


def shared_dict():
    """Two layers hold the same dict of parameters, used by a function that only vmap of the model sees into."""
    bank = nn.ParameterDict({"scale": nn.Parameter(torch.rand(D))})
    layers = [Net(lambda n, x: ScaleForVmap.apply(x, n.bank["scale"]), bank=bank) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(D, 2))


def shared_layer():
    """One layer in two places, which leaves what it gave in an attribute."""

    def forward(n, x):
        n.seen = ScaleForVmap.apply(x, n.scale)
        return n.seen

    layer = Net(forward, scale=nn.Parameter(torch.rand(D)))
    layer.seen = None
    return nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer, nn.Linear(D, 2)))


def contents(model):
    """Every tensor that the model holds, by place, shared places and attributes included."""
    return {
        (name, place): value
        for name, module in model.named_modules(remove_duplicate=False)
        for place, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items())
        if isinstance(value, Tensor)
    }


@pytest.mark.parametrize("make", [shared_dict, shared_layer])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.filterwarnings("ignore:examples are run through the model one at a time:UserWarning")
def test_shared_modules_keep_their_parameters(make, broken, monkeypatch):
    """When the whole model is run on other tensors by vmap, whether that succeeds or not."""
    model, (x, targets) = make(), batch()
    kept = {place: value for place, value in contents(model).items() if isinstance(value, nn.Parameter)}
    if broken:
        monkeypatch.setattr(ScaleForVmap, "generate_vmap_rule", False)
    expected = oracle.clipped_gradients(model, squared, x, targets, 0.5)
    for _ in range(3):
        assert_same(run(model, x, targets), expected, rtol=2e-5)
    for place, value in contents(model).items():
        assert value is kept.get(place, value), place
        assert not torch._C._functorch.is_functorch_wrapped_tensor(value), place
    assert kept.keys() <= contents(model).keys()


def test_adapters_that_share_a_bank_of_vectors_are_left_alone():
    """VB-LoRA of `peft`: every adapter holds the same dict."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    adapters = peft.VBLoRAConfig(r=2, num_vectors=6, vector_length=4, topk=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    kept = contents(model)
    words, targets = torch.randint(11, (B, 3)), torch.randn(B)
    lengths = torch.arange(3) < torch.tensor([[3], [2], [3], [1]])
    for inputs in ({"input_ids": words}, {"input_ids": words, "attention_mask": lengths.long()}):
        expected = oracle.clipped_gradients(model, logits_loss, inputs, targets, 0.5)
        for _ in range(2):
            assert_same(run(model, inputs, targets, logits_loss), expected, rtol=2e-5)
            assert contents(model).keys() == kept.keys()
            assert all(value is kept[place] for place, value in contents(model).items())


def logits_loss(outputs, targets):
    return squared(outputs.logits, targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_parameters_are_put_back_bit_by_bit(dtype):
    """The proof perturbs them, large and small, signed zeros included."""
    model = mlp().to(dtype)
    with torch.no_grad():
        model[0].weight[0] = torch.tensor([0.0, -0.0, 1e-30, -1e30, 1.0, torch.finfo(dtype).tiny]).to(dtype)
        model[2].bias[0] = torch.nan
    integers = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    before = [p.detach().clone().view(integers) for p in model.parameters()]
    x, targets = batch()
    run(model, x.to(dtype), targets.to(dtype))
    for p, bits in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach().view(integers), bits)


def test_parameters_are_put_back_after_a_refusal():
    model = Net(lambda n, x: n.one(x - x.mean(0)), one=nn.Linear(D, P))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(Refusal, match="examples mix"):
        run(model, *batch())
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_batch_is_not_written_to():
    model, (x, targets) = mlp(), batch()
    before = x.clone(), targets.clone()
    versions = x._version, targets._version
    run(model, x, targets)
    assert torch.equal(x, before[0])
    assert torch.equal(targets, before[1])
    assert (x._version, targets._version) == versions
    assert not x.requires_grad


def test_results_have_no_graph():
    result = run(mlp(), *batch())
    tensors = [*result.sums.values(), result.norms, result.group_norms, result.losses, result.mask]
    assert all(x.grad_fn is None and not x.requires_grad for x in tensors)


def test_results_do_not_share_memory_with_the_model():
    model, (x, targets) = mlp(), batch()
    before = copy.deepcopy(model.state_dict())
    first = run(model, x, targets)
    for sum_ in first.sums.values():
        sum_.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(run(model, x, targets).sums["0.weight"], first.sums["0.weight"])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_random_numbers_are_drawn_as_by_one_forward_pass(dropout):
    """With a proof or without: the same state before gives the same state after, and the same result."""
    model, (x, targets) = mlp(nn.Dropout(dropout)), batch()
    torch.manual_seed(3)
    squared(model(x), targets)
    expected = torch.get_rng_state()
    results = []
    for _ in range(3):
        torch.manual_seed(3)
        results.append(run(model, x, targets))
        assert torch.equal(torch.get_rng_state(), expected)
    assert_same(results[1], results[0], rtol=1e-6)
    assert_same(results[2], results[0], rtol=1e-6)


def test_other_generators_are_left_alone():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    run(mlp(nn.Dropout(0.5)), *batch())
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


def test_global_settings_are_left_alone():
    filters, threads, grad = list(warnings.filters), torch.get_num_threads(), torch.is_grad_enabled()
    run(mlp(nn.PReLU()), *batch())
    assert warnings.filters == filters
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled() == grad
    assert not torch.is_autocast_enabled("cpu")
    assert not modes()


def test_explain_leaves_nothing_behind():
    model, (x, _) = mlp(nn.PReLU()), batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    explain(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not modes()


# Evaluation and no_grad


def test_gradients_are_enabled_whatever_the_caller_says():
    model, (x, targets) = mlp(), batch()
    expected = run(model, x, targets)
    with torch.no_grad():
        again = run(model, x, targets)
        anew = run(copy.deepcopy(model), x, targets)
        assert not torch.is_grad_enabled()
    assert_same(again, expected, rtol=1e-6)
    assert_same(anew, expected, rtol=1e-6)


def test_evaluation_is_not_captured():
    model, (x, _) = mlp(nn.Dropout(0.5)), batch()
    _, watch = watching(model)
    model.eval()
    with torch.no_grad():
        one = model(x)
    with torch.inference_mode():
        other = model(x)
    assert watch.last is None
    assert torch.equal(one, other)
    assert not one.requires_grad
    assert not modes()


def test_evaluation_mode_with_gradients_is_captured():
    """Gradients are what counts, not `training`: frozen dropout is a choice."""
    model, (x, targets) = mlp(nn.Dropout(0.5)).eval(), batch()
    engine, _ = watching(model)
    found = engine.finish(model(x), targets, squared, 0.5)
    assert_same(found, run(model, x, targets), rtol=1e-6)


def test_the_model_is_usable_as_before():
    """Plain training of a model that is watched, and was clipped."""
    model, (x, targets) = mlp(), batch()
    squared(model(x), targets).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    run(model, x, targets)
    _, watch = watching(model)
    squared(model(x), targets).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), plain, strict=True))
    watch.remove()


def test_modes_and_dtypes_are_proven_apart():
    """Dropout on, then off: what was proven for the one is not used for the other."""
    model, (x, targets) = mlp(nn.Dropout(0.5)), batch()
    run(model, x, targets)
    model.eval()
    assert_same(run(model, x, targets), run(copy.deepcopy(model), x, targets), rtol=1e-6)


def test_a_batch_norm_switched_to_training_later_is_refused():
    model, (x, targets) = nn.Sequential(nn.Linear(D, P), nn.BatchNorm1d(P)).eval(), batch()
    run(model, x, targets)
    model.train()
    with pytest.raises(Refusal, match="BatchNorm1d"):
        run(model, x, targets)


# Copies


def test_a_copy_is_inert_and_independent():
    """As for an average of the weights."""
    model, (x, targets) = mlp(), batch()
    engine, watch = watching(model)
    average = copy.deepcopy(model)
    outputs = average(x)
    assert watch.last is None
    assert torch.equal(outputs, model(x))
    squared(outputs, targets).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    engine.finish(model(x), targets, squared, 0.5)
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
    other, other_watch = watching(average)
    found = other.finish(average(x), targets, squared, 0.5)
    assert watch.last is None
    assert other_watch.last is None
    assert_same(found, run(average, x, targets), rtol=1e-6)


def test_a_copy_within_a_forward_pass_is_inert():
    model, (x, _) = mlp(), batch()
    _, watch = watching(model)
    outputs = model(x)
    captured = watch.last
    copied = copy.deepcopy(model)
    copied(x)
    assert watch.last is captured
    assert outputs.requires_grad


def test_averaged_model():
    model, (x, targets) = mlp(), batch()
    engine, watch = watching(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    average(x)
    assert watch.last is None
    engine.finish(model(x), targets, squared, 0.5)


def test_saved_and_loaded():
    model, (x, targets) = mlp(), batch()
    engine, watch = watching(model)
    engine.finish(model(x), targets, squared, 0.5)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), model(x))
    watch.last = None
    loaded(x)
    assert watch.last is None
    assert_same(run(loaded, x, targets), run(model, x, targets), rtol=1e-6)


def test_saved_state_has_only_the_models_own():
    model = mlp()
    names = list(model.state_dict())
    watching(model)
    assert list(model.state_dict()) == names


# Models that change between calls


def test_another_dtype():
    model, (x, targets) = mlp(), batch()
    engine, _ = watching(model)
    single = engine.finish(model(x), targets, squared, 0.5)
    model.double()
    x, targets = x.double(), targets.double()
    double = engine.finish(model(x), targets, squared, 0.5)
    assert double.norms.dtype == double.sums["0.weight"].dtype == torch.float64
    torch.testing.assert_close(double.norms.float(), single.norms)
    assert_same(run(model, x, targets), double, rtol=1e-9)


def test_loaded_weights():
    model, other, (x, targets) = mlp(), mlp(), batch()
    engine, _ = watching(model)
    engine.finish(model(x), targets, squared, 0.5)
    model.load_state_dict(other.state_dict())
    found = engine.finish(model(x), targets, squared, 0.5)
    assert_same(found, run(other, x, targets), rtol=1e-6)


def test_weights_loaded_as_other_objects():
    """An optimizer would go on with those it was given; a new engine takes the new ones."""
    model, other, (x, targets) = mlp(), mlp(), batch()
    engine, _ = watching(model)
    model.load_state_dict(other.state_dict(), assign=True)
    with pytest.raises(Refusal, match="was replaced by another"):
        model(x)
    engine, _ = watching(model)
    assert_same(engine.finish(model(x), targets, squared, 0.5), run(other, x, targets), rtol=1e-6)


def test_other_batch_sizes_and_lengths():
    model = mlp()
    for shape in [(4, D), (3, D), (4, 3, D), (1, D), (4, D)]:
        x, targets = torch.randn(shape), torch.randn(shape[0])
        assert_same(run(model, x, targets), run(copy.deepcopy(model), x, targets), rtol=1e-6)


def test_a_layer_replaced():
    model, (x, targets) = mlp(), batch()
    run(model, x, targets)
    model[0] = nn.Linear(D, P, bias=False)
    assert_same(run(model, x, targets), run(copy.deepcopy(model), x, targets), rtol=1e-6)


def test_training_by_the_sums():
    """The engine between optimizer steps: always the gradients of now."""
    model, (x, targets) = mlp(), batch()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    losses = []
    for _ in range(5):
        result = run(model, x, targets)
        assert_same(result, run(copy.deepcopy(model), x, targets), rtol=1e-6)
        for name, p in model.named_parameters():
            p.grad = result.sums[name]
        optimizer.step()
        losses.append(float(result.losses.sum()))
    assert losses[-1] < losses[0]


# Exceptions


def failing():
    """A model that fails behind its first layer when told to."""

    def forward(n, x):
        h = n.one(x)
        if n.broken:
            raise KeyError("on purpose")
        return n.two(h)

    model = Net(forward, one=nn.Linear(D, P), two=nn.Linear(P, 2))
    model.broken = True
    return model


def test_an_exception_in_the_model_leaves_no_mode():
    model, (x, targets) = failing(), batch()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError, match="on purpose"):
        run(model, x, targets)
    assert not modes()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.broken = False
    assert_same(run(model, x, targets), run(copy.deepcopy(model), x, targets), rtol=1e-6)


def test_an_exception_in_the_proof_leaves_nothing():
    """The third forward pass is one of the proof's, at perturbed parameters."""

    def forward(n, x):
        n.calls += 1
        if n.calls == 3:
            raise KeyError("on purpose")
        return n.one(x)

    model, (x, targets) = Net(forward, one=nn.Linear(D, P)), batch()
    model.calls = 0
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises((KeyError, Refusal), match="on purpose"):
        run(model, x, targets)
    assert not modes()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    run(model, x, targets)


def test_an_exception_in_the_loss_leaves_no_mode():
    def broken(outputs, targets):
        raise KeyError("on purpose")

    model, (x, targets) = mlp(), batch()
    with pytest.raises(KeyError, match="on purpose"):
        run(model, x, targets, loss=broken)
    assert not modes()
    run(model, x, targets)


def test_an_exception_in_a_watched_model():
    model, (x, targets) = failing(), batch()
    engine, _ = watching(model)
    with pytest.raises(KeyError, match="on purpose"):
        model(x)
    assert not modes()
    model.broken = False
    found = engine.finish(model(x), targets, squared, 0.5)
    assert_same(found, run(model, x, targets), rtol=1e-6)


def test_a_forward_pass_that_failed_has_no_loss():
    model, (x, targets) = failing(), batch()
    engine, _ = watching(model)
    model.broken = False
    outputs = model(x)
    model.broken = True
    with pytest.raises(KeyError, match="on purpose"):
        model(x)
    model.broken = False
    with pytest.raises(Refusal, match=r"no forward pass|just returned"):
        engine.finish(outputs, targets, squared, 0.5)


def test_an_exception_in_a_watched_loss():
    def broken(outputs, targets):
        raise KeyError("on purpose")

    model, (x, targets) = mlp(), batch()
    engine, _ = watching(model)
    with pytest.raises(KeyError, match="on purpose"):
        engine.finish(model(x), targets, broken, 0.5)
    assert not modes()
    engine.finish(model(x), targets, squared, 0.5)


def test_compilation_is_allowed_again_afterwards():
    model, (x, targets) = failing(), batch()
    with pytest.raises(KeyError, match="on purpose"):
        run(model, x, targets)
    model.broken = False
    run(model, x, targets)
    assert compiles()


def compiles():
    """Whether torch.compile still does anything."""
    seen = []

    def backend(graph, examples):
        seen.append(graph)
        return graph.forward

    torch.compile(lambda x: x + len(seen), backend=backend)(torch.zeros(2))
    return bool(seen)


# Models beside one another


def test_models_take_turns():
    models, x = [mlp(), Net(lambda n, x: n.conv(x[:, None]), conv=nn.Conv1d(1, 2, 3)), nn.Linear(D, 1)], batch()[0]
    targets = torch.randn(B)
    expected = [run(copy.deepcopy(model), x, targets) for model in models]
    for _ in range(2):
        for model, answer in zip(models, expected, strict=True):
            assert_same(run(model, x, targets), answer, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:data decide which rows of the batch go where:UserWarning")
def test_one_call_within_another():
    """A loss that clips the gradients of another model; what the inner proofs move is seen by the outer capture."""
    inner, outer, (x, targets) = mlp(), mlp(), batch()
    expected, answers = run(copy.deepcopy(inner), x, targets), []

    def loss(outputs, others):
        answers.append(run(inner, x, targets))
        return squared(outputs, others)

    found = run(outer, x, targets, loss=loss)
    assert_same(found, run(outer, x, targets), rtol=1e-6)
    for answer in answers:
        assert_same(answer, expected, rtol=1e-6)


def test_two_watched_models():
    """As in adversarial training: what the one makes, the other judges, each with an engine of its own."""
    maker, judge, (x, targets) = nn.Linear(D, P), nn.Linear(P, 2), batch()
    (one, _), (two, _) = watching(maker), watching(judge)
    made = maker(x)
    found = two.finish(judge(made), targets, squared, 0.5)
    assert_same(found, run(judge, made.detach(), targets), rtol=1e-6)
    assert_same(one.finish(maker(x), targets, squared, 0.5), run(maker, x, targets), rtol=1e-6)


def test_a_model_watched_by_two_engines():
    """As when a cell of a notebook is run again: the latest counts."""
    model, (x, targets) = mlp(), batch()
    (one, _), (two, _) = watching(model), watching(model)
    expected = run(model, x, targets)
    outputs = model(x)
    with pytest.raises(Refusal, match="no forward pass"):
        one.finish(outputs, targets, squared, 0.5)
    assert_same(two.finish(outputs, targets, squared, 0.5), expected, rtol=1e-6)
    assert not modes()
    assert compiles()


def test_a_watched_part_of_a_watched_model():
    model, (x, targets) = mlp(), batch()
    (whole, _), (part, _) = watching(model), watching(model[0])
    found = whole.finish(model(x), targets, squared, 0.5)
    assert_same(found, run(copy.deepcopy(model), x, targets), rtol=1e-6)
    assert not modes()
    h = model[0](x)
    assert part.finish(h, targets, squared, 0.5).norms.shape == (B,)


def test_threads():
    """Each with its own model."""
    models = [mlp(), nn.Sequential(nn.Linear(D, 3), nn.ReLU(), nn.Linear(3, 1))]
    x, targets = batch()
    expected = [run(copy.deepcopy(model), x, targets) for model in models]
    results, errors = [[], []], []
    barrier = threading.Barrier(2)

    def work(k):
        try:
            for _ in range(20):
                barrier.wait(timeout=20)
                results[k].append(run(models[k], x, targets))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for found, answer in zip(results, expected, strict=True):
        assert len(found) == 20
        for result in found:
            assert_same(result, answer, rtol=1e-6)
    assert not modes()


def test_threads_that_overlap_leave_compilation_as_it_was():
    """The first to begin is the first to end, so that the second must not put back what it found."""
    began, ended = [threading.Event(), threading.Event()], threading.Event()

    def forward(n, x):
        if not began[n.k].is_set():
            began[n.k].set()
            (began[1] if n.k == 0 else ended).wait(timeout=20)
        return n.one(x)

    def work(k):
        if k == 1:
            began[0].wait(timeout=20)
        model = Net(forward, one=nn.Linear(D, P))
        model.k = k
        run(model, *batch())
        if k == 0:
            ended.set()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiles()


# Memory


def tensors_alive():
    return [x for x in gc.get_objects() if issubclass(type(x), Tensor)]


class Doors:
    """The ways to run a step, on a model with every kind of site: a rule, a fallback, a tie, dropout."""

    def __init__(self):
        self.model = Net(
            lambda n, i: F.linear(n.act(n.drop(n.norm(n.words(i)))), n.words.weight),
            words=nn.Embedding(7, D), norm=nn.LayerNorm(D), drop=nn.Dropout(0.1), act=nn.PReLU(),
        )  # fmt: skip
        self.words, self.targets = torch.randint(7, (B, 3)), torch.randn(B)
        self.engine = Engine(self.model)

    def function(self):
        run(self.model, self.words, self.targets)

    def watched(self):
        if self.engine._watch is None:
            self.engine.watch(lambda: B)
        self.engine.finish(self.model(self.words), self.targets, squared, 0.5)


doors = pytest.mark.parametrize("door", ["function", "watched"])


@pytest.mark.slow
@doors
def test_memory_is_flat(door):
    """Objects and tensors alive after 1000 steps are those after 100."""
    step, counts = getattr(Doors(), door), []
    for k in range(1, 1001):
        step()
        if k in (100, 1000):
            gc.collect()
            counts.append((len(tensors_alive()), len(gc.get_objects()), sys.getallocatedblocks()))
    (tensors, objects, blocks), after = counts
    assert after[0] == tensors
    assert after[1] <= objects + 10
    assert after[2] < blocks + 900  # not even one number a step


@doors
def test_nothing_captured_outlives_its_step(door):
    """Without help from the garbage collector, which does not know how large a tensor is."""
    step = getattr(Doors(), door)
    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    try:
        before = {id(x) for x in tensors_alive()}
        for _ in range(3):
            step()
        left = [tuple(x.shape) for x in tensors_alive() if id(x) not in before]
    finally:
        gc.enable()
    assert not left


def test_a_watched_pass_whose_loss_never_comes_is_replaced():
    model, (x, _) = mlp(), batch()
    watching(model)
    counts = []
    for _ in range(4):
        model(x)
        gc.collect()
        counts.append(len(tensors_alive()))
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("what", ["model", "loss"])
def test_what_was_proven_is_forgotten_with_the_model_and_the_loss(what):
    model, scale = mlp(), torch.ones(())
    loss = lambda outputs, targets: scale * squared(outputs, targets)  # noqa: E731
    run(model, *batch(), loss=loss)
    seen = weakref.ref(model if what == "model" else loss)
    assert seen() is not None
    if what == "model":
        del model
    else:
        del loss
    gc.collect()
    assert seen() is None


def test_a_watched_model_is_forgotten():
    model, (x, targets) = mlp(), batch()
    engine, watch = watching(model)
    engine.finish(model(x), targets, squared, 0.5)
    model(x)
    seen = weakref.ref(model)
    del model, engine, watch
    gc.collect()
    assert seen() is None


class Counted(nn.Module):
    """A model that counts its forward passes."""

    def __init__(self):
        super().__init__()
        self.linear, self.passes = nn.Linear(D, P), 0

    def forward(self, x):
        self.passes += 1
        return self.linear(x)

    def loss(self, outputs, targets):
        return squared(outputs, targets)


@pytest.mark.parametrize("method", [False, True], ids=["function", "method"])
def test_what_was_proven_is_not_proven_again(method):
    """But for a few times later, since mixing may depend on the data: at the 1st, 2nd, 16th, 256th, ... batch."""
    model, (x, targets) = Counted(), batch()
    proven = []
    for step in range(1, 21):
        model.passes = 0
        run(model, step * x, targets + step, loss=model.loss if method else squared)
        if model.passes > 1:
            proven.append(step)
    assert proven == [1, 2, 16]


def test_another_loss_is_proven_anew():
    model, (x, targets) = Counted(), batch()
    run(model, x, targets)
    model.passes = 0
    with pytest.raises(Refusal, match="examples mix"):
        run(model, x, targets, loss=lambda outputs, targets: squared(outputs - outputs.detach().mean(0), targets))


# Stopping


def test_remove():
    model, (x, targets) = mlp(), batch()
    engine, watch = watching(model)
    model(x)
    assert watch.last is not None
    watch.remove()
    assert watch.last is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    outputs = model(x)
    assert watch.last is None
    with pytest.raises(Refusal, match="no forward pass"):
        engine.finish(outputs, targets, squared, 0.5)
    watch.remove()
    engine.watch(lambda: B)
    engine.finish(model(x), targets, squared, 0.5)


def test_a_batch_size_of_none_leaves_the_pass_alone():
    model, (x, _) = mlp(), batch()
    _, watch = watching(model, batch_size=None)
    outputs = model(x)
    assert watch.last is None
    assert outputs.requires_grad
