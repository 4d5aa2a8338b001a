"""Layers of torch whose state follows the data in a forward pass, and what to use instead of them."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def remedy(layer: nn.Module, tensor: str) -> str | None:
    """What to use instead of a layer that changes this parameter or buffer of its own by the data of a forward pass.

    None for a layer that is not known to. Subclasses are like the layers of torch that they come from.
    """
    if isinstance(layer, _NormBase) and tensor in _STATISTICS:
        if isinstance(layer, _InstanceNorm):
            return "make it with track_running_stats=False, so that it normalises every example by itself"
        return (
            "replace it by GroupNorm, or, where its statistics come from public data, keep them fixed: call eval() on "
            "it after every train() of the model (its weight and bias are still trained)"
        )
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None and tensor == "weight":
        return "make it with max_norm=None; normalise what it returns instead, if need be"
    # Observers and fake quantizers, by name: torch has announced that it will remove them.
    if any(kind.__module__.startswith("torch.ao.quantization.") for kind in type(layer).__mro__):
        return "disable its observer, and quantize after private training"
    return None
