"""The way of a tensor to a device."""

import pytest
import torch

from qclip._transfer import sent


@pytest.mark.parametrize("x", [torch.randn(3, 2), torch.eye(3).to_sparse()], ids=["dense", "sparse"])
def test_what_is_there_already_is_not_copied(x):
    assert sent(x, torch.device("cpu")) is x


def test_it_may_change_the_device():
    assert sent(torch.randn(3), torch.device("meta")).device.type == "meta"
