"""Every rule equals the vjp of its function, one example at a time; and users' rules work from end to end."""

from dataclasses import replace
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cases import OPERATIONS, PARAMETERS, Net
from engine.cases.case import D, P, T, V, ids, param, squared
from engine.cases.hidden import Scale
from engine.compare import assert_same, quiet
from qclip.engine import Dense, Engine, Outer, Rows, clipped_gradients, explain, oracle, register_rule
from qclip.engine import batch as batches
from qclip.engine.driver import call
from qclip.engine.gradients.plan import gradient_forms
from qclip.engine.gradients.rules import find, unregister_rule
from qclip.engine.gradients.rules.attention import biased_attention
from qclip.engine.gradients.rules.recurrent import RECURRENT
from qclip.engine.gradients.sites import output_gradients
from shards import every

pytestmark = quiet

B = 4
_T = Tensor


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def x(*shape):
    return torch.randn(B, *(shape or (D,)))


def fixed(*shape):
    """A shared tensor: it has no examples and is not trained."""
    tensor = torch.randn(shape)
    tensor.shared = True
    return tensor


def one(value, b, axis):
    """What the function sees for one example."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not hasattr(value, "shared"):
        return value.narrow(axis, b, 1)
    return value


def assert_rule(function, *args, axis=0, names=None, **kwargs):
    """The rule's gradients for every parameter among the arguments are autograd's, example by example.

    Tensors hold the examples at ``axis``, parameters and shared tensors do not.
    """
    entry = find(function)
    assert entry is not None, f"{function} has no rule"
    with torch.no_grad():
        out = function(*args, **kwargs)
    grad = torch.randn_like(out)

    def by_example(value):
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not hasattr(value, "shared"):
            return value.movedim(axis, 0).unsqueeze(axis + 1)
        return value.detach() if isinstance(value, Tensor) else value

    seen = [by_example(value) for value in args], {key: by_example(value) for key, value in kwargs.items()}
    forms = entry.rule(by_example(grad), *seen[0], **seen[1])
    bound = entry.signature.bind(grad, *args, **kwargs).arguments
    parameters = {name: value for name, value in bound.items() if isinstance(value, nn.Parameter)}
    assert parameters
    for name, parameter in parameters.items():
        form = forms[name]() if callable(forms[name]) else forms[name]
        expected = []
        for b in range(grad.shape[axis]):
            alone = function(
                *(one(value, b, axis) for value in args), **{k: one(v, b, axis) for k, v in kwargs.items()}
            )
            expected.append(torch.autograd.grad(alone, parameter, one(grad, b, axis))[0])
        torch.testing.assert_close(form.dense(), torch.stack(expected), rtol=1e-4, atol=1e-5)
        squares = form.squared_norms().norms
        lengths = torch.stack([grad.square().sum() for grad in expected])
        torch.testing.assert_close(squares, lengths, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1], ids=["batch first", "time first"])
@pytest.mark.parametrize("shape", [(B, T, D), (T, B, D)], ids=str)
def test_linear(shape, axis):
    if shape[axis] != B:
        return
    data = torch.randn(shape)
    assert_rule(F.linear, data, param(P, D), axis=axis)
    assert_rule(F.linear, data, param(P, D), param(P), axis=axis)
    assert_rule(F.linear, data, weight=param(P, D), bias=param(P), axis=axis)


def test_linear_with_a_vector_of_weights():
    assert_rule(F.linear, x(T, D), param(D))
    assert_rule(F.linear, x(T, D), param(D), param())


@pytest.mark.parametrize("scales", [{}, {"beta": 0.5}, {"alpha": 2.0}, {"beta": 0.5, "alpha": 2.0}], ids=str)
@pytest.mark.parametrize("function", [torch.addmm, _T.addmm])
def test_addmm(function, scales):
    assert_rule(function, param(P), x(), param(D, P), **scales)


@pytest.mark.parametrize("function", [torch.matmul, _T.matmul, _T.__matmul__])
def test_matmul(function):
    assert_rule(function, x(), param(D, P))
    assert_rule(function, x(T, D), param(D, P))
    assert_rule(function, x(2, T, D), param(D, P))
    assert_rule(function, param(P, D), x(D, T))
    assert_rule(function, param(P, D), x(2, D, T))
    assert_rule(function, x(T, D), param(D, P), axis=0)


@pytest.mark.parametrize("function", [torch.bmm, _T.bmm, torch.matmul])
def test_bmm_of_experts(function):
    """[G, B, M] @ [G, M, N]: every group of rows has its own weight."""
    assert_rule(function, torch.randn(3, B, D), param(3, D, P), axis=1)
    assert_rule(function, param(3, P, D), torch.randn(3, D, B), axis=2)


@pytest.mark.parametrize("function", [torch.baddbmm, _T.baddbmm])
def test_baddbmm_of_experts(function):
    assert_rule(function, param(3, 1, P), torch.randn(3, B, D), param(3, D, P), axis=1, beta=0.5, alpha=2.0)


@pytest.mark.parametrize("function", [torch.mm, _T.mm])
def test_mm(function):
    assert_rule(function, x(), param(D, P))


def test_rmatmul():
    assert_rule(_T.__rmatmul__, param(D, P), x(T, D))
    assert_rule(_T.__rmatmul__, x(D, T), param(P, D))


@pytest.mark.parametrize(
    ("function", "shape", "kernel"),
    [(torch.conv1d, (7,), (3,)), (torch.conv2d, (6, 7), (3, 2)), (torch.conv3d, (4, 5, 4), (2, 3, 2))],
    ids=["1d", "2d", "3d"],
)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"stride": 2}, {"padding": 2}, {"dilation": 2, "padding": 2}, {"padding": "same"}, {"padding": "valid"},
        {"groups": 2}, {"stride": 2, "padding": 1, "groups": 2}, {"padding": "same", "dilation": 2},
    ],
    ids=str,
)  # fmt: skip
def test_convolution(function, shape, kernel, options):
    groups = options.get("groups", 1)
    assert_rule(function, x(4, *shape), param(6, 4 // groups, *kernel), param(6), **options)


def test_convolution_with_positional_arguments_of_every_dimension():
    assert_rule(torch.conv2d, x(3, 7, 8), param(5, 3, 3, 2), None, (2, 1), (1, 0), (1, 2), 1)
    assert_rule(torch.conv1d, x(3, 9), param(5, 3, 2), param(5), [2], [1], [3], 1)


def test_embedding():
    words = ids(B, 6, high=4)
    for table in (param(V, D), param(V, 1)):
        assert_rule(torch.embedding, table, words)
        assert_rule(torch.embedding, table, words, 1)
        assert_rule(torch.embedding, table, words[:, 0])


@pytest.mark.parametrize("function", [torch.index_select, _T.index_select])
@pytest.mark.parametrize("dim", [0, -2])
def test_index_select(function, dim):
    assert_rule(function, param(V, D), dim, ids(B))


def test_index_select_of_another_dimension_is_left_to_the_fallback():
    entry = find(torch.index_select)
    assert entry.rule(torch.randn(B, 1, V, 2), param(V, D), 1, ids(B, 2)) == {}


def test_indexing():
    assert_rule(_T.__getitem__, param(V, D), ids(B, 6, high=3))
    assert_rule(_T.__getitem__, param(V, D), ids(B, T) - V)
    assert_rule(
        _T.__getitem__, param(V, D).to(torch.float64).float().requires_grad_() if False else param(V, D), ids(B)
    )
    assert_rule(_T.__getitem__, param(V, 2, 3), ids(B, T))


def test_indexing_a_vector():
    """A number for every id: a bias by class, or by distance."""
    assert_rule(_T.__getitem__, param(V), ids(B, 6, high=3))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 1])
def test_embedding_bag(mode, padding):
    assert_rule(F.embedding_bag, ids(B, 6, high=4), param(V, D), mode=mode, padding_idx=padding)


def test_embedding_bag_with_weights():
    assert_rule(F.embedding_bag, ids(B, 6, high=4), param(V, D), mode="sum", per_sample_weights=x(6))


@pytest.mark.parametrize("shape", [(D,), (T, D), (2, T, D)], ids=str)
def test_layer_norm(shape):
    assert_rule(torch.layer_norm, x(*shape), (D,), param(D), param(D))
    assert_rule(torch.layer_norm, x(*shape), (D,), param(D), None, 0.1)
    assert_rule(torch.rms_norm, x(*shape), (D,), param(D))
    assert_rule(torch.rms_norm, x(*shape), (D,), param(D), 0.1)


def test_norms_over_two_dimensions():
    assert_rule(torch.layer_norm, x(2, T, D), (T, D), param(T, D), param(T, D))
    assert_rule(torch.rms_norm, x(2, T, D), (T, D), param(T, D))


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 5, 3)], ids=str)
def test_group_norm(shape):
    assert_rule(torch.group_norm, x(*shape), 2, param(6), param(6), 0.1)


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3)], ids=str)
def test_instance_norm(shape):
    mean, var = fixed(6), fixed(6).square()
    var.shared = True
    assert_rule(torch.instance_norm, x(*shape), param(6), param(6), None, None, True, 0.1, 1e-2, False)
    assert_rule(torch.instance_norm, x(*shape), param(6), param(6), mean, var, False, 0.1, 1e-2, False)


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 5, 3)], ids=str)
def test_batch_norm_in_evaluation(shape):
    mean, var = fixed(6), fixed(6).square()
    var.shared = True
    assert_rule(torch.batch_norm, x(*shape), param(6), param(6), mean, var, False, 0.1, 1e-2, False)


def test_batch_norm_in_training_has_no_rule():
    entry = find(torch.batch_norm)
    assert entry.rule(x(1, 6), x(1, 6), param(6), param(6), None, None, True, 0.1, 1e-5, False) == {}


SHAPES = [(D,), (1,), (), (T, D), (T, 1), (1, 1, D)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        torch.add, _T.add, _T.__add__, _T.__radd__, torch.sub, _T.sub, _T.__sub__, torch.rsub, _T.__rsub__,
        torch.mul, _T.mul, _T.__mul__, _T.__rmul__,
    ],
    ids=lambda function: function.__qualname__ if hasattr(function, "__qualname__") else str(function),
)  # fmt: skip
def test_arithmetic(function, shape):
    assert_rule(function, x(T, D), param(*shape))
    assert_rule(function, param(*shape), x(T, D))


@pytest.mark.parametrize("function", [torch.add, torch.sub, torch.rsub, _T.add, _T.sub])
def test_arithmetic_with_a_factor(function):
    assert_rule(function, x(T, D), param(D), alpha=0.3)
    assert_rule(function, param(T, D), x(T, D), alpha=0.3)


@pytest.mark.parametrize("function", [_T.add_, _T.sub_, _T.mul_, _T.__iadd__, _T.__isub__, _T.__imul__])
def test_arithmetic_in_place_shares_the_rule(function):
    plain = {"add_": _T.add, "sub_": _T.sub, "mul_": _T.mul, "__iadd__": _T.add, "__isub__": _T.sub, "__imul__": _T.mul}
    assert find(function) is find(plain[function.__name__])


def test_spreading():
    """A parameter that gets a row for each example."""
    for shape in [(D,), (1, D), (1, 1, D)]:
        token, spread = param(*shape), [B] + [1] * max(0, 2 - len(shape)) + list(shape)[len(shape) > 2 :]
        grad = torch.randn(B, 1, *spread[1:])
        form = find(_T.expand).rule(grad, token, *spread)["input"]()
        assert form.dense().shape == (B, *shape)
        torch.testing.assert_close(form.dense().sum(), grad.sum())


@pytest.mark.parametrize("function", [_T.repeat, _T.tile, torch.tile])
def test_repeating(function):
    """Each copy counts, those within an example are added up."""
    token = param(2, 3)
    grad = torch.randn(B, 1, 4, 9)  # [1, 2, 3] copies of one example
    form = find(function).rule(grad, token, B, 2, 3)["input"]()
    expected = grad[:, 0].unflatten(1, (2, 2)).unflatten(3, (3, 3)).sum((1, 3))
    torch.testing.assert_close(form.dense(), expected)


@pytest.mark.parametrize("step", RECURRENT, ids=lambda function: function.__name__)
def test_recurrent_layers_taken_apart_give_the_same(step):
    """The slow twin of torch's fused kernels: outputs and states."""
    name = step.__name__
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[name.split("_")[0]]
    data = torch.randn(5, B, D)
    weights = [param(gates * P, D), param(gates * P, P), param(gates * P), param(gates * P)]
    if name.endswith("cell"):
        state = torch.randn(B, P)
        state = (state, torch.randn(B, P)) if name.startswith("lstm") else state
        found, expected = RECURRENT[step](data[0], state, *weights), step(data[0], state, *weights)
    else:
        state = torch.randn(2, B, P)
        state = (state, torch.randn(2, B, P)) if name.startswith("lstm") else state
        twice = [*weights, param(gates * P, D), *weights[1:]]
        arguments = (data, state, twice, True, 1, 0.0, False, True, False)
        found, expected = RECURRENT[step](*arguments), step(*arguments)
    flat = lambda result: [result] if isinstance(result, Tensor) else list(result)  # noqa: E731
    for mine, theirs in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(mine, theirs)


