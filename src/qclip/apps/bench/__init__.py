"""Benchmarks of one training step in every mode, its growth, whole loops, and the largest models that fit."""

from qclip.apps.bench.cases import CASES, BenchCase
from qclip.apps.bench.comparison import BenchResult, BenchRow, compare, describe
from qclip.apps.bench.growth import Growth, GrowthRow, measure_growth
from qclip.apps.bench.large import LARGE_CASES, LargeRow, measure_large
from qclip.apps.bench.modes import MODES, Mode
from qclip.apps.bench.precision import PRECISIONS, Precision
from qclip.apps.bench.throughput import ThroughputRow, measure_throughput

__all__ = [
    "CASES",
    "LARGE_CASES",
    "MODES",
    "PRECISIONS",
    "BenchCase",
    "BenchResult",
    "BenchRow",
    "Growth",
    "GrowthRow",
    "LargeRow",
    "Mode",
    "Precision",
    "ThroughputRow",
    "compare",
    "describe",
    "measure_growth",
    "measure_large",
    "measure_throughput",
]
