"""Derivations: what is made from a parameter, and how its gradient gets back there."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.cases import Net
from engine.cases.case import param, squared
from engine.compare import assert_same
from qclip.engine import Dense, Outer, Rows, clipped_gradients, oracle
from qclip.engine.capture.capture import Capture
from qclip.engine.gradients.derivations import keeps_norm, simplify, to_parameters

B = 7  # like no other size here


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def derived(derive, **parameters):
    """The source that a function of parameters makes, from the site where it meets data; and the parameters."""
    net = Net(lambda n, x: torch.where(x > 0, derive(n), x), **parameters)
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    fixed = [x for x in [*net.parameters(), *net.buffers()] if not x.requires_grad]
    capture, x = Capture(trained, fixed, B), torch.ones(B, *derive(net).shape)
    with capture:
        net(x)
    (site,) = capture.sites
    (found,) = site.call.sources.values()
    return found, trained


SELECTIONS = {
    "transposed": lambda n: n.w.T,
    "t": lambda n: n.w.t(),
    "mT": lambda n: n.w.mT,
    "transpose": lambda n: n.w.transpose(0, 1),
    "transpose function": lambda n: torch.transpose(n.w, -1, -2),
    "permuted": lambda n: n.w.permute(1, 0),
    "viewed": lambda n: n.w.view(-1),
    "reshaped": lambda n: n.w.reshape(2, -1),
    "flattened": lambda n: n.w.flatten(),
    "row": lambda n: n.w[1],
    "sliced": lambda n: n.w[1:3, ::2],
    "new axis": lambda n: n.w[None, ..., :2],
    "unsqueezed": lambda n: n.w.unsqueeze(0),
    "chunk": lambda n: n.w.chunk(2)[1],
    "split": lambda n: n.w.split([1, 3])[0],
    "unbound": lambda n: n.w.unbind(1)[2],
    "narrowed": lambda n: n.w.narrow(1, 1, 2),
    "several": lambda n: n.w[1:].T.reshape(-1)[2:],
    "cloned": lambda n: n.w.clone(),
    "double": lambda n: n.w.double(),
}

OTHERS = {
    "expanded": lambda n: n.w[:, :1].expand(4, 6),
    "repeated": lambda n: n.w.repeat(1, 2),
    "scaled": lambda n: 3 * n.w,
    "squared": lambda n: n.w.square(),
    "normalised": lambda n: n.w / n.w.norm(),
    "two parameters": lambda n: n.w @ n.v,
    "joined": lambda n: torch.cat([n.w, n.v.T]),
    "looked up twice": lambda n: n.w[torch.tensor([0, 0, 1])],
    "rounded": lambda n: n.w.bfloat16(),
    "shaped like another": lambda n: n.u.view_as(n.w),
    "cast like another": lambda n: n.w.type_as(n.v),
}


def parts():
    return {"w": param(4, 6), "v": param(6, 2), "u": param(24)}


@pytest.mark.parametrize("derive", SELECTIONS.values(), ids=SELECTIONS)
def test_selections_keep_the_norm(derive):
    source, trained = derived(derive, **parts())
    assert keeps_norm(source)
    grads = torch.randn(B, *source.shape, dtype=source.dtype)
    carried = to_parameters(source, grads, trained, batched=True)["w"]
    torch.testing.assert_close(carried.flatten(1).norm(dim=1).float(), grads.flatten(1).norm(dim=1).float())


@pytest.mark.parametrize("derive", OTHERS.values(), ids=OTHERS)
def test_everything_else_does_not_claim_to(derive):
    """Whatever it says, the norm must be kept where it says so."""
    source, trained = derived(derive, **parts())
    if keeps_norm(source):
        (name,) = source.parameters
        grads = torch.randn(B, *source.shape, dtype=source.dtype)
        carried = to_parameters(source, grads, trained, batched=True)[name]
        torch.testing.assert_close(carried.flatten(1).norm(dim=1), grads.flatten(1).norm(dim=1))


@pytest.mark.parametrize("name", ["expanded", "scaled", "squared", "looked up twice", "rounded"])
def test_what_changes_the_norm_is_known(name):
    source, _ = derived(OTHERS[name], **parts())
    assert not keeps_norm(source)


@pytest.mark.parametrize("derive", (SELECTIONS | OTHERS).values(), ids=SELECTIONS | OTHERS)
def test_gradients_are_carried_back_as_by_autograd(derive):
    """All examples at once, or one sum."""
    given = parts()
    source, trained = derived(derive, **given)
    grads = torch.randn(B, *source.shape).to(source.dtype)
    carried = to_parameters(source, grads, trained, batched=True)
    one = to_parameters(source, grads[0], trained, batched=False)
    made = derive(Net(derive, **given))
    for name in source.parameters:
        expected = [torch.autograd.grad(made, trained[name], g, retain_graph=True, allow_unused=True)[0] for g in grads]
        if expected[0] is None:  # only its shape or type was used
            assert name not in carried
        else:
            torch.testing.assert_close(carried[name], torch.stack(expected))
            torch.testing.assert_close(one[name], expected[0])


TRANSPOSES = ["transposed", "t", "mT", "transpose", "transpose function"]


@pytest.mark.parametrize("name", TRANSPOSES)
def test_transposed_products_stay_products(name):
    source, trained = derived(SELECTIONS[name], **parts())
    form = Outer(torch.randn(B, 1, 2, 6), torch.randn(B, 1, 2, 4), source.shape)
    parent, simple = simplify(source, form)
    assert parent.call is None
    assert isinstance(simple, Outer)
    expected = to_parameters(source, form.dense(), trained, batched=True)["w"]
    torch.testing.assert_close(simple.dense(), expected)


@pytest.mark.parametrize("name", ["cloned", "double"])
def test_casts_are_undone(name):
    source, _ = derived(SELECTIONS[name], **parts())
    form = Dense(torch.randn(B, 4, 6))
    parent, simple = simplify(source, form)
    assert parent.call is None
    assert simple is form


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 2)], ids=str)
def test_a_constant_lookup_is_a_few_rows(shape):
    """Position tables: the gradient of the looked-up rows is a few rows of the table."""
    order = torch.randint(4, shape)
    source, trained = derived(lambda n: F.embedding(n.order, n.w), order=nn.Buffer(order), **parts())
    form = Dense(torch.randn(B, *shape, 6))
    parent, simple = simplify(source, form)
    assert parent.call is None
    assert isinstance(simple, Rows)
    expected = to_parameters(source, form.grads, trained, batched=True)["w"]
    torch.testing.assert_close(simple.dense(), expected)


def test_a_constant_lookup_with_padding_is_carried_back():
    order = torch.tensor([0, 1, 1, 3])
    source, trained = derived(lambda n: F.embedding(n.order, n.w, padding_idx=1), order=nn.Buffer(order), **parts())
    form = Dense(torch.randn(B, 4, 6))
    parent, simple = simplify(source, form)
    expected = to_parameters(source, form.grads, trained, batched=True)["w"]
    found = simple.dense() if parent.call is None else to_parameters(parent, simple.dense(), trained, batched=True)["w"]
    torch.testing.assert_close(found, expected)
    assert not found[:, 1].any()


@pytest.mark.parametrize("derive", (SELECTIONS | OTHERS).values(), ids=SELECTIONS | OTHERS)
def test_simplifying_changes_nothing(derive):
    source, trained = derived(derive, **parts())
    form = Dense(torch.randn(B, *source.shape))
    parent, simple = simplify(source, form)
    expected = to_parameters(source, form.dense(), trained, batched=True)
    if parent.call is None:
        (name,) = parent.parameters
        found = {name: simple.dense()}
    else:
        found = to_parameters(parent, simple.dense(), trained, batched=True)
    rough = source.dtype == torch.bfloat16
    for name, grads in found.items():
        torch.testing.assert_close(grads, expected[name], rtol=1e-2 if rough else 1e-6, atol=1e-2 if rough else 1e-6)


# On models


@pytest.mark.parametrize("derive", (SELECTIONS | OTHERS).values(), ids=SELECTIONS | OTHERS)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another use"])
def test_models_of_derived_parameters(derive, alone):
    """The derived value meets data once, or the parameter is used elsewhere too, so that the two are clipped as one."""

    def forward(n, x):
        made = derive(n).flatten().float()
        out = x[:, : len(made)] * made
        return out if alone else out.sum(1, keepdim=True) + x[:, :4] @ n.w + n.u[0] + n.v.sum()

    model, x, targets = Net(forward, **parts()), torch.randn(B, 48), torch.randn(B)
    found = clipped_gradients(model, squared, x, targets, 0.5)
    rough = derive in (OTHERS["rounded"],)
    assert_same(found, oracle.clipped_gradients(model, squared, x, targets, 0.5), rtol=1e-2 if rough else 2e-5)
