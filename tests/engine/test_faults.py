"""Where torch's gradients of batch and instance norms are wrong, the engine, the oracle and what they are compared with
are right.

Expected values are those of the norms written out in elementary operations.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.cases import Net
from engine.cases.case import squared
from engine.cases.hidden import ScaleForVmap
from engine.compare import assert_same
from qclip.engine import clipped_gradients, oracle
from qclip.engine.capture import faults

SHAPES = [
    (1, 4, 2, 3),
    (1, 4, 1, 3),
    (2, 4, 1, 3),
    (2, 4, 3, 1),
    (3, 4, 2, 3),
    (1, 4, 1, 2, 3),
    (1, 1, 2, 3),
    (2, 4, 1, 1),
]
EPS = 1e-2


def across(x, like):
    return x.view(-1, *[1] * (like.dim() - 2))


def scaled(x, weight, bias):
    x = x if weight is None else x * across(weight, x)
    return x if bias is None else x + across(bias, x)


def fixed(x, mean, variance, weight, bias):
    """A norm with running statistics, in elementary operations."""
    return scaled((x - across(mean, x)) / (across(variance, x) + EPS).sqrt(), weight, bias)


def single(x, weight, bias):
    """An instance norm, in elementary operations."""
    over = tuple(range(2, x.dim()))
    mean, variance = x.mean(over, keepdim=True), x.var(over, correction=0, keepdim=True)
    return scaled((x - mean) / (variance + EPS).sqrt(), weight, bias)


NORMS = {
    "batch": (lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, False, 0.1, EPS), fixed),
    "instance": (
        lambda x, m, v, w, b: F.instance_norm(x, weight=w, bias=b, eps=EPS),
        lambda x, m, v, w, b: single(x, w, b),
    ),
    "instance-fixed": (lambda x, m, v, w, b: F.instance_norm(x, m, v, w, b, False, 0.1, EPS), fixed),
}


def layouts(shape):
    """Strides of every order in which examples, channels and positions may lie, and any for dimensions of length 1."""
    positions = list(range(2, len(shape)))
    for order in ([0, 1, *positions], [0, *positions, 1], [*positions, 0, 1]):
        strides, size = [0] * len(shape), 1
        for k in reversed(order):
            strides[k], size = size, size * shape[k]
        yield tuple(strides)
        for k, other in itertools.product(range(len(shape)), (1, shape[1])):
            if shape[k] == 1:
                yield (*strides[:k], other, *strides[k + 1 :])


def laid(x, strides):
    return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)


def values(shape, dtype=torch.float64):
    torch.manual_seed(0)
    channels = [(torch.rand(shape[1], dtype=torch.float64) + 0.5).to(dtype) for _ in range(4)]
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype), channels


@pytest.mark.parametrize("affine", [True, False], ids=["", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_gradients_in_every_layout(name, shape, affine):
    if name == "instance" and shape[2:].count(1) == len(shape[2:]):
        pytest.skip("one number has no variance")
    torchs, elementary = NORMS[name]
    x, grad, (mean, variance, *rest) = values(shape)
    weight, bias = rest if affine else (None, None)
    for before, after in itertools.product(set(layouts(shape)), repeat=2):
        given = [laid(x, before).requires_grad_(), *(y.clone().requires_grad_() for y in rest if affine)]
        arguments = (given[0], mean, variance, *(given[1:] if affine else (weight, bias)))
        with faults.avoided():
            found = torchs(*arguments)
            grads = torch.autograd.grad(found, given, laid(grad, after))
        expected = elementary(*arguments)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(grads, torch.autograd.grad(expected, given, grad))


@pytest.mark.parametrize("name", NORMS)
def test_precision_is_that_of_torch(name):
    """Numbers of 16 bits, with parameters of 16 or 32, give such numbers, rounded once."""
    torchs, _ = NORMS[name]
    x, _, channels = values((1, 4, 2, 3), torch.bfloat16)
    for kind in (torch.bfloat16, torch.float32):
        arguments = (x, *(y.to(kind) for y in channels))
        with faults.avoided():
            found = torchs(*arguments)
        expected = torchs(*arguments)
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


def test_statistics_are_still_moved():
    """Training mode is not replaced: what it does to the model must be seen, and refused."""
    x, _, (mean, variance, weight, bias) = values((1, 4, 2, 3))
    for function in (F.batch_norm, F.instance_norm):
        before = mean.clone()
        with faults.avoided():
            function(x, mean, variance, weight, bias, True, 0.1, EPS)
        assert not torch.equal(mean, before)


def test_checks_of_torch_are_kept():
    with faults.avoided(), pytest.raises(ValueError, match="more than 1 spatial element"):
        F.instance_norm(torch.randn(2, 3, 1, 1))


def tokens(norm, *, checkpointed=False):
    """[B, 6, 5] by a linear layer to an image with channels last, normed: the gradient lies in order, or time first."""
    torch.manual_seed(0)
    for x in norm.state_dict().values():
        if x.is_floating_point():
            x.uniform_(0.5, 1.5)
    time_first = isinstance(norm, nn.InstanceNorm2d)  # which puts its own input in order

    def forward(n, x):
        image = n.first(x).mT.unflatten(2, (2, 3))
        image = checkpoint(n.norm, image, use_reentrant=False) if checkpointed else n.norm(image)
        if time_first:
            return n.last(image.flatten(2).permute(2, 0, 1).contiguous()).transpose(0, 1)
        return n.last(image.flatten(1))

    return Net(forward, first=nn.Linear(5, 4), norm=norm.eval(), last=nn.Linear(4 if time_first else 24, 3))


MODELS = {
    "batch": lambda: tokens(nn.BatchNorm2d(4, eps=EPS)),
    "batch-checkpointed": lambda: tokens(nn.BatchNorm2d(4, eps=EPS), checkpointed=True),
    "instance": lambda: tokens(nn.InstanceNorm2d(4, eps=EPS, affine=True)),
    "instance-fixed": lambda: tokens(nn.InstanceNorm2d(4, eps=EPS, affine=True, track_running_stats=True)),
}


def unseen():
    """Gradients of the whole model are needed, example by example."""
    model = tokens(nn.BatchNorm2d(4, eps=EPS))
    model.scale = nn.Parameter(torch.rand(5) + 0.5)
    forward = model.function
    model.function = lambda n, x: forward(n, ScaleForVmap.apply(x, n.scale))
    return model


MODELS["within the unseen"] = unseen


def written_out(norm):
    """The norm in elementary operations."""
    affine = norm.weight, norm.bias
    if norm.running_mean is None:
        return lambda x: single(x, *affine)
    return lambda x: fixed(x, norm.running_mean, norm.running_var, *affine)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_engine_and_oracle(name, count):
    """Both give what they give for the norm in elementary operations."""
    model = MODELS[name]()
    x, targets = torch.randn(count, 6, 5), torch.randn(count)
    found = clipped_gradients(model, squared, x, targets, 0.5)
    one_by_one = oracle.clipped_gradients(model, squared, x, targets, 0.5)
    model.norm.forward = written_out(model.norm)
    expected = oracle.clipped_gradients(model, squared, x, targets, 0.5)
    assert_same(one_by_one, expected, 2e-5)
    assert_same(found, expected, 2e-5)


def test_torch_is_left_as_it_was():
    """Also where contexts overlap, as those of two threads do."""
    before = torch.batch_norm, torch.instance_norm
    one, two = faults.avoided(), faults.avoided()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert torch.batch_norm is not before[0]
    two.__exit__(None, None, None)
    assert (torch.batch_norm, torch.instance_norm) == before


def test_memory_that_is_not_initialised(monkeypatch):
    """Positions are written example by example into memory that holds anything before, as in SigLIP 2."""
    torch.manual_seed(0)

    def forward(n, x):
        places = torch.empty(len(x), 3, 6)
        for i in range(len(x)):
            places[i] = n.places.tanh()
        return n.one(x + places)

    model = Net(forward, places=nn.Parameter(torch.randn(3, 6)), one=nn.Linear(6, 2))
    problem = (model, squared, torch.randn(4, 3, 6), torch.randn(4), 0.1)
    torch.use_deterministic_algorithms(True)  # which fills such memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        found = clipped_gradients(*problem)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(found, oracle.clipped_gradients(*problem), rtol=2e-5)
