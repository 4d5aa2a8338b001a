"""qclip: training at a quantile of the gradient norms (QC-SGD and DP-QC-SGD), with bounds that run.

The parts load when they are first used: ``import qclip`` is cheap, and `qclip.theory`, `qclip.accounting`,
`qclip.schedules`, `qclip.problems` and `qclip.simulate` never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qclip import accounting, problems, schedules, simulate, theory

__version__ = "0.1.0"
__all__ = ["accounting", "problems", "schedules", "simulate", "theory"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"qclip.{name}")
    raise AttributeError(f"module 'qclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
