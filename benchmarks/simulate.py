"""Time a million steps of 64 copies of QC-SGD in 10 dimensions: bare numpy, the numpy loop and the compiled loop.

The numpy rows are measured over fewer steps and extrapolated in proportion; the compiled rows run every step. All run
in one process, one after the other, so the ratios compare like with like, as far as the load of the machine allows.
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

SEEDS, DIM = 64, 10
Loop = Literal["numpy", "compiled"]


@dataclass(frozen=True)
class Options:
    """Time the simulator."""

    steps: int = 1_000_000
    """Steps of a full run; numpy rows are extrapolated to it."""
    bare_steps: int = 20_000
    """Steps measured of the bare numpy step."""
    numpy_steps: int = 2_000
    """Steps measured of the numpy loop."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Timing:
    """One measurement."""

    what: str
    loop: str
    measured_steps: int
    measured_seconds: float
    seconds: float  # for the full run
    over_bare: float


def main(options: Options) -> None:
    """Measure, then print."""
    start_load = _load()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NUMBA_CACHE_DIR"] = cache  # an empty cache, so that the compilation is seen
        compile_seconds = _timed(lambda: _run("Gaussian, constant p", steps=10, loop="compiled"))
        rows = list(_measure(options))
    facts = _facts() | {"load": [start_load, _load()], "compile_seconds": round(compile_seconds, 2)}
    facts |= {"seeds": SEEDS, "dim": DIM}
    if options.json:
        json.dump(facts | {"steps": options.steps, "rows": [asdict(row) for row in rows]}, sys.stdout, indent=2)
        print()
    else:
        _print(options, facts, rows)


def _measure(options: Options):  # noqa: ANN202
    _bare(100)
    bare = _timed(lambda: _bare(options.bare_steps)) / options.bare_steps * options.steps
    yield Timing("bare step", "numpy", options.bare_steps, bare * options.bare_steps / options.steps, bare, 1.0)
    for what in _settings():
        loops: tuple[tuple[Loop, int], ...] = (("numpy", options.numpy_steps), ("compiled", options.steps))
        for loop, steps in loops:
            _run(what, steps=10, loop=loop)  # caches of quadrature nodes, and the compiled code
            taken = _timed(partial(_run, what, steps=steps, loop=loop))
            full = taken / steps * options.steps
            yield Timing(what, loop, steps, taken, full, full / bare)


def _bare(steps: int) -> None:
    """Run clipped SGD at a fixed threshold in plain numpy: the cost of a step without a quantile."""
    rng = np.random.default_rng(0)
    x, gamma, tau = np.ones((SEEDS, DIM)), 0.01, 1.0
    for _ in range(steps // 100):
        draws = rng.standard_normal((100, SEEDS, DIM))
        for xi in draws:
            g = x + 0.3 * xi
            norms = np.sqrt((g**2).sum(1, keepdims=True))
            x = x - gamma * np.minimum(1, tau / norms) * g


def _settings() -> dict[str, dict]:
    from qclip.schedules import coupled
    from qclip.simulation.problems import Gaussian, HeavyTailedQuadratic, Pareto

    gaussian = HeavyTailedQuadratic(DIM, Gaussian(0.3))
    pareto = HeavyTailedQuadratic(DIM, Pareto(2.5, 0.5, one_sided=True))
    gamma, p = coupled(2, step_size=0.3, clipped_fraction=0.4)
    return {
        "Gaussian, constant p": {"problem": gaussian, "step_size": 0.01, "p": 0.8},
        "Gaussian, coupled p": {"problem": gaussian, "step_size": gamma, "p": p},
        "Pareto, constant p": {"problem": pareto, "step_size": 0.01, "p": 0.8},
    }


def _run(what: str, *, steps: int, loop: Loop) -> None:
    from qclip.simulation.simulate import simulate

    simulate(steps=steps, x0=np.ones(DIM), seeds=SEEDS, loop=loop, **_settings()[what])


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _facts() -> dict[str, str | int | None]:
    import numba

    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "numba_threads": numba.get_num_threads(),
    }


def _load() -> float | None:
    """Return the one-minute load average, where there is one."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _processor() -> str:
    """Return the name of the processor, from `platform` or from /proc/cpuinfo."""
    named = platform.processor()
    if named and named != platform.machine():
        return named
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _print(options: Options, facts: dict, rows: list[Timing]) -> None:
    console = Console()
    table = Table(title=f"{options.steps:,} steps of {SEEDS} seeds in {DIM} dimensions")
    for heading in ("run", "loop"):
        table.add_column(heading)
    for heading in ("measured steps", "seconds", "/ bare", "numpy / compiled"):
        table.add_column(heading, justify="right")
    numpy_seconds = {row.what: row.seconds for row in rows if row.loop == "numpy"}
    for row in rows:
        faster = f"{numpy_seconds[row.what] / row.seconds:.0f}" if row.loop == "compiled" else ""
        measured = f"{row.measured_steps:,}"
        table.add_row(row.what, row.loop, measured, f"{row.seconds:.1f}", f"{row.over_bare:.2f}", faster)
    console.print(table)
    console.print(f"First compiled run, empty cache: {facts['compile_seconds']} s, most of it compilation.")
    start, end = facts["load"]
    console.print(f"Load average {start} at the start, {end} at the end.")
    console.print(", ".join(f"{name} {facts[name]}" for name in ("processor", "cpus", "python", "numpy", "numba")))


if __name__ == "__main__":
    main(tyro.cli(Options))
