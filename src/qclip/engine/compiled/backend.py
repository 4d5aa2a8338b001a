"""The backend of a compiled step: torch's compiler makes machine code of its graph, and a CUDA graph replays that."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qclip.engine.compiled.rewrites import compare_uniform
from qclip.engine.randomness import RandomState

GROWING: Final = "expandable_segments"
"""Torch's name for blocks of memory that can grow."""


def compile_graph(graph: GraphModule, inputs: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile a traced graph, or load it from torch's cache on disk.

    This does not use `torch.compile`, which would first trace the Python code of the graph: that takes minutes for
    tens of thousands of operations.

    Args:
        graph: The graph; rewritten in place. Compiled, it draws other random numbers than when it is interpreted.
        inputs: Its inputs, or tensors like them.
        options: Options of torch's compiler.

    Returns:
        A function of as many tensors. The caller ensures that they have the shapes of ``inputs``.
    """
    from torch._inductor.compile_fx import compile_fx

    compare_uniform(graph.graph)
    graph.recompile()
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):  # otherwise the cache is not used
        compiled: Any = compile_fx(graph, list(inputs), config_patches=options, ignore_shape_env=True)
    return compiled


class Replay:
    """A function of a list of tensors that is recorded as a CUDA graph: the whole step becomes one launch.

    The function is recorded at its first call, and again whenever a fixed tensor has moved.

    Args:
        function: The function to record.
        fixed: How many of the first tensors are read where they lie. The others are copied to where the recording
            reads them.
    """

    def __init__(self, function: Callable[[Sequence[Tensor]], Any], fixed: int) -> None:
        self._function = function
        self._fixed = fixed
        self._addresses: tuple[int, ...] | None = None
        self._copied: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """Return the result, in memory that the next call overwrites."""
        addresses = tuple(x.data_ptr() for x in inputs[: self._fixed])
        if self._graph is None or addresses != self._addresses:
            self._record(inputs)
            self._addresses = addresses
        for copy, x in zip(self._copied, inputs[self._fixed :], strict=True):
            copy.copy_(x, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        return self._result

    def _record(self, inputs: Sequence[Tensor]) -> None:
        self._graph = self._result = None
        self._copied = [x.detach().clone() for x in inputs[self._fixed :]]
        recorded = [*inputs[: self._fixed], *self._copied]
        with RandomState.now(recorded[0].device).replayed():
            self._function(recorded)  # anything set up at a first call must not be recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _growing_memory(), torch.cuda.graph(graph):
            self._result = self._function(recorded)
        self._graph = graph


def _environment() -> str:
    """Return the allocator settings with which torch was started."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


@contextmanager
def _growing_memory() -> Iterator[None]:
    """Take memory for new tensors from blocks that can grow, where torch has them and the user did not configure them.

    A recording keeps its memory for good. In blocks of fixed sizes much of it would be gaps between tensors.
    """
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", _environment)()
    is_configured = GROWING in _environment() or f"{GROWING}:True" in settings
    if is_configured or configure is None or torch.cuda.get_allocator_backend() != "native":
        yield
        return
    others = [setting for setting in settings.split(",") if setting and not setting.startswith(GROWING)]
    configure(",".join([*others, f"{GROWING}:True"]))
    try:
        yield
    finally:
        configure(",".join([*others, f"{GROWING}:False"]))
