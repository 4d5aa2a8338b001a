"""The kernels are their twins, on a GPU: compiled, at full size, on any strides. Rehearsed in Triton's interpreter.

The checks are those of tests/engine/test_kernels.py. Every shape and stride is compiled anew: half a second or more.
"""

import pytest
import torch

from engine import test_kernels as checks
from engine.test_kernels import BLOCK, GEOMETRIES, IGNORED, normal
from gpu.device import DEVICE, ON_GPU, cuda_only, require_memory
from qclip.engine import kernels, torch_settings
from qclip.engine.kernels import cross_entropy, gram, layer_norm, windows

pytestmark = pytest.mark.gpu

BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture(scope="module")
def run():
    """Runs a check: on the GPU in this process, in a rehearsal in one with the interpreter."""
    if ON_GPU:
        if not kernels.installed():
            pytest.skip("Triton is not installed")

        def on_gpu(check, *args):
            with DEVICE:
                check(*args)
            torch.cuda.synchronize()  # a launch that fails does so later

        yield on_gpu
    else:
        with checks.interpreting() as interpreted:
            yield interpreted


@cuda_only("what takes the kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_this_gpu_takes_the_kernels(dtype):
    x = torch.ones(2, 3, 4, device=DEVICE, dtype=dtype)
    assert kernels.usable(x, x)
    assert layer_norm.takes(x, x.float())
    assert not kernels.usable(x, x.cpu())
    assert not kernels.usable(x.double())


@BOTH
@pytest.mark.parametrize(("positions", "m", "n"), [(1, 7, 96), (17, 130, 64), (130, 7, 96), (260, 40, 7)])
def test_gram(run, positions, m, n, dtype):
    run(checks.check_gram_of, positions, m, n, dtype)


def check_gram_of_many_positions(positions, dtype):
    checks.check_gram(normal(1, positions, 64, dtype=dtype), normal(1, positions, 48, dtype=dtype))


@BOTH
def test_gram_of_many_positions_of_one_example(run, dtype):
    run(check_gram_of_many_positions, 2500 if ON_GPU else 150, dtype)


@BOTH
def test_gram_of_any_strides(run, dtype):
    run(checks.check_gram_of_strided, dtype)


def test_gram_in_every_tiling(run):
    run(checks.check_gram_tilings)


@pytest.mark.parametrize("positions", [8, 72, 256])
def test_pairs(run, positions):
    run(checks.check_pairs, positions)


@pytest.mark.parametrize(
    ("case", "dtype", "layout"),
    [
        pytest.param(0, torch.bfloat16, torch.channels_last, id="few-channels-bfloat16"),
        pytest.param(1, torch.bfloat16, torch.channels_last, id="all-different-bfloat16"),
        pytest.param(1, torch.bfloat16, torch.contiguous_format, id="all-different-bfloat16-contiguous"),
        pytest.param(1, torch.float32, torch.contiguous_format, id="all-different-float32-contiguous"),
        pytest.param(2, torch.bfloat16, torch.channels_last, id="one-example-bfloat16"),
        pytest.param(3, torch.float32, torch.channels_last, id="large-kernel-float32"),
    ],
)
def test_windows(run, case, dtype, layout):
    run(checks.check_windows, dtype, layout, None, *GEOMETRIES[case].values)


def test_windows_of_many_channels(run):
    """The sum is cut into smaller tiles than the norms: the numbers are the same, to the last bit."""
    case = (2, 16, 5, 6), 128, (3, 3), (1, 1), (1, 1), (1, 1)
    run(checks.check_windows, torch.bfloat16, torch.channels_last, None, *case)


def test_windows_of_any_strides(run):
    run(checks.check_windows_of_views)


def test_windows_in_a_small_tiling(run):
    case = (2, 5, 8, 7), 20, (3, 3), (1, 1), (1, 1), (1, 1)
    run(checks.check_windows, torch.bfloat16, torch.channels_last, windows.WindowTiling(16, 64, 32, 4, 2), *case)


def test_windows_of_no_examples(run):
    run(checks.check_windows_of_no_examples)


def test_pixels_outside_every_window_do_not_count(run):
    run(checks.check_pixels_outside_every_window_do_not_count)


@BOTH
@pytest.mark.parametrize(
    ("rows", "classes", "width"),
    [(1, 3, 8), (3, BLOCK, BLOCK), (3, BLOCK + 1, BLOCK + 8), (4, 2 * BLOCK + 905, 2 * BLOCK + 912)],
)
def test_cross_entropy(run, rows, classes, width, dtype):
    run(checks.check_cross_entropy_of, rows, classes, dtype, width)


def test_cross_entropy_of_any_targets(run):
    run(checks.check_other_targets)


@pytest.mark.parametrize("classes", [9, BLOCK + 5])
def test_cross_entropy_of_extreme_scores(run, classes):
    run(checks.check_extreme_scores, classes)


def test_cross_entropy_of_scores_that_are_not_finite(run):
    run(checks.check_non_finite_scores)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize(
    "shape", [(3, 1, 8), (2, layer_norm.ROWS + 1, 65), (1, 2 * layer_norm.ROWS + 44, 130)], ids=str
)
def test_layer_norm(run, shape, dtypes):
    run(checks.check_norm_sums_of, shape, *dtypes)


def test_layer_norm_of_any_strides(run):
    run(checks.check_norm_sums_of_views)


def test_layer_norm_keeps_examples_apart(run):
    run(checks.check_parts_of_examples)


def check_exactness():
    """Against float64: by TF32 numbers would be off by 5e-4."""
    left, right = normal(3, 70, 40, dtype=torch.float32), normal(3, 70, 24, dtype=torch.float32)
    truth = (left.double().mT @ right.double()).square().sum((1, 2))
    torch.testing.assert_close(gram.launch(left, right)[0].double(), truth, rtol=1e-5, atol=0)
    case = (2, 16, 9, 8), 20, (3, 2), (2, 1), (0, 2), (1, 2)
    images, grads = checks.images_and_grads(*case, dtype=torch.float32)
    found, _ = windows.launch(images, grads, *case[2:])
    truth, _ = windows.twin(images.double(), grads.double(), *case[2:])
    assert (found.double() - truth).abs().max() <= 1e-5 * truth.abs().max()


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_float32_is_exact_with_and_without_tf32(run, precision):
    """CUDA only: that TF32 is there at all (test_bounds.py)."""
    with torch_settings.fp32_precision(precision):
        run(check_exactness)


@cuda_only("the operators launch kernels there")
@BOTH
def test_operators_are_their_twins(dtype):
    """As the engine calls them."""
    with DEVICE:
        left, right = normal(3, 197, 40, dtype=dtype), normal(3, 197, 24, dtype=dtype)
        for found, expected in zip(gram.gram_squares(left, right), gram.twin(left, right), strict=True):
            checks.assert_close(found, expected, 1e-6)
        for found, expected in zip(gram.squares_from_matrices(left, right), gram.twin(left, right), strict=True):
            checks.assert_close(found, expected, 1e-6)
        grads, inputs, means, scales = checks.norm_inputs((3, 300, 40), dtype, dtype)
        for found, expected in zip(
            layer_norm.layer_norm_sums(grads, inputs, 1e-5),
            layer_norm.twin(grads, inputs, means, scales),
            strict=True,
        ):
            checks.assert_close(found, expected, 2e-6)
        scores, target = checks.scores_and_targets(4, 5000, dtype)
        losses, _ = cross_entropy.cross_entropy(scores, target, IGNORED)
        checks.assert_close(losses, cross_entropy.twin(scores, target, IGNORED)[0], 1e-6)


@cuda_only("tensors of more than 2^31 numbers")
def test_numbers_beyond_32_bits():
    """The last examples of tensors whose places do not fit 32 bits; the twins see these examples alone."""
    require_memory(60)
    with DEVICE:
        big = torch.empty(2**31 + 2**28, dtype=torch.bfloat16)
        for part in big.split(2**28):
            part.normal_()
        rows = big[: 2**31 // 50_257 * 50_257 + 50_257 * 64].view(-1, 50_257)
        target = torch.arange(len(rows)) % 50_257
        losses, sums = cross_entropy.cross_entropy(rows, target, IGNORED)
        expected, _ = cross_entropy.twin(rows[-3:], target[-3:], IGNORED)
        checks.assert_close(losses[-3:], expected, 1e-6)
        last = slice(len(rows) - 3, None)
        upstream = torch.ones(len(rows))
        found = cross_entropy.cross_entropy_gradients(rows, target, upstream, sums, IGNORED)[last]
        arguments = rows[last], target[last], upstream[last], sums[:, last], IGNORED
        checks.assert_close(found, cross_entropy.twin_gradients(*arguments), torch.finfo(torch.bfloat16).eps)
        del found
        positions = big.view(-1, 256, 128)  # [examples, positions, numbers]
        grams = gram.launch(positions, positions)[:, -3:]
        checks.assert_close(grams[0], gram.twin(positions[-3:], positions[-3:])[0], 1e-6)
        means, scales = torch.zeros(positions.shape[:2]), torch.ones(positions.shape[:2])
        found = layer_norm.launch(positions, positions, means, scales)[:, -3:].sum(2)
        expected = layer_norm.twin(positions[-3:], positions[-3:], means[-3:], scales[-3:])
        checks.assert_close(found[0].contiguous(), expected[0], 2e-6)
        images = big.view(-1, 64, 32, 32)
        squares = windows.launch_squares(images, images[:, :8], (3, 3), (1, 1), (1, 1), (1, 1))
        expected = windows.twin_squares(images[-3:], images[-3:, :8], (3, 3), (1, 1), (1, 1), (1, 1))
        checks.assert_close(squares[-3:], expected, torch.finfo(torch.bfloat16).eps)
