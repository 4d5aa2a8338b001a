"""The kernels are their twins, and their operators trace as what they return.

Kernels run in Triton's interpreter, on the CPU. It must be switched on before Triton is imported, which other tests may
have done in this process: so they run in another one, kept for all tests of this module.
"""

import multiprocessing
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from qclip.engine import kernels
from qclip.engine.kernels import gram, windows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
GEOMETRIES = [  # images, side, kernel, stride, padding, dilation
    pytest.param((2, 3, 9, 8), 5, (3, 3), (1, 1), (1, 1), (1, 1), id="few-channels"),
    pytest.param((2, 16, 9, 8), 20, (3, 2), (2, 1), (0, 2), (1, 2), id="all-different"),
    pytest.param((1, 40, 5, 6), 7, (1, 1), (2, 2), (0, 0), (1, 1), id="shortcut"),
    pytest.param((3, 8, 12, 13), 17, (5, 3), (1, 2), (3, 1), (2, 1), id="large-kernel"),
]


def prepare_interpreter():
    torch.set_num_threads(1)
    import triton.language as tl
    from triton.runtime import interpreter

    multiply, patch = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def create_dot(self, a, b, *others):
        # The interpreter multiplies bfloat16 numbers by their bits; float32 holds the same numbers.
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *others)

    def patch_tensor(tensor, scope):
        # The interpreter's scalars are arrays of one number, which numpy does not take for the bounds of a loop.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang_tensor = patch_tensor


@pytest.fixture(scope="module")
def interpreter():
    if not kernels.installed():
        pytest.skip("Triton is not installed")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:  # inherited by the process, which starts with its first task
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(prepare_interpreter).result(timeout=300)
        yield lambda check, *args: pool.submit(check, *args).result(timeout=300)


