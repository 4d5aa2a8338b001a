"""The way of a tensor to a device."""

import pytest
import torch

from qclip.engine.batch import to_device_async


@pytest.mark.parametrize("x", [torch.randn(3, 2), torch.eye(3).to_sparse()], ids=["dense", "sparse"])
def test_what_is_there_already_is_not_copied(x):
    assert to_device_async(x, torch.device("cpu")) is x


@pytest.mark.parametrize(
    ("pinned", "layout"), [(False, torch.strided), (True, torch.strided), (False, torch.sparse_coo)]
)
def test_a_gpu_is_not_waited_for(pinned, layout, monkeypatch):
    """As if there were one: what can be is in pinned memory when it is sent, and the copy does not block."""
    x, done = torch.eye(3).to_sparse() if layout == torch.sparse_coo else torch.eye(3), []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: done.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: done.append(non_blocking) or self)
    assert to_device_async(x, torch.device("cuda")) is x
    assert done == ([True] if pinned or layout == torch.sparse_coo else ["pinned", True])


def test_it_may_change_the_device():
    assert to_device_async(torch.randn(3), torch.device("meta")).device.type == "meta"
