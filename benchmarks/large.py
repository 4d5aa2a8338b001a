"""The largest batch of a large model that fits a GPU, with activation checkpointing, and its speed.

python benchmarks/large.py [--device cuda --budget 300]
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import tyro
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qclip import _validate as check
from qclip.apps.bench import measure, models
from qclip.apps.bench.cases import BenchCase
from qclip.apps.bench.comparison import WARM_UP, device_named
from qclip.apps.bench.measure import Say, silent
from qclip.apps.bench.modes import MODES
from qclip.apps.bench.precision import Precision, precision_named
from qclip.apps.bench.workload import workload
from qclip.apps.cli.bench import BenchTable, show

LARGE_MODES = ("compiled", "qclip compiled", "qclip per-layer compiled")


class Recomputed(nn.Module):
    """A module whose activations are recomputed in the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Tensor:
        """Return the output of the module."""
        return checkpoint(self.module, *inputs, use_reentrant=False)


def recomputed_gpt2(positions: int, layers: int, width: int, heads: int) -> nn.Module:
    """Return a model of the shape of GPT-2 with every block recomputed."""
    model = models.gpt2(positions, layers=layers, width=width, heads=heads)
    blocks: Any = model.blocks
    for k, block in enumerate(blocks):
        blocks[k] = Recomputed(block)
    return model


def _gpt2(name: str, layers: int, width: int, heads: int, positions: int = 1024) -> BenchCase:
    model = partial(recomputed_gpt2, positions, layers, width, heads)
    return BenchCase(name, model, shape=(positions,), classes=50257, batch=1, tokens=True, device="cuda")


LARGE_CASES = {case.name: case for case in (_gpt2("gpt2-medium", 24, 1024, 16), _gpt2("gpt2-large", 36, 1280, 20))}


@dataclass(frozen=True)
class LargeRow:
    """The largest batch of a mode that fits."""

    case: str
    mode: str
    dtype: str
    batch: int
    """0 where no batch fits."""
    examples_per_second: float
    reserved_bytes: int
    """The most memory that torch reserved during a step."""
    limit: str
    """The limit that ended the search: "memory" or "time"."""
    parameters: int


@dataclass(frozen=True)
class Attempt:
    """A batch that fits."""

    batch: int
    seconds: float
    """Time of a step."""
    reserved_bytes: int


@dataclass(frozen=True)
class Search:
    """The largest batch that fits (None without one), and the limit that ended the search."""

    best: Attempt | None
    limit: str


def largest_batch(
    attempt: Callable[[int], Attempt | None], capacity: int, *, start: int = 1, deadline: float = float("inf")
) -> Search:
    """Search the largest batch: double it until it does not fit, then try the middle; halve a first batch that fails.

    Memory grows no faster than the batch, so doublings that are sure to fit are skipped.

    Args:
        attempt: Tries a batch; returns None where it does not fit.
        capacity: Memory of the device, in bytes.
        start: The first batch.
        deadline: Time (of ``time.monotonic``) after which no attempt begins.
    """
    best, too_large, batch = None, None, start
    while time.monotonic() < deadline:
        fitting = attempt(batch)
        if fitting is None:
            too_large = batch
        else:
            best = fitting
        batch = _next(best, too_large, capacity)
        if batch == 0:
            return Search(best, "memory")
    return Search(best, "time")


def _next(best: Attempt | None, too_large: int | None, capacity: int) -> int:
    """Return the next batch to try; 0 once the smallest failure is less than twice the largest success."""
    if best is None:
        return 0 if too_large is None else too_large // 2
    if too_large is None:
        batch = 2 * best.batch
        while best.reserved_bytes and 2 * batch * best.reserved_bytes <= best.batch * capacity:
            batch *= 2
        return batch
    return (best.batch + too_large) // 2 if too_large >= max(2 * best.batch, best.batch + 2) else 0


