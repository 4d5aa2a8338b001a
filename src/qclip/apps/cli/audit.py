"""``qclip audit``."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qclip import _validate as check

COLORS = {"holds": "green", "caught": "green", "fails": "red", "missed": "red"}


@dataclass(frozen=True)
class AuditCommand:
    """Try to break the guarantee: replays, attackers who guess, and faults of other libraries.

    With --ledger, add up what several runs on the same data have spent.
    """

    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An audit to run (repeat it for several): replay, canary, one-run or foreign; all when left out."""
    data: str = "digits"
    """Data of the replays: a data set of `qclip train`, or a table."""
    data_dir: Path | None = None
    """Folder of the files of a named data set."""
    target: str | None = None
    """Column to predict, for a table."""
    out: Path = Path("out/audit")
    """Folder for audit.json, figures and report.html."""
    quick: bool = False
    """Fewer runs: about a minute instead of about ten."""
    seed: int = 0
    """Seed of coins, sampling and noise."""
    json: bool = False
    """Print JSON instead of a table."""
    ledger: tuple[Path, ...] = ()
    """Folders of runs on the same data: print what they have spent together, and audit nothing."""

    def run(self, console: Console) -> int:
        """Run the audits; the status is 1 when a claim is exceeded or a fault missed."""
        return self._ledger(console) if self.ledger else self._audit(console)

    def _audit(self, console: Console) -> int:
        try:
            from qclip.apps.audits import report, suite
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(f"{missing.name} is not installed; pip install 'qclip[train]'") from missing
        from qclip._files import replace_text

        for name in self.only:
            check.choice("--only", name, suite.AUDITS)
        scope = suite.Scope(self.quick, self.data, self.data_dir, self.target, self.seed)
        screen = Console(stderr=True) if self.json else console
        began, found = time.monotonic(), []
        self.out.mkdir(parents=True, exist_ok=True)
        with screen.status("auditing") as status:
            for name in [name for name in suite.AUDITS if not self.only or name in self.only]:
                for row in suite.rows(name, scope, status.update):
                    found.append(row)
                    replace_text(self.out / "audit.json", json.dumps([row.as_json() for row in found], indent=1))
                    verdict = f"[{COLORS[row.verdict]}]{row.verdict:7}[/]"
                    screen.print(f"{verdict}{row.audit:8} {escape(row.subject)}: {escape(row.found)}", highlight=False)
        page = report.write(found, self.out, time.monotonic() - began)
        if self.json:
            print(json.dumps([row.as_json() for row in found], indent=1))
        screen.print(f"report: {page}", highlight=False, soft_wrap=True)
        return 1 if any(row.verdict in ("fails", "missed") for row in found) else 0

    def _ledger(self, console: Console) -> int:
        from qclip.apps.ledger import read

        ledger = read(self.ledger)
        if self.json:
            print(json.dumps(ledger.as_json(), indent=1))
            return 0
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("run", "steps", "rate", "noise", "epsilon", "delta"):
            table.add_column(column, justify="left" if column == "run" else "right")
        for run in ledger.runs:
            numbers: list[Any] = [run.steps, f"{run.sample_rate:.4g}", f"{run.noise_multiplier:.4g}"]
            table.add_row(run.name, *map(str, numbers), f"{run.epsilon:.4g}", f"{run.delta:.3g}")
        console.print(table)
        console.print(f"together: epsilon {ledger.epsilon:.4g} at delta {ledger.delta:.3g}", highlight=False)
        for note in ledger.notes:
            console.print(escape(note), highlight=False)
        return 0