# On the rows of the suite


@pytest.mark.parametrize("case", every(2, OPERATIONS + PARAMETERS, name=attrgetter("id")))
def test_rule_and_fallback_agree_at_every_site(case):
    """The rung above and the rung below, on the same inputs and gradients."""
    problem = case.build()
    engine, batch = Engine(problem.model), (problem.inputs, problem.targets)
    evaluate = lambda pair: problem.loss(call(problem.model, pair[0]), pair[1])  # noqa: E731
    try:
        run = engine.record(evaluate, batch, B)
        keep = batches.full_mask(B, None, engine.device)
        run, plan, _ = engine.parts(run, keep, evaluate, batch)
    except ValueError as refusal:
        if not case.may_refuse:
            raise
        pytest.skip(f"refused: {refusal}")
    torch.manual_seed(1)
    run = engine.record(evaluate, batch, B)
    weights, sites = torch.ones_like(run.losses), run.capture.sites
    grads = output_gradients(run.losses, weights, sites, run.capture.parameters, retain_graph=False)
    for site, how, found in zip(sites, plan.sites, grads, strict=True):
        if how is None or not how.by_rule or found[0] is None:
            continue
        by_rule = gradient_forms(site, how, found, B)
        again = None
        for dims in (len(site.outputs[0].shape), None):
            try:
                again = gradient_forms(site, replace(how, by_rule=False, dims=dims), found, B)
                break
            except (RuntimeError, ValueError, IndexError):
                continue  # vmap does not know every function that has a rule
        if again is None:
            continue
        for key, form in again.items():
            mine = by_rule[key]() if callable(by_rule[key]) else by_rule[key]
            scale = float(form.grads.abs().max()) + 1e-6
            torch.testing.assert_close(mine.dense(), form.grads, rtol=1e-4, atol=1e-5 * scale, msg=str(site))


