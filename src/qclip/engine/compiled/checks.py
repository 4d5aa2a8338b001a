"""Trials: what a step gives when it is tried, against what the eager driver gives and against itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qclip.engine import batch as batches
from qclip.engine.capture.checks import Evaluate
from qclip.engine.compiled.graph import Function, inputs_of, model_tensors, outputs_of, trace
from qclip.engine.driver import Engine, Run
from qclip.engine.gradients import clipping
from qclip.engine.gradients.plan import Plan
from qclip.engine.proof.separation import require_separation
from qclip.engine.randomness import RandomState
from qclip.engine.result import ClippedGradients
from qclip.engine.torch_settings import tf32_anywhere


class Trial(NamedTuple):
    """What a step gave."""

    sums: list[Tensor]
    norms: Tensor
    """[B, K]."""
    losses: Tensor
    """[B, 1]."""
    random: bool
    """Whether it drew random numbers."""


class Trials:
    """Of steps of an engine's model, at thresholds of 1, each from the same random numbers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ones = tuple(1.0 for _ in engine.groups.names)

    @property
    def limits(self) -> Tensor:
        """The thresholds."""
        return torch.ones(len(self._ones), dtype=clipping.norm_dtype(self._engine.parameters), device=self._device)

    @property
    def _device(self) -> torch.device:
        return self._engine.device

    def inputs(self, batch: Any, counted: Tensor) -> list[Tensor]:
        """What the step is called with."""
        return inputs_of(model_tensors(self._engine), batch, counted, self.limits)

    def trial(self, function: Function, batch: Any, counted: Tensor) -> Trial:
        """What the step gives for the examples that are counted."""
        state = RandomState.now(self._device)
        with state.replayed():
            sums, norms, losses, _ = outputs_of(function, self.inputs(batch, counted))
            return Trial([x.clone() for x in sums], norms.clone(), losses.clone()[:, None], not state.unmoved())

    def agrees(self, function: Function, evaluate: Evaluate, batch: Any, few: Tensor) -> bool:
        """Whether the step gives the norms and sums that the eager driver gives for a ``few`` examples alone.

        Where random numbers are drawn the two draw others, so only what is finite is compared.
        """
        mine = self.trial(function, batch, few)
        theirs = self._eager(evaluate, batches.select(batch, few, len(few)), few[few], like=len(few))
        if mine.random:
            return torch.equal(mine.norms[few].isfinite(), theirs.group_norms.isfinite())
        return self._same(mine.sums, mine.norms[few], theirs)

    def draws_alike(self, run: Run, plan: Plan, evaluate: Evaluate, batch: Any, count: int) -> bool:
        """Whether a step's graph gives what the eager driver gives for these examples, from the same random numbers.

        Run as it is, operation by operation: compiled, it would draw others.
        """
        everyone = torch.ones(count, dtype=torch.bool, device=self._device)
        graph = trace(self._engine, run, plan, evaluate, batch, everyone, self.limits)
        mine = self.trial(lambda inputs: graph(*inputs), batch, everyone)
        return self._same(mine.sums, mine.norms, self._eager(evaluate, batch, everyone, like=count))

    def require_separation(self, function: Function, batch: Any, count: int) -> None:
        """Refuse a model in which replacing some of all examples changes the norms or losses of others."""
        everyone = torch.ones(count, dtype=torch.bool, device=self._device)
        before = self.trial(function, batch, everyone)
        tolerance = self._tolerance(1e-4, 1e-2)

        def difference(after: Trial, is_kept: Tensor) -> str | None:
            pairs = (before.norms, after.norms), (before.losses, after.losses)
            differ = any(bool(_differ(a[is_kept], b[is_kept], tolerance).any()) for a, b in pairs)
            return "in their losses or gradient norms" if differ else None

        require_separation(
            lambda others: self.trial(function, others, everyone), difference, batch, count, before.norms[:, 0]
        )

    def _eager(self, evaluate: Evaluate, batch: Any, mask: Tensor, *, like: int) -> ClippedGradients:
        """By the norms that a compiled step takes: others allow for other rounding, and clip a little more or less."""
        with RandomState.now(self._device).replayed():
            return self._engine.clipped(evaluate, batch, self._ones, mask=mask, like=like)

    def _same(self, sums: Sequence[Tensor], norms: Tensor, theirs: ClippedGradients) -> bool:
        """Whether these are the sums and the norms [B, K] of the eager driver.

        The norm of one example of five may differ, as where another kernel's rounding makes another element the largest
        of its pool.
        """
        tolerance = self._tolerance(1e-3, 5e-2)
        differ = _differ(norms, theirs.group_norms, tolerance)
        if bool(differ.any()) or not bool(theirs.norms.isfinite().all()):
            return int(differ.sum()) <= len(differ) // 5
        apart = [torch.linalg.vector_norm(a - b) for a, b in zip(sums, theirs.sums.values(), strict=True)]
        room = tolerance * theirs.norms.clamp(max=theirs.l2_bound).sum()
        return bool(torch.linalg.vector_norm(torch.stack(apart)) <= room)

    def _tolerance(self, single: float, half: float) -> float:
        rough = any(p.dtype == torch.bfloat16 for p in self._engine.parameters.values())
        rough = rough or tf32_anywhere(self._device) or torch.is_autocast_enabled(self._device.type)
        return half if rough else single


def _differ(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """[B]: where norms [B, K] differ by more than rounding, or only one of them is finite."""
    both = a.isfinite() & b.isfinite()
    apart = torch.where(both, a - b, 0).abs() > tolerance * torch.linalg.vector_norm(
        torch.where(both, a, 0) + torch.where(both, b, 0), dim=1, keepdim=True
    )
    return (apart | (a.isfinite() != b.isfinite())).any(1)
