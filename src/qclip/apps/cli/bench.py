"""``qclip bench``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qclip import _validate as check

Say = Callable[[str], object]


@dataclass(frozen=True)
class BenchTable:
    """The rows of a measurement, and the same as a table."""

    rows: Sequence[Any]
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    caption: str = ""
    failures: Sequence[str] = ()


@dataclass(frozen=True)
class BenchCommand:
    """Time training steps: plain, clipped by qclip, and by Opacus where it is installed, in one run.

    --throughput measures whole loops instead.
    """

    device: str = "cpu"
    """Device to run on: cpu, cuda or cuda:1."""
    dtype: str = "float32"
    """float32, tf32, bfloat16 or autocast."""
    case: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A case to run (repeat it for several); those sized for the device when left out."""
    mode: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A mode to run (repeat it for several); all that this machine can run when left out."""
    rounds: int | None = None
    """Rounds in which the modes take turns; the median counts. 15 when left out, 5 with --throughput."""
    throughput: bool = False
    """Measure the examples per second of whole training loops, plain and private."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self, console: Console) -> int:
        """Measure and print a table."""
        measure = self._throughput if self.throughput else self._compare
        show(console, measure, self.device, self.dtype, as_json=self.json)
        return 0

    def _rounds(self, default: int) -> int:
        return default if self.rounds is None else check.count("rounds", self.rounds)

    def _compare(self, say: Say) -> BenchTable:
        from qclip.apps.bench.comparison import compare

        rounds = self._rounds(15)
        result = compare(self.device, dtype=self.dtype, cases=self.case, modes=self.mode, rounds=rounds, say=say)
        cells = [
            (row.case, row.mode, f"{row.ms:.2f}", f"{row.memory_bytes / 2**20:.1f}",
             _ratio(row.ratio_time), _ratio(row.ratio_memory), f"{row.compile_seconds:.1f}")
            for row in result.rows
        ]  # fmt: skip
        caption = (
            "time and memory are relative to the faster compiled plain step (to the plain one where none was run); "
            "every step includes its update, and private steps include the noise"
        )
        header = ("case", "mode", "ms", "MiB", "time", "memory", "first s")
        return BenchTable(result.rows, header, cells, caption, result.failures)

    def _throughput(self, say: Say) -> BenchTable:
        from qclip.apps.bench.throughput import measure_throughput

        rounds = self._rounds(5)
        rows = measure_throughput(self.device, dtype=self.dtype, cases=self.case, rounds=rounds, say=say)
        cells = [
            (row.case, row.mode, str(row.batch_size), f"{row.examples_per_second:.1f}",
             _ratio(row.ratio), _ratio(row.padding))
            for row in rows
        ]  # fmt: skip
        return BenchTable(rows, ("case", "mode", "batch", "examples/s", "ratio", "padding"), cells)


def show(
    console: Console, measure: Callable[[Say], BenchTable], device: str, dtype: str, *, as_json: bool = False
) -> None:
    """Measure, and print a table with a section for each case, or JSON."""
    # With JSON, stdout holds nothing else.
    screen = Console(stderr=True) if as_json else console
    with screen.status("measuring") as status:
        output = measure(status.update)
    if as_json:
        print(json.dumps([asdict(row) for row in output.rows], indent=2))
    else:
        _print_table(console, output, device, dtype)
    for failure in output.failures:
        screen.print(f"no row for {escape(failure)}", highlight=False)


def _print_table(console: Console, output: BenchTable, device: str, dtype: str) -> None:
    from qclip.apps.bench.comparison import describe

    table = Table(title=describe(device, dtype))
    for column in output.header:
        table.add_column(column, justify="left" if column in ("case", "mode", "factor", "ended by") else "right")
    before = None
    for name, *cells in output.cells:
        if before not in (None, name):
            table.add_section()
        table.add_row("" if name == before else name, *cells)
        before = name
    console.print(table)
    if output.caption:
        console.print(output.caption)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
