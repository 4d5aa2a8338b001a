"""Measures of a step: its time, and its memory."""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from qclip.apps.bench.workload import Step

Say = Callable[[str], object]
"""Is told what is being measured."""
STEPS_PER_MEASUREMENT = {"cpu": 1, "cuda": 5}
"""On a GPU several in a row: one is prepared while the one before it runs."""


def silent(_: str) -> None:
    """Says nothing."""


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings (Opacus's about its own hooks, the compiler's about precision), but for one that is an error.

    A step that is to be compiled and is not must not pass for one that is.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="not compiled")
        yield


def take_turns(steps: Mapping[str, Step], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """The milliseconds of each step in each round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(1e3 * seconds(step, device, STEPS_PER_MEASUREMENT[device.type]))
    return times


def seconds(step: Step, device: torch.device, repeats: int = 1) -> float:
    """The time of a step, the mean of so many in a row."""
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    wait(device)
    return (time.perf_counter() - start) / repeats


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Let go of compiled code and of memory that nothing uses."""
    torch.compiler.reset()
    release_unused(device)


def release_unused(device: torch.device) -> None:
    """Give back what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def reserved_now(device: torch.device) -> int:
    """What torch holds of a GPU's memory, CUDA graphs included, after giving back what is free; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    release_unused(device)
    return torch.cuda.memory_reserved(device)


def most_reserved(step: Step, device: torch.device) -> int:
    """The most that torch holds of a GPU's memory during a step; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    release_unused(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return torch.cuda.max_memory_reserved(device)


def peak_bytes(step: Step, device: torch.device) -> int:
    """The most memory a step has in use beyond what was there before it.

    On a GPU what lies in the memory of CUDA graphs is not seen: `most_reserved` sees it.
    """
    release_unused(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    used = peak = 0
    results = getattr(profile.profiler, "kineto_results", None)
    events = [] if results is None else [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    return peak
