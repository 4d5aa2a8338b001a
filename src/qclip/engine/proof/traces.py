"""Traces: reruns of an evaluation, and a summary of each example's values and gradients in them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from qclip.engine.capture.capture import Capture
from qclip.engine.gradients.layouts import Layout
from qclip.engine.gradients.plan import SitePlan
from qclip.engine.gradients.sites import output_gradients

_MOST_ELEMENTS: Final = 2**24
"""The most elements that are projected at once."""

SitePlans = list[list[SitePlan]]
"""The plans that fit each site: none, or more than one where no gradient distinguishes its layouts."""
Projections = dict[tuple[int, Layout], Tensor]
"""Projections and sizes [B, 3], by site and layout."""


@dataclass(eq=False)
class Repetition:
    """One more run of the evaluation."""

    capture: Capture
    losses: Tensor
    """[B]."""
    random: bool
    """Whether it drew random numbers, from any generator."""

    def gradients(self, weights: Tensor, *, retain_graph: bool = False) -> list[list[Tensor | None]]:
        """Return the gradients of the weighted losses at every output of every site."""
        sites, parameters = self.capture.sites, self.capture.parameters
        return output_gradients(self.losses, weights, sites, parameters, retain_graph=retain_graph)


Rerun = Callable[..., Repetition]
"""``rerun(batch, batch_size, keep_values=False, observe=None)`` runs the evaluation again, on this batch or one like
it, with the same random numbers; ``observe`` is called with the index and the output of every site."""


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
    def of(rerun: Rerun, batch: Any, batch_size: int, plans: SitePlans) -> "Traces":
        """Run the evaluation and trace it.

        Args:
            rerun: Runs the evaluation.
            batch: The batch.
            batch_size: B.
            plans: The plans whose layouts are traced at each site.
        """
        traces = Traces(plans, batch_size)
        trial = rerun(batch, batch_size, observe=lambda k, value: traces._add(traces.values, k, value))
        traces.losses, traces.random = trial.losses.detach(), trial.random
        traces.rough |= torch.is_autocast_enabled(traces.losses.device.type) or traces.losses.dtype == torch.bfloat16
        traces.sites = [str(site) for site in trial.capture.sites]
        for k, grads in enumerate(trial.gradients(torch.ones_like(traces.losses))):
            if grads[0] is not None:
                traces._add(traces.grads, k, grads[0])
        return traces

    def _add(self, projections: Projections, k: int, x: Tensor) -> None:
        for plan in self.plans[k] if k < len(self.plans) else ():
            if plan.layout.holds(x, self.batch_size) and (x.is_floating_point() or x.is_complex()):
                self.rough |= x.dtype in (torch.bfloat16, torch.float16)
                projections[k, plan.layout] = project(plan.layout.by_example(x.detach(), self.batch_size))

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
                largest = max((float(here[k, known[k][0].layout][index, 2].max()) for k in order), default=0.0)
                for k in order:
                    pairs = [(p, here[k, p.layout][index], there[k, p.layout][index]) for p in known[k]]
                    plans[k] = [p for p, a, b in pairs if _num_apart(a, b, tolerance, largest) <= allowed]
                    if not plans[k]:
                        return plans, f"{words} {self.sites[k]}"
        a, b = self.losses[index].double(), other.losses[index].double()
        if int(((a - b).abs() > tolerance * (a.abs() + b.abs()) + 1e-12).sum()) <= allowed:
            return plans, None
        unknown = [name for name, fitting in zip(self.sites, self.plans, strict=False) if not fitting]
        return plans, f"at or after {unknown[-1]}" if unknown else "in the loss"


def _num_apart(a: Tensor, b: Tensor, tolerance: float, largest: float) -> int:
    """Return the number of examples whose projections [B, 3] differ by more than the tolerance."""
    margin = tolerance * (a[:, 2:] + b[:, 2:]) + 1e-3 * tolerance * largest
    return int(((a - b).abs() > margin).any(1).sum())


def project(rows: Tensor) -> Tensor:
    """Return two projections of each example's rows [B, ...], and their size, as [B, 3]."""
    rows = rows.reshape(len(rows), -1)
    rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    generator = torch.Generator(rows.device).manual_seed(rows.shape[1])
    with torch._C.DisableTorchFunction():  # `SameDraws` would take this for a draw of the model
        directions = torch.randn(rows.shape[1], 2, generator=generator, dtype=torch.float64, device=rows.device)
    chunks = rows.split(max(1, _MOST_ELEMENTS // max(1, rows.shape[1])))  # all of them may not fit in float64
    return torch.cat([torch.cat([x @ directions, x.norm(dim=1, keepdim=True)], 1) for x in map(Tensor.double, chunks)])
