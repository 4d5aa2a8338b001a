"""Stochastic problems with exact oracles: gradient, per-example gradients, quantile, moments, smoothness, minimiser."""

from qclip.problems.additive import AdditiveNoise, HeavyTailedQuadratic, NonConvex, ShiftedQuadratic, TwoPoint
from qclip.problems.logistic import Logistic
from qclip.problems.noise import Bernoulli, ClipMoments, Gaussian, Noise, Pareto, StudentT
from qclip.problems.problem import Problem

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
