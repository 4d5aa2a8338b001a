"""The way of a tensor to a device."""

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it.

    What lies in ordinary memory is copied to pinned memory first: from there a GPU fetches it when its turn has come,
    while a copy from ordinary memory waits until all that was asked of the GPU before is done.
    """
    if device.type == "cuda" and x.device.type == "cpu" and x.layout == torch.strided and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
