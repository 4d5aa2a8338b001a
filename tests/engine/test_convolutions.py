"""Cutting out a convolution's windows: both ways are one."""

import pytest
import torch
import torch.nn.functional as F

from qclip.engine.convolutions import Geometry, columns


@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("pads", [(0, 0), (2, 1)])
@pytest.mark.parametrize("dilations", [(1, 1), (2, 3)])
def test_windows_by_views_are_those_of_unfold(strides, pads, dilations):
    images = torch.randn(3, 2, 11, 12)
    kernel = torch.Size((3, 2))
    found = columns(images, kernel, Geometry(strides, pads, dilations, groups=1))
    assert torch.equal(found, F.unfold(images, (3, 2), dilations, pads, strides))
