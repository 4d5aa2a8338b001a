"""Traces: reruns of an evaluation, and a summary of each example's values and gradients in them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from qclip.engine.capture.capture import Capture
from qclip.engine.capture.repeat import Repeat, Script
from qclip.engine.gradients.layouts import Axis, Layout, placed
from qclip.engine.gradients.plan import SitePlan
from qclip.engine.gradients.sites import output_gradients

_MOST_ELEMENTS: Final = 2**24
"""The most elements that are projected at once."""
_KEPT: Final = (2**14, 2**16, 2**18, 2**20)
"""Up to which lengths directions are parts of the same ones, which are kept: drawing them takes time."""

_USUAL: Final = Axis(0)

SitePlans = list[list[SitePlan]]
"""The plans that fit each site: none, or more than one where no gradient distinguishes its layouts."""
Projections = dict[tuple[int, Layout], Tensor]
"""Projections and sizes [B, 3], by site and layout."""


@dataclass(frozen=True, eq=False)
class Repetition:
    """One more run of the evaluation."""

    capture: Capture | Repeat
    losses: Tensor
    """[B]."""
    random: bool
    """Whether it drew random numbers, from any generator."""

    def gradients(self, weights: Tensor, *, retain_graph: bool = False) -> list[list[Tensor | None]]:
        """Return the gradients of the weighted losses at every output of every site."""
        sites, parameters = self.capture.sites, self.capture.parameters
        return output_gradients(self.losses, weights, sites, parameters, retain_graph=retain_graph)


@dataclass(frozen=True, eq=False)
class Trial(Repetition):
    """The first run of a proof: captured, with the values of its sites."""

    capture: Capture
    script: Script | None
    """To repeat it, unless data move rows, and others in another run."""
    can_grow: bool
    """Whether inputs of the model can be enlarged."""


Rerun = Callable[..., Repetition]
"""``rerun(batch, batch_size, script=None, observe=None)`` runs the evaluation again, on this batch or one like it, with
the same random numbers; ``script`` is a run that makes the same calls, most likely, and ``observe`` is called with the
index and the output of every site."""


@dataclass(eq=False)
class Traces:
    """What each example left at every site: random projections and sizes of its values and gradients.

    A projection on a Gaussian direction moves by as much as the projected tensor, so a few numbers stand for many.
    """

    plans: SitePlans
    batch_size: int
    values: Projections = field(default_factory=dict)
    grads: Projections = field(default_factory=dict)
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    sites: list[str] = field(default_factory=list)
    random: bool = False
    rough: bool = False
    """Whether something was rounded to 16 bits on the way."""

    @staticmethod
    def of(rerun: Rerun, batch: Any, batch_size: int, plans: SitePlans, script: Script | None = None) -> "Traces":
        """Run the evaluation and trace it.

        Args:
            rerun: Runs the evaluation.
            batch: The batch.
            batch_size: B.
            plans: The plans whose layouts are traced at each site.
            script: A run that makes the same calls, most likely.
        """
        traces = Traces(plans, batch_size)

        def observe(k: int, value: Tensor, order: Tensor | None) -> None:
            traces._add(traces.values, k, value, order)

        again = rerun(batch, batch_size, script=script, observe=observe)
        traces._finish(again, again.gradients(torch.ones_like(again.losses)))
        return traces

    @staticmethod
    def of_trial(trial: Trial, grads: Sequence[Sequence[Tensor | None]], plans: SitePlans) -> "Traces":
        """Trace a run whose sites have kept their values.

        Args:
            trial: The run.
            grads: The gradients of the sum of its losses.
            plans: The plans whose layouts are traced at each site.
        """
        traces = Traces(plans, len(trial.losses))
        for k, site in enumerate(trial.capture.sites):
            assert site.value is not None
            traces._add(traces.values, k, site.value, site.order)
        traces._finish(trial, grads)
        return traces

    def _finish(self, run: Repetition, grads: Iterable[Sequence[Tensor | None]]) -> None:
        self.losses, self.random = run.losses.detach(), run.random
        self.rough |= torch.is_autocast_enabled(self.losses.device.type) or self.losses.dtype == torch.bfloat16
        self.sites = [str(site) for site in run.capture.sites]
        for k, (grad, *_) in enumerate(grads):
            if grad is not None:
                self._add(self.grads, k, grad.detach(), run.capture.sites[k].order)

    def _add(self, projections: Projections, k: int, x: Tensor, order: Tensor | None) -> None:
        for plan in self.plans[k] if k < len(self.plans) else ():
            if plan.layout.holds(x, self.batch_size) and (x.is_floating_point() or x.is_complex()):
                self.rough |= x.dtype in (torch.bfloat16, torch.float16)
                in_front = plan.layout == _USUAL and order is None  # a view of the examples would take time for nothing
                layout = placed(plan.layout, len(x), order, self.batch_size) if x.dim() else plan.layout
                rows = x if in_front else layout.by_example(x, self.batch_size)
                projections[k, plan.layout] = project(rows)

    def compare(
        self, other: "Traces", index: Tensor, tolerance: float, *, allowed: int = 0
    ) -> tuple[SitePlans, str | None]:
        """Compare some examples in both traces, plan by plan.

        Mixing shows in values after the mixing operation and in gradients before it.

        Args:
            other: The other traces.
            index: The examples to compare, as indices or a mask [B].
            tolerance: The relative difference that rounding may cause.
            allowed: The number of examples that may differ.

        Returns:
            The plans by which the examples agree at their sites; and where they agree by no plan, in words, or None.
        """
        plans = [list(fitting) for fitting in self.plans]
        if self.sites == other.sites:
            # Values in the order of the forward pass, gradients in that of the backward pass.
            passes = (self.values, other.values, 1, "at or before"), (self.grads, other.grads, -1, "at or after")
            for here, there, step, words in passes:
                common = here.keys() & there.keys()
                known = [[plan for plan in fitting if (k, plan.layout) in common] for k, fitting in enumerate(plans)]
                order = [k for k, fitting in enumerate(known) if fitting][::step]
                if not order:
                    continue
                pairs: list[tuple[int, SitePlan]] = []
                first: list[int] = []
                for k in order:
                    first.append(len(pairs))
                    pairs += [(k, plan) for plan in known[k]]
                    plans[k] = []
                a, b = (
                    torch.stack([s[k, p.layout].to(index.device) for k, p in pairs])[:, index] for s in (here, there)
                )
                apart = _num_apart(a, b, tolerance, float(a[first, :, 2].max())).tolist()
                for (k, plan), num in zip(pairs, apart, strict=True):
                    plans[k] += [plan] if num <= allowed else []
                if mixed := [k for k in order if not plans[k]]:
                    return plans, f"{words} {self.sites[mixed[0]]}"
        a, b = self.losses[index].double(), other.losses[index].double()
        if int(((a - b).abs() > tolerance * (a.abs() + b.abs()) + 1e-12).sum()) <= allowed:
            return plans, None
        unknown = [name for name, fitting in zip(self.sites, self.plans, strict=False) if not fitting]
        return plans, f"at or after {unknown[-1]}" if unknown else "in the loss"


def _num_apart(a: Tensor, b: Tensor, tolerance: float, largest: float) -> Tensor:
    """Return the numbers of examples whose projections [N, B, 3] differ by more than the tolerance, [N]."""
    margin = tolerance * (a[..., 2:] + b[..., 2:]) + 1e-3 * tolerance * largest
    return ((a - b).abs() > margin).any(-1).sum(-1)


def project(rows: Tensor) -> Tensor:
    """Return two projections of each example's rows [B, ...], and their size, as [B, 3]."""
    rows = rows.reshape(len(rows), -1)
    rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    directions = _directions(rows.shape[1], rows.device)
    if rows.numel() <= _MOST_ELEMENTS:
        return _projected(rows, directions)
    chunks = rows.split(max(1, _MOST_ELEMENTS // max(1, rows.shape[1])))  # all of them may not fit in float64
    return torch.cat([_projected(chunk, directions) for chunk in chunks])


def _projected(rows: Tensor, directions: Tensor) -> Tensor:
    rows = rows.double()
    return torch.cat([rows @ directions, torch.linalg.vector_norm(rows, dim=1, keepdim=True)], 1)


_kept_directions: dict[tuple[int, torch.device], Tensor] = {}


def _directions(length: int, device: torch.device) -> Tensor:
    """Return two Gaussian directions [length, 2], the same at every call."""
    drawn = next((most for most in _KEPT if length <= most), length)
    if drawn == length:
        return _drawn(length, device)
    if (drawn, device) not in _kept_directions:
        _kept_directions[drawn, device] = _drawn(drawn, device)
    return _kept_directions[drawn, device][:length]


def _drawn(length: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(length)
    with torch._C.DisableTorchFunction():  # `SameDraws` would take this for a draw of the model
        return torch.randn(length, 2, generator=generator, dtype=torch.float64, device=device)
