"""Repeats: forward passes that make the same calls as a captured one, and find the same sites without classifying.

A proof runs the model many times. Classifying every call again would take most of the time of a small model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from qclip.engine.capture.capture import Calls, Capture, Observe, outputs_of
from qclip.engine.capture.checks import State
from qclip.engine.capture.faults import CORRECTED
from qclip.engine.capture.invocation import Invocation
from qclip.engine.gradients.sites import Output, results_of


class OtherCalls(Exception):
    """The forward pass makes other calls than the captured one."""


@dataclass(frozen=True)
class Script:
    """What is known of a captured forward pass that is to be repeated; it holds no data."""

    calls: Calls
    sites: list[str]
    """The names of the sites."""
    state: State
    """The state of the model before it."""

    @staticmethod
    def of(capture: Capture, state: State) -> "Script":
        """Return the script of a captured forward pass."""
        return Script(capture.calls, [str(site) for site in capture.sites], state)


@dataclass(frozen=True)
class RepeatedSite:
    """A site of a captured forward pass, found again."""

    name: str
    outputs: tuple[Output, ...]
    order: None = None
    """A pass in which data move rows is not repeated."""

    def __str__(self) -> str:
        return self.name


class Repeat(TorchFunctionMode):
    """Follows the calls of a captured forward pass.

    Args:
        script: The captured forward pass.
        parameters: The trainable parameters by name.
        observe: Called with the index and the first output of every site.
    """

    def __init__(
        self,
        script: Script,
        parameters: Mapping[str, Tensor],
        observe: Observe | None = None,
    ) -> None:
        super().__init__()
        self.sites: list[RepeatedSite] = []
        self.parameters = parameters
        self._names = script.sites
        self._remaining = iter(script.calls)
        self._observe = observe
        self._differs = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__iter__ and args[0].dim():
            with self:
                return iter(args[0].unbind())
        expected, role = next(self._remaining, (None, False))
        if func != expected:
            self._differs = True  # whatever the model makes of the exception
            raise OtherCalls
        kwargs = kwargs or {}
        if callable(role):
            with self:
                return role(*args, **kwargs)
        result = CORRECTED.get(func, func)(*args, **kwargs)
        if role:
            self._find(Invocation.of(func, args, kwargs), result)
        return result

    def _find(self, call: Invocation, result: Any) -> None:
        results: Sequence[Tensor] = results_of(call.function, call.args, result)
        outputs = outputs_of(call, results)
        if not outputs:
            raise OtherCalls
        if self._observe is not None:
            self._observe(len(self.sites), results[outputs[0].position].detach(), None)
        self.sites.append(RepeatedSite(self._names[len(self.sites)], outputs))

    def require_same(self) -> None:
        """Raise `OtherCalls` unless the captured forward pass made the same calls."""
        if self._differs or next(self._remaining, None) is not None:
            raise OtherCalls
