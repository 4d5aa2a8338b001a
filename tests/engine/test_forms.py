"""Forms against dense arithmetic in float64: norms, sums, masks, transposes, joins, and norms that round upward."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from qclip.engine.gradients import forms
from qclip.engine.gradients.convolutions import Geometry, Windows
from qclip.engine.gradients.forms import Dense, Outer, Rows, join, joint_squared_norms
from qclip.engine.kernels import products

seeds = st.integers(0, 2**31)
few = st.integers(1, 4)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
EPS = torch.finfo(torch.float32).eps


def numbers(generator, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def outers(draw, groups=few):
    g = torch.Generator().manual_seed(draw(seeds))
    B, G, T, M, N = draw(st.integers(0, 4)), draw(groups), draw(st.integers(0, 6)), draw(few), draw(few)
    dtype = draw(dtypes)
    left, right = numbers(g, B, G, T, M, dtype=dtype), numbers(g, B, G, T, N, dtype=dtype)
    return Outer(left, right, torch.Size((G * M, N)))


@st.composite
def tables(draw):
    g = torch.Generator().manual_seed(draw(seeds))
    B, S, V, row = draw(st.integers(0, 4)), draw(st.integers(0, 6)), draw(few), draw(st.lists(few, max_size=2))
    grads = numbers(g, B, S, *row, dtype=draw(dtypes))
    return Rows(torch.randint(V, (B, S), generator=g), grads, torch.Size((V, *row)))


@st.composite
def denses(draw):
    g = torch.Generator().manual_seed(draw(seeds))
    return Dense(numbers(g, draw(st.integers(0, 4)), *draw(st.lists(few, max_size=3)), dtype=draw(dtypes)))


@st.composite
def windows(draw):
    """A convolution of any geometry whose windows fit."""
    g = torch.Generator().manual_seed(draw(seeds))
    spatial, B, R = draw(st.integers(1, 3)), draw(few), draw(st.integers(1, 2))
    groups, channels, out = draw(st.integers(1, 2)), draw(few), draw(few)
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(spatial))  # noqa: E731
    kernel, strides, pads, dilations = each(1, 3), each(1, 2), each(0, 2), each(1, 2)
    space = tuple(d * (k - 1) + 1 + extra for d, k, extra in zip(dilations, kernel, each(0, 2), strict=True))
    images = numbers(g, B * R, groups * channels, *space)
    shape = torch.Size((groups * out, channels, *kernel))
    conv = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    like = conv(images, torch.zeros(shape), None, strides, pads, dilations, groups)
    geometry = Geometry(strides, pads, dilations, groups)
    return Windows(images, numbers(g, *like.shape), B, shape, geometry), conv


def exact(form):
    """The gradients of a form in float64, by definition: [B, *shape]."""
    if isinstance(form, Dense):
        return form.grads.double()
    if isinstance(form, Outer):
        found = torch.einsum("bgtm,bgtn->bgmn", form.left.double(), form.right.double())
        return found.reshape(len(form.left), *form.shape)
    found = torch.zeros(len(form.ids), *form.shape, dtype=torch.float64)
    for b, ids in enumerate(form.ids.tolist()):
        for s, row in enumerate(ids):
            found[b, row] += form.grads[b, s].double()
    return found


def norms(x):
    return x.flatten(1).norm(dim=1) if x.dim() > 1 else x.abs()


def summands(form):
    """[B]: the lengths of what is added up, one by one."""
    if isinstance(form, Outer):
        return (form.left.double().norm(dim=3) * form.right.double().norm(dim=3)).sum((1, 2))
    if isinstance(form, Rows):
        return form.grads.double().flatten(2).norm(dim=2).sum(1) if form.grads.dim() > 2 else form.grads.abs().sum(1)
    return norms(exact(form))


def assert_norms(squares, form, expected=None, gram=False):
    """Right, and not below the truth by more than the last digit; above it by rounding of the summands only."""
    truth, sizes = norms(exact(form) if expected is None else expected), summands(form)
    found = squares.double().sqrt()
    margin = 20 * EPS * sizes.square() if gram else 20 * EPS * sizes * truth + (20 * EPS * sizes).square()
    assert (found >= truth * (1 - 2 * EPS) - 1e-30).all()
    assert (found.square() <= truth.square() * (1 + 20 * EPS) + margin + 1e-30).all()


def check(form):
    truth = exact(form)
    expected_dtype = torch.float64 if truth.numel() and form.dense().dtype == torch.float64 else torch.float32
    count = len(truth)
    torch.testing.assert_close(form.dense().double(), truth, rtol=1e-5, atol=1e-5)
    assert form.dense().dtype == expected_dtype or not truth.numel()
    factors = torch.linspace(0, 1, count, dtype=form.dense().dtype)
    summed = form.weighted_sum(factors)
    assert summed.shape == truth.shape[1:]
    torch.testing.assert_close(
        summed.double(), torch.einsum("b,b...->...", factors.double(), truth), rtol=1e-5, atol=1e-5
    )
    assert form.squared_norms().norms.shape == (count,)
    keep = torch.arange(count) % 2 == 0
    masked = form.masked(keep)
    assert type(masked) is type(form)
    assert not masked.dense()[~keep].any()
    torch.testing.assert_close(masked.dense()[keep], form.dense()[keep], rtol=0, atol=0)


@given(outers())
def test_outer(form):
    check(form)
    assert_norms(form.gram_norms().norms, form, gram=True)
    assert_norms(form.direct_norms().norms, form)
    assert_norms(form.squared_norms().norms, form, gram=True)
    assert form.outer() is form
    assert form.dims.batch_size == len(form.left)
    assert form.dims.elements == form.shape.numel()


@given(tables())
def test_rows(form):
    check(form)
    assert_norms(form.squared_norms().norms, form)


@given(denses())
def test_dense(form):
    check(form)
    torch.testing.assert_close(form.squared_norms().norms.double(), norms(exact(form)).square(), rtol=1e-5, atol=1e-10)


@given(outers(groups=st.just(1)))
def test_transposed(form):
    torch.testing.assert_close(exact(form.mT), exact(form).mT)
    assert form.mT.shape == torch.Size(reversed(form.shape))
    assert form.mT.mT.left is form.left


@given(windows())
def test_windows(drawn):
    """Every way to the gradient of a convolution is autograd's, image by image."""
    form, conv = drawn
    weight = torch.zeros(form.shape, dtype=torch.float64, requires_grad=True)
    g, each = form.geometry, len(form.grads) // form.dims.batch_size
    truth = []
    for images, grads in zip(form.images.double().split(each), form.grads.double().split(each), strict=True):
        out = conv(images, weight, None, g.strides, g.pads, g.dilations, g.groups)
        truth.append(torch.autograd.grad(out, weight, grads)[0])
    truth = torch.stack(truth)
    torch.testing.assert_close(form.dense().double(), truth, rtol=1e-5, atol=1e-5)
    outer = form.outer()
    torch.testing.assert_close(exact(outer), truth)
    assert form.dims == outer.dims._replace(unfolded=form.dims.unfolded)
    assert (form.sizes().double() >= summands(outer) * (1 - 1e-5)).all()
    factors = torch.linspace(0.5, 1, form.dims.batch_size)
    expected = torch.einsum("b,b...->...", factors.double(), truth)
    torch.testing.assert_close(form.weighted_sum(factors).double(), expected, rtol=1e-5, atol=1e-5)
    squares = norms(truth).square()
    for found in (form.gram_norms().norms, form.direct_norms().norms, form.squared_norms().norms):
        torch.testing.assert_close(found.double(), squares, rtol=1e-4, atol=1e-4)
    keep = torch.arange(form.dims.batch_size) % 2 == 0
    assert not form.masked(keep).dense()[~keep].any()
    torch.testing.assert_close(form.masked(keep).dense()[keep], form.dense()[keep])


