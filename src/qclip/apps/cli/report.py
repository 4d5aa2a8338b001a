"""``qclip report``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from qclip import _validate as check

if TYPE_CHECKING:
    from qclip.apps.report.compare import RunComparison


@dataclass(frozen=True)
class ReportCommand:
    """Write the report of a run, or compare several."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that `qclip train --out` wrote: one for its report, several to compare them."""
    out: Path | None = None
    """File of the page; the run's report.html, or ./comparison.html for several, when left out."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self, console: Console) -> int:
        """Print the table and write the page; the status is 1 when a run could not be read, 2 without a page."""
        from qclip.apps.report.compare import compare

        if not self.folders:
            raise check.Refusal("no folder of a run was given; name folders that `qclip train --out` wrote")
        errors = Console(stderr=True)
        found = compare(self.folders)
        for error in found.broken.values():
            errors.print(f"[red]error:[/] {escape(error)}", highlight=False)
        page = self._write(found, errors) if found.runs else None
        if self.json:
            print(json.dumps(found.as_json() | {"page": None if page is None else str(page)}, indent=1))
        elif found.runs:
            _print(console, found)
            if page is not None:
                console.print(f"report: {page}", highlight=False, soft_wrap=True)
        if page is None:
            return 2
        return 1 if found.broken else 0

    def _write(self, found: "RunComparison", errors: Console) -> Path | None:
        """Write the page and return its path; None where matplotlib is missing."""
        try:
            from qclip.apps.report.compare_page import write_comparison
            from qclip.apps.report.run import write_report
        except ModuleNotFoundError as missing:
            errors.print(f"[red]error:[/] {missing.name} is not installed; pip install 'qclip\\[train]'")
            return None
        if len(self.folders) == 1:
            return write_report(self.folders[0], self.out)
        return write_comparison(found, self.out or Path("comparison.html"))


def _print(console: Console, found: "RunComparison") -> None:
    """Print a table of the columns that differ and a line of the others; a single run is printed vertically."""
    from qclip.apps.report.compare import constant_columns

    rows = found.rows()
    if len(rows) == 1:
        table = Table(show_header=False)
        for column, text in rows[0].items():
            table.add_row(column, escape(text))
        console.print(table)
        return
    same = constant_columns(rows)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in rows[0]:
        if column not in same:
            words = column in ("run", "task", "threshold")
            table.add_column(column, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(text) for column, text in row.items() if column not in same))
    # As wide as necessary: a line that the terminal wraps is better than a truncated number.
    needed = Measurement.get(console, console.options.update(width=1000), table).maximum
    Console(file=console.file, width=max(needed, console.width)).print(table)
    if same:
        common = ", ".join(f"{column} {text}" for column, text in same.items())
        console.print(f"the same for all: {common}", highlight=False)
