"""Capture: which calls are sites, of which parameters, what is made from parameters alone, where gradients arrive."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.cases import Net
from engine.cases.case import D, P, T, V, ids, param, squared
from qclip.engine import Engine
from qclip.engine.capture.capture import Capture
from qclip.engine.capture.invocation import is_in_place
from qclip.engine.gradients.sites import output_gradients, tensors

B = 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def capture(function, *inputs, batch_size=B, constants=(), **parameters):
    """The capture of ``function(parameters, *inputs)`` and what it returned."""
    net = Net(function, **parameters)
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    fixed = [x for x in [*net.parameters(), *net.buffers()] if not x.requires_grad]
    seen = Capture(trained, [*fixed, *constants], batch_size)
    with seen:
        returned = net(*inputs)
    return seen, returned


def sites(function, *inputs, **parameters):
    """(function, parameters) of every site."""
    seen, _ = capture(function, *inputs, **parameters)
    return [(site.call.function_name, site.parameters) for site in seen.sites]


def x(*shape):
    return torch.randn(B, *(shape or (D,)))


# What is a site

LINEAR = "torch.nn.functional.linear"

SITES = {
    "linear": (lambda n, x: n.one(x), [(LINEAR, ["one.bias", "one.weight"])], {"one": nn.Linear(D, P)}),
    "functional": (lambda n, x: F.linear(x, n.w), [(LINEAR, ["w"])], {"w": param(P, D)}),
    "matmul": (lambda n, x: x @ n.w, [("torch.Tensor.matmul", ["w"])], {"w": param(D, P)}),
    "twice": (
        lambda n, x: n.one(n.one(x)),
        [(LINEAR, ["one.bias", "one.weight"])] * 2,
        {"one": nn.Linear(D, D)},
    ),
    "tied": (
        lambda n, x: F.linear(n.one(x), n.one.weight.T),
        [(LINEAR, ["one.weight"])] * 2,
        {"one": nn.Linear(D, P, bias=False)},
    ),
    "frozen weight": (
        lambda n, x: F.linear(x, n.w, n.b),
        [(LINEAR, ["b"])],
        {"w": nn.Parameter(torch.randn(P, D), requires_grad=False), "b": param(P)},
    ),
    "two in one call": (lambda n, x: torch.addcmul(n.a, x, n.b), [("torch.addcmul", ["a", "b"])],
                        {"a": param(D), "b": param(D)}),
    "in a list": (lambda n, x: torch.cat([x, n.token.expand(B, -1)]).sum(0).expand(B, -1),
                  [("torch.Tensor.expand", ["token"])], {"token": param(1, D)}),
    "unused": (lambda n, x: (n.w * x, x)[1], [("torch.Tensor.mul", ["w"])], {"w": param(D)}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "found", "parameters"), SITES.values(), ids=SITES)
def test_sites(function, found, parameters):
    names = [(name.replace("torch.Tensor.__matmul__", "torch.Tensor.matmul").replace("__mul__", "mul"), each)
             for name, each in sites(function, x(), **parameters)]  # fmt: skip
    assert names == found


def test_modules_and_functions_are_seen_the_same():
    module, function = nn.Conv1d(3, 5, 2), lambda n, x: F.conv1d(x, n.w, n.b)
    by_module = sites(lambda n, x: n.one(x), x(3, 7), one=module)
    by_function = sites(function, x(3, 7), w=module.weight, b=module.bias)
    assert [name for name, _ in by_module] == [name for name, _ in by_function]
    assert by_module[0][0].endswith("conv1d")


@pytest.mark.parametrize(
    "function",
    [
        lambda n, x: x + 1,
        lambda n, x: x * n.buffer,
        lambda n, x: F.linear(x, n.frozen),
        lambda n, x: x.type_as(n.w),
        lambda n, x: x.to(n.w.dtype) + n.w.shape[0],
        lambda n, x: F.linear(x, n.w.detach()),
        lambda n, x: x * (n.w > 0).sum(),
    ],
    ids=["none", "buffer", "frozen", "type", "shape", "detached", "comparison"],
)
def test_what_is_no_site(function):
    parts = {"w": param(P, D), "buffer": nn.Buffer(torch.ones(D)), "frozen": nn.Parameter(torch.ones(P, D), False)}
    assert sites(function, x(), **parts) == []


def test_nothing_is_captured_without_gradients():
    def forward(n, x):
        with torch.no_grad():
            n.one(x)
        return n.one(x)

    assert len(sites(forward, x(), one=nn.Linear(D, P))) == 1


# Functions that are opened


def test_attention_is_opened():
    seen = sites(
        lambda n, x: n.attention(x, x, x, need_weights=False)[0],
        x(T, D),
        attention=nn.MultiheadAttention(D, 2, batch_first=True),
    )
    assert {name for name, _ in seen} <= {LINEAR, "torch.addmm"}
    assert {parameter for _, each in seen for parameter in each} == {
        "attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight", "attention.out_proj.bias",
    }  # fmt: skip


def test_normalisation_written_in_python_is_opened():
    """F.layer_norm asks for overrides and then calls torch.layer_norm, which has a rule."""
    assert sites(lambda n, x: n.norm(x), x(), norm=nn.LayerNorm(D)) == [
        ("torch.layer_norm", ["norm.bias", "norm.weight"])
    ]
    assert sites(lambda n, i: n.words(i), ids(B, T), words=nn.Embedding(V, D)) == [
        ("torch.embedding", ["words.weight"])
    ]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_taken_apart(kind):
    seen = sites(lambda n, x: n.rnn(x)[0], x(T, D), rnn=kind(D, P, batch_first=True))
    assert {name for name, _ in seen} == {LINEAR}
    assert len(seen) == 1 + T  # the inputs at once, the states one by one


# Sources


def source(function, *, site=0, **parameters):
    """What the first site got from parameters."""
    seen, _ = capture(function, x(), **parameters)
    (found,) = seen.sites[site].call.sources.values()
    return found


def test_a_parameter_is_its_own_source():
    found = source(lambda n, x: x * n.w, w=param(D))
    assert found.call is None
    assert found.parameters == {"w"}
    assert found.shape == (D,)


@pytest.mark.parametrize(
    ("derive", "shape"),
    [
        (lambda n: n.w.T, (D, P)),
        (lambda n: n.w[:2].T, (D, 2)),
        (lambda n: (n.w * n.mask).T, (D, P)),
        (lambda n: n.w.T / n.w.norm(), (D, P)),
        (lambda n: torch.cat([n.w, n.v]).T, (D, P + 1)),
        (lambda n: n.w.T.exp().softmax(0), (D, P)),
        (lambda n: n.w.double().float().T, (D, P)),
        (lambda n: (n.w @ n.v.T @ n.v).T, (D, P)),
    ],
    ids=["transposed", "sliced", "masked", "normalised", "joined", "softmax", "cast", "product"],
)
def test_made_from_parameters_alone(derive, shape):
    """Not a site: the site is where data comes in."""
    parts = {"w": param(P, D), "v": param(1, D), "mask": nn.Buffer(torch.ones(P, D))}
    seen, _ = capture(lambda n, x: x @ derive(n), x(), **parts)
    assert len(seen.sites) == 1
    (found,) = seen.sites[0].call.sources.values()
    assert found.call is not None
    assert found.shape == shape
    assert "w" in found.parameters


def test_a_chain_of_sources_leads_to_the_parameter():
    found = source(lambda n, x: x @ n.w.T[:, 2:].exp(), w=param(P, D))
    chain = []
    while found.call is not None:
        chain.append(found.call.function_name)
        (found,) = found.parents
    assert len(chain) == 3
    assert found.parameters == {"w"}


def test_data_makes_an_end_of_it():
    """What a site returns is data, whatever is done with it next."""
    seen, _ = capture(lambda n, x: (n.w * x).exp() * n.v, x(), w=param(D), v=param(D))
    assert [site.parameters for site in seen.sites] == [["w"], ["v"]]


def test_a_parameter_overwritten_by_data():
    """A derived value that data is written into is data."""

    def forward(n, x):
        h = n.w.expand(B, D).clone()
        h[:, 0] = x[:, 0]
        return h * n.v

    seen, _ = capture(forward, x(), w=param(D), v=param(D))
    assert any(site.parameters == ["w"] for site in seen.sites)
    assert seen.sites[-1].parameters == ["v"]


# Constants


def test_shared_inputs_are_no_data():
    """A call without data is none of a site's: position ids [1, T] make a table, which meets the examples later."""
    places = torch.arange(T)[None]
    seen, _ = capture(
        lambda n, i, places: n.words(i) + n.places(places),
        ids(B, T),
        places,
        constants=[places],
        words=nn.Embedding(V, D),
        places=nn.Embedding(8, D),
    )
    functions = [(site.call.function_name.rpartition(".")[2], site.parameters) for site in seen.sites]
    assert functions[0] == ("embedding", ["words.weight"])
    assert functions[1][1] == ["places.weight"]
    assert "add" in functions[1][0]


