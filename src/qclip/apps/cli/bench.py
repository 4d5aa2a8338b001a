"""``qclip bench``."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qclip import _validate as check

if TYPE_CHECKING:
    from qclip.apps.bench import BenchResult, Growth, LargeRow, ThroughputRow

Say = Callable[[str], object]


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
        measure, show = self._task()
        # With --json, stdout holds nothing but JSON.
        with (Console(stderr=True) if self.json else console).status("measuring") as status:
            result = measure(status.update)
        show(console, result)
        return 0

    def _task(self) -> tuple[Callable[[Say], Any], Callable[[Console, Any], None]]:
        """Return the functions that measure and that show the result."""
        tasks = {
            "growth": (self._growth, self._show_growth),
            "throughput": (self._throughput, self._show_throughput),
            "large": (self._large, self._show_large),
        }
        chosen = [name for name in tasks if vars(self)[name]]
        if len(chosen) > 1:
            options = " and ".join(f"--{name}" for name in chosen)
            raise check.Refusal(f"{options} exclude each other; run them one by one")
        if self.out is not None and chosen != ["growth"]:
            raise check.refuse("--out", str(self.out), "left out", "only --growth draws a figure")
        return tasks[chosen[0]] if chosen else (self._compare, self._show_comparison)

    @property
    def _dtype(self) -> str:
        return self.dtype or "float32"

    def _rounds(self, default: int) -> int:
        return default if self.rounds is None else check.count("rounds", self.rounds)

    def _compare(self, say: Say) -> "BenchResult":
        from qclip.apps import bench

        rounds = self._rounds(15)
        return bench.compare(self.device, dtype=self._dtype, cases=self.case, modes=self.mode, rounds=rounds, say=say)

    def _show_comparison(self, console: Console, found: "BenchResult") -> None:
        if self.json:
            _print_json(found.rows)
            console = Console(stderr=True)
        else:
            columns = ("case", "mode", "ms", "MiB", "time", "memory", "first s")
            rows = [
                (
                    row.case,
                    row.mode,
                    f"{row.ms:.2f}",
                    f"{(row.peak_bytes if row.reserved_bytes is None else row.reserved_bytes) / 2**20:.1f}",
                    _ratio(row.ratio_time),
                    _ratio(row.ratio_memory),
                    f"{row.compile_seconds:.1f}",
                )
                for row in found.rows
            ]
            self._print_table(console, columns, rows)
            console.print(
                "time and memory are relative to the faster compiled plain step (to the plain one where none was run); "
                "every step includes its update, and private steps include the noise"
            )
        for failure in found.failures:
            console.print(f"no row for {escape(failure)}", highlight=False)

    def _growth(self, say: Say) -> "Growth":
        from qclip.apps import bench

        return bench.measure_growth(self.device, dtype=self._dtype, modes=self.mode, rounds=self._rounds(5), say=say)

    def _show_growth(self, console: Console, found: "Growth") -> None:
        if self.json:
            _print_json(found.rows)
        else:
            rows = [
                (factor, mode, *_cells(*found.line(factor, mode)), f"{exponent:.2f}")
                for (factor, mode), exponent in found.exponents.items()
            ]
            self._print_table(console, ("factor", "mode", "values", "ms", "exponent"), rows)
        if self.out is not None:
            from qclip.apps.bench.growth import figure
            from qclip.apps.report.style import save

            save(figure(found), self.out)

    def _throughput(self, say: Say) -> "list[ThroughputRow]":
        from qclip.apps import bench

        return bench.measure_throughput(
            self.device, dtype=self._dtype, cases=self.case, rounds=self._rounds(5), say=say
        )

    def _show_throughput(self, console: Console, found: "list[ThroughputRow]") -> None:
        if self.json:
            return _print_json(found)
        columns = ("case", "mode", "batch", "examples/s", "ratio", "padding")
        rows = [
            (
                row.case,
                row.mode,
                str(row.batch_size),
                f"{row.examples_per_second:.1f}",
                _ratio(row.ratio),
                _ratio(row.padding),
            )
            for row in found
        ]
        return self._print_table(console, columns, rows)

    def _large(self, say: Say) -> "list[LargeRow]":
        from qclip.apps import bench

        return bench.measure_large(
            self.device,
            dtype=self.dtype or "bfloat16",
            cases=self.case,
            modes=self.mode,
            budget_seconds=self.budget,
            say=say,
        )

    def _show_large(self, console: Console, found: "list[LargeRow]") -> None:
        if self.json:
            return _print_json(found)
        columns = ("case", "mode", "largest batch", "examples/s", "reserved GiB", "ended by")
        rows = [
            (
                row.case,
                row.mode,
                str(row.batch),
                f"{row.examples_per_second:.1f}",
                f"{row.reserved_bytes / 2**30:.1f}",
                row.limit,
            )
            for row in found
        ]
        return self._print_table(console, columns, rows)

    def _print_table(self, console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print cells in columns, with a section for each case or factor."""
        from qclip.apps import bench

        dtype = self.dtype or ("bfloat16" if self.large else "float32")
        table = Table(title=bench.describe(self.device, dtype))
        for column in columns:
            table.add_column(column, justify="left" if column in ("case", "mode", "factor", "ended by") else "right")
        before = None
        for name, *cells in rows:
            if before not in (None, name):
                table.add_section()
            table.add_row("" if name == before else name, *cells)
            before = name
        console.print(table)


def _cells(values: Sequence[int], times: Sequence[float]) -> tuple[str, str]:
    return " ".join(map(str, values)), " ".join(f"{ms:.1f}" for ms in times)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _print_json(rows: Iterable[Any]) -> None:
    print(json.dumps([asdict(row) for row in rows], indent=2))
