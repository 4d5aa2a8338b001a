"""qclip: training at a quantile of the gradient norms (QC-SGD and DP-QC-SGD), privately or not, with bounds that run.

The parts load when they are first used: ``import qclip`` is cheap, and `qclip.theory`, `qclip.accounting`,
`qclip.schedules`, `qclip.problems` and `qclip.simulate` never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qclip import accounting, engine, problems, schedules, simulate, theory
    from qclip.engine import clipped_gradients, explain, register_rule
    from qclip.lost_threshold import LostThreshold
    from qclip.private import make_private
    from qclip.private_training import PrivateTraining
    from qclip.thresholds import (
        Constant,
        ExactQuantile,
        GeometricQuantile,
        HistogramQuantile,
        PrivateQuantile,
        RollingQuantile,
        SlackQuantile,
    )

__version__ = "0.1.0"
__all__ = [
    "Constant",
    "ExactQuantile",
    "GeometricQuantile",
    "HistogramQuantile",
    "LostThreshold",
    "PrivateQuantile",
    "PrivateTraining",
    "RollingQuantile",
    "SlackQuantile",
    "accounting",
    "clipped_gradients",
    "engine",
    "explain",
    "make_private",
    "problems",
    "register_rule",
    "schedules",
    "simulate",
    "theory",
    "thresholds",
]

_HOMES = {
    "Constant": "thresholds",
    "ExactQuantile": "thresholds",
    "GeometricQuantile": "thresholds",
    "HistogramQuantile": "thresholds",
    "LostThreshold": "lost_threshold",
    "PrivateQuantile": "thresholds",
    "PrivateTraining": "private_training",
    "RollingQuantile": "thresholds",
    "SlackQuantile": "thresholds",
    "clipped_gradients": "engine",
    "explain": "engine",
    "make_private": "private",
    "register_rule": "engine",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"qclip.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"qclip.{name}")
    raise AttributeError(f"module 'qclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
