"""A logical batch: the raw sums of one step, over its physical batches, all clipped at the same thresholds."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qclip._validate import Floats
from qclip.engine import ClippedGradients
from qclip.engine.batch import to_device_async
from qclip.engine.driver import Choice
from qclip.thresholds import Answer, Question
from qclip.thresholds.threshold import Grid
from qclip.training.noise import BoundedSum


class Noise(NamedTuple):
    """The standard deviation of what was added to each group of the gradient sum, and to each count."""

    gradient_stds: tuple[float, ...]
    counts_std: float


class LogicalBatch:
    """The raw sums so far: of clipped gradients, and of what the threshold asked.

    ``choice`` is the threshold of each group, or how to choose it from the first physical batch's norms.
    """

    def __init__(self, choice: Choice, question: Question, *, keep_norms: bool) -> None:
        self.choice = choice
        self.parts = 0
        self._question = question
        self._sums: dict[str, Tensor] = {}
        self._clip_norms: tuple[float, ...] = ()
        self._bins: Tensor | None = None
        self._within: Tensor | None = None
        self._examples = 0
        self._finite: Tensor | None = None
        self._norms: list[Floats] | None = [] if keep_norms else None
        self._clean: Tensor | None = None
        self._repaired: list[Callable[[], ClippedGradients]] = []

    @property
    def clip_norms(self) -> tuple[float, ...]:
        """The threshold of each group: what every part was clipped at."""
        return self._clip_norms

    @property
    def hopeless(self) -> bool:
        """Whether there were examples and the gradient of none of them was finite."""
        return self._examples > 0 and self._finite is not None and not bool(self._finite)

    def add(self, gradients: ClippedGradients, examples: int, *, last: bool = False) -> None:
        """Take in one physical batch, of so many examples that count; ``last`` where no other will follow."""
        assert self.parts == 0 or gradients.clip_norms == self._clip_norms, "clipped at other norms than before"
        self._clip_norms = self.choice = gradients.clip_norms
        if gradients.all_finite is None or gradients.recompute is None:
            self._settle()  # what came before, since this one cannot be computed again
        elif self.parts > 0 and self._clean is None:
            gradients = gradients.resolve()
        else:
            self._clean = gradients.all_finite if self._clean is None else self._clean & gradients.all_finite
            self._repaired.append(gradients.recompute)
        self._add_sums(gradients, last=last)
        if len(self._repaired) >= _MOST_HELD:
            self._settle()
        count, slack = self._question.count, self._question.slack
        if count is not None:
            cumulative = gradients.count_under(count.radii).float()
            self._bins = _plus(self._bins, cumulative.diff(dim=1, prepend=torch.zeros_like(cumulative[:, :1])))
            self._bins -= count.centre * examples
        if slack is not None:
            self._within = _plus(self._within, gradients.count_under(slack.radii).float())
        finite = (gradients.norms.isfinite() & gradients.mask).any()
        self._finite = finite if self._finite is None else self._finite | finite
        self._examples += examples
        if self._norms is not None:
            self._norms.append(gradients.group_norms[gradients.mask].cpu().numpy())
        self.parts += 1

    def _add_sums(self, gradients: ClippedGradients, *, last: bool) -> None:
        if self._sums:
            torch._foreach_add_(list(self._sums.values()), [gradients.sums[name] for name in self._sums])
        else:  # sums that the next step overwrites are copied, unless there is none
            kept = gradients.is_view and not last
            self._sums = {name: value.clone() if kept else value for name, value in gradients.sums.items()}

    def _settle(self) -> None:
        """Now that the device has to be waited for anyway: compute again what examples that are not finite spoilt."""
        if self._clean is not None and not bool(self._clean):
            self._sums = {}
            for recompute in self._repaired:
                self._add_sums(recompute(), last=False)
        self._clean, self._repaired = None, []

    def gradient(self, members: Mapping[str, int], dims: Sequence[int]) -> BoundedSum:
        """The clipped gradients, with the slack's coordinates appended to each group: the bound is the same.

        ``members``: the group of each parameter; ``dims``: the number of parameters of each group in the whole run.
        """
        self._settle()
        tensors, groups, dims = dict(self._sums), dict(members), list(dims)
        if self._question.slack is not None and self._within is not None:
            coefficients = torch.tensor(self._question.slack.coefficients(self._clip_norms), dtype=self._within.dtype)
            for k, row in enumerate(self._within * to_device_async(coefficients, self._within.device)):
                tensors[_slack(k)] = row
                groups[_slack(k)] = k
                dims[k] += len(row)
        return BoundedSum(tensors, groups, self._clip_norms, tuple(dims))

    def counts(self) -> BoundedSum | None:
        """What the threshold pays for, if anything."""
        if self._question.count is None or self._bins is None:
            return None
        dims = (sum(map(len, self._question.count.radii)),)
        return BoundedSum({"counts": self._bins}, {"counts": 0}, (self._question.count.l2_bound,), dims)

    def answer(
        self,
        noisy_gradient: dict[str, Tensor],
        noisy_counts: Mapping[str, Tensor],
        noise: Noise,
        batch_size: int,
        *,
        divisor: float,
    ) -> Answer:
        """What the threshold learns, from the released counts and the released gradient, over its ``divisor``.

        The slack's coordinates are taken out of the gradient.
        """
        noisy_bins: Grid = ()
        if self._question.count is not None:
            fractions = noisy_counts["counts"] / batch_size + self._question.count.centre
            noisy_bins = tuple(map(tuple, fractions.tolist()))
        noisy_within: Grid = ()
        within_std: Grid = ()
        if self._question.slack is not None:
            rows = self._question.slack.coefficients(self._clip_norms)
            noisy = torch.stack([noisy_gradient.pop(_slack(k)) for k in range(len(rows))]).tolist()
            noisy_within = tuple(
                tuple(value * divisor / a / batch_size for value, a in zip(values, row, strict=True))
                for values, row in zip(noisy, rows, strict=True)
            )
            stds = zip(noise.gradient_stds, rows, strict=True)
            within_std = tuple(tuple(std / a / batch_size for a in row) for std, row in stds)
        return Answer(
            noisy_bins=noisy_bins,
            noisy_within=noisy_within,
            raw_norms=None if self._norms is None else np.concatenate(self._norms),
            bins_std=noise.counts_std / batch_size,
            within_std=within_std,
            batch_size=batch_size,
            clip_norms=self._clip_norms,
        )


_MOST_HELD = 32
"""How many physical batches are held so that they can be computed again; later ones are waited for."""


def _plus(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total + value


def _slack(group: int) -> str:
    return f"slack of group {group}"  # no parameter has a space in its name
