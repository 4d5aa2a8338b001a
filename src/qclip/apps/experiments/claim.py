"""Claims: a statement, an experiment, and a verdict that is computed from its outcome."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.figure import Figure

from qclip.apps.report.style import label, new_figure

Verdict = Literal["holds", "fails", "erratum"]
How = Literal["measured", "evaluated"]


@dataclass(frozen=True)
class Effort:
    """The size of the experiments; ``quick`` ones take seconds each, with wider intervals."""

    quick: bool = False
    seed: int = 0
    stream: int = 0
    data_dir: Path | None = None
    """Folder of the data sets; None where they are not at hand, and others that come along stand in."""

    def pick(self, quick: int, full: int) -> int:
        """Return one of two sizes."""
        return quick if self.quick else full

    def rng(self) -> np.random.Generator:
        """Return a fresh generator; every claim has its own stream, independent of earlier claims."""
        return np.random.default_rng([self.seed, self.stream])


@dataclass(frozen=True)
class Outcome:
    """The outcome of an experiment: whether the printed text passed, and our correction of it (``repaired``)."""

    expected: str
    measured: str
    printed: bool
    repaired: bool | None = None
    error: str = ""
    values: dict[str, float] = field(default_factory=dict)
    draw: Callable[[], Figure] | None = None

    @property
    def verdict(self) -> Verdict:
        """`holds`, `fails`, or `erratum` where the printed text fails and the repaired one holds."""
        if self.repaired is False:
            return "fails"  # a correction that does not hold is a failure, whatever the text does
        if self.printed:
            return "holds"
        return "erratum" if self.repaired else "fails"


@dataclass(frozen=True)
class Claim:
    """A statement with its place in the paper (or in docs/theory.md) and its experiment."""

    id: str
    statement: str
    equation: str
    run: Callable[[Effort], Outcome]
    how: How = "measured"


def claim(
    id: str, statement: str, equation: str, *, how: How = "measured"
) -> Callable[[Callable[[Effort], Outcome]], Claim]:
    """Return a decorator that turns an experiment into a claim with a random stream of its own.

    Args:
        id: The name of the claim.
        statement: What is claimed.
        equation: The place in the paper, or in docs/theory.md.
        how: "measured" for experiments and for independent calculations; "evaluated" where both sides are formulas,
            so that only a wrong formula could fail.
    """
    stream = zlib.crc32(id.encode())
    return lambda run: Claim(id, statement, equation, lambda effort: run(replace(effort, stream=stream)), how)


@dataclass(frozen=True)
class Slope:
    """A fitted exponent, with a 95 % interval from resampling the seeds."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def fit_slope(x: np.ndarray, samples: np.ndarray, rng: np.random.Generator, *, resamples: int = 400) -> Slope:
    """Fit the exponent of the mean over the seeds of ``samples`` [points, seeds] against x.

    The points of a run are correlated and the seeds are not, so the interval resamples whole seeds.
    """
    design = np.stack([np.log(x), np.ones(len(x))], axis=1)
    solve = np.linalg.pinv(design)[0]
    seeds = samples.shape[1]
    picks = rng.integers(seeds, size=(resamples, seeds))
    slopes = np.array([solve @ np.log(samples[:, pick].mean(1)) for pick in picks])
    low, high = np.quantile(slopes, [0.025, 0.975])
    return Slope(float(solve @ np.log(samples.mean(1))), float(low), float(high))


def bars(values: dict[str, float], axis: str, title: str = "", *, log: bool = False) -> Figure:
    """Draw a few numbers as bars."""
    figure, (ax,) = new_figure(height=1.2 + 0.4 * len(values))
    ax.barh(list(values), list(values.values()), color="#2563a8", height=0.55)
    ax.invert_yaxis()
    if log:
        ax.set_xscale("log")
    label(ax, axis, "", title)
    return figure
