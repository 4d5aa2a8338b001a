"""The comparison of every case in every mode, in one process.

First each mode is built and warmed up, one after the other, and its memory is measured: the most that torch reserves on
the GPU during a step, beyond what it had reserved before the mode was built. So weights, gradients, activations and
CUDA graphs count, and the memory that other modes keep (weights and graphs; gradients are dropped) does not. Then the
modes take turns, so that a slow moment of the machine affects all of them; the time of each is its median over the
rounds.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qclip import _validate as check
from qclip.apps.bench import cases as all_cases
from qclip.apps.bench import measure
from qclip.apps.bench import modes as all_modes
from qclip.apps.bench.cases import BenchCase
from qclip.apps.bench.measure import Say, silent
from qclip.apps.bench.modes import BASELINES, Mode
from qclip.apps.bench.precision import Precision, precision_named
from qclip.apps.bench.workload import Step, workload

WARM_UP = 4
"""Steps before the measurement: proofs, the recording of CUDA graphs, allocator and thread pools."""


@dataclass(frozen=True)
class BenchRow:
    """A case in a mode."""

    case: str
    mode: str
    dtype: str
    ms: float
    """Median time of a step."""
    ms_low: float
    """The lower quartile."""
    ms_high: float
    """The upper quartile."""
    peak_bytes: int
    """Peak memory of a step beyond the memory in use before it; without the pools of CUDA graphs on a GPU."""
    reserved_bytes: int | None
    """On a GPU, the most that torch reserves during a step, beyond its reservation before the mode was built."""
    ratio_time: float | None
    """Ratio to the baseline: the faster of the compiled plain steps that were run, else the plain one, if any ran."""
    ratio_memory: float | None
    """Ratio to the same step: of reserved memory on a GPU, of the peak on a CPU."""
    parameters: int
    compile_seconds: float
    """Time of the first step: proofs, and compilation where there is one."""

    @property
    def memory_bytes(self) -> int:
        """The memory to compare: reserved on a GPU, the peak on a CPU."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes


@dataclass(frozen=True)
class BenchResult:
    """The rows of the comparison, and a line for each mode that could not run a case."""

    rows: tuple[BenchRow, ...]
    failures: tuple[str, ...]


@dataclass(frozen=True)
class _Ready:
    """A mode that is built and warmed up."""

    name: str
    step: Step
    peak_bytes: int
    reserved_bytes: int | None
    parameters: int
    compile_seconds: float

    @property
    def memory(self) -> int:
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes


def device_named(name: str) -> torch.device:
    """Return a CPU or GPU of this machine, or refuse it; the memory of other devices cannot be measured."""
    if not name.startswith(("cpu", "cuda")):
        raise check.refuse("device", name, "cpu or cuda", "the memory of other devices cannot be measured")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise check.Refusal(f"device = {name!r} was given, but torch finds no GPU here; use cpu")
    return torch.device(name)


def describe(device: str, dtype: str = "float32") -> str:
    """Describe the machine and the versions, for the title of a table."""
    gpu = device.startswith("cuda")
    where = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    versions = [
        f"{package} {importlib.metadata.version(package)}"
        for package in ("torch", "triton", "opacus")
        if importlib.util.find_spec(package)
    ]
    return ", ".join([where, *versions, dtype])


def compare(
    device: str = "cpu",
    *,
    dtype: str = "float32",
    cases: Sequence[str] = (),
    modes: Sequence[str] = (),
    rounds: int = 15,
    say: Say = silent,
) -> BenchResult:
    """Measure every case in every mode.

    Args:
        device: "cpu", "cuda" or "cuda:1".
        dtype: A name in `PRECISIONS`.
        cases: Names in `CASES`; those sized for the device when left out.
        modes: Names in `MODES`; those that suit the case and the machine when left out.
        rounds: Rounds in which the modes take turns.
        say: Called with the progress.
    """
    place, precision = device_named(device), precision_named(dtype)
    check.count("rounds", rounds)
    plan = [(case, all_modes.chosen(modes, case, place)) for case in all_cases.chosen(cases, place)]
    rows: list[BenchRow] = []
    failures: list[str] = []
    with measure.quietly(), precision.settings():
        for case, chosen in plan:
            rows += _compare_modes(case, chosen, precision, place, rounds, say, failures)
    return BenchResult(tuple(rows), tuple(failures))


def _compare_modes(
    case: BenchCase,
    modes: list[Mode],
    precision: Precision,
    device: torch.device,
    rounds: int,
    say: Say,
    failures: list[str],
) -> list[BenchRow]:
    """Return the rows of a case; the error of a mode without a row is added to the failures."""
    measure.forget(device)
    ready = []
    for mode in modes:
        say(f"preparing {case.name}, {mode.name}")
        try:
            ready.append(_prepare(mode, case, precision, device))
        except Exception as error:  # a peer or a compiler may raise anything; the other modes still run
            failures.append(f"{case.name}, {mode.name}: {type(error).__name__}: {_first_line(error)}")
    say(f"timing {case.name}")
    times = measure.take_turns({each.name: each.step for each in ready}, device, rounds)
    return _rows(case, ready, times, precision)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _prepare(mode: Mode, case: BenchCase, precision: Precision, device: torch.device) -> _Ready:
    before = measure.reserved_now(device)
    work = workload(case, precision, device)
    step = mode.make(work)
    compile_seconds = measure.seconds(step, device)
    for _ in range(WARM_UP - 1):
        step()
    work.drop_gradients()  # the gradients of the step before do not count
    peak = measure.peak_bytes(step, device)
    work.drop_gradients()
    reserved = measure.most_reserved(step, device) - before if device.type == "cuda" else None
    work.drop_gradients()
    return _Ready(mode.name, step, peak, reserved, work.parameters, compile_seconds)


def _rows(case: BenchCase, ready: list[_Ready], times: dict[str, list[float]], precision: Precision) -> list[BenchRow]:
    quartiles = {name: np.percentile(each, (25, 50, 75)).tolist() for name, each in times.items()}
    base = _baseline(ready, {name: median for name, (_, median, _) in quartiles.items()})
    rows = []
    for each in ready:
        low, median, high = quartiles[each.name]
        rows.append(
            BenchRow(
                case=case.name,
                mode=each.name,
                dtype=precision.name,
                ms=median,
                ms_low=low,
                ms_high=high,
                peak_bytes=each.peak_bytes,
                reserved_bytes=each.reserved_bytes,
                ratio_time=median / quartiles[base.name][1] if base else None,
                ratio_memory=each.memory / max(base.memory, 1) if base else None,
                parameters=each.parameters,
                compile_seconds=each.compile_seconds,
            )
        )
    return rows


def _baseline(ready: list[_Ready], medians: dict[str, float]) -> _Ready | None:
    """Return the faster of the compiled plain steps, else the plain one."""
    baselines = [each for each in ready if each.name in BASELINES]
    compiled = [each for each in baselines if each.name != "plain"]
    return min(compiled or baselines, key=lambda each: medians[each.name], default=None)
