"""Benchmarks: one training step in every mode, its growth, whole loops, and the largest models that fit."""

from qclip.bench.cases import CASES, Case
from qclip.bench.comparison import Comparison, Row, compare, describe
from qclip.bench.growth import Growth, GrowthRow, measure_growth
from qclip.bench.large import LARGE_CASES, LargeRow, measure_large
from qclip.bench.modes import MODES, Mode
from qclip.bench.precision import PRECISIONS, Precision
from qclip.bench.throughput import ThroughputRow, measure_throughput

__all__ = [
    "CASES",
    "LARGE_CASES",
    "MODES",
    "PRECISIONS",
    "Case",
    "Comparison",
    "Growth",
    "GrowthRow",
    "LargeRow",
    "Mode",
    "Precision",
    "Row",
    "ThroughputRow",
    "compare",
    "describe",
    "measure_growth",
    "measure_large",
    "measure_throughput",
]
