"""The time and the memory of a step."""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from qclip.apps.bench.workload import Step

Say = Callable[[str], object]
"""A function that shows the progress."""
STEPS_PER_MEASUREMENT = {"cpu": 1, "cuda": 5}
"""On a GPU several in a row: the CPU launches one while the GPU runs the one before."""


def silent(_: str) -> None:
    """Show nothing."""


@contextmanager
def quietly() -> Iterator[None]:
    """Silence warnings (Opacus's about its own hooks, the compiler's about precision), except one.

    The warning that a step was not compiled is an error: an eager step must not be reported as a compiled one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="not compiled")
        yield


def take_turns(steps: Mapping[str, Step], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each step in each round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(1e3 * seconds(step, device, STEPS_PER_MEASUREMENT[device.type]))
    return times


def seconds(step: Step, device: torch.device, repeats: int = 1) -> float:
    """Return the time of a step, as the mean over ``repeats`` in a row."""
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    wait(device)
    return (time.perf_counter() - start) / repeats


def wait(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Drop compiled code and release unused memory."""
    torch.compiler.reset()
    release_unused(device)


def release_unused(device: torch.device) -> None:
    """Release unused memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def reserved_now(device: torch.device) -> int:
    """Return the GPU memory that torch reserves, CUDA graphs included, after releasing unused memory; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    release_unused(device)
    return torch.cuda.memory_reserved(device)


def most_reserved(step: Step, device: torch.device) -> int:
    """Return the most GPU memory that torch reserves during a step; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    release_unused(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    wait(device)
    return torch.cuda.max_memory_reserved(device)


def peak_bytes(step: Step, device: torch.device) -> int:
    """Return the peak memory of a step beyond the memory in use before it.

    On a GPU the memory pools of CUDA graphs do not count; they do in `most_reserved`.
    """
    release_unused(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    used = peak = 0
    results = getattr(profile.profiler, "kineto_results", None)
    events = [] if results is None else [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    return peak