# Rules of one's own


@pytest.fixture
def forget():
    """Functions whose rules are forgotten at the end."""
    functions = []
    yield functions.append
    unregister_rule(*functions)


def check(model, data, way="rule"):
    targets = torch.randn(B)
    found = clipped_gradients(model, squared, data, targets, 0.5)
    assert_same(found, oracle.clipped_gradients(model, squared, data, targets, 0.5), rtol=2e-5)
    ways = {row.name: row.strategy for row in explain(model, data).parameters}
    assert ways["p"] == way


def test_the_documented_example(forget):
    forget(torch.addcmul)
    model = Net(lambda n, x: torch.addcmul(n.one(x), n.p, n.one(x), value=0.5), one=nn.Linear(D, P), p=param(P))
    check(model, x(T, D), way="vmap of the function")

    @register_rule(torch.addcmul)
    def addcmul(grad, input, tensor1, tensor2, *, value=1):
        rows = (value * grad * tensor2).flatten(1, -2)
        return {"tensor1": Dense(rows.sum(1))}

    model = Net(lambda n, x: torch.addcmul(n.one(x), n.p, n.one(x), value=0.5), one=nn.Linear(D, P), p=param(P))
    check(model, x(T, D))


def test_the_rule_is_returned_as_it_was(forget):
    forget(torch.addcdiv)

    def rule(grad, input, tensor1, tensor2, *, value=1):
        return {}

    assert register_rule(torch.addcdiv)(rule) is rule
    assert find(torch.addcdiv).rule is rule


