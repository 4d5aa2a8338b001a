"""Audits: attempts to break the privacy of a training, and what they show at least.

* `replay`: your own training on neighbouring data sets with identical randomness, every raw sum held against its bound.
* `white_box`: lower bounds on epsilon from many short runs, with the most exposed example that there can be.
* `one_run`: a lower bound on epsilon from a single run with thousands of such examples.
"""

from qclip.audit.canary import CanaryAudit, white_box
from qclip.audit.neighbours import Neighbour, enlarged, replaced, without
from qclip.audit.one_run import OneRunAudit, one_run
from qclip.audit.replay import Finding, Replay, replay

__all__ = [
    "CanaryAudit",
    "Finding",
    "Neighbour",
    "OneRunAudit",
    "Replay",
    "enlarged",
    "one_run",
    "replaced",
    "replay",
    "white_box",
    "without",
]
