"""``qclip bench``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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

    --growth, --throughput and --large measure other things than the time of one step.
    """

    device: str = "cpu"
    """Device to run on: cpu, cuda or cuda:1."""
    dtype: str | None = None
    """float32, tf32, bfloat16 or autocast; float32 when left out (bfloat16 with --large)."""
    case: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A case to run (repeat it for several); those sized for the device when left out."""
    mode: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A mode to run (repeat it for several); all that this machine can run when left out."""
    rounds: int | None = None
    """Rounds in which the modes take turns; the median counts. 15 when left out, 5 with --growth and --throughput."""
    growth: bool = False
    """Measure how the time of a step grows with batch, depth, width and length."""
    throughput: bool = False
    """Measure the examples per second of whole training loops, plain and private."""
    large: bool = False
    """Find the largest batch of a large model that fits a GPU, and its speed."""
    budget: float = 300.0
    """Approximate time of --large, in seconds."""
    out: Path | None = None
    """File for the figure of --growth."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self, console: Console) -> int:
        """Measure and print a table."""
        measure = self._task()
        # With --json, stdout holds nothing but JSON.
        screen = Console(stderr=True) if self.json else console
        with screen.status("measuring") as status:
            output = measure(status.update)
        if self.json:
            print(json.dumps([asdict(row) for row in output.rows], indent=2))
        else:
            self._print_table(console, output)
        for failure in output.failures:
            screen.print(f"no row for {escape(failure)}", highlight=False)
        return 0

    def _task(self) -> Callable[[Say], BenchTable]:
        tasks = {"growth": self._growth, "throughput": self._throughput, "large": self._large}
        chosen = [name for name in tasks if vars(self)[name]]
        if len(chosen) > 1:
            options = " and ".join(f"--{name}" for name in chosen)
            raise check.Refusal(f"{options} exclude each other; run them one by one")
        if self.out is not None and chosen != ["growth"]:
            raise check.refuse("--out", str(self.out), "left out", "only --growth draws a figure")
        return tasks[chosen[0]] if chosen else self._compare

    @property
    def _dtype(self) -> str:
        return self.dtype or ("bfloat16" if self.large else "float32")

    def _rounds(self, default: int) -> int:
        return default if self.rounds is None else check.count("rounds", self.rounds)

    def _compare(self, say: Say) -> BenchTable:
        from qclip.apps.bench.comparison import compare

        rounds = self._rounds(15)
        result = compare(self.device, dtype=self._dtype, cases=self.case, modes=self.mode, rounds=rounds, say=say)
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

    def _growth(self, say: Say) -> BenchTable:
        from qclip.apps.bench.growth import figure, measure_growth

        rounds = self._rounds(5)
        growth = measure_growth(self.device, dtype=self._dtype, modes=self.mode, rounds=rounds, say=say)
        if self.out is not None:
            from qclip.apps.report.style import save

            save(figure(growth), self.out)
        cells = []
        for (factor, mode), exponent in growth.exponents.items():
            values, times = growth.line(factor, mode)
            shown = " ".join(map(str, values)), " ".join(f"{ms:.1f}" for ms in times)
            cells.append((factor, mode, *shown, f"{exponent:.2f}"))
        return BenchTable(growth.rows, ("factor", "mode", "values", "ms", "exponent"), cells)

    def _throughput(self, say: Say) -> BenchTable:
        from qclip.apps.bench.throughput import measure_throughput

        rounds = self._rounds(5)
        rows = measure_throughput(self.device, dtype=self._dtype, cases=self.case, rounds=rounds, say=say)
        cells = [
            (row.case, row.mode, str(row.batch_size), f"{row.examples_per_second:.1f}",
             _ratio(row.ratio), _ratio(row.padding))
            for row in rows
        ]  # fmt: skip
        return BenchTable(rows, ("case", "mode", "batch", "examples/s", "ratio", "padding"), cells)

    def _large(self, say: Say) -> BenchTable:
        from qclip.apps.bench.large import measure_large

        options: dict[str, Any] = {"cases": self.case, "modes": self.mode, "budget_seconds": self.budget, "say": say}
        rows = measure_large(self.device, dtype=self._dtype, **options)
        cells = [
            (row.case, row.mode, str(row.batch), f"{row.examples_per_second:.1f}",
             f"{row.reserved_bytes / 2**30:.1f}", row.limit)
            for row in rows
        ]  # fmt: skip
        header = ("case", "mode", "largest batch", "examples/s", "reserved GiB", "ended by")
        return BenchTable(rows, header, cells)

    def _print_table(self, console: Console, output: BenchTable) -> None:
        """Print cells in columns, with a section for each case or factor."""
        from qclip.apps.bench.comparison import describe

        table = Table(title=describe(self.device, self._dtype))
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
