"""The same step in other libraries."""

from typing import Any

import torch
from torch import Tensor, nn

from qclip.apps.bench.workload import CLIP_NORM, NOISE_MULTIPLIER, Step, Workload


def opacus_hooks(workload: Workload) -> Step:
    """Return a step of Opacus with per-example gradients."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(workload.model)
    optimizer = DPOptimizer(workload.optimizer(), **_settings(workload))

    def step() -> None:
        optimizer.zero_grad()
        workload.losses(wrapped, workload.batch).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(workload: Workload) -> Step:
    """Return a step of Opacus with ghost clipping: norms first, then a second backward pass."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(workload.model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(workload.optimizer(), **_settings(workload))
    criterion = DPLossFastGradientClipping(wrapped, optimizer, _Criterion(workload), "mean")
    inputs, targets = workload.batch

    def step() -> None:
        optimizer.zero_grad()
        with workload.precision.autocast(workload.device):
            loss = criterion(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


def _settings(workload: Workload) -> dict[str, Any]:
    return {
        "noise_multiplier": NOISE_MULTIPLIER,
        "max_grad_norm": CLIP_NORM,
        "expected_batch_size": workload.case.batch,
        "loss_reduction": "mean",
        "generator": torch.Generator(workload.device).manual_seed(0),
    }


class _Criterion(nn.Module):
    """A loss with a settable reduction, which Opacus's ghost clipping needs."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self.workload.case.losses(outputs, targets)
        return losses if self.reduction == "none" else losses.mean()
