"""Proofs are made by kernels that give the same twice, as if on a GPU; attention's are insisted on where one fails."""

import threading

import pytest
import torch

from qclip._validate import Refusal
from qclip.engine.torch_settings import determinism_level, deterministically

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


def without_deterministic_kernel():
    return torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


@pytest.mark.parametrize("choice", LEVELS)
def test_kernels_are_repeatable_meanwhile(choice):
    torch.set_deterministic_debug_mode(choice)
    assert deterministically(GPU, level) == max(LEVELS[choice], 1)
    assert deterministically(GPU, determinism_level) == LEVELS[choice]
    assert deterministically(torch.device("cpu"), level) == LEVELS[choice]
    assert level() == LEVELS[choice]


def test_what_has_no_repeatable_kernel_is_computed_without_a_warning():
    assert deterministically(GPU, without_deterministic_kernel)[0] == 1


def test_a_refusal_stands_only_if_made_by_repeatable_kernels():
    """As of attention, whose kernels torch exchanges only where they are insisted on."""
    seen = []

    def compute():
        seen.append((level(), determinism_level()))
        if level() < 2:
            raise Refusal("examples mix")
        return "proven"

    assert deterministically(GPU, compute) == "proven"
    assert seen == [(1, 0), (2, 0)]
    assert level() == determinism_level() == 0


@pytest.mark.parametrize("again", [Refusal("another"), None])
def test_the_first_refusal_is_the_one_that_is_told(again):
    def compute():
        if level() < 2:
            raise Refusal("examples mix")
        without_deterministic_kernel()  # which raises now
        pytest.fail("torch was to raise")

    def refuse():
        raise Refusal("examples mix") if level() < 2 else again

    with pytest.raises(Refusal, match="examples mix"):
        deterministically(GPU, compute if again is None else refuse)
    assert level() == 0


def test_memory_that_runs_out_is_told_as_such():
    def compute():
        raise Refusal("examples mix") if level() < 2 else torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        deterministically(GPU, compute)


@pytest.mark.parametrize(("device", "choice"), [("cpu", "default"), ("cuda", "error")])
def test_a_refusal_by_repeatable_kernels_is_not_tried_again(device, choice):
    torch.set_deterministic_debug_mode(choice)
    calls = []

    def compute():
        calls.append(1)
        raise Refusal("examples mix")

    with pytest.raises(Refusal):
        deterministically(torch.device(device), compute)
    assert len(calls) == 1


def test_threads_prove_one_after_the_other():
    """Else one of them would put back what another had set."""
    inside, leave, levels = threading.Event(), threading.Event(), []

    def first():
        def stay():
            inside.set()
            assert leave.wait(30)
            levels.append(level())

        deterministically(GPU, stay)

    threads = [threading.Thread(target=first), threading.Thread(target=deterministically, args=(GPU, leave.is_set))]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    leave.set()
    for thread in threads:
        thread.join(30)
    assert levels == [1]
    assert level() == determinism_level() == 0