def measure_large(
    device: str = "cuda",
    *,
    dtype: str = "bfloat16",
    cases: Sequence[str] = (),
    modes: Sequence[str] = (),
    budget_seconds: float = 300.0,
    start: int = 8,
    say: Say = silent,
) -> list[LargeRow]:
    """Find the largest batch and its speed, for each case and mode.

    Args:
        device: "cuda" or "cuda:1".
        dtype: A name in `PRECISIONS`.
        cases: Names in `LARGE_CASES`; the first when left out.
        modes: Names in `MODES`; `LARGE_MODES` when left out.
        budget_seconds: Time of all searches together, shared equally.
        start: The first batch to try.
        say: Called with the progress.
    """
    place, precision = device_named(device), precision_named(dtype)
    if place.type != "cuda":
        raise check.refuse("device", device, "cuda", "a CPU has no memory of its own; run it on a GPU")
    chosen = [LARGE_CASES[check.choice("case", name, LARGE_CASES)] for name in cases or [*LARGE_CASES][:1]]
    names = [check.choice("mode", name, MODES) for name in modes or LARGE_MODES]
    share = check.positive("budget_seconds", budget_seconds) / (len(chosen) * len(names))
    capacity = torch.cuda.get_device_properties(place).total_memory
    rows = []
    with measure.quietly(), precision.settings():
        for case in chosen:
            with torch.device("meta"):
                parameters = sum(p.numel() for p in case.model().parameters())
            for name in names:

                def attempt(batch: int, case: BenchCase = case, name: str = name) -> Attempt | None:
                    say(f"trying {case.name}, {name}, batch {batch}")
                    return try_batch(replace(case, batch=batch), name, precision, place)

                deadline = time.monotonic() + share
                search = largest_batch(attempt, capacity, start=check.count("start", start), deadline=deadline)
                rows.append(_row(case, name, dtype, search, parameters))
    return rows


def _row(case: BenchCase, mode: str, dtype: str, search: Search, parameters: int) -> LargeRow:
    best = search.best or Attempt(0, float("inf"), 0)
    speed = best.batch / best.seconds
    return LargeRow(case.name, mode, dtype, best.batch, speed, best.reserved_bytes, search.limit, parameters)


def try_batch(case: BenchCase, mode: str, precision: Precision, device: torch.device) -> Attempt | None:
    """Build the mode and take some steps; None where it runs out of memory."""
    measure.forget(device)
    try:
        step = MODES[mode].make(workload(case, precision, device))
        for _ in range(WARM_UP):
            step()
        reserved = measure.most_reserved(step, device)
        return Attempt(case.batch, measure.seconds(step, device, measure.STEPS_PER_MEASUREMENT[device.type]), reserved)
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
        return None


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


@dataclass(frozen=True)
class Options:
    """Find the largest batch of a large model that fits a GPU, and its speed."""

    device: str = "cuda"
    """Device to run on: cuda or cuda:1."""
    dtype: str = "bfloat16"
    """float32, tf32, bfloat16 or autocast."""
    case: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A case to run (repeat it for several); the first when left out."""
    mode: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A mode to run (repeat it for several)."""
    budget: float = 300.0
    """Approximate time in seconds."""
    json: bool = False
    """Print JSON instead of a table."""

    def measure(self, say: Say) -> BenchTable:
        """Measure, and return the table."""
        rows = measure_large(
            self.device, dtype=self.dtype, cases=self.case, modes=self.mode, budget_seconds=self.budget, say=say
        )
        cells = [
            (row.case, row.mode, str(row.batch), f"{row.examples_per_second:.1f}",
             f"{row.reserved_bytes / 2**30:.1f}", row.limit)
            for row in rows
        ]  # fmt: skip
        header = ("case", "mode", "largest batch", "examples/s", "reserved GiB", "ended by")
        return BenchTable(rows, header, cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = tyro.cli(Options, args=arguments)
    show(Console(), options.measure, options.device, options.dtype, as_json=options.json)


if __name__ == "__main__":
    main()
