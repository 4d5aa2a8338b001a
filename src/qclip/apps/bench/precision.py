"""The precisions of a step."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qclip import _validate as check
from qclip.engine.torch_settings import fp32_precision


@dataclass(frozen=True)
class Precision:
    """The dtype of parameters and floating-point inputs, and the precision of their products."""

    name: str
    dtype: torch.dtype = torch.float32
    tf32: bool | None = None
    """Whether a GPU may use TF32 for float32 products; None leaves torch's settings unchanged."""
    mixed: bool = False
    """Whether forward pass and loss run under bfloat16 autocast."""

    def model(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move and convert the model."""
        return model.to(device, self.dtype)

    def place(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Move inputs or targets, and convert floating-point ones."""
        return tensor.to(device, self.dtype if tensor.is_floating_point() else None)

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the autocast context of forward pass and loss."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.mixed)

    def settings(self) -> AbstractContextManager[None]:
        """Return a context with torch's settings for float32 products, which are restored at its end."""
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
    """Return one of `PRECISIONS` by its name, or refuse it."""
    return PRECISIONS[check.choice("dtype", name, PRECISIONS)]
