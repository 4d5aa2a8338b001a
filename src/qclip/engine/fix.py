"""Fix: replace the layers of a model that keep what the data did to them, or that mix examples, by layers that do not.

model = qclip.fix(model)  # before the optimizer or after it: weights and biases stay the same parameters
print(qclip.fixes(model))  # what it would do, without doing it
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from qclip._display import Row, html_table, text_table
from qclip.engine.capture.checks import running_state_remedy

MOST_GROUPS = 32
LEAST_CHANNELS = 4
"""The fewest channels of a group: one channel of one position would be normalised to nothing."""
_OWN_FORWARD = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
log = logging.getLogger("qclip")


@dataclass(frozen=True)
class Fix:
    """What `fix` does about one layer, or why it does nothing."""

    path: str
    """The name of the layer in the model; empty for the model itself."""
    layer: str
    """The layer as it was."""
    instead: str
    """The layer in its place; empty where there is none."""
    remark: str
    """What changes with it, or what to do by hand."""
    make: Callable[[], nn.Module] | None = field(default=None, repr=False, compare=False)
    """Makes what comes in its place."""


@dataclass(frozen=True)
class Fixes:
    """What `fix` does to a model; prints as a table."""

    replaced: tuple[Fix, ...]
    left: tuple[Fix, ...]
    """Layers that it does not change: they are kept, or to be replaced by hand."""

    def __str__(self) -> str:
        if not self.replaced and not self.left:
            return "nothing to replace"
        return text_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    def _table(self) -> tuple[Row, Sequence[Row]]:
        rows = [(fix.path or "the model", fix.layer, fix.instead or "-", fix.remark) for fix in self.all]
        return ("layer", "was", "is now", "remark"), rows

    @property
    def all(self) -> tuple[Fix, ...]:
        """Both, those that are replaced first."""
        return self.replaced + self.left


def fix(model: nn.Module) -> nn.Module:
    """Replace the layers that no private step can train, in place, and return the model.

    - Batch norm of any kind becomes group norm with the same weight and bias: the parameters themselves, so that an
      optimizer made before still has all of them. Running statistics are dropped. In 2-D and 3-D there are up to 32
      groups of at least 4 channels, in 1-D there is one group (a layer norm).
    - Instance norm with running statistics stops to track them.
    - Batch norm in evaluation mode inside a model in training mode is kept: its statistics are fixed already.
    - What it did, and what has to be done by hand, is logged: as a warning, so that it is seen. `fixes` returns the
      same as an object. A second call changes nothing.

    Load weights before: a fixed model has no running statistics to load. The accuracy of a trained model suffers, until
    it is trained with its new layers.

    >>> import torch, qclip
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU())
    >>> print(qclip.fixes(model))
    layer  was              is now            remark
    1      BatchNorm2d(16)  GroupNorm(4, 16)  without running statistics
    >>> model = qclip.fix(model)

    Args:
        model: The model. A layer that is used in several places is replaced once, in all of them.

    Returns:
        The model, or what replaces it if it is such a layer itself.
    """
    found = fixes(model)
    (log.warning if found.all else log.info)("qclip.fix:\n%s", found)
    new = {model.get_submodule(each.path): each.make() for each in found.replaced if each.make is not None}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return new.get(model, model)


def fixes(model: nn.Module) -> Fixes:
    """Return what `fix` would do to a model; it prints as a table."""
    found = [each for path, layer in model.named_modules() for each in _fixes_of(path, layer, training=model.training)]
    replaced = tuple(each for each in found if each.make is not None)
    return Fixes(replaced, tuple(each for each in found if each.make is None))


def num_groups(channels: int) -> int:
    """Return the number of groups of a group norm that replaces a batch norm of images.

    >>> [num_groups(channels) for channels in (1, 6, 7, 16, 24, 64, 256, 2048)]
    [1, 1, 1, 4, 6, 16, 32, 32]
    """
    fitting = range(1, min(MOST_GROUPS, max(channels // LEAST_CHANNELS, 1)) + 1)
    return max(groups for groups in fitting if channels % groups == 0)


def _fixes_of(path: str, layer: nn.Module, *, training: bool) -> Iterator[Fix]:
    name = type(layer).__name__
    if isinstance(layer, _BatchNorm):
        is_lazy = isinstance(layer, LazyModuleMixin)
        shown = name if is_lazy else f"{name}({layer.num_features})"
        if training and not layer.training:
            remark = "kept, in evaluation mode: call eval() on it after every train() of the model"
            yield Fix(path, shown, "", remark)
        elif (remedy := _obstacle(layer)) is not None:
            yield Fix(path, shown, "", remedy)
        elif is_lazy:
            yield Fix(path, shown, "GroupNorm", "groups follow from the first batch", partial(_lazy_group_norm, layer))
        else:
            norm = _group_norm(layer)
            instead = f"GroupNorm({norm.num_groups}, {norm.num_channels})"
            yield Fix(path, shown, instead, "without running statistics", lambda: norm)
    elif isinstance(layer, _InstanceNorm):
        if layer.track_running_stats:
            remark = "every example is normalised by itself, also in evaluation mode"
            yield Fix(path, name, f"{name}, track_running_stats=False", remark, partial(_untracked, layer))
    elif isinstance(layer, torch.jit.ScriptModule):
        if "BatchNorm" in layer.original_name:
            yield Fix(path, layer.original_name, "", "it is scripted: call qclip.fix on the model before torch.jit")
    else:
        remedies = [running_state_remedy(layer, tensor) for tensor in (*layer._parameters, *layer._buffers)]
        if remedy := next(filter(None, remedies), None):
            yield Fix(path, name, "", remedy)


def _obstacle(layer: _BatchNorm) -> str | None:
    """Return why a batch norm cannot be replaced as it is, with a remedy; None if it can."""
    if type(layer).forward not in _OWN_FORWARD:
        return "it has a forward pass of its own: replace it by hand, with a GroupNorm in it"
    if is_parametrized(layer):
        return "it is parametrized: call torch.nn.utils.parametrize.remove_parametrizations on it first"
    if any(isinstance(vars(layer).get(name), Tensor) for name in ("weight", "bias")):
        return "a hook computes its weight: remove it first, such as by torch.nn.utils.remove_weight_norm"
    if isinstance(layer, LazyModuleMixin) and len(layer._forward_pre_hooks) + len(layer._forward_hooks) > 1:
        return "it has hooks and no shape yet: run one batch through the model first"
    return None


def _group_norm(layer: _BatchNorm) -> nn.GroupNorm:
    """Return a group norm with the parameters, the hooks and the mode of a batch norm."""
    channels = layer.num_features
    # A 1-D batch norm may get one position [B, C], of which a small group would leave little.
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else num_groups(channels)
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=False)
    norm.affine, norm.weight, norm.bias = layer.affine, layer.weight, layer.bias
    norm.__dict__.update({name: value for name, value in vars(layer).items() if "_hook" in name})
    return norm.train(layer.training)


class LazyGroupNorm(LazyModuleMixin, nn.GroupNorm):  # type: ignore[misc]
    """A group norm that takes its channels, and the place of a lazy batch norm, at the first batch."""

    cls_to_become = nn.GroupNorm

    weight: Any
    bias: Any

    def __init__(self, layer: Any) -> None:
        super().__init__(1, 1, eps=layer.eps, affine=False)  # type: ignore[arg-type]
        self.affine, self.weight, self.bias = layer.affine, layer.weight, layer.bias
        self._is_flat = isinstance(layer, nn.LazyBatchNorm1d)

    def reset_parameters(self) -> None:
        """Start with weights 1 and biases 0, once there are any."""
        if not any(isinstance(p, nn.parameter.UninitializedParameter) for p in self.parameters()):
            super().reset_parameters()

    def initialize_parameters(self, input: Tensor) -> None:
        """Take the shape of the input, [B, C, ...]."""
        self.num_channels = input.shape[1]
        self.num_groups = 1 if self._is_flat else num_groups(self.num_channels)
        for parameter in (self.weight, self.bias):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                parameter.materialize((self.num_channels,))
        self.reset_parameters()


def _lazy_group_norm(layer: Any) -> nn.GroupNorm:
    return LazyGroupNorm(layer).train(layer.training)


def _untracked(layer: Any) -> nn.Module:
    """Stop to track running statistics, as if the layer had been made without."""
    layer.track_running_stats = False
    layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return layer
