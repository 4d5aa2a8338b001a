"""Proofs are made by kernels that give the same twice, as if on a GPU; attention's are insisted on where one fails."""

import threading

import pytest
import torch

from qclip._validate import Refusal
from qclip.engine import repeatable
from qclip.engine.repeatable import repeatably

GPU = torch.device("cuda")
LEVELS = {"default": 0, "warn": 1, "error": 2}


@pytest.fixture(autouse=True)
def _as_before():
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    assert torch.utils.deterministic.fill_uninitialized_memory == fills
    torch.set_deterministic_debug_mode("default")


def level():
    return torch.get_deterministic_debug_mode()


def without_repeatable_kernel():
    return torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


@pytest.mark.parametrize("choice", LEVELS)
def test_kernels_are_repeatable_meanwhile(choice):
    torch.set_deterministic_debug_mode(choice)
    assert repeatably(GPU, level) == max(LEVELS[choice], 1)
    assert repeatably(GPU, repeatable.chosen) == LEVELS[choice]
    assert repeatably(torch.device("cpu"), level) == LEVELS[choice]
    assert level() == LEVELS[choice]


def test_what_has_no_repeatable_kernel_is_computed_without_a_warning():
    assert repeatably(GPU, without_repeatable_kernel)[0] == 1


def test_a_refusal_stands_only_if_made_by_repeatable_kernels():
    """As of attention, whose kernels torch exchanges only where they are insisted on."""
    seen = []

    def compute():
        seen.append((level(), repeatable.chosen()))
        if level() < 2:
            raise Refusal("examples mix")
        return "proven"

    assert repeatably(GPU, compute) == "proven"
    assert seen == [(1, 0), (2, 0)]
    assert level() == repeatable.chosen() == 0


@pytest.mark.parametrize("again", [Refusal("another"), None])
def test_the_first_refusal_is_the_one_that_is_told(again):
    def compute():
        if level() < 2:
            raise Refusal("examples mix")
        without_repeatable_kernel()  # which raises now
        pytest.fail("torch was to raise")

    def refuse():
        raise Refusal("examples mix") if level() < 2 else again

    with pytest.raises(Refusal, match="examples mix"):
        repeatably(GPU, compute if again is None else refuse)
    assert level() == 0


def test_memory_that_runs_out_is_told_as_such():
    def compute():
        raise Refusal("examples mix") if level() < 2 else torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        repeatably(GPU, compute)


@pytest.mark.parametrize(("device", "choice"), [("cpu", "default"), ("cuda", "error")])
def test_a_refusal_by_repeatable_kernels_is_not_tried_again(device, choice):
    torch.set_deterministic_debug_mode(choice)
    calls = []

    def compute():
        calls.append(1)
        raise Refusal("examples mix")

    with pytest.raises(Refusal):
        repeatably(torch.device(device), compute)
    assert len(calls) == 1


def test_threads_prove_one_after_the_other():
    """Else one of them would put back what another had set."""
    inside, leave, levels = threading.Event(), threading.Event(), []

    def first():
        def stay():
            inside.set()
            assert leave.wait(30)
            levels.append(level())

        repeatably(GPU, stay)

    threads = [threading.Thread(target=first), threading.Thread(target=repeatably, args=(GPU, leave.is_set))]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    leave.set()
    for thread in threads:
        thread.join(30)
    assert levels == [1]
    assert level() == repeatable.chosen() == 0
