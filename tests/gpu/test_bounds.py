"""The two bounds of a squared norm (`qclip.engine.gradients.forms.Squares`), on products of native 16-bit numbers.

The tests of tests/engine/test_products.py, where the CPU stands for a GPU, run here on one: its products, its order of
additions, its kernels. In a rehearsal they run as they do there.
"""

import pytest
import torch

from engine.test_products import (
    METHODS,
    SLACK,
    assert_bounded,
    outer,
    take_for_native,
    test_an_embedding_tied_to_a_native_head,  # noqa: F401 - collected here as well, like those that follow
    test_kept_examples_together_stay_within_their_bounds,  # noqa: F401
    test_kept_gradients_are_summed_as_they_are_measured,  # noqa: F401
    test_native_rows_are_summed_in_full_precision,  # noqa: F401
    test_no_example_adds_more_than_its_norm,  # noqa: F401
    test_no_example_adds_more_than_its_norm_where_positions_cancel,  # noqa: F401
    test_norms_are_from_above_and_close,  # noqa: F401
    test_only_what_is_clipped_gives_way_to_rounding,  # noqa: F401
    test_padding_for_alignment_is_cut_off,  # noqa: F401
    test_room_is_needed_where_positions_cancel,  # noqa: F401
    test_sums_are_close_to_the_true_ones,  # noqa: F401
    true_grads,
)
from gpu.device import DEVICE, ON_GPU, cuda_only
from qclip.engine import torch_settings
from qclip.engine.gradients.convolutions import Geometry, Windows
from qclip.engine.gradients.forms import Outer
from qclip.engine.kernels import products
from qclip.engine.kernels.gram import kernel_is_faster

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """Tensors are made on the device, which multiplies bfloat16 numbers as they are."""
    if not ON_GPU:
        take_for_native(monkeypatch)
    with DEVICE:
        assert products.is_native(torch.ones(1, dtype=torch.bfloat16))
        yield


@cuda_only("the Gram kernel")
@pytest.mark.parametrize("positions", [130, 197, 1024, 1500])
def test_norms_by_the_gram_kernel(positions):
    """Where it is chosen over whole matrices; sizes that are no multiple of a tile too."""
    form = outer(5, positions, 40, 56)
    assert kernel_is_faster(form.left[:, 0], form.right[:, 0])
    norms, scaled = (squares.sqrt().double() for squares in form.gram_norms())
    truth = torch.linalg.vector_norm(true_grads(form).flatten(1), dim=1)
    assert (norms >= truth * (1 - 1e-7)).all()
    torch.testing.assert_close(norms, truth, rtol=2e-3, atol=0)
    assert (scaled > norms).all()
    assert_bounded(form, form.gram_norms(), tries=5)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("images", [1, 3])
def test_what_a_convolution_adds_is_what_was_measured(images, groups):
    """By kernels where they take it (one image per example, one group), else by products with the windows.

    CUDA only: a CPU's sum is the ordinary convolution's, which rounds nothing, so there it is only close.
    """
    count, side, channels, factors = 6, 10, 4, torch.linspace(0.05, 1, 6)
    form = Windows(
        _bf16(count * images, channels, 9, 8),
        _bf16(count * images, side, 9, 8, seed=1),
        count,
        torch.Size([side, channels // groups, 3, 3]),
        Geometry((1, 1), (1, 1), (1, 1), groups),
    )
    truth = torch.linalg.vector_norm(form.outer().dense().double().flatten(1), dim=1)
    for squares in (form.direct_norms(), form.gram_norms(), form.kept().squared_norms()):
        norms = squares.norms.sqrt().double()
        torch.testing.assert_close(norms, truth, rtol=0.1, atol=0)
        added = [form.weighted_sum(factors * one) for one in torch.eye(count)]
        lengths = torch.stack([torch.linalg.vector_norm(each.double()) for each in added])
        if ON_GPU:
            assert (lengths <= factors.double() * norms * SLACK).all()
    total = form.weighted_sum(factors)
    expected = torch.einsum("b,b...->...", factors.double(), form.outer().dense().double())
    assert torch.linalg.vector_norm(total - expected) <= 0.01 * torch.linalg.vector_norm(expected)


def _bf16(*shape, seed=0):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(DEVICE, torch.bfloat16)


@cuda_only("TF32")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("positions", [5, 64, 300])
def test_norms_have_a_margin_for_tf32(positions, method):
    """Products in float32 are rounded to 10 bits in norm and sum: reported norms have the margin too."""
    form = outer(5, positions, 40, 56)
    form = Outer(*(x + 1e-3 * torch.rand_like(x) for x in (form.left.float(), form.right.float())), form.shape)
    with torch_settings.fp32_precision("tf32"):
        squares = METHODS[method](form)
        assert_bounded(form, squares, tries=5)
    assert squares.is_exact
    norms = squares.norms.sqrt().double()
    truth = torch.linalg.vector_norm(true_grads(form).flatten(1), dim=1)
    assert (norms >= truth * (1 - 1e-3)).all()
    torch.testing.assert_close(norms, truth, rtol=0.1, atol=0)


@cuda_only("TF32")
def test_tf32_is_there_to_be_dealt_with():
    """The tests above and those of the kernels would see nothing where a GPU does not round."""
    x = torch.randn(256, 256, device=DEVICE)
    exact = (x.double() @ x.double()).abs().max()
    errors = []
    for precision in ("ieee", "tf32"):
        with torch_settings.fp32_precision(precision):
            errors.append(float((x @ x - x.double() @ x.double()).abs().max() / exact))
    assert errors[0] < 1e-5 < errors[1]
