"""The engine: exact sums of per-example clipped gradients, from one forward and one backward pass."""

from qclip.engine import oracle
from qclip.engine.costs import CostModel
from qclip.engine.engine import Engine
from qclip.engine.explain import Explanation, explain
from qclip.engine.forms import Dense, Outer, Rows
from qclip.engine.functional import clipped_gradients
from qclip.engine.refusal import Refusal
from qclip.engine.result import ClippedGradients
from qclip.engine.rules import register_rule

__all__ = [
    "ClippedGradients",
    "CostModel",
    "Dense",
    "Engine",
    "Explanation",
    "Outer",
    "Refusal",
    "Rows",
    "clipped_gradients",
    "explain",
    "oracle",
    "register_rule",
]
