"""Machine code of a traced graph, by torch's compiler."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qclip.engine.compiled.rewrites import compare_uniform


def machine_code(graph: GraphModule, inputs: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    """The graph as a function of as many tensors, of just these shapes; whoever calls it takes care of that.

    Not by `torch.compile`, which would first make a graph of the graph's own Python code, which takes minutes for tens
    of thousands of operations. What was compiled before is found on the disk.
    Random numbers are others than the graph would draw by itself.
    """
    from torch._inductor.compile_fx import compile_fx

    compare_uniform(graph.graph)
    graph.recompile()
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):  # else nothing is looked for on the disk
        found: Any = compile_fx(graph, list(inputs), config_patches=options, ignore_shape_env=True)
    return found
