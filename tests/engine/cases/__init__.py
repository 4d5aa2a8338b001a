"""The rows of the engine's suite: one for each operation, structure or model."""

from engine.cases.case import Case, Net, Problem, squared
from engine.cases.layers import LAYERS
from engine.cases.models import MODELS
from engine.cases.operations import OPERATIONS
from engine.cases.parameters import PARAMETERS
from engine.cases.structure import STRUCTURE
from engine.cases.wiring import WIRING

CASES: list[Case] = OPERATIONS + LAYERS + PARAMETERS + STRUCTURE + WIRING + MODELS

__all__ = [
    "CASES",
    "LAYERS",
    "MODELS",
    "OPERATIONS",
    "PARAMETERS",
    "STRUCTURE",
    "WIRING",
    "Case",
    "Net",
    "Problem",
    "squared",
]
