"""A convolution's gradients: every way to cut out windows and to form gradients is one."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from qclip.engine.gradients import convolutions
from qclip.engine.gradients.convolutions import Geometry, Windows, columns


@pytest.mark.parametrize("kernel", [(3, 2), (2, 9)], ids=["short rows", "long rows"])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("pads", [(0, 0), (2, 1)])
@pytest.mark.parametrize("dilations", [(1, 1), (2, 3)])
def test_windows_by_views_are_those_of_unfold(kernel, strides, pads, dilations):
    images = torch.randn(3, 2, 11, 27)
    found = columns(images, torch.Size(kernel), Geometry(strides, pads, dilations, groups=1))
    assert torch.equal(found, F.unfold(images, kernel, dilations, pads, strides))


CASES = {  # channels, outputs, side, kernel, stride, pad, groups, and whether windows are cut out
    "few channels": (3, 4, 9, 3, 1, 1, 1, True),
    "few channels, long rows": (1, 4, 12, 8, 2, 2, 1, True),
    "few positions": (8, 32, 6, 3, 2, 0, 1, True),
    "few positions, two groups": (16, 32, 4, 3, 1, 0, 2, True),
    "many positions": (8, 4, 9, 3, 1, 1, 1, False),
    "depthwise": (6, 6, 7, 3, 1, 1, 6, False),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def windows(case, examples=4, each=1):
    """A form in double precision, with several images per example where asked for."""
    channels, outputs, side, kernel, stride, pad, groups, _ = case
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(examples * each, channels, side, side, generator=generator, dtype=torch.double)
    places = (side + 2 * pad - kernel) // stride + 1
    grads = torch.randn(examples * each, outputs, places, places, generator=generator, dtype=torch.double)
    shape = torch.Size((outputs, channels // groups, kernel, kernel))
    return Windows(images, grads, examples, shape, Geometry((stride,) * 2, (pad,) * 2, (1, 1), groups))


def by_autograd(form):
    """Example by example."""
    g, found = form.geometry, []
    pairs = zip(form.images.chunk(form.batch_size), form.grads.chunk(form.batch_size), strict=True)
    for images, grads in pairs:
        weight = torch.zeros(form.shape, dtype=images.dtype, requires_grad=True)
        outputs = F.conv2d(images, weight, None, g.strides, g.pads, g.dilations, g.groups)
        found.append(torch.autograd.grad(outputs, weight, grads)[0])
    return torch.stack(found)


@pytest.mark.parametrize("each", [1, 2])
@cases
def test_gradients_are_those_of_autograd(case, each):
    form = windows(case, each=each)
    expected = by_autograd(form)
    torch.testing.assert_close(form.dense(), expected)
    torch.testing.assert_close(form._grouped(), expected)
    torch.testing.assert_close(form.outer().dense(), expected)
    for squares in (form.direct_norms().norms, form.gram_norms().norms):
        torch.testing.assert_close(squares, expected.flatten(1).square().sum(1))


@cases
def test_which_way(case):
    assert windows(case)._unfolding_is_faster() == case[-1]


@cases
def test_windows_are_cut_out_a_few_examples_at_a_time(case, monkeypatch):
    """However many examples there are, no more windows at once than their memory holds."""
    form = windows(case, examples=7)
    expected, seen = by_autograd(form), []

    def counted(images, kernel, geometry):
        seen.append(len(images))
        return columns(images, kernel, geometry)

    monkeypatch.setattr(convolutions, "columns", counted)
    monkeypatch.setattr(convolutions, "WINDOWS_BYTES", 4 * 2 * form.dims.unfolded)
    torch.testing.assert_close(form.dense(), expected)
    assert seen == ([2, 2, 2, 1] if case[-1] else [])


NATIVE = {name: case for name, case in CASES.items() if case[-2] == 1}


@pytest.fixture
def native(monkeypatch):
    """Bfloat16 on the CPU passes for native: the operators run their twins."""
    monkeypatch.setattr(convolutions, "is_native", lambda x: x.dtype == torch.bfloat16)


def in_bfloat16(form):
    return replace(form, images=form.images.bfloat16(), grads=form.grads.bfloat16())


@pytest.mark.parametrize("case", NATIVE.values(), ids=NATIVE)
def test_kernels_give_norms_and_sums_of_the_very_gradients_that_would_be_kept(case, native, monkeypatch):
    """Also where they are not kept: nothing is split, and no norm needs a rounding margin."""
    form, factors = in_bfloat16(windows(case)), torch.tensor([0.5, 0.0, 2.0, 0.125])
    assert form.in_kernels
    monkeypatch.setattr(Windows, "_split", None)
    kept = form.kept()
    assert kept.grads.dtype == torch.bfloat16  # rounded
    torch.testing.assert_close(form.direct_norms().norms, kept.grads.float().flatten(1).square().sum(1))
    found = form.weighted_sum(factors)
    assert found.is_contiguous()
    torch.testing.assert_close(found, (kept.grads.float() * factors.view(-1, 1, 1, 1, 1)).sum(0))
    assert found.shape == form.shape


def test_kernels_take_one_image_per_example_ungrouped_native_in_two_dimensions(native):
    case, depthwise = CASES["many positions"], CASES["depthwise"]
    assert not windows(case).in_kernels  # double precision
    assert not in_bfloat16(windows(case, each=2)).in_kernels
    assert not in_bfloat16(windows(depthwise)).in_kernels
    line = Windows(torch.ones(2, 3, 5), torch.ones(2, 4, 3), 2, torch.Size((4, 3, 3)), Geometry((1,), (0,), (1,), 1))
    assert not in_bfloat16(line).in_kernels
    assert not replace(in_bfloat16(windows(case)), grads=windows(case).grads).in_kernels
