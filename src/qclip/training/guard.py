"""The guard: an optimizer applies a released gradient, once, or nothing."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from qclip import _validate as check


@dataclass
class Released:
    """What was written to one ``.grad``. Held weakly, so that zero_grad frees it."""

    grad: weakref.ref[Tensor]
    version: int
    """Any later change in place raises the tensor's own."""
    applied_to: int | None = None
    """The version of the parameter when a step began to apply it; None before."""

    def is_applied(self, parameter: Tensor) -> bool:
        """Whether a step has moved the parameter by it.

        A step that calls another one (an optimizer class that calls ``super().step()``) asks twice, and moves it once.
        """
        return self.applied_to is not None and self.applied_to != parameter._version


_hooks: "weakref.WeakKeyDictionary[Optimizer, RemovableHandle]" = weakref.WeakKeyDictionary()


class Guard:
    """Stands before `step` of the optimizers: raises unless each ``.grad`` is None or released and not yet applied.

    An optimizer has one guard, the latest: what an earlier one would release is refused from then on. ``applying`` is
    told of each step that is let through, before it is taken.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        *,
        applying: Callable[[Optimizer], None] = lambda _: None,
    ) -> None:
        self._parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._released: dict[int, Released] = {}
        self._applying = applying
        for optimizer in optimizers:
            if optimizer in _hooks:
                _hooks[optimizer].remove()
            _hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def write(self, grads: Mapping[str, Tensor]) -> None:
        """Make these the gradients that may be applied, once."""
        for name, grad in grads.items():
            parameter = self._parameters[name]
            # Noted first: an interruption between the two lines must not leave a gradient that nobody released.
            self._released[id(parameter)] = Released(weakref.ref(grad), grad._version)
            parameter.grad = grad

    def refuse_pending(self, before: str) -> None:
        """Refuse to go on while a released gradient waits: it is paid for, and would be lost."""
        if self.pending:
            remedy = (
                "call optimizer.step() after every logical batch (training.updated says when), or "
                "optimizer.zero_grad() to go on without it: it stays charged"
            )
            bound = f"applied or thrown away before {before}"
            raise check.refuse("released gradient", "not yet applied", bound, remedy)

    @property
    def pending(self) -> bool:
        """Whether a released gradient waits for a step; one that was thrown away or changed cannot be applied any more.

        One that a step took up waits no longer, even where nothing shows that the parameter moved: an optimizer that
        writes to ``.data`` leaves its version as it was.
        """
        if not self._released:  # as nearly always: asked at every physical batch
            return False
        waiting = (self._applicable(parameter) for parameter in self._parameters.values())
        return any(released is not None and released.applied_to is None for released in waiting)

    @property
    def applied(self) -> bool:
        """Whether every gradient that was released since the last `clear` was applied."""
        found = ((self._released.get(id(parameter)), parameter) for parameter in self._parameters.values())
        return all(released is None or released.is_applied(parameter) for released, parameter in found)

    def clear(self) -> None:
        """Take back what was written and is still there; refuse anything else that lies there."""
        for parameter in self._parameters.values():
            if parameter.grad is not None and self._of(parameter) is None:
                raise self._refusal(parameter)
        for parameter in self._parameters.values():
            parameter.grad = None
        self._released.clear()

    def _of(self, parameter: Tensor) -> Released | None:
        """The record of the gradient that this parameter holds now."""
        released = self._released.get(id(parameter))
        here = released is not None and parameter.grad is not None and released.grad() is parameter.grad
        return released if here else None

    def _applicable(self, parameter: Tensor) -> Released | None:
        """The same, where a step may apply it: as it was written, and not applied yet."""
        released, grad = self._of(parameter), parameter.grad
        if released is None or grad is None or released.is_applied(parameter) or grad._version != released.version:
            return None
        return released

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            remedy = "call training.step(batch), or training.loss(...).backward() and then optimizer.step()"
            raise check.refuse("closure", closure, "None: it would compute gradients without clipping or noise", remedy)
        due = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            released = self._applicable(parameter)
            if released is None:
                raise self._refusal(parameter)
            due.append((released, parameter))
        if due:
            self._applying(optimizer)
        for released, parameter in due:
            released.applied_to = parameter._version

    def _refusal(self, parameter: Tensor) -> ValueError:
        name = f"{self._names.get(id(parameter), 'parameter')}.grad"
        released = self._of(parameter)
        if released is None:
            value = "a raw gradient"
            remedy = (
                "call optimizer.zero_grad(), and training.loss(outputs, targets).backward() instead of "
                "criterion(outputs, targets).backward()"
            )
        elif released.is_applied(parameter):
            value = "a gradient that was applied already"
            remedy = "call optimizer.zero_grad() after optimizer.step(), and step once for each training.loss(...)"
        else:
            value = "a released gradient that was changed afterwards"
            remedy = (
                "remove what changes it in place, such as clip_grad_norm_ or another backward(): it is clipped and "
                "noisy already"
            )
        return check.refuse(name, value, "None or the gradient that qclip released for this step", remedy)
