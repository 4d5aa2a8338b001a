"""``qclip bench``."""

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import tyro
from rich.console import Console
from rich.table import Table

from qclip import _validate as check


@dataclass(frozen=True)
class Bench:
    """Time one training step: plain, clipped by qclip, and by Opacus where it is installed, in one run."""

    device: str = "cpu"
    """Where to run: cpu, cuda or cuda:1."""
    rounds: int = 15
    """How often each mode takes its turn; the median counts."""
    case: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A case to run (repeat it for several); all of them when left out."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self, console: Console) -> int:
        """Print the table."""
        from qclip import bench

        with nullcontext() if self.json else console.status("measuring") as status:
            say = None if status is None else status.update
            rows = bench.run(self.device, rounds=check.count("rounds", self.rounds), cases=self.case, say=say)
        if self.json:
            print(json.dumps([asdict(row) for row in rows], indent=2))
            return 0
        table = Table(title=bench.describe(self.device))
        for column in ("case", "mode", "ms", "peak MiB", "time", "memory"):
            table.add_column(column, justify="left" if column in ("case", "mode") else "right")
        for before, row in zip([None, *rows], rows, strict=False):
            if before is not None and before.case != row.case:
                table.add_section()
            cells = (
                f"{row.ms:.1f}",
                f"{row.peak_bytes / 2**20:.1f}",
                f"{row.ratio_time:.2f}",
                f"{row.ratio_memory:.2f}",
            )
            table.add_row(row.case, row.mode, *cells)
        console.print(table)
        console.print(
            "time and memory are relative to the plain step; every step includes its update, private ones noise"
        )
        return 0
