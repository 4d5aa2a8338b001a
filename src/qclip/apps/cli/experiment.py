"""``qclip experiment``: the comparisons whose tables and figures are in docs/."""

import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console


@dataclass(frozen=True)
class Quality:
    """Test accuracy of private quantiles and of constants at epsilon = 3 (docs/private-training.md)."""

    data: str = "fashion-mnist"
    """The data set: fashion-mnist, or another that `qclip train` knows."""
    data_dir: Path | None = None
    """Where its files are."""
    epochs: int = 40
    """How long each run is."""
    batch_size: int = 2048
    """Expected examples per step."""
    learning_rate: float = 4.0
    """Of every run, in units of its threshold."""
    seeds: int = 3
    """How many runs of each."""
    device: str = "cpu"
    """Where to train: cpu or cuda."""
    workers: int = 1
    """How many runs at a time."""
    out: Path = Path("out/quality")
    """Where to write rows.json, table.md and quality.png."""

    def run(self, console: Console) -> int:
        """Train them all; print the table."""
        from qclip.apps.experiments import quality

        settings = quality.Quality(**asdict(self))
        rows = quality.quality(settings, say=lambda text: console.print(text, highlight=False))
        console.print(quality.table(rows), highlight=False)
        return 0


@dataclass(frozen=True)
class Tracking:
    """How well each threshold follows a quantile that moves, at equal privacy (docs/thresholds.md)."""

    quick: bool = False
    """Fewer laws and steps: a minute instead of seven."""
    out: Path = Path("out/tracking")
    """Where to write thresholds.md and thresholds.png."""

    def run(self, console: Console) -> int:
        """Follow them all; print the table."""
        from qclip.apps.experiments import tracking

        with console.status("following"):
            rows = tracking.report(self.out, quick=self.quick)
        console.print(tracking.table(rows), highlight=False)
        return 0


@dataclass(frozen=True)
class RareClass:
    """Held-out loss and AUC of thresholds on tables with a rare class, at epsilon = 3 (docs/private-training.md)."""

    data_dir: Path | None = None
    """Where the files of Adult are; without it, made-up tables only."""
    seeds: int = 3
    """How many runs of each."""
    out: Path = Path("out/rare-class")
    """Where to write table.md."""

    def run(self, console: Console) -> int:
        """Train them all; print the table."""
        from qclip.apps.experiments import rare_class
        from qclip.training.lost_threshold import LostThreshold

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LostThreshold)  # what the table is about
            say = partial(console.print, highlight=False)
            rows = rare_class.compare(self.out, data_dir=self.data_dir, seeds=self.seeds, say=say)
        console.print(rare_class.table(rows), highlight=False, soft_wrap=True)
        return 0


@dataclass(frozen=True)
class Experiment:
    """Make a table and a figure of the documentation anew."""

    which: (
        Annotated[Quality, tyro.conf.subcommand("quality")]
        | Annotated[RareClass, tyro.conf.subcommand("rare-class")]
        | Annotated[Tracking, tyro.conf.subcommand("tracking")]
    )

    def run(self, console: Console) -> int:
        """Run the chosen one."""
        try:
            return self.which.run(console)
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(f"{missing.name} is not installed; pip install 'qclip[train]'") from missing