@given(outers(), st.integers(1, 3))
def test_chunks(form, examples):
    """A few examples at a time give the same as all at once."""
    whole = form.gram_norms().norms, form.direct_norms().norms
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "chunk", lambda elements, sample: examples)
        torch.testing.assert_close(form.gram_norms().norms, whole[0])
        torch.testing.assert_close(form.direct_norms().norms, whole[1])


def test_a_chunk_is_at_least_one_example():
    sample = torch.zeros(1)
    assert products.chunk(10**12, sample) == 1
    assert products.chunk(0, sample) >= 1
    assert products.chunk(2**10, sample) * 4 * 2**10 <= products.CHUNK_BYTES


def test_a_gpu_has_chunks_by_its_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**37))
    sample = SimpleNamespace(is_cuda=True, device="cuda")
    assert products.chunk(2**20, sample) == 2**37 // products.CHUNK_SHARE // 2**22
    assert products.chunk(10**12, sample) == 1


def test_a_kernel_that_writes_no_products_takes_all_examples_at_once(monkeypatch):
    form = Outer(torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 6), torch.Size((2, 4, 6)))
    expected = form.gram_norms().norms
    monkeypatch.setattr(forms, "kernel_is_faster", lambda left, right: True)
    monkeypatch.setattr(forms, "chunk", None)
    torch.testing.assert_close(form.gram_norms().norms, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["outer", "rows", "dense", "windows"])
