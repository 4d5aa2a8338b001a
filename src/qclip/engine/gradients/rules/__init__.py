"""Rules for torch's functions, one file per family."""

from qclip.engine.gradients.rules import convolution, elementwise, embedding, linear, normalization, recurrent
from qclip.engine.gradients.rules.experts import GROUPED
from qclip.engine.gradients.rules.registry import Entry, find, register_rule, unregister_rule

DECOMPOSITIONS = recurrent.RECURRENT | GROUPED
"""Functions that consist of others with rules."""

__all__ = [
    "DECOMPOSITIONS",
    "Entry",
    "convolution",
    "elementwise",
    "embedding",
    "find",
    "linear",
    "normalization",
    "register_rule",
    "unregister_rule",
]
