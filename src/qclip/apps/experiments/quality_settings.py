"""The settings of the quality experiment. Light to import: the fields are a part of the command line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class QualitySettings:
    """The data, the privacy budget and the thresholds of the quality experiment."""

    data: str = "fashion-mnist"
    """The data set: fashion-mnist, mnist, or another that `qclip train` knows."""
    data_dir: Path | None = None
    """Folder of its files."""
    epsilon: float = 3.0
    """Privacy budget of each run."""
    delta: float = 1e-5
    """Delta of the budget."""
    epochs: int = 40
    """Length of each run."""
    batch_size: int = 2048
    """Expected examples per step."""
    learning_rate: float = 4.0
    """Learning rate of every run, in units of its threshold."""
    quantiles: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    """Unclipped fractions p."""
    constants: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0, 100.0)
    """Constant thresholds to compare with."""
    seeds: int = 3
    """Runs of each threshold."""
    device: str = "cpu"
    """Where to train: cpu or cuda."""
    workers: int = 1
    """Runs at a time."""
    out: Path = Path("out/quality")
    """Folder for rows.json, table.md and quality.png."""