def test_one_rule_for_several_functions(forget):
    forget(torch.maximum)
    forget(torch.fmax)

    @register_rule(torch.maximum, torch.fmax)
    def maximum(grad, input, other):
        return {"other": Dense((grad * (other > input)).flatten(1, -2).sum(1))}

    for function in (torch.maximum, torch.fmax):
        model = Net(lambda n, x, function=function: function(n.one(x), n.p), one=nn.Linear(D, P), p=param(P))
        check(model, x(T, D))


def test_the_last_registration_wins(forget):
    forget(torch.maximum)
    calls = []
    for name in ("first", "second"):

        @register_rule(torch.maximum)
        def maximum(grad, input, other, name=name):
            calls.append(name)
            return {"other": Dense((grad * (other > input)).flatten(1, -2).sum(1))}

    check(Net(lambda n, x: torch.maximum(x, n.p), p=param(D)), x())
    assert set(calls) == {"second"}


def test_unregister(forget):
    forget(torch.maximum)
    register_rule(torch.maximum)(lambda grad, input, other: {})
    assert find(torch.maximum) is not None
    unregister_rule(torch.maximum, torch.minimum)
    assert find(torch.maximum) is None
    check(Net(lambda n, x: torch.maximum(x, n.p), p=param(D)), x(), way="vmap of the function")