def test_tensors_made_inside_from_nothing_are_no_data():
    def forward(n, x):
        return x @ (n.w * torch.arange(P))

    seen, _ = capture(forward, x(), w=param(D, P))
    assert [site.call.function_name.strip("_").rpartition(".")[2].strip("_") for site in seen.sites] == ["matmul"]


def test_results_of_an_iterator():
    seen, _ = capture(lambda n, x: sum(x @ w for w in n.weights), x(), weights=param(2, D, P))
    assert [site.parameters for site in seen.sites] == [["weights"], ["weights"]]


def test_what_is_written_into_a_constant():
    """Values of parameters make it a source, data make it data."""

    def forward(n, x):
        of_parameters, of_data = torch.zeros(D, P), torch.zeros(B, 1)
        of_parameters[0] = n.w
        of_data[:] = x[:, :1]
        return of_data * n.v + x @ of_parameters

    seen, _ = capture(forward, x(), w=param(P), v=param(P))
    assert [site.parameters for site in seen.sites] == [["v"], ["w"]]


@pytest.mark.parametrize(
    ("write", "routes"),
    [
        (lambda n, h, mask: 0.0, False),
        (lambda n, h, mask: n.w, False),
        (lambda n, h, mask: torch.ones(P), False),
        (lambda n, h, mask: h[0].clone(), True),
        (lambda n, h, mask: h.flip(0)[mask].detach(), True),
    ],
    ids=["number", "parameter", "constant", "row of an example", "rows of other examples"],
)
def test_writing_over_rows_moves_none_but_those_of_examples(write, routes):
    def forward(n, x, mask):
        h = x.clone()
        h[mask] = write(n, h, mask)
        return h + n.w

    seen, _ = capture(forward, torch.randn(B, P), torch.rand(B) > 0.5, w=param(P))
    assert seen.routes is routes


