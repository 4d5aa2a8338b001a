"""Stochastic problems with exact oracles: per-example gradients, quantiles, moments, smoothness, minimiser."""

from qclip.simulation.problems.additive import (
    AdditiveNoise,
    HeavyTailedQuadratic,
    NonConvex,
    ShiftedQuadratic,
    TwoPoint,
)
from qclip.simulation.problems.logistic import Logistic
from qclip.simulation.problems.noise import Bernoulli, ClipMoments, Gaussian, Noise, Pareto, StudentT
from qclip.simulation.problems.problem import Problem

__all__ = [
    "AdditiveNoise",
    "Bernoulli",
    "ClipMoments",
    "Gaussian",
    "HeavyTailedQuadratic",
    "Logistic",
    "Noise",
    "NonConvex",
    "Pareto",
    "Problem",
    "ShiftedQuadratic",
    "StudentT",
    "TwoPoint",
]
