"""The growth of a step's time with batch, depth, width and length, for a small transformer.

    python benchmarks/growth.py [--device cuda --dtype bfloat16] [--out docs/figures/growth.png]

One factor at a time is changed; the others stay at the base. The exponent is the slope of a least-squares line
through the points on logarithmic axes: 1 where time is proportional to the factor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
import tyro
from rich.console import Console

from qclip import _validate as check
from qclip.apps.bench import measure
from qclip.apps.bench.cases import BenchCase
from qclip.apps.bench.comparison import WARM_UP, device_named
from qclip.apps.bench.measure import Say, silent
from qclip.apps.bench.modes import MODES
from qclip.apps.bench.precision import Precision, precision_named
from qclip.apps.bench.workload import Step, workload
from qclip.apps.cli.bench import BenchTable, show
from qclip.apps.data.models import CausalTransformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHABET = 1024
GROWTH_MODES = {"cpu": ("plain", "qclip"), "cuda": ("compiled", "qclip compiled")}
"""Compiled on a GPU. On a CPU, compiling every shape takes many minutes and changes little."""


@dataclass(frozen=True)
class Shape:
    """The size of a transformer and of its batch."""

    batch: int
    layers: int
    width: int
    positions: int

    def case(self) -> BenchCase:
        """Return the case of a language model of this shape."""
        heads = max(1, self.width // 64)
        model = partial(CausalTransformer, ALPHABET, self.positions, width=self.width, layers=self.layers, heads=heads)
        return BenchCase(f"{self}", model, shape=(self.positions,), classes=ALPHABET, batch=self.batch, tokens=True)


@dataclass(frozen=True)
class Sweep:
    """A base shape, and the values that each factor takes in turn."""

    base: Shape
    values: Mapping[str, Sequence[int]]

    def shapes(self) -> dict[tuple[str, int], Shape]:
        """Return the shape of each (factor, value)."""
        return {
            (factor, value): replace(self.base, **{factor: value})
            for factor, values in self.values.items()
            for value in values
        }


SWEEPS = {
    "cpu": Sweep(
        Shape(batch=8, layers=2, width=128, positions=32),
        {
            "batch": (8, 16, 32, 64),
            "layers": (1, 2, 4, 8),
            "width": (64, 128, 256, 512),
            "positions": (32, 64, 128, 256),
        },
    ),
    # Large enough that the time is spent in kernels, not in launching them.
    "cuda": Sweep(
        Shape(batch=32, layers=2, width=1024, positions=256),
        {
            "batch": (32, 64, 128, 256),
            "layers": (1, 2, 4, 8),
            "width": (512, 1024, 2048, 4096),
            "positions": (128, 256, 512, 1024),
        },
    ),
}


@dataclass(frozen=True)
class GrowthRow:
    """The time of a step at one value of one factor."""

    factor: str
    value: int
    mode: str
    ms: float


@dataclass(frozen=True)
class Growth:
    """The rows of the measurement, with the exponent of each factor in each mode."""

    rows: tuple[GrowthRow, ...]

    @property
    def exponents(self) -> dict[tuple[str, str], float]:
        """The exponent of each (factor, mode)."""
        lines = dict.fromkeys((row.factor, row.mode) for row in self.rows)
        return {(factor, mode): slope(*self.line(factor, mode)) for factor, mode in lines}

    def line(self, factor: str, mode: str) -> tuple[list[int], list[float]]:
        """Return the values of the factor, and the milliseconds at each."""
        rows = [row for row in self.rows if (row.factor, row.mode) == (factor, mode)]
        return [row.value for row in rows], [row.ms for row in rows]


def slope(values: Sequence[float], times: Sequence[float]) -> float:
    """Return the exponent b of the least-squares fit ``times = a values^b`` in logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(values), np.log(times), 1)[0])