@pytest.mark.parametrize("spread", [
    lambda n, x: n.token.expand(len(x), -1), lambda n, x: n.token.repeat(len(x), 1), lambda n, x: n.token.expand_as(x),
    lambda n, x: torch.broadcast_to(n.token, x.shape),
], ids=["expand", "repeat", "expand_as", "broadcast_to"])  # fmt: skip
def test_a_parameter_spread_over_the_examples_is_a_site(spread):
    seen, _ = capture(spread, x(), token=param(1, D))
    assert [site.parameters for site in seen.sites] == [["token"]]
    assert seen.sites[0].outputs[0].shape == (B, D)


def test_fixed_tensors_are_known():
    """Frozen parameters and buffers, and what is made from them, hold no examples, whatever their size."""
    seen, _ = capture(
        lambda n, x: torch.addcmul(n.w, x, 2 * n.buffer), x(), w=param(D), buffer=nn.Buffer(torch.ones(B, D))
    )
    (site,) = seen.sites
    shapes = [tuple(tensor.shape) for tensor, _ in site.call.versions if id(tensor) in site.call.fixed]
    assert shapes == [(D,), (B, D)]


# Edges


def gradient(function, *inputs, **parameters):
    """The gradient at the first site's output, from the loss."""
    seen, returned = capture(function, *inputs, **parameters)
    losses = squared(returned, torch.ones(B))
    return output_gradients(losses, torch.ones(B), seen.sites, seen.parameters, retain_graph=False)[0][0]


IN_PLACE = {
    "relu": (F.relu, lambda h: F.relu(h, inplace=True)),
    "relu_": (torch.relu, lambda h: h.relu_()),
    "add": (lambda h: h + 1.5, lambda h: h.add_(1.5)),
    "mul": (lambda h: h * h.detach(), lambda h: h.mul_(h.detach().clone())),
    "operator": (lambda h: h * 3, lambda h: h.__imul__(3)),
    "index": (
        lambda h: torch.where(torch.arange(h.shape[1]).view(-1, *[1] * (h.dim() - 2)) > 0, h, 0.0),
        lambda h: (h.__setitem__((slice(None), 0), 0.0), h)[1],
    ),
    "view": (lambda h: 2 * h, lambda h: (h.view(-1).mul_(2), h)[1]),
    "twice": (lambda h: (2 * h).sigmoid(), lambda h: h.mul_(2).sigmoid_()),
}


