"""The engine: exact sums of per-example clipped gradients, from one forward and one backward pass."""

from qclip._validate import Refusal
from qclip.engine import oracle
from qclip.engine.driver import Engine
from qclip.engine.explain import Explanation, explain
from qclip.engine.fix import Fixes, fix, fixes
from qclip.engine.functional import clipped_gradients
from qclip.engine.gradients.costs import CostModel
from qclip.engine.gradients.forms import Dense, Outer, Rows
from qclip.engine.gradients.rules import register_rule
from qclip.engine.result import ClippedGradients

__all__ = [
    "ClippedGradients",
    "CostModel",
    "Dense",
    "Engine",
    "Explanation",
    "Fixes",
    "Outer",
    "Refusal",
    "Rows",
    "clipped_gradients",
    "explain",
    "fix",
    "fixes",
    "oracle",
    "register_rule",
]
