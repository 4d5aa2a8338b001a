"""qclip: private training without a clipping constant (QC-SGD and DP-QC-SGD), with bounds that run.

The parts load when they are first used: ``import qclip`` is cheap, and `qclip.theory`, `qclip.accounting`,
`qclip.schedules`, `qclip.problems` and `qclip.simulate` never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qclip._version import __version__ as __version__

if TYPE_CHECKING:
    from qclip import accounting, audit, engine, federated, schedules, tables, theory, thresholds
    from qclip._validate import Refusal
    from qclip.apps.run_log import RunLog, report
    from qclip.engine import CostModel, clipped_gradients, explain, fix, fixes, register_rule
    from qclip.integrations.sklearn import PrivateClassifier, PrivateRegressor
    from qclip.simulation import problems, simulate
    from qclip.tables.predictor import load
    from qclip.thresholds import (
        BalancedThreshold,
        Constant,
        ExactQuantile,
        GeometricQuantile,
        HistogramQuantile,
        PrivateQuantile,
        RollingQuantile,
        SlackQuantile,
    )
    from qclip.training.history import StepRecord
    from qclip.training.lost_threshold import LostThreshold
    from qclip.training.make import make_private
    from qclip.training.rows import Repeated
    from qclip.training.run import PrivateTraining

__all__ = [
    "BalancedThreshold",
    "Constant",
    "CostModel",
    "ExactQuantile",
    "GeometricQuantile",
    "HistogramQuantile",
    "LostThreshold",
    "PrivateClassifier",
    "PrivateQuantile",
    "PrivateRegressor",
    "PrivateTraining",
    "Refusal",
    "Repeated",
    "RollingQuantile",
    "RunLog",
    "SlackQuantile",
    "StepRecord",
    "accounting",
    "audit",
    "clipped_gradients",
    "engine",
    "explain",
    "federated",
    "fix",
    "fixes",
    "load",
    "make_private",
    "problems",
    "register_rule",
    "report",
    "schedules",
    "simulate",
    "tables",
    "theory",
    "thresholds",
]

# Where public modules are that do not lie beside this file.
_MODULES = {"problems": "simulation.problems", "simulate": "simulation.simulate"}
# Where names come from that are not modules.
_HOMES = {
    "BalancedThreshold": "thresholds",
    "Constant": "thresholds",
    "CostModel": "engine",
    "ExactQuantile": "thresholds",
    "GeometricQuantile": "thresholds",
    "HistogramQuantile": "thresholds",
    "LostThreshold": "training.lost_threshold",
    "PrivateClassifier": "integrations.sklearn",
    "PrivateQuantile": "thresholds",
    "PrivateRegressor": "integrations.sklearn",
    "PrivateTraining": "training.run",
    "Refusal": "_validate",
    "Repeated": "training.rows",
    "RollingQuantile": "thresholds",
    "RunLog": "apps.run_log",
    "SlackQuantile": "thresholds",
    "StepRecord": "training.history",
    "clipped_gradients": "engine",
    "explain": "engine",
    "fix": "engine",
    "fixes": "engine",
    "load": "tables.predictor",
    "make_private": "training.make",
    "register_rule": "engine",
    "report": "apps.run_log",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"qclip.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"qclip.{_MODULES.get(name, name)}")
    raise AttributeError(f"module 'qclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
