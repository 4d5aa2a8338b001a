"""Precisions: what numbers a step computes with."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qclip import _validate as check
from qclip.engine.torch_settings import fp32_precision


@dataclass(frozen=True)
class Precision:
    """The type of the parameters and floating-point inputs, and what products of them are computed in."""

    name: str
    dtype: torch.dtype = torch.float32
    tf32: bool | None = None
    """Whether a GPU may round float32 factors to 10 bits; None leaves torch's settings as they are."""
    mixed: bool = False
    """Whether forward pass and loss run under bfloat16 autocast."""

    def model(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, moved and converted."""
        return model.to(device, self.dtype)

    def place(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Inputs or targets, moved, and converted where they are floating-point numbers."""
        return tensor.to(device, self.dtype if tensor.is_floating_point() else None)

    def autocast(self, device: torch.device) -> torch.autocast:
        """Around forward pass and loss."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.mixed)

    def settings(self) -> AbstractContextManager[None]:
        """Torch's settings for float32 products, and then as they were."""
        return nullcontext() if self.tf32 is None else fp32_precision("tf32" if self.tf32 else "ieee")


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", tf32=False),
        Precision("tf32", tf32=True),
        Precision("bfloat16", dtype=torch.bfloat16),
        Precision("autocast", mixed=True),
    )
}


def precision_named(name: str) -> Precision:
    """One of `PRECISIONS`."""
    return PRECISIONS[check.choice("dtype", name, PRECISIONS)]