@pytest.mark.parametrize(("plain", "in_place"), IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("shape", [(D,), (T, D)], ids=["2d", "3d"])
def test_an_output_overwritten_later_keeps_its_gradient(plain, in_place, shape):
    layer, inputs = nn.Linear(D, P), x(*shape)
    expected = gradient(lambda n, x: plain(n.one(x)), inputs, one=layer)
    found = gradient(lambda n, x: in_place(n.one(x)), inputs, one=layer)
    torch.testing.assert_close(found, expected)


def test_unused_outputs_have_no_gradient():
    seen, returned = capture(lambda n, x: (n.one(x), n.two(x))[0], x(), one=nn.Linear(D, P), two=nn.Linear(D, P))
    losses = squared(returned, torch.ones(B))
    first, second = output_gradients(losses, torch.ones(B), seen.sites, seen.parameters, retain_graph=False)
    assert first[0] is not None
    assert second == [None]


def test_weights_of_the_losses():
    """Left-out examples have no gradient."""
    seen, returned = capture(lambda n, x: n.one(x), x(), one=nn.Linear(D, P))
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0])
    ((grad,),) = output_gradients(
        squared(returned, torch.ones(B)), weights, seen.sites, seen.parameters, retain_graph=False
    )
    assert grad[0].any()
    assert not grad[1].any()
    assert not grad[3].any()


def test_no_sites():
    assert output_gradients(torch.ones(2, requires_grad=True), torch.ones(2), [], {}, retain_graph=False) == []


def test_the_output_itself_is_not_held():
    """Only its edge, unless a check asks for the value."""
    seen, _ = capture(lambda n, x: n.one(x), x(), one=nn.Linear(D, P))
    assert seen.sites[0].value is None
    parameters = dict(nn.Linear(D, P).named_parameters())
    kept = Capture(parameters, [], B, keep_values=True)
    inputs = x()
    with kept:
        out = F.linear(inputs, parameters["weight"])
    assert torch.equal(kept.sites[0].value, out)
    out.data.zero_()
    assert kept.sites[0].value.any()


def test_captured_tensors_are_detached_and_versioned():
    inputs = x().requires_grad_()
    seen, _ = capture(lambda n, x: n.one(2 * x), inputs, one=nn.Linear(D, P))
    for tensor, version in seen.sites[0].call.versions:
        assert not tensor.requires_grad
        assert tensor._version == version


def test_capture_ends_with_its_block():
    layer = nn.Linear(D, P)
    seen = Capture(dict(layer.named_parameters()), [], B)
    layer(x())
    with seen:
        layer(x())
    layer(x())
    assert len(seen.sites) == 1


def test_autocast_is_remembered():
    engine_model = nn.Linear(D, P)
    seen = Capture(dict(engine_model.named_parameters()), [], B)
    with torch.autocast("cpu", torch.bfloat16), seen:
        engine_model(x())
    assert seen.sites[0].cast_to == torch.bfloat16
    seen = Capture(dict(engine_model.named_parameters()), [], B)
    with seen:
        engine_model(x())
    assert seen.sites[0].cast_to is None


def test_randomness_is_remembered_where_a_call_may_be_run_again():
    """A rule needs none."""
    seen, _ = capture(lambda n, x: F.prelu(n.one(x), n.slope), x(), one=nn.Linear(D, P), slope=param(1))
    by_rule, again = seen.sites
    assert by_rule.random_state is None
    assert again.random_state is not None


# Names


def test_sites_say_what_they_are():
    seen, _ = capture(lambda n, x: n.one(x), x(), one=nn.Linear(D, P))
    assert str(seen.sites[0]) == f"{LINEAR} with one.bias, one.weight"


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (torch.Tensor.add_, True),
        (torch.Tensor.__iadd__, True),
        (torch.Tensor.__setitem__, True),
        (torch.relu_, True),
        (torch.Tensor.add, False),
        (torch.Tensor.__add__, False),
        (torch.Tensor.__getitem__, False),
        (F.linear, False),
    ],
)
def test_in_place_functions_are_known_by_name(function, answer):
    assert is_in_place(function) is answer


def test_tensors_are_found_in_lists():
    a, b, c = torch.zeros(3)
    assert [id(t) for t in tensors([a, [b, ("word", c)], 3, None])] == [id(a), id(b), id(c)]


def test_the_engine_captures_the_evaluation():
    """Everything between the batch and the losses, the loss function included."""
    model = nn.Linear(D, P)
    engine = Engine(model)
    run = engine.record(
        lambda batch: squared(model(batch[0]), batch[1]) + model.weight.square().sum(), (x(), torch.randn(B)), B
    )
    assert run.capture.sites[0].parameters == ["bias", "weight"]
    assert run.capture.sites[-1].parameters == ["weight"]
    assert run.losses.shape == (B,)
