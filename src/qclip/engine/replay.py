"""Replay: a function recorded as a CUDA graph, so that the whole step is one launch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qclip.engine.randomness import RandomState


class Replay:
    """A function of a list of tensors, recorded at its first call and replayed from then on.

    The first ``fixed`` tensors are read where they lie; if one has moved, the function is recorded anew. The others are
    copied to where the recording reads them. The result is overwritten by the next call.
    """

    def __init__(self, function: Callable[[Sequence[Tensor]], Any], fixed: int) -> None:
        self._function = function
        self._fixed = fixed
        self._where: tuple[int, ...] | None = None
        self._copied: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """The result, in memory that the next call reuses."""
        where = tuple(x.data_ptr() for x in inputs[: self._fixed])
        if self._graph is None or where != self._where:
            self._record(inputs)
            self._where = where
        for mine, given in zip(self._copied, inputs[self._fixed :], strict=True):
            mine.copy_(given, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        return self._result

    def _record(self, inputs: Sequence[Tensor]) -> None:
        self._graph = self._result = None
        self._copied = [x.detach().clone() for x in inputs[self._fixed :]]
        mine = [*inputs[: self._fixed], *self._copied]
        with RandomState.now(mine[0].device).replayed():
            self._function(mine)  # whatever is set up on the way must not be recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._result = self._function(mine)
        self._graph = graph
