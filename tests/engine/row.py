"""A row of the table with all that its checks share: one model, proven once, and its examples' gradients."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.cases import Case, Problem
from engine.cases.case import T
from engine.compare import Expected, expected, fast, known, medians, scaled
from qclip.engine import ClippedGradients, oracle
from qclip.engine import batch as batches
from qclip.engine.driver import call

SHIELDED = {"embedding-all-padding", "interface-all-labels-ignored"}
"""Rows where padding or ignored labels keep everything from the parameters, NaN included."""


class Row:
    """The same model for batches of any size: what it proves on one batch it relies on in the next, as in training.

    The first batch has as many examples as there are positions, so that sizes cannot tell them apart. Every loss is
    multiplied by a factor of its example, which is 1 unless a check says otherwise.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self._built = case.build(T)
        self._problems = {T: scaled(self._built, torch.ones(T))}
        self._examples: dict[int, list[oracle.Example]] = {}

    def problem(self, size: int) -> Problem:
        """With this many examples."""
        if size not in self._problems:
            built = self.case.build(size)
            if self._is_the_model_of(built):
                targets = (built.targets, torch.ones(size))
                self._problems[size] = replace(self._problems[T], inputs=built.inputs, targets=targets)
            else:
                self._problems[size] = scaled(built, torch.ones(size))
        return self._problems[size]

    def _is_the_model_of(self, built: Problem) -> bool:
        mine, other = self._built.model.state_dict(), built.model.state_dict()
        return built.loss is self._built.loss and all(
            isinstance(value, Tensor) and torch.equal(value, other[name]) for name, value in mine.items()
        )

    def examples(self, size: int) -> list[oracle.Example]:
        """What the oracle finds of each example."""
        if size not in self._examples:
            self._examples[size] = self._ask(self.problem(size))
        return self._examples[size]

    def _ask(self, problem: Problem) -> list[oracle.Example]:
        torch.manual_seed(1)
        evaluate = lambda pair: problem.loss(call(problem.model, pair[0]), pair[1])  # noqa: E731
        pair = (problem.inputs, problem.targets)
        mask = torch.ones(batches.size_of_pair(*pair), dtype=torch.bool)
        return list(oracle.per_example(problem.model, evaluate, pair, mask=mask, shared_forward=self.case.random))

    def expected(self, size: int, clip_norm: Any, **options: Any) -> Expected:
        """The oracle's sum for the first examples of the row."""
        problem = self.problem(size)

        def ask(problem: Problem) -> ClippedGradients:
            return oracle.clip(problem.model, self._ask(problem), clip_norm, **options)

        found = oracle.clip(problem.model, self.examples(size), clip_norm, **options)
        return expected(found, None if self.case.random else lambda: known(problem, ask))

    def middle(self, size: int, groups: Any = "flat", mask: Tensor | None = None) -> Any:
        """The median norm of each group: half the examples are clipped."""
        problem = self.problem(size)
        found = oracle.clip(problem.model, self.examples(size), 1.0, groups=groups, mask=mask)
        return medians(found, problem, groups)

    def found(self, size: int, clip_norm: Any = 1.0, *, factors: Any = None, **options: Any) -> ClippedGradients:
        """The engine's answer; ``factors`` multiply the losses."""
        return fast(self.case, self.with_factors(size, factors), clip_norm, **options)

    def with_factors(self, size: int, factors: Any) -> Problem:
        """The problem with these factors of the losses."""
        problem = self.problem(size)
        return problem if factors is None else replace(problem, targets=(problem.targets[0], torch.as_tensor(factors)))

    def poisoned(self, index: int, value: float) -> Problem | None:
        """The first problem with all floating inputs of one example replaced; None where all inputs are ids."""
        problem = self.problem(T)
        if not any(leaf.is_floating_point() for leaf in batches.tensor_leaves(problem.inputs)):
            return None

        def poison(leaf: Tensor) -> Tensor:
            return leaf.index_fill(0, torch.tensor([index]), value) if leaf.is_floating_point() else leaf

        return replace(problem, inputs=pytree.tree_map_only(Tensor, poison, problem.inputs))
