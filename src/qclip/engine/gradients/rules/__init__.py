"""Rules for torch's functions, one file per family."""

from qclip.engine.gradients.rules import convolution, elementwise, embedding, linear, normalization
from qclip.engine.gradients.rules.recurrent import DECOMPOSITIONS
from qclip.engine.gradients.rules.registry import Entry, find, register_rule, unregister_rule

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