def test_forms_and_functions_that_make_them(forget):
    forget(torch.tensordot)

    @register_rule(torch.tensordot)
    def tensordot(grad, a, b, dims=2, out=None):
        left, right = a.flatten(2).unsqueeze(1), grad.flatten(2).unsqueeze(1)
        return {"b": lambda: Outer(left, right, b.shape)}

    check(Net(lambda n, x: torch.tensordot(x, n.p, 2), p=param(T, D, P)), x(T, D))


def test_rows_of_a_table(forget):
    forget(torch.take_along_dim)

    @register_rule(torch.take_along_dim)
    def take(grad, input, indices, dim=None):
        return {"input": Rows(indices[..., 0], grad, input.shape)}

    def forward(n, i):
        return torch.take_along_dim(n.p, i.reshape(-1, 1).expand(-1, D), 0).view(*i.shape, D)

    check(Net(forward, p=param(V, D)), ids(B, T))


def test_a_function_that_broadcasts(forget):
    """Elementwise functions say so: then data with fewer dimensions is aligned as torch does it."""
    forget(torch.hypot)

    @register_rule(torch.hypot, broadcasts=True)
    def hypot(grad, input, other):
        slope = grad * other / torch.hypot(input, other)
        return {"other": Dense(slope.flatten(1, -2).sum(1))}

    check(Net(lambda n, x: torch.hypot(1 + x.square(), 1 + n.p), p=param(D)), x(T, D))


