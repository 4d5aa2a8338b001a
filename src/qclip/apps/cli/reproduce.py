"""``qclip reproduce``."""

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from qclip import _validate as check


@dataclass(frozen=True)
class ReproduceCommand:
    """Run every claim of the paper and of docs/theory.md; write claims.json, figures and report.html."""

    out: Path = Path("out/reproduce")
    """Folder to write to."""
    quick: bool = False
    """Smaller experiments: about a minute instead of about six; with data sets about 2 more instead of 9."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Id of a claim to run (repeat it, or separate ids by commas); all claims when left out."""

    data_dir: Path | None = None
    """Folder of the data sets of figure1, each in its own subfolder; digits stand in for them when left out."""

    def run(self, console: Console) -> int:
        """Run the claims; the status is 1 when one of them fails."""
        try:
            from qclip.apps.experiments.reproduce import reproduce, summary
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(f"{missing.name} is not installed; pip install 'qclip[reproduce]'") from missing
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise check.refuse("--data-dir", str(self.data_dir), "a folder that exists", "check the path")
        only = [name.strip() for given in self.only for name in given.split(",")]
        rows = reproduce(self.out, quick=self.quick, only=only, data_dir=self.data_dir, console=console)
        console.print(summary(rows))
        console.print(f"report: {self.out / 'report.html'}")
        return 1 if any(row.outcome.verdict == "fails" for row in rows) else 0
