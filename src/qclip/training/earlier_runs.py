"""The runs that a model has behind it in this process: each has an epsilon of its own, and they add up."""

import warnings
import weakref

from torch import nn

from qclip.training.history import History

_histories: "weakref.WeakKeyDictionary[nn.Module, list[History]]" = weakref.WeakKeyDictionary()


def remember(model: nn.Module, history: History) -> None:
    """Note a run of this model, for as long as the model is there."""
    _histories.setdefault(model, []).append(history)


def warn_of_earlier(model: nn.Module) -> None:
    """Say that releases of earlier runs are not in the epsilon of the next one."""
    steps = sum(map(len, _histories.get(model, [])))
    if steps:
        warnings.warn(
            f"this model has taken {steps} steps in earlier runs: epsilon() counts those of the new run only. "
            "Where they have seen the same people's data, epsilons and deltas add up",
            stacklevel=3,
        )
