"""Machine code of a graph: what the graph gives, and compiled once."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from qclip.engine.compiled.machine_code import machine_code


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # the compiler's, of its own parts
def test_it_gives_what_the_graph_gives_and_is_found_on_the_disk():
    def step(x, y):
        return x.tanh() @ y, x.sum(1)

    inputs = torch.randn(4, 6), torch.randn(6, 3)
    expected = step(*inputs)
    counters.clear()
    for _ in range(2):
        compiled = machine_code(make_fx(step)(*inputs), inputs, {})
        for found, wanted in zip(compiled(*inputs), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    assert counters["inductor"]["fxgraph_cache_hit"] >= 1
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0
