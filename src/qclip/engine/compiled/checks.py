"""Checks of a compiled step: it must agree with the eager driver, and keep examples separate."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qclip.engine import batch as batches
from qclip.engine.capture.checks import Evaluate, require_losses
from qclip.engine.compiled.graph import Function, as_a_step_runs, inputs_of, model_tensors, outputs_of, trace
from qclip.engine.driver import Engine, Run
from qclip.engine.gradients import clipping
from qclip.engine.gradients.costs import Method
from qclip.engine.gradients.plan import Plan
from qclip.engine.proof.separation import require_separation
from qclip.engine.randomness import RandomState
from qclip.engine.result import ClippedGradients
from qclip.engine.torch_settings import tf32_anywhere


class Trial(NamedTuple):
    """The results of a step, copied."""

    sums: list[Tensor]
    norms: Tensor
    """[B, K]."""
    losses: Tensor
    """[B, 1]."""
    is_random: bool
    """Whether the step drew random numbers."""


class Trials:
    """Runs steps of an engine's model at clip norms of 1, each with the same random numbers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ones = tuple(1.0 for _ in engine.groups.names)

    @property
    def clip_norms(self) -> Tensor:
        """The clip norms, [K]."""
        return torch.ones(len(self._ones), dtype=clipping.norm_dtype(self._engine.parameters), device=self._device)

    @property
    def _device(self) -> torch.device:
        return self._engine.device

    def inputs(self, batch: Any, is_counted: Tensor) -> list[Tensor]:
        """Return the inputs of a step on this batch."""
        return inputs_of(model_tensors(self._engine), batch, is_counted, self.clip_norms)

    def trial(self, function: Function, batch: Any, is_counted: Tensor) -> Trial:
        """Run a step; leave the generators as they were."""
        state = RandomState.now(self._device)
        with state.replayed():
            sums, norms, losses, _ = outputs_of(function, self.inputs(batch, is_counted))
            return Trial([x.clone() for x in sums], norms.clone(), losses.clone()[:, None], not state.unmoved())

    def agrees(
        self,
        function: Function,
        methods: Mapping[str, Method | None],
        evaluate: Evaluate,
        batch: Any,
        is_counted: Tensor,
    ) -> bool:
        """Return whether a step agrees with the eager driver in norms and sums.

        A step that draws random numbers draws others than the eager driver. Then only the examples whose norms are
        finite are compared.

        Args:
            function: The step.
            methods: How it computes the norms of each parameter.
            evaluate: Runs the model on a batch and returns one loss per example.
            batch: The batch of the step.
            is_counted: The examples to compare, [B]. The eager driver runs on these alone.
        """
        compiled = self.trial(function, batch, is_counted)
        few = batches.select(batch, is_counted, len(is_counted))
        eager = self._eager(evaluate, few, int(is_counted.sum()), methods)
        if compiled.is_random:
            return torch.equal(compiled.norms[is_counted].isfinite(), eager.group_norms.isfinite())
        return self._is_same(compiled.sums, compiled.norms[is_counted], eager)

    def draws_alike(self, run: Run, plan: Plan, evaluate: Evaluate, batch: Any, batch_size: int) -> bool:
        """Return whether a step's graph agrees with the eager driver when both draw the same random numbers.

        The graph is interpreted, operation by operation: compiled, it would draw others.
        """
        everyone = torch.ones(batch_size, dtype=torch.bool, device=self._device)
        traced = trace(self._engine, run, plan, evaluate, batch, everyone, self.clip_norms)
        interpreted = self.trial(traced, batch, everyone)
        eager = self._eager(evaluate, batch, batch_size, traced.methods)
        return self._is_same(interpreted.sums, interpreted.norms, eager)

    def require_separation(self, function: Function, batch: Any, batch_size: int) -> None:
        """Refuse a model in which replacing some examples changes the norms or losses of others."""
        everyone = torch.ones(batch_size, dtype=torch.bool, device=self._device)
        before = self.trial(function, batch, everyone)
        tolerance = self._tolerance(1e-4, 1e-2)

        def difference(after: Trial, is_kept: Tensor) -> str | None:
            pairs = (before.norms, after.norms), (before.losses, after.losses)
            differ = any(bool(_differ(a[is_kept], b[is_kept], tolerance).any()) for a, b in pairs)
            return "in their losses or gradient norms" if differ else None

        require_separation(
            lambda others: self.trial(function, others, everyone), difference, batch, batch_size, before.norms[:, 0]
        )

    def _eager(
        self, evaluate: Evaluate, batch: Any, batch_size: int, methods: Mapping[str, Method | None]
    ) -> ClippedGradients:
        """Clip a batch by the eager driver, with norms computed as in a step.

        Other methods have other rounding margins, and clip a little more or less.
        """
        engine = self._engine
        everyone = torch.ones(batch_size, dtype=torch.bool, device=self._device)
        with RandomState.now(self._device).replayed():
            run = engine.record(evaluate, batch, batch_size)
            require_losses(run.losses, batch_size)
            run, _, parts = engine.parts(run, everyone, evaluate, batch)
            for name, (part, *more) in ((name, found) for name, found in parts.items() if found):
                # Gradients to be kept are formed whenever they are needed: here those of all groups would not fit.
                part.method = None if more else methods.get(name)
            with as_a_step_runs(self._device):
                return engine.clip(parts, run.losses, everyone, self._ones)

    def _is_same(self, sums: Sequence[Tensor], norms: Tensor, eager: ClippedGradients) -> bool:
        """Return whether sums and norms [B, K] are those of the eager driver.

        The norm of one example in five may differ, as where the rounding of another kernel makes another element the
        largest of its pool.
        """
        tolerance = self._tolerance(1e-3, 5e-2)
        differ = _differ(norms, eager.group_norms, tolerance)
        if bool(differ.any()) or not bool(eager.norms.isfinite().all()):
            return int(differ.sum()) <= len(differ) // 5
        apart = [torch.linalg.vector_norm(a - b) for a, b in zip(sums, eager.sums.values(), strict=True)]
        margin = tolerance * eager.norms.clamp(max=eager.l2_bound).sum()
        return bool(torch.linalg.vector_norm(torch.stack(apart)) <= margin)

    def _tolerance(self, single: float, half: float) -> float:
        rough = any(p.dtype == torch.bfloat16 for p in self._engine.parameters.values())
        rough = rough or tf32_anywhere(self._device) or torch.is_autocast_enabled(self._device.type)
        return half if rough else single


def _differ(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """Return which rows [B] of norms [B, K] differ by more than rounding, or in being finite."""
    both = a.isfinite() & b.isfinite()
    apart = torch.where(both, a - b, 0).abs() > tolerance * torch.linalg.vector_norm(
        torch.where(both, a, 0) + torch.where(both, b, 0), dim=1, keepdim=True
    )
    return (apart | (a.isfinite() != b.isfinite())).any(1)