def test_masked_examples_add_nothing_whatever_they_hold(kind, value):
    x = torch.ones(3, 1, 2, 4)
    x[1] = value
    geometry = Geometry((1, 1), (0, 0), (1, 1), 1)
    form = {
        "outer": Outer(x, x, torch.Size((4, 4))),
        "rows": Rows(torch.zeros(3, 2, dtype=torch.long), x[:, 0], torch.Size((5, 4))),
        "dense": Dense(x),
        "windows": Windows(x, x, 3, torch.Size((1, 1, 1, 1)), geometry),
    }[kind]
    masked = form.masked(torch.tensor([True, False, True]))
    factors = torch.ones(3)
    assert masked.weighted_sum(factors).isfinite().all()
    assert masked.squared_norms().norms.isfinite().all()
    assert masked.squared_norms().norms[1] == 0
    assert not form.squared_norms().norms[1].isfinite()


# Cancellation


@st.composite
def cancelling(draw):
    """Positions, or entries of one row, that cancel but for a small rest."""
    g = torch.Generator().manual_seed(draw(seeds))
    T, rest = draw(st.integers(1, 20)), 10.0 ** draw(st.integers(-8, 0))
    M, N = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    a, b = numbers(g, 3, 1, T, M), numbers(g, 3, 1, T, N)
    left = torch.cat([a, a], 2)
    right = torch.cat([b, -b + rest * numbers(g, 3, 1, T, N)], 2)
    return Outer(left, right, torch.Size((M, N)))


def assert_bounded(form, squares, clip_norm=1.0):
    """However it rounds: what an example adds, clipped at a threshold by these norms, is no longer than it."""
    factors = (clip_norm / squares.sqrt()).clamp(max=1)
    for b in range(len(factors)):
        alone = form.weighted_sum(torch.where(torch.arange(len(factors)) == b, factors, 0))
        assert alone.double().norm() <= clip_norm * (1 + 2e-6)


@given(cancelling(), st.sampled_from([1e-9, 1e-6, 1e-3, 1.0]))
def test_norms_that_cancel_are_taken_from_above(form, clip_norm):
    for squares in (form.gram_norms().norms, form.direct_norms().norms, form.squared_norms().norms):
        assert (squares >= 0).all()
        assert_bounded(form, squares, clip_norm)


@given(cancelling(), st.sampled_from([1e-9, 1e-6, 1e-3, 1.0]))
def test_rows_that_cancel_are_taken_from_above(outer, clip_norm):
    grads = torch.cat([outer.left[:, 0], -outer.left[:, 0] * (1 + 1e-6)], 1)
    form = Rows(torch.zeros(grads.shape[:2], dtype=torch.long), grads, torch.Size((2, grads.shape[2])))
    assert_bounded(form, form.squared_norms().norms, clip_norm)


@given(seeds, st.integers(-8, 0), st.sampled_from([1e-9, 1e-3, 1.0]))
def test_ties_that_cancel_are_taken_from_above(seed, exponent, clip_norm):
    """An embedding whose gradient is minus that of its head, but for a small rest."""
    g = torch.Generator().manual_seed(seed)
    V, T, N = 5, 3, 4
    ids = torch.randint(V, (2, T), generator=g)
    right = numbers(g, 2, 1, T, N)
    outer = Outer(F.one_hot(ids, V).float()[:, None], right, torch.Size((V, N)))
    table = Rows(ids, -right[:, 0] + 10.0**exponent * numbers(g, 2, T, N), torch.Size((V, N)))
    squares = joint_squared_norms(outer, table).norms
    factors = (clip_norm / squares.sqrt()).clamp(max=1)
    for b in range(2):
        alone = torch.where(torch.arange(2) == b, factors, 0)
        total = outer.weighted_sum(alone) + table.weighted_sum(alone)
        assert total.double().norm() <= clip_norm * (1 + 2e-6)


# Joins


