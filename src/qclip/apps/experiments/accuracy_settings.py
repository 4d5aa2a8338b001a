"""The settings of the accuracy experiment. Light to import: the fields are a part of the command line."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from qclip import _validate as check

FIRST_FRESH_SEED = 100
"""The grids run with seed 0, finalists with this one and the next ones: none was used to choose anything."""


@dataclass(frozen=True)
class AccuracySettings:
    """The data, the privacy budgets and the grids of the accuracy experiment."""

    data: str = "digits"
    """The data set, by its name in `qclip train`."""
    data_dir: Path | None = None
    """Folder of its files."""
    epsilon: float = 3.0
    """Privacy budget of the grids and of the verdicts."""
    also_epsilon: tuple[float, ...] = ()
    """Further privacy budgets for the finalists."""
    delta: float = 1e-5
    """Delta of the budgets."""
    batch_size: int | None = None
    """Expected examples per step; that of `qclip train` when left out."""
    epochs: int | None = None
    """Length of each run; that of `qclip train` when left out."""
    rates: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0)
    """Learning rates of the grid, in units of the threshold."""
    quantiles: tuple[float, ...] = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
    """Unclipped fractions p of the grid."""
    constants: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    """Constant thresholds of the grid."""
    reference_rates: tuple[float, ...] = ()
    """Learning rates of Adam for runs without privacy, to compare with; none when left out."""
    seeds: int = 3
    """Runs of each finalist, on seeds that the grids did not use."""
    choose: Literal["accuracy", "loss"] = "accuracy"
    """What decides in the grids, of the held-out examples."""
    device: str = "cpu"
    """Where to train: cpu or cuda."""
    workers: int = 1
    """Runs at a time, each in a process of its own."""
    physical_batch_size: int | None = None
    """Most examples in memory at once."""
    table_only: bool = False
    """Write table.md from the runs that are finished, and start none."""
    figure: bool = False
    """Draw accuracy.png, too, which takes matplotlib."""
    out: Path = Path("out/accuracy")
    """Folder for runs.jsonl, to which each run is added as it finishes and from which the next call goes on, and for
    table.md."""

    def check(self) -> None:
        """Refuse settings that are out of bounds; those of single runs are refused by the runs."""
        check.count("seeds", self.seeds)
        check.count("workers", self.workers)
        check.choice("choose", self.choose, ("accuracy", "loss"))
        for name in ("rates", "quantiles", "constants"):
            if not getattr(self, name):
                raise check.refuse(name, (), "a grid of at least one value", "leave it out for the usual grid")

    @property
    def fresh_seeds(self) -> range:
        """The seeds of the finalists."""
        return range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + self.seeds)

    @property
    def command(self) -> str:
        """The command line that asks for this experiment; folders are named DIR."""
        words = ["qclip experiment accuracy"]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("out", "table_only", "figure") or value == field.default:
                continue
            listed = value if isinstance(value, tuple) else (value,)
            words += [f"--{field.name.replace('_', '-')}", *map(_word, listed)]
        return " ".join(words)


def _word(value: object) -> str:
    return "DIR" if isinstance(value, Path) else f"{value:g}" if isinstance(value, float) else str(value)
