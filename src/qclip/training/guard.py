"""The guard: a hook that lets an optimizer apply released gradients, each once, and nothing else."""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from qclip._validate import Refusal


@dataclass
class Released:
    """The gradient that was written to one ``.grad``. Held weakly, so that ``zero_grad`` frees it."""

    grad: weakref.ref[Tensor]
    version: int
    """The tensor's version when it was written: every later change in place raises it."""
    applied_to: int | None = None
    """The version of the parameter when an optimizer step took the gradient up; None before."""

    def is_applied(self, parameter: Tensor) -> bool:
        """Return whether an optimizer step has moved the parameter by this gradient.

        The version decides, not the number of steps: an optimizer class that calls ``super().step()`` runs the hook
        twice and moves the parameter once.
        """
        return self.applied_to is not None and self.applied_to != parameter._version


_hooks: "weakref.WeakKeyDictionary[Optimizer, RemovableHandle]" = weakref.WeakKeyDictionary()


class Guard:
    """A hook before ``optimizer.step()`` that refuses every gradient that qclip has not released.

    Guarantees:
        * A step passes if each ``.grad`` of the optimizer is None, or released, unchanged and not yet applied.
          Otherwise it raises `qclip.Refusal` before any parameter moves.
        * A released gradient is applied once: after a step has moved the parameter, the gradient is refused. A move
          is seen by the parameter's version, which a write to ``.data`` does not raise.
        * An optimizer obeys one guard, the latest: gradients that an earlier guard wrote are refused from then on.
        * The guard holds gradients weakly: ``zero_grad`` frees their memory.

    Edge cases:
        * No gradient anywhere: the step passes and does nothing.
        * A raw gradient, alone or in place of a released one: refused.
        * A released gradient that was changed in place, by ``clip_grad_norm_`` for instance: refused.
        * A closure: refused, because it would compute raw gradients.
        * A step inside a step, by ``super().step()``: both pass, as one.

    Args:
        parameters: The trainable parameters, by name.
        optimizers: The optimizers to guard.
        applying: Called with the optimizer before each step that passes and has gradients to apply.
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
        """Write released gradients to ``.grad``, by name of the parameter; each may be applied once."""
        for name, grad in grads.items():
            parameter = self._parameters[name]
            # Recorded first: an interruption between the two lines must not leave a gradient without a record.
            self._released[id(parameter)] = Released(weakref.ref(grad), grad._version)
            parameter.grad = grad

    def refuse_pending(self, before: str) -> None:
        """Refuse to continue while a released gradient is pending: its privacy is spent, and it would be lost.

        Args:
            before: The event that may not happen yet, for the message.
        """
        if self.pending:
            raise Refusal(
                f"the last released gradient was not applied before {before}: call optimizer.step() after every "
                "logical batch (when training.updated is True), or optimizer.zero_grad() to drop the gradient, whose "
                "privacy stays spent"
            )

    @property
    def pending(self) -> bool:
        """Whether a released gradient waits for an optimizer step.

        * A gradient that was dropped or changed is not pending: no step can apply it.
        * A gradient that a step took up is not pending, even if the parameter's version is unchanged: an optimizer
          that writes to ``.data`` does not raise it.
        """
        if not self._released:  # the usual case, checked at every physical batch
            return False
        applicable = (self._applicable(parameter) for parameter in self._parameters.values())
        return any(released is not None and released.applied_to is None for released in applicable)

    @property
    def applied(self) -> bool:
        """Whether every gradient that was written since the last `clear` was applied."""
        pairs = ((self._released.get(id(parameter)), parameter) for parameter in self._parameters.values())
        return all(released is None or released.is_applied(parameter) for released, parameter in pairs)

    def clear(self) -> None:
        """Set every ``.grad`` to None, and forget the gradients that were written; refuse a raw gradient."""
        for parameter in self._parameters.values():
            if parameter.grad is not None and self._of(parameter) is None:
                raise self._refusal(parameter)
        for parameter in self._parameters.values():
            parameter.grad = None
        self._released.clear()

    def _of(self, parameter: Tensor) -> Released | None:
        """Return the record of the gradient that the parameter holds now; None for a raw gradient."""
        released = self._released.get(id(parameter))
        is_held = released is not None and parameter.grad is not None and released.grad() is parameter.grad
        return released if is_held else None

    def _applicable(self, parameter: Tensor) -> Released | None:
        """Return the record of the parameter's gradient if a step may apply it: unchanged, and not yet applied."""
        released, grad = self._of(parameter), parameter.grad
        if released is None or grad is None or released.is_applied(parameter) or grad._version != released.version:
            return None
        return released

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            raise Refusal(
                "optimizer.step() was called with a closure, which would compute gradients without clipping or noise: "
                "call training.step(batch), or training.loss(...).backward() and then optimizer.step() without one. "
                "Lightning passes a closure unless the module sets self.automatic_optimization = False"
            )
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

    def _refusal(self, parameter: Tensor) -> Refusal:
        name = f"{self._names.get(id(parameter), 'parameter')}.grad"
        released = self._of(parameter)
        if released is None:
            return Refusal(
                f"{name} is a raw gradient, not one that qclip released for this step: call optimizer.zero_grad(), and "
                "training.loss(outputs, targets).backward() instead of criterion(outputs, targets).backward()"
                + _trainer()
            )
        if released.is_applied(parameter):
            return Refusal(
                f"{name} was applied already: call optimizer.zero_grad() after optimizer.step(), and step once for "
                "each training.loss(...)"
            )
        return Refusal(
            f"{name} was changed after its release: remove what changes it in place, such as clip_grad_norm_ or "
            f"another backward(); it is clipped and noisy already{_trainer()}"
        )


def _trainer() -> str:
    """Return where to go from Hugging Face's Trainer, whose loop does what is refused, if it may be in use."""
    if "transformers.trainer" not in sys.modules or "qclip.integrations.transformers.trainer" in sys.modules:
        return ""
    return ". In place of transformers.Trainer take qclip.integrations.transformers.PrivateTrainer"
