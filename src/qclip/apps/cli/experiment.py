"""``qclip experiment``: the comparisons behind tables and figures in docs/."""

import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from qclip.apps.experiments.accuracy_settings import AccuracySettings


@dataclass(frozen=True)
class AccuracyCommand:
    """Accuracy with nothing tuned, against the best of grids, at one budget (docs/accuracy.md)."""

    settings: AccuracySettings = field(default_factory=AccuracySettings)
    """The runs to compare."""

    def run(self, console: Console) -> int:
        """Finish the runs and print the table."""
        from qclip.apps.experiments.accuracy import accuracy

        say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        say(accuracy(self.settings, say))
        return 0


@dataclass(frozen=True)
class TrackingCommand:
    """Tracking error of each threshold on a moving quantile, at equal privacy (docs/thresholds.md)."""

    quick: bool = False
    """Fewer distributions and steps: a minute instead of seven."""
    out: Path = Path("out/tracking")
    """Folder for thresholds.md and thresholds.png."""

    def run(self, console: Console) -> int:
        """Simulate every threshold and print the table."""
        from qclip.apps.experiments import tracking

        with console.status("simulating"):
            rows = tracking.report(self.out, quick=self.quick)
        console.print(tracking.table(rows), highlight=False)
        return 0


@dataclass(frozen=True)
class RareClassCommand:
    """Loss and AUC of thresholds on tables with a rare class, at epsilon = 3 (docs/accuracy.md)."""

    shares: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
    """Shares of the rare class, one synthetic table of 30,000 rows for each."""
    data_dir: Path | None = None
    """Folder of the Adult files; without it, synthetic tables only."""
    seeds: int = 5
    """Runs of each threshold."""
    out: Path = Path("out/rare-class")
    """Folder for table.md."""

    def run(self, console: Console) -> int:
        """Train every run and print the table."""
        from qclip.apps.experiments import rare_class
        from qclip.training.lost_threshold import LostThreshold

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LostThreshold)  # the table shows it
            say = partial(console.print, highlight=False)
            rows = rare_class.compare(self.out, shares=self.shares, data_dir=self.data_dir, seeds=self.seeds, say=say)
        console.print(rare_class.table(rows), highlight=False, soft_wrap=True)
        return 0


@dataclass(frozen=True)
class ExperimentCommand:
    """Reproduce a table and a figure of the documentation."""

    which: (
        Annotated[AccuracyCommand, tyro.conf.subcommand("accuracy")]
        | Annotated[RareClassCommand, tyro.conf.subcommand("rare-class")]
        | Annotated[TrackingCommand, tyro.conf.subcommand("tracking")]
    )

    def run(self, console: Console) -> int:
        """Run the chosen experiment."""
        try:
            return self.which.run(console)
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(f"{missing.name} is not installed; pip install 'qclip[train]'") from missing
