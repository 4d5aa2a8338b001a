"""Native 16-bit products: what is added for an example is never longer than its norm times its factor.

The CPU stands for a device that multiplies bfloat16 numbers as they are: what makes a difference is where numbers are
rounded, and that is the same. Tensors are made on torch's default device: tests/gpu runs some of these tests on a GPU.
"""

import pytest
import torch
from torch import Tensor

from qclip.engine.gradients import clipping, forms
from qclip.engine.gradients.convolutions import Geometry, Windows
from qclip.engine.gradients.forms import Dense, Outer, Rows, joint_squared_norms
from qclip.engine.gradients.parts import Part
from qclip.engine.groups import Groups
from qclip.engine.kernels import products

SLACK = 1 + 1e-5
"""Rounding of float32, as in test_sensitivity.py."""


def is_native(x):
    return x.dtype == torch.bfloat16


def exact_product(multiply):
    """With the precision of the result as an option, which not every device has."""

    def wrapped(left, right, *, out_dtype=None):
        return multiply(left, right) if out_dtype is None else multiply(left.to(out_dtype), right.to(out_dtype))

    return wrapped


def take_for_native(monkeypatch):
    """The CPU stands for such a device."""
    monkeypatch.setattr(products, "is_native", is_native)
    monkeypatch.setattr(forms, "is_native", is_native)
    monkeypatch.setattr(forms, "kernel_is_faster", lambda *shape: False)
    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, exact_product(getattr(torch, name)))


@pytest.fixture(autouse=True)
def native(monkeypatch):
    take_for_native(monkeypatch)


def bf16(*shape, seed=0):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), torch.bfloat16)


def outer(count, positions, m, n, groups=1, seed=0):
    left, right = bf16(count, groups, positions, m, seed=seed), bf16(count, groups, positions, n, seed=seed + 1)
    shape = torch.Size([m, n]) if groups == 1 else torch.Size([groups, m, n])
    return Outer(left, right, shape)


def cancelling(count, m, n, seed=0):
    """Two positions whose products nearly cancel."""
    left, right = bf16(count, 1, 1, m, seed=seed), bf16(count, 1, 1, n, seed=seed + 1)
    off = (right.float() * (1 + 0.01 * bf16(count, 1, 1, n, seed=seed + 2).float())).bfloat16()
    return Outer(torch.cat([left, -left], 2), torch.cat([right, off], 2), torch.Size([m, n]))


def true_grads(form: Outer) -> Tensor:
    return (form.left.double().mT @ form.right.double()).view(-1, *form.shape)


def single(form, b):
    return type(form)(form.left[b : b + 1], form.right[b : b + 1], form.shape)