@torch.overrides.wrap_torch_function(lambda x, w: (x, w))
def scale(x, w):
    """The product made visible."""
    return Scale.apply(x, w)


@pytest.mark.parametrize("shape", [(D,), (T, D)], ids=str)
def test_a_function_of_ones_own_made_visible(forget, shape):
    forget(scale)

    @register_rule(scale)
    def rule(grad, x, w):
        return {"w": Dense((grad * x).flatten(1, -2).sum(1))}

    check(Net(lambda n, x: scale(n.one(x), n.p), one=nn.Linear(D, P), p=param(P)), x(*shape))


def test_an_operator_of_ones_own(forget):
    @torch.library.custom_op("qclip_tests::scale", mutates_args=())
    def scale(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).flatten(0, -2).sum(0)

    scale.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    operator = torch.ops.qclip_tests.scale.default
    forget(operator)

    @register_rule(operator)
    def rule(grad, x, w):
        return {"w": Dense((grad * x).flatten(1, -2).sum(1))}

    check(Net(lambda n, x: scale(n.one(x), n.p), one=nn.Linear(D, P), p=param(P)), x(T, D))


def test_a_rule_sees_detached_tensors_and_no_gradients(forget):
    forget(torch.maximum)
    seen = []

    @register_rule(torch.maximum)
    def maximum(grad, input, other):
        seen.append((grad.requires_grad, input.requires_grad, other.requires_grad, torch.is_grad_enabled()))
        return {"other": Dense((grad * (other > input)).flatten(1, -2).sum(1))}

    check(Net(lambda n, x: torch.maximum(n.one(x), n.p), one=nn.Linear(D, P), p=param(P)), x())
    assert set(seen) == {(False, False, False, False)}


def test_a_rule_sees_one_example_as_the_function_would(forget):
    """Batch-first, time-first and flattened models look the same to it, but for where the ones are."""
    forget(torch.maximum)
    shapes = []

    @register_rule(torch.maximum)
    def maximum(grad, input, other):
        shapes.append((tuple(grad.shape), tuple(input.shape), tuple(other.shape)))
        return {"other": Dense((grad * (other > input)).flatten(1, -2).sum(1))}

    for turn, turned, shape in [
        (lambda x: x, lambda h: h, (B, 1, T, D)),
        (lambda x: x.transpose(0, 1), lambda h: h.transpose(0, 1), (B, T, 1, D)),
        (lambda x: x.flatten(0, 1), lambda h: h.view(-1, T, D), (B, T, D)),
    ]:
        shapes.clear()
        forward = lambda n, x, turn=turn, turned=turned: turned(torch.maximum(turn(x), n.p))  # noqa: E731
        check(Net(forward, p=param(D)), x(T, D))
        assert set(shapes) == {(shape, shape, (D,))}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_with_a_trained_bias_taken_apart(dropout):
    """The slow twin of torch's own, where a position may attend to nothing, too; it draws the same numbers."""
    query, key, value = torch.randn(3, 2, 2, 5, 4)
    bias = param(2, 5, 5)
    cut_off = torch.zeros(5, 5).index_fill(0, torch.tensor(1), -torch.inf)
    results = []
    for attention in (F.scaled_dot_product_attention, biased_attention):
        torch.manual_seed(0)
        results.append(attention(query, key, value, bias + cut_off, dropout, scale=0.3))
    torch.testing.assert_close(results[1], results[0])


def test_attention_without_a_trained_bias_is_torchs():
    for options in ({}, {"attn_mask": torch.zeros(5, 5)}, {"is_causal": True}):
        with pytest.raises(NotImplementedError):
            biased_attention(*torch.randn(3, 2, 2, 5, 4), **options)