def normal(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def images_and_grads(shape, side, kernel, stride, padding, dilation, *, dtype, layout=torch.contiguous_format):
    sizes = zip(shape[2:], kernel, stride, padding, dilation, strict=True)
    positions = [(size + 2 * pad - spread * (k - 1) - 1) // step + 1 for size, k, step, pad, spread in sizes]
    images, grads = normal(*shape, dtype=dtype), normal(shape[0], side, *positions, dtype=dtype)
    return images.to(memory_format=layout), grads.to(memory_format=layout)


def assert_close(found, expected, rtol):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert (found.double() - expected.double()).abs().max() <= rtol * expected.double().abs().max()


def check_gram(left, right, cut=None):
    found, expected = gram.launch(left, right, cut), torch.stack(gram.twin(left, right))
    for one, other in zip(found, expected, strict=True):  # squares and sizes: each with its own scale
        assert_close(one, other, 1e-6)


def check_gram_of(positions, m, n, dtype):
    check_gram(normal(3, positions, m, dtype=dtype), normal(3, positions, n, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("positions", "m", "n"), [(1, 7, 96), (5, 7, 96), (17, 96, 7), (17, 130, 64), (130, 7, 96), (260, 40, 7)]
)
def test_gram_kernel_is_its_twin(interpreter, positions, m, n, dtype):
    interpreter(check_gram_of, positions, m, n, dtype)


def check_gram_of_strided(dtype):
    wide = normal(3, 40, 2, 36, dtype=dtype)
    rows = wide[:, :, 1, :33]  # starts anywhere, steps further than its length
    check_gram(rows, normal(40, 3, 24, dtype=dtype).transpose(0, 1))
    check_gram(rows.mT.contiguous().mT, wide[:, :1, 0].expand(3, 40, 36))  # columns contiguous; one row repeated
    assert gram.launch(rows[:0], rows[:0]).shape == (2, 0)
    assert gram.launch(rows[:, :0], rows[:, :0]).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gram_kernel_takes_any_strides(interpreter, dtype):
    interpreter(check_gram_of_strided, dtype)


def check_gram_tilings():
    left, right = normal(2, 70, 50, dtype=torch.float16), normal(2, 70, 40, dtype=torch.float16)
    for positions in (16, 32, 64, 128):
        check_gram(left, right, gram.Tiling(positions, 32, 4, 2))


def test_gram_kernel_is_its_twin_in_every_tiling(interpreter):
    interpreter(check_gram_tilings)


def test_gram_twin_is_the_squared_norm_of_the_gradients():
    left, right = normal(3, 6, 5, dtype=torch.float64), normal(3, 6, 4, dtype=torch.float64)
    squares, sizes = gram.gram_squares(left, right)
    assert torch.allclose(squares, (left.mT @ right).square().sum((1, 2)))
    assert torch.allclose(sizes, (left.norm(dim=2) * right.norm(dim=2)).sum(1))


def check_windows(dtype, layout, cut, *case):
    images, grads = images_and_grads(*case, dtype=dtype, layout=layout)
    found, squares = windows.launch(images, grads, *case[2:], cut=cut)
    expected, _ = windows.twin(images, grads, *case[2:])
    # Summed in another order, and then rounded; the interpreter rounds to bfloat16 towards zero: one unit.
    unit = max(1e-6, torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    assert_close(found, expected, unit)
    assert_close(squares, found.float().square().sum((1, 2, 3, 4)), 1e-6)
    # Without writing the gradients: the same numbers, to the last bit.
    alone = windows.launch_squares(images, grads, *case[2:], cut=cut)
    assert torch.equal(alone, squares)
    assert_close(alone, windows.twin_squares(images, grads, *case[2:]), 2 * unit)
    check_sums(images, grads, found, unit, cut, case[2:])


def check_sums(images, grads, gradients, unit, cut, geometry):
    """However the examples are shared out, the sum is one of the rounded gradients."""
    count = len(images)
    wide = normal(count, 3, dtype=torch.float32)
    factors = wide[:, 1]  # with a stride, as one of several groups
    expected = torch.einsum("b,bmijc->mijc", factors, gradients.float())
    for shares in (1, 2, None):
        found = windows.launch_sums(images, grads, factors, *geometry, cut=cut, shares=shares)
        assert_close(found, expected, 1e-6)
        for example, one in enumerate(torch.eye(count)):
            chosen = windows.launch_sums(images, grads, one, *geometry, cut=cut, shares=shares)
            assert torch.equal(chosen, gradients[example].float())
    # The twin may round every gradient one unit away from the kernel.
    room = unit * (factors.abs() @ gradients.float().abs().amax((1, 2, 3, 4)))
    assert (found - windows.twin_sums(images, grads, factors, *geometry)).abs().max() <= room


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "side", "kernel", "stride", "padding", "dilation"), GEOMETRIES)
def test_windows_kernel_is_its_twin(interpreter, shape, side, kernel, stride, padding, dilation, dtype, layout):
    interpreter(check_windows, dtype, layout, None, shape, side, kernel, stride, padding, dilation)


@pytest.mark.parametrize("cut", [(16, 16, 16), (16, 64, 32), (64, 32, 64)], ids=str)
def test_windows_kernel_is_its_twin_in_every_tiling(interpreter, cut):
    case = (2, 5, 8, 7), 20, (3, 3), (1, 1), (1, 1), (1, 1)
    interpreter(check_windows, torch.float16, torch.channels_last, windows.Tiling(*cut, 4, 2), *case)


def check_windows_of_views():
    wide, errors = normal(2, 6, 7, 18, dtype=torch.float32), normal(2, 4, 5, 16, dtype=torch.float32)
    images, grads = wide[:, 1:, :, ::2], errors.transpose(0, 1)[:2, :2, :, ::2].transpose(0, 1)[:, :, :, :7]
    geometry = (3, 3), (1, 1), (0, 0), (1, 1)
    found, expected = windows.launch(images, grads, *geometry), windows.twin(images, grads, *geometry)
    assert_close(found[0], expected[0], 1e-6)
    assert_close(found[1], expected[1], 1e-6)
    assert_close(windows.launch_squares(images, grads, *geometry), expected[1], 1e-6)
    check_sums(images, grads, found[0], 1e-6, None, geometry)


def test_windows_kernel_takes_any_strides(interpreter):
    interpreter(check_windows_of_views)


def check_windows_of_no_examples():
    images, grads = (torch.ones(0, channels, 3, 3) for channels in (2, 4))
    geometry = (1, 1), (1, 1), (0, 0), (1, 1)
    for squares, sums in [(windows.launch_squares, windows.launch_sums), (windows.twin_squares, windows.twin_sums)]:
        assert squares(images, grads, *geometry).shape == (0,)
        assert torch.equal(sums(images, grads, torch.ones(0), *geometry), torch.zeros(4, 1, 1, 2))


def test_windows_of_no_examples(interpreter):
    interpreter(check_windows_of_no_examples)


def check_pixels_outside_every_window_do_not_count():
    images = normal(
        1, 2, 7, 7, dtype=torch.float32
    )  # windows see rows and columns 0, 1, 3, 4; a third one would start at 6
    images[:, :, [2, 5, 6]], images[:, :, :, [2, 5, 6]] = torch.inf, torch.nan
    grads = normal(1, 3, 2, 2, dtype=torch.float32)
    found, squares = windows.launch(images, grads, (2, 2), (3, 3), (0, 0), (1, 1))
    assert found.isfinite().all()
    assert squares.isfinite().all()
    assert windows.launch_sums(images, grads, torch.ones(1), (2, 2), (3, 3), (0, 0), (1, 1)).isfinite().all()


def test_pixels_outside_every_window_do_not_count(interpreter):
    interpreter(check_pixels_outside_every_window_do_not_count)


@pytest.mark.parametrize(("shape", "side", "kernel", "stride", "padding", "dilation"), GEOMETRIES)
def test_windows_twin_is_the_gradient_of_the_convolution(shape, side, kernel, stride, padding, dilation):
    geometry = stride, padding, dilation
    images, grads = images_and_grads(shape, side, kernel, *geometry, dtype=torch.float64)
    found, squares = windows.window_gradients(images, grads, kernel, *geometry)
    weight = (side, shape[1], *kernel)
    expected = torch.stack(
        [
            torch.nn.grad.conv2d_weight(image[None], weight, grad[None], *geometry)
            for image, grad in zip(images, grads, strict=True)
        ]
    )
    assert torch.allclose(found, expected)
    assert torch.allclose(squares, expected.square().sum((1, 2, 3, 4)))


@pytest.mark.parametrize("numbers", [1, 1200, 2**24])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_windows_twins_a_few_examples_at_a_time(dtype, numbers, monkeypatch):
    monkeypatch.setattr(windows, "TWIN_NUMBERS", numbers)  # one example at a time, three of five, or all
    case = (5, 3, 6, 7), 4, (3, 2), (2, 1), (1, 0), (1, 2)
    images, grads = images_and_grads(*case, dtype=dtype)
    steps = {1: 1, 1200: 3, 2**24: 5}[numbers]
    assert len(next(windows._in_chunks(images, grads, case[2]))[0]) == steps
    found, squares = windows.window_gradients(images, grads, *case[2:])
    assert torch.allclose(windows.window_squares(images, grads, *case[2:]), squares)
    factors = normal(5, dtype=torch.float32)
    total = windows.window_sums(images, grads, factors, *case[2:])
    gradients = found if dtype == torch.float64 else found.float()
    assert_close(total, torch.einsum("b,bmcij->mcij", factors.to(gradients.dtype), gradients).contiguous(), 1e-6)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_operators_keep_the_rules_of_operators(dtype):
    sides = normal(3, 6, 5, dtype=dtype), normal(3, 6, 4, dtype=dtype)
    torch.library.opcheck(gram.squares_and_sizes, sides)
    case = (2, 3, 6, 7), 4, (3, 2), (2, 1), (1, 0), (1, 2)
    for layout in LAYOUTS:
        both = images_and_grads(*case, dtype=dtype, layout=layout)
        torch.library.opcheck(windows.gradients_and_squares, (*both, *case[2:]))
        torch.library.opcheck(windows.squares_alone, (*both, *case[2:]))
        torch.library.opcheck(windows.weighted_sums, (*both, torch.ones(2), *case[2:]))


def test_operators_are_one_node_of_a_traced_graph():
    case = (2, 3, 6, 7), 4, (3, 2), (2, 1), (1, 0), (1, 2)
    sides = normal(3, 6, 5, dtype=torch.float32), normal(3, 6, 4, dtype=torch.float32)
    inputs = *sides, *images_and_grads(*case, dtype=torch.float32)

    def both(left, right, images, grads):
        found, squares = windows.window_gradients(images, grads, *case[2:])
        alone = windows.window_squares(images, grads, *case[2:])
        return *gram.gram_squares(left, right), found, alone, windows.window_sums(images, grads, squares, *case[2:])

    traced = make_fx(both, tracing_mode="fake")(*inputs)
    nodes = [node.target._schema.name for node in traced.graph.nodes if isinstance(node.target, OpOverload)]
    assert sorted(node for node in nodes if node.startswith("qclip")) == [
        "qclip::gram_squares",
        "qclip::window_gradients",
        "qclip::window_squares",
        "qclip::window_sums",
    ]
    assert set(nodes) - {"aten::permute", "aten::unbind", "aten::clone"} <= {n for n in nodes if n.startswith("qclip")}
    for found, expected in zip(traced(*inputs), both(*inputs), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_the_twins_remain_without_triton():
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from qclip.engine import kernels
        from qclip.engine.kernels.gram import gram_squares
        from qclip.engine.kernels.windows import window_gradients, window_squares, window_sums
        assert not kernels.installed()
        assert gram_squares(torch.ones(1, 2, 3), torch.ones(1, 2, 5))[0].item() == 60
        geometry = [(1, 1)] * 2 + [(0, 0), (1, 1)]
        ones = torch.ones(1, 1, 3, 3)
        assert window_gradients(ones, ones, *geometry)[1].item() == 81
        assert window_squares(ones, ones, *geometry).item() == 81
        assert window_sums(ones, ones, torch.ones(1), *geometry).item() == 9
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
