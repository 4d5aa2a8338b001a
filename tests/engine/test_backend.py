"""Machine code gives what its graph gives and is compiled once; memory for recordings comes from blocks that can grow.

A recording needs a GPU; the settings of torch's allocator do not.
"""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from qclip.engine.compiled import backend
from qclip.engine.compiled.backend import _growing_memory, compile_graph

NAMES = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
ON, OFF = "expandable_segments:True", "expandable_segments:False"


class Allocator:
    """Stands for torch's: its settings, and what it was told."""

    def __init__(self):
        self.settings, self.told, self.backend = "", [], "native"

    def settle(self, settings):
        self.told.append(settings)
        self.settings = settings


@pytest.fixture
def allocator(monkeypatch):
    found = Allocator()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.settle, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: found.settings, raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: found.backend)
    return found


def test_blocks_grow_while_a_recording_is_made(allocator):
    with _growing_memory():
        assert allocator.settings == ON
    assert allocator.settings == OFF
    assert allocator.told == [ON, OFF]


def test_they_stop_growing_when_it_fails(allocator):
    with pytest.raises(torch.OutOfMemoryError), _growing_memory():
        raise torch.OutOfMemoryError
    assert allocator.told == [ON, OFF]


@pytest.mark.parametrize(
    "others",
    [
        "max_split_size_mb:64",
        "max_split_size_mb:64,garbage_collection_threshold:0.6",
        "roundup_power2_divisions:[256:1,>:4]",
    ],
)
def test_other_settings_stay(others, allocator):
    allocator.settings = others
    with _growing_memory():
        assert allocator.settings == f"{others},{ON}"
    assert allocator.settings == f"{others},{OFF}"


def test_a_second_recording_is_told_the_same(allocator):
    """What the first left behind does not pile up."""
    allocator.settings = "max_split_size_mb:64"
    for _ in range(2):
        with _growing_memory():
            pass
    assert allocator.told == 2 * [f"max_split_size_mb:64,{ON}", f"max_split_size_mb:64,{OFF}"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [ON, OFF, f"max_split_size_mb:64,{OFF}"])
def test_what_the_environment_says_holds(settings, name, allocator, monkeypatch):
    monkeypatch.setenv(name, settings)
    with _growing_memory():
        pass
    assert allocator.told == []


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_may_say_other_things(name, allocator, monkeypatch):
    """They are settings like any other; a torch that does not say which it has is told them again."""
    monkeypatch.setenv(name, "max_split_size_mb:64")
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    with _growing_memory():
        pass
    assert allocator.told == [f"max_split_size_mb:64,{ON}", f"max_split_size_mb:64,{OFF}"]


def test_other_allocators_are_left_alone(allocator):
    allocator.backend = "cudaMallocAsync"
    with _growing_memory():
        pass
    assert allocator.told == []


def test_a_torch_that_cannot_be_told_is_left_alone(allocator, monkeypatch):
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    with _growing_memory():
        pass
    assert allocator.told == []


def test_blocks_that_grew_before_go_on_growing(allocator):
    """As where a program has told torch so itself."""
    allocator.settings = ON
    with _growing_memory():
        assert allocator.settings == ON
    assert allocator.settings == ON


def test_a_recording_is_made_in_such_memory(allocator, monkeypatch):
    """And what is set up before it is not."""
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    run = backend.Replay(lambda inputs: seen.append(allocator.settings) or inputs[1] + 1, fixed=1)
    fixed = torch.zeros(2)
    assert run([fixed, torch.ones(2)]).tolist() == [2, 2]
    run([fixed, torch.ones(2)])
    assert seen == ["", ON]  # set up, recorded; then only replayed
    run([torch.zeros(2), torch.ones(2)])  # moved
    assert seen == ["", ON, OFF, ON]


class FakeGraph:
    """Stands for a CUDA graph."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def replay(self):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # the compiler's, of its own parts
def test_it_gives_what_the_graph_gives_and_is_found_on_the_disk():
    def step(x, y):
        return x.tanh() @ y, x.sum(1)

    inputs = torch.randn(4, 6), torch.randn(6, 3)
    expected = step(*inputs)
    counters.clear()
    for _ in range(2):
        compiled = compile_graph(make_fx(step)(*inputs), inputs, {})
        for found, wanted in zip(compiled(*inputs), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    assert counters["inductor"]["fxgraph_cache_hit"] >= 1
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0