METHODS = {
    "chosen": lambda form: form.squared_norms(),
    "gram": lambda form: form.gram_norms(),
    "direct": lambda form: form.direct_norms(),
}
SHAPES = [
    pytest.param((3, 1, 9, 7), id="one position"),
    pytest.param((4, 5, 9, 7), id="odd sizes"),
    pytest.param((17, 8, 16, 24), id="aligned"),
    pytest.param((3, 40, 6, 5), id="many positions"),
    pytest.param((2, 6, 5, 11, 3), id="groups"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_from_above_and_close(shape, method):
    """The norms themselves nearly are the true ones; scaled gradients have a rounding margin."""
    form = outer(*shape)
    norms, scaled = (squares.sqrt().double() for squares in METHODS[method](form))
    truth = torch.linalg.vector_norm(true_grads(form).flatten(1), dim=1)
    assert (norms >= truth * (1 - 1e-7)).all()
    assert (norms <= 1.0003 * truth).all()
    assert (scaled >= (1 + 2.0**-9) * norms).all()
    assert (scaled <= 1.03 * truth).all()


def assert_bounded(form, squares, tries=20):
    """For many factors and every example by itself."""
    norms, scaled = (x.sqrt().double() for x in squares)
    exponents = torch.empty(tries, device="cpu").uniform_(-4, 0, generator=torch.Generator().manual_seed(7))
    factors = 10.0 ** exponents.to(torch.get_default_device())
    for b in range(form.dims.batch_size):
        alone = single(form, b)
        for c in (*factors, torch.tensor(1.0)):
            added = alone.weighted_sum(c[None])
            assert added.dtype == torch.float32
            length = torch.linalg.vector_norm(added.double())
            assert length <= c.double() * (norms if c == 1 else scaled)[b] * SLACK


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_example_adds_more_than_its_norm(shape, method):
    form = outer(*shape, seed=3)
    assert_bounded(form, METHODS[method](form))


@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize("seed", range(5))
def test_no_example_adds_more_than_its_norm_where_positions_cancel(seed, method):
    """A scaled factor is rounded, and what is left of two that cancel is of that size."""
    form = cancelling(6, 16, 24, seed=seed)
    squares = METHODS[method](form)
    assert_bounded(form, squares)
    truth = torch.linalg.vector_norm(true_grads(form).flatten(1), dim=1)
    assert (squares.norms.sqrt() >= truth).all()


@pytest.mark.parametrize("method", ["gram", "direct"])
def test_only_what_is_clipped_gives_way_to_rounding(method):
    """With 1024 positions that point anywhere, rounding could make an eighth of a norm: so its bound is wide."""
    form = outer(4, 1024, 24, 40)
    found = clipping.group_norms(
        {"w": [Part(form, method=method)]},
        [],
        Groups(("all",), {"w": 0}),
        {"w": torch.nn.Parameter(torch.zeros(24, 40))},
        torch.ones(4, dtype=torch.bool),
    )
    truth = torch.linalg.vector_norm(true_grads(form).flatten(1), dim=1)
    torch.testing.assert_close(found.by_group[:, 0].double(), truth, rtol=1e-3, atol=0)
    assert (found.scaled[0] > 1.1 * found.raw[0]).all()
    order = truth.argsort()
    limit = float(found.raw[0][order[1]]) * (1 + 1e-5)  # two are within it, just so
    (factors,) = clipping.clip_factors(found, torch.tensor([limit]))
    assert (factors[order[:2]] == 1).all()
    torch.testing.assert_close(factors[order[2:]], limit / found.scaled[0][order[2:]], rtol=3e-6, atol=0)
    for b in range(4):
        added = single(form, b).weighted_sum(factors[b : b + 1])
        assert torch.linalg.vector_norm(added.double()) <= limit * SLACK


def test_room_is_needed_where_positions_cancel():
    """Without it some example would add more than its norm: the tests above can fail."""
    longest = 0.0
    for seed in range(5):
        form = cancelling(6, 16, 24, seed=seed)
        truth = torch.linalg.vector_norm(true_grads(form).flatten(1), dim=1)
        for b in range(6):
            for c in torch.linspace(0.01, 0.99, 15):
                added = torch.linalg.vector_norm(single(form, b).weighted_sum(c[None]).double())
                longest = max(longest, float(added / (c.double() * truth[b])))
    assert longest > SLACK


@pytest.mark.parametrize("shape", SHAPES)
def test_kept_gradients_are_summed_as_they_are_measured(shape):
    form = outer(*shape).kept()
    assert form.grads.dtype == torch.bfloat16
    squares = form.squared_norms()
    assert squares.scaled is squares.norms  # no factor is rounded
    norms = squares.norms.sqrt().double()
    truth = torch.linalg.vector_norm(true_grads(outer(*shape)).flatten(1), dim=1)
    torch.testing.assert_close(norms, truth, rtol=0.02, atol=0)
    for b in range(len(form.grads)):
        for c in (1.0, 0.37, 3e-3):
            added = Dense(form.grads[b : b + 1]).weighted_sum(torch.tensor([c]))
            assert torch.linalg.vector_norm(added.double()) <= c * norms[b] * SLACK


@pytest.mark.parametrize("count", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("shape", [(8,), (5,), (3, 7), (4, 2, 3)], ids=str)
def test_native_rows_are_summed_in_full_precision(count, shape):
    """No factor is rounded to 16 bits: the sum is float32's."""
    rows = bf16(count, *shape)
    factors = torch.linspace(0.1, 0.9, count) ** 3
    found = Dense(rows).weighted_sum(factors)
    truth = torch.einsum("b,b...->...", factors.double(), rows.double())
    assert found.shape == shape
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


def test_kept_examples_together_stay_within_their_bounds():
    """With more than 16 rows the sum is one product: what one example adds to it is still bounded."""
    rows = bf16(33, 12, 5)
    norms = Dense(rows).squared_norms().norms.sqrt().double()
    factors = (0.5 / norms).clamp(max=1).float()
    full = Dense(rows).weighted_sum(factors).double()
    for gone in (0, 7, 32):
        less = Dense(rows).weighted_sum(factors.index_fill(0, torch.tensor(gone), 0)).double()
        assert torch.linalg.vector_norm(full - less) <= 0.5 * SLACK


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_close_to_the_true_ones(shape):
    form = outer(*shape)
    factors = torch.linspace(0.2, 0.8, shape[0])
    truth = torch.einsum("b,b...->...", factors.double(), true_grads(form))
    found = form.weighted_sum(factors).double()
    assert found.shape == truth.shape
    assert torch.linalg.vector_norm(found - truth) <= 0.01 * torch.linalg.vector_norm(truth)


def test_padding_for_alignment_is_cut_off():
    """As behind a widened layer: more outputs than the parameter has, all zero."""
    count, positions, m, n = 4, 6, 5, 9
    plain = outer(count, positions, m, n)
    wide = Outer(torch.nn.functional.pad(plain.left, (0, 3)), plain.right, plain.shape)
    factors = torch.linspace(0.2, 0.8, count)
    torch.testing.assert_close(wide.weighted_sum(factors), plain.weighted_sum(factors))
    torch.testing.assert_close(wide.dense(), plain.dense())
    torch.testing.assert_close(wide.kept().grads, plain.kept().grads)
    for method in METHODS.values():
        torch.testing.assert_close(tuple(method(wide)), tuple(method(plain)), rtol=1e-5, atol=0)


def test_an_embedding_tied_to_a_native_head():
    count, positions, words, width = 3, 4, 11, 6
    head = outer(count, positions, words, width)
    ids = torch.randint(words, (count, positions), generator=torch.Generator().manual_seed(1), device="cpu")
    ids = ids.to(torch.get_default_device())
    table = Rows(ids, bf16(count, positions, width, seed=5), torch.Size([words, width]))
    norms, scaled = (squares.sqrt().double() for squares in joint_squared_norms(head, table))
    truth = torch.linalg.vector_norm((true_grads(head) + table.dense().double()).flatten(1), dim=1)
    assert (norms >= truth).all()
    assert (norms <= 1.0003 * truth).all()
    assert (scaled <= 1.05 * truth).all()
    for b in range(count):
        for c in (1.0, 0.61, 0.013):
            factor = torch.tensor([c])
            rows = Rows(ids[b : b + 1], table.grads[b : b + 1], table.shape)
            added = single(head, b).weighted_sum(factor) + rows.weighted_sum(factor)
            assert torch.linalg.vector_norm(added.double()) <= c * (norms if c == 1 else scaled)[b] * SLACK


def test_float16_is_converted():
    form = Outer(bf16(3, 1, 4, 5).half(), bf16(3, 1, 4, 7).half(), torch.Size([5, 7]))
    assert form.kept().grads.dtype == torch.float32
    factors = torch.full((3,), 1e-6)
    truth = 1e-6 * true_grads(form).sum(0)
    torch.testing.assert_close(form.weighted_sum(factors).double(), truth, rtol=1e-3, atol=0)


def assert_position_sums(x):
    found, truth = products.position_sums(x), x.double().sum(1)
    assert found.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert found.shape == truth.shape
    size = x.double().abs().sum(1)
    assert ((found.double() - truth).abs() <= (1e-6 if found.dtype == torch.float32 else 1e-14) * size).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("positions", [0, 1, 7, 256, 257, 258, 512, 521, 1000, 4 * 241])
def test_sums_over_positions(positions, dtype):
    """Few and many, with divisors and primes; those of 16 bits are added up in float32."""
    x = 1 + torch.randn(3, positions, 5, generator=torch.Generator().manual_seed(positions), dtype=torch.float64)
    assert_position_sums(x.to(dtype))


@pytest.mark.parametrize("positions", [40, 600])
def test_sums_over_positions_of_any_shape(positions):
    assert_position_sums(bf16(2, positions, 3, 4))
    assert_position_sums(bf16(2, positions))
    assert_position_sums(bf16(3, 4, positions).mT)
    assert_position_sums(bf16(2, 1, 4).expand(2, positions, 4))
    assert products.position_sums(bf16(0, positions, 4)).shape == (0, 4)


def test_long_sums_go_in_two_steps():
    """Each of at most so many summands, where the number of positions can be divided into parts of about that."""
    sizes = {}
    for positions in (256, 257, 320, 512, 514, 600):
        watched = Watched(positions)
        products.position_sums(watched)
        sizes[positions] = watched.sizes
    assert sizes == {256: [256], 257: [257], 320: [160, 2], 512: [256, 2], 514: [514], 600: [200, 3]}


class Watched:
    """Stands for a tensor [B, T], and notes how many numbers are added up at once."""

    dtype = torch.float32

    def __init__(self, *lengths, sizes=None):
        self.shape, self.sizes = (1, *lengths), [] if sizes is None else sizes

    def unflatten(self, dim, sizes):
        return Watched(self.shape[1] // sizes[1], sizes[1], sizes=self.sizes)

    def sum(self, dim, dtype):
        self.sizes.append(self.shape[dim])
        return Watched(*self.shape[1:dim], *self.shape[dim + 1 :], sizes=self.sizes)


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("count", [0, 1, 64, 65])
@pytest.mark.parametrize("kind", [torch.Tensor, OnGpu])
def test_weighted_rows(count, kind):
    """A few are added up one way on a GPU, many another, and here: the sum is the same, in the rows' precision."""
    rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    factors = torch.linspace(0.1, 0.9, count)
    found = products.weighted_rows(factors, rows.as_subclass(kind)).as_subclass(torch.Tensor)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.einsum("b,bn->n", factors.double(), rows))


def test_few_rows_on_a_gpu_are_scaled_one_by_one(monkeypatch):
    """No product of matrices, which the compiler could not take together with what made the factors."""
    rows = torch.ones(4, 3).as_subclass(OnGpu)
    monkeypatch.setattr(OnGpu, "__rmatmul__", lambda *sides: pytest.fail("a product"))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda *sides: pytest.fail("a product"))
    assert products.weighted_rows(torch.full((4,), 0.5), rows).tolist() == [2.0] * 3


@pytest.mark.parametrize("count", [0, 1, clipping.FEW, clipping.FEW + 1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_of_groups_of_any_number_of_parameters(count, dtype):
    """None, a few, which are added one by one, or many; the other group has one."""
    generator = torch.Generator().manual_seed(count)
    grads = {f"{k}": torch.randn(5, 3, k + 1, generator=generator, dtype=dtype) for k in range(count)}
    alone = torch.randn(5, 2, generator=generator, dtype=dtype)
    parts = {name: [Part(Dense(x))] for name, x in grads.items()} | {"alone": [Part(Dense(alone))], "unused": []}
    groups = Groups(("all", "one"), dict.fromkeys(grads, 0) | {"alone": 1, "unused": 0})
    parameters = {name: torch.zeros(3, int(name) + 1, dtype=dtype) for name in grads}
    parameters |= {"alone": torch.zeros(2, dtype=dtype), "unused": torch.zeros(1, dtype=dtype)}
    keep = torch.arange(5) != 2
    found = clipping.group_norms(parts, [], groups, parameters, keep)
    rows = [x.flatten(1) for x in grads.values()]
    truth = torch.cat(rows, 1).norm(dim=1) if rows else torch.zeros(5, dtype=dtype)
    assert found.by_group.dtype == dtype
    torch.testing.assert_close(found.raw[0], truth)
    torch.testing.assert_close(found.raw[1], alone.norm(dim=1))
    torch.testing.assert_close(found.by_group[keep], torch.stack([truth, alone.norm(dim=1)], 1)[keep])
    assert found.by_group[2].tolist() == [torch.inf] * 2
    bundles = clipping.bundled(parts, groups)
    together = clipping.group_norms(parts, bundles, groups, parameters, keep)
    assert len(bundles) == (count > 1)
    torch.testing.assert_close(together.by_group, found.by_group)


def test_rounded_gradients_of_a_convolution_are_within_its_gram_norms():
    """On a GPU they are what is added up, at a factor of 1, too."""
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)
    form = Windows(bf16(12, 2, 5, 5), bf16(12, 3, 5, 5, seed=1), 12, torch.Size([3, 2, 3, 3]), geometry)
    squares, rounded = form.gram_norms(), form.outer().kept()
    assert rounded.grads.dtype == torch.bfloat16
    assert squares.is_exact
    truth = torch.linalg.vector_norm(form.outer().dense().double().flatten(1), dim=1)
    lengths = torch.linalg.vector_norm(rounded.grads.double().flatten(1), dim=1)
    assert (lengths > truth * (1 + 1e-4)).any()  # else there would be nothing to see
    assert (lengths <= squares.norms.sqrt() * SLACK).all()