@st.composite
def shared(draw):
    """Several gradients of one matrix, each in any form."""
    g = torch.Generator().manual_seed(draw(seeds))
    B, V, N = draw(st.integers(1, 3)), draw(few), draw(few)
    shape, found = torch.Size((V, N)), []
    for kind in draw(st.lists(st.sampled_from(["outer", "rows", "dense", "bfloat16"]), min_size=1, max_size=4)):
        T = draw(st.integers(0, 4))
        if kind == "dense":
            found.append(Dense(numbers(g, B, V, N)))
        elif kind == "rows":
            found.append(Rows(torch.randint(V, (B, T), generator=g), numbers(g, B, T, N), shape))
        else:
            dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
            found.append(Outer(numbers(g, B, 1, T, V, dtype=dtype), numbers(g, B, 1, T, N, dtype=dtype), shape))
    return found


@given(shared())
def test_join(found):
    """One form, or one sum of outer products and one table, whose gradients are the sum of all."""
    truth = sum(exact(form) for form in found)
    joined = join(found)
    assert len(joined) <= 2
    torch.testing.assert_close(sum(exact(form) for form in joined), truth, rtol=1e-5, atol=1e-5)
    factors = torch.linspace(0.5, 1, len(truth))
    total = sum(form.weighted_sum(factors) for form in joined)
    torch.testing.assert_close(
        total.double(), torch.einsum("b,b...->...", factors.double(), truth), rtol=1e-5, atol=1e-5
    )
    if len(joined) == 2:
        outer, table = joined
        assert isinstance(outer, Outer)
        assert isinstance(table, Rows)
        squares = joint_squared_norms(outer, table).norms
    else:
        squares = joined[0].squared_norms().norms
    size = sum(summands(form) for form in found)
    atol = 40 * EPS * float(size.square().max()) + 1e-12
    torch.testing.assert_close(squares.double(), norms(truth).square(), rtol=1e-5, atol=atol)


def test_join_keeps_what_is_alone():
    form = Outer(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 5), torch.Size((4, 5)))
    assert join([form]) == [form]


def test_join_of_grouped_products():
    """Convolutions with groups, used twice; beside a table they are added up as they are."""
    g = torch.Generator().manual_seed(0)
    shape = torch.Size((6, 2))
    one, two = (Outer(numbers(g, 2, 3, T, 2), numbers(g, 2, 3, T, 2), shape) for T in (2, 4))
    table = Rows(torch.randint(6, (2, 3), generator=g), numbers(g, 2, 3, 2), shape)
    for found in ([one, two], [one, table], [table, two, one]):
        joined = join(found)
        assert len(joined) == 1
        torch.testing.assert_close(exact(joined[0]), sum(map(exact, found)), rtol=1e-5, atol=1e-5)


def test_join_of_a_convolution_and_a_table():
    """A weight with more than two dimensions whose rows are looked up as well."""
    g = torch.Generator().manual_seed(0)
    geometry = Geometry((1,), (0,), (1,), 1)
    shape = torch.Size((4, 2, 3))
    images, grads = numbers(g, 2, 2, 5), numbers(g, 2, 4, 3)
    conv = Windows(images, grads, 2, shape, geometry)
    table = Rows(torch.randint(4, (2, 3), generator=g), numbers(g, 2, 3, 2, 3), shape)
    truth = conv.dense().double() + exact(table)
    joined = join([conv, table])
    squares = joint_squared_norms(*joined).norms if len(joined) == 2 else joined[0].squared_norms().norms
    torch.testing.assert_close(squares.double(), norms(truth).square(), rtol=1e-5, atol=1e-5)
    total = sum(form.weighted_sum(torch.ones(2)) for form in joined)
    torch.testing.assert_close(total.double(), truth.sum(0), rtol=1e-5, atol=1e-5)


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_arithmetic_is_in_float32_for_lower_precisions(dtype):
    """Each form of rounded numbers has the norms and sums of the same numbers in float32."""
    g = torch.Generator().manual_seed(0)
    left, right = (1 + numbers(g, 2, 1, 64, n, dtype=dtype) for n in (8, 6))
    ids = torch.randint(5, (2, 64), generator=g)
    factors = torch.tensor([0.3, 0.7])
    for low, high in [
        (Outer(left, right, torch.Size((8, 6))), Outer(left.float(), right.float(), torch.Size((8, 6)))),
        (Rows(ids, left[:, 0], torch.Size((5, 8))), Rows(ids, left[:, 0].float(), torch.Size((5, 8)))),
        (Dense(left), Dense(left.float())),
    ]:
        assert low.squared_norms().norms.dtype == low.weighted_sum(factors).dtype == torch.float32
        torch.testing.assert_close(low.squared_norms().norms, high.squared_norms().norms, rtol=1e-6, atol=0)
        torch.testing.assert_close(low.weighted_sum(factors), high.weighted_sum(factors), rtol=1e-6, atol=1e-6)