def measure_growth(
    device: str = "cpu",
    *,
    dtype: str = "float32",
    modes: Sequence[str] = (),
    rounds: int = 5,
    sweep: Sweep | None = None,
    say: Say = silent,
) -> Growth:
    """Measure the median time of a step at every value of every factor.

    Args:
        device: "cpu", "cuda" or "cuda:1".
        dtype: A name in `PRECISIONS`.
        modes: Names in `MODES`; the plain and the private step when left out, compiled on a GPU.
        rounds: Rounds in which the modes take turns.
        sweep: The shapes; those of `SWEEPS` for the device when left out.
        say: Called with the progress.
    """
    place, precision = device_named(device), precision_named(dtype)
    check.count("rounds", rounds)
    names = [check.choice("mode", name, MODES) for name in modes or GROWTH_MODES[place.type]]
    shapes = (sweep or SWEEPS[place.type]).shapes()
    times: dict[Shape, dict[str, float]] = {}
    with measure.quietly(), precision.settings():
        for shape in dict.fromkeys(shapes.values()):
            say(f"measuring {shape}")
            times[shape] = _times(shape, names, precision, place, rounds)
    return Growth(
        tuple(
            GrowthRow(factor, value, name, times[shape][name])
            for (factor, value), shape in shapes.items()
            for name in names
        )
    )


def _times(
    shape: Shape, modes: Sequence[str], precision: Precision, device: torch.device, rounds: int
) -> dict[str, float]:
    measure.forget(device)
    steps: dict[str, Step] = {name: MODES[name].make(workload(shape.case(), precision, device)) for name in modes}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    return {name: median(each) for name, each in measure.take_turns(steps, device, rounds).items()}


def figure(growth: Growth) -> "Figure":
    """Draw the time against each factor, a logarithmic panel each; the legend gives the exponents."""
    from qclip.apps.report.style import label, new_figure

    factors = list(dict.fromkeys(row.factor for row in growth.rows))
    times = [row.ms for row in growth.rows]
    drawn, axes = new_figure(len(factors), width=3.1 * len(factors), height=3.0)
    for ax, factor in zip(axes, factors, strict=True):
        for (name, mode), exponent in growth.exponents.items():
            if name == factor:
                ax.loglog(
                    *growth.line(factor, mode), "o-", markersize=3, linewidth=1.2, label=f"{mode}: {exponent:.2f}"
                )
        values = sorted({row.value for row in growth.rows if row.factor == factor})
        ax.set_xticks(values, [str(value) for value in values])
        ax.minorticks_off()
        ax.set_ylim(0.8 * min(times), 1.5 * max(times))  # one scale for all, with space for the legend
        label(ax, factor, "ms per step" if ax is axes[0] else "")
    return drawn


@dataclass(frozen=True)
class Options:
    """Measure how the time of a step grows with batch, depth, width and length."""

    device: str = "cpu"
    """Device to run on: cpu, cuda or cuda:1."""
    dtype: str = "float32"
    """float32, tf32, bfloat16 or autocast."""
    mode: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A mode to run (repeat it for several); the plain and the private step when left out, compiled on a GPU."""
    rounds: int = 5
    """Rounds in which the modes take turns; the median counts."""
    out: Path | None = None
    """File for the figure."""
    json: bool = False
    """Print JSON instead of a table."""

    def measure(self, say: Say) -> BenchTable:
        """Measure, draw the figure, and return the table."""
        growth = measure_growth(self.device, dtype=self.dtype, modes=self.mode, rounds=self.rounds, say=say)
        if self.out is not None:
            from qclip.apps.report.style import save

            save(figure(growth), self.out)
        cells = []
        for (factor, mode), exponent in growth.exponents.items():
            values, times = growth.line(factor, mode)
            shown = " ".join(map(str, values)), " ".join(f"{ms:.1f}" for ms in times)
            cells.append((factor, mode, *shown, f"{exponent:.2f}"))
        return BenchTable(growth.rows, ("factor", "mode", "values", "ms", "exponent"), cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = tyro.cli(Options, args=arguments)
    show(Console(), options.measure, options.device, options.dtype, as_json=options.json)


if __name__ == "__main__":
    main()
