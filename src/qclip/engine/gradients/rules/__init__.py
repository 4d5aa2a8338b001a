"""Rules for torch's functions, one file per family."""

import torch.nn.functional as F

from qclip.engine.gradients.rules import convolution, elementwise, embedding, linear, normalization, recurrent
from qclip.engine.gradients.rules.attention import biased_attention
from qclip.engine.gradients.rules.experts import GROUPED
from qclip.engine.gradients.rules.registry import Entry, find, register_rule, unregister_rule

DECOMPOSITIONS = recurrent.RECURRENT | GROUPED | {F.scaled_dot_product_attention: biased_attention}
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
