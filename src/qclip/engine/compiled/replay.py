"""Replay: a function recorded as a CUDA graph, so that the whole step is one launch."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from qclip.engine.randomness import RandomState

GROWING: Final = "expandable_segments"
"""Torch's name for blocks of memory that can grow."""


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
        with _growing_memory(), torch.cuda.graph(graph):
            self._result = self._function(mine)
        self._graph = graph


def _environment() -> str:
    """How torch was told to deal with memory when it started."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


@contextmanager
def _growing_memory() -> Iterator[None]:
    """Memory for new tensors comes from blocks that can grow, where torch has such and is not told otherwise.

    A recording keeps its memory for good. In blocks of fixed sizes much of that would be gaps between tensors.
    """
    settle = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", _environment)()
    told = GROWING in _environment() or f"{GROWING}:True" in settings
    if told or settle is None or torch.cuda.get_allocator_backend() != "native":
        yield
        return
    others = [each for each in settings.split(",") if each and not each.startswith(GROWING)]
    settle(",".join([*others, f"{GROWING}:True"]))
    try:
        yield
    finally:
        settle(",".join([*others, f"{GROWING}:False"]))
