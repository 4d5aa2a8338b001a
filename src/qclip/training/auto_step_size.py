"""A learning rate that finds itself, from released gradients and public numbers only: it costs no privacy.

While the gradient points where the last steps went, larger steps would have come further: the rate grows. When it
points back, the steps have overshot, and the rate falls. In the second half of the run the rate decays to 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from qclip import _validate as check

FIRST: Final = 40.0
"""The first rate, times the root of the number of steps, where there is little noise."""
LARGEST_FIRST: Final = 3.0
"""The largest first rate, that of short runs."""
SPEED: Final = 0.1
"""The largest change of the log rate in a step."""
MEMORY: Final = 0.98
"""The weight of the past in the average direction of the steps."""
SIGNAL_MEMORY: Final = 0.9
"""The weight of the past in the average squared length of the gradient without its noise."""
DOUBT: Final = 2.0
"""A gradient along the steps that is shorter than this many standard deviations of its noise counts in part."""
LARGEST: Final = 1e3
"""The rate never exceeds this many clip norms: no rate repairs a threshold that is lost."""


class AutoStepSize:
    """The state of the rule for one run. Gradients are in units of the clip norm (``rescale_to_unit_norm``).

    With the released gradient u of this step, its noise power S (public), the average direction m of the steps taken,
    and the average v of ``|u|^2 - S``, the squared length of the gradient without its noise:

        c        = <u, m> / max(sqrt(v) |m|, 2 sqrt(S / d) |m|), clipped to [-1, 1]
        log rate = log rate + 0.1 c         in the first half of the run

    The noise of u is independent of m, so <u, m> is unbiased. The first rate of a run of T steps is
    40 / sqrt(T (1 + S)), at most 3: theory has the same roots, and a factor that depends on the loss. 40 was measured,
    on runs of 180 to 1500 steps.

    * The direction is that of the parameters, so momentum and weight decay are part of it. With momentum mu the first
      rate is multiplied by 1 - mu.
    * It keeps two copies of the trainable parameters.

    Args:
        num_steps: The length of the run.
        momentum: The momentum of the optimizer.
    """

    def __init__(self, num_steps: int, momentum: float = 0.0) -> None:
        self._num_steps, self._momentum = num_steps, momentum
        self._rate = 0.0
        self._signal: float | None = None
        self._direction: list[Tensor] | None = None
        self._before: list[Tensor] | None = None

    def next_rate(
        self,
        step: int,
        gradient: Sequence[Tensor],
        parameters: Sequence[Tensor],
        noise_power: float,
        *,
        num_coordinates: int | None = None,
        add_up: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> float:
        """Return the learning rate of this step.

        Args:
            step: The step, counted from 0.
            gradient: The released gradient, one tensor per parameter.
            parameters: The parameters before the step.
            noise_power: The expected squared norm of the noise on the gradient.
            num_coordinates: The number of elements of the whole gradient; by default those of ``gradient``.
            add_up: Returns the sum of a small tensor over all ranks, where each has a part of the gradient.
        """
        if step == 0:
            first = FIRST / math.sqrt(self._num_steps * (1 + noise_power))
            self._rate = (1 - self._momentum) * min(first, LARGEST_FIRST)
        if step >= self._num_steps / 2:
            self._direction = self._before = None  # not needed any more
            return self._rate * late_decay(step, self._num_steps)
        self._follow(parameters)
        size = sum(part.numel() for part in gradient) if num_coordinates is None else num_coordinates
        self._learn(gradient, noise_power, size, add_up)
        self._before = [parameter.detach().clone() for parameter in parameters]
        return self._rate

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data and tensors, those of ``direction`` and ``before`` one per parameter."""
        return {
            "rate": self._rate,
            "signal": self._signal,
            "direction": self._direction,
            "before": self._before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._rate, self._signal = state["rate"], state["signal"]
        self._direction, self._before = state["direction"], state["before"]

    def _follow(self, parameters: Sequence[Tensor]) -> None:
        """Add the last step to the average direction."""
        if self._before is None:
            return
        taken = torch._foreach_sub(self._before, [parameter.detach() for parameter in parameters])
        torch._foreach_div_(taken, self._rate)
        if self._direction is not None:  # into the new tensors: a `state_dict` may still hold the old ones
            torch._foreach_lerp_(taken, self._direction, MEMORY)
        self._direction = list(taken)

    def _learn(
        self,
        gradient: Sequence[Tensor],
        noise_power: float,
        num_coordinates: int,
        add_up: Callable[[Tensor], Tensor],
    ) -> None:
        """Move the rate by the agreement of the gradient with the direction of the steps."""
        direction = self._direction
        others = [] if direction is None else [_dot(gradient, direction), _dot(direction, direction)]
        products = add_up(torch.stack([_dot(gradient, gradient), *others]))
        squared, *along_and_length = torch.cat([products[:2], products[2:].sqrt()]).tolist()  # one wait for the device
        signal = squared - noise_power
        if not math.isfinite(signal):  # the average would not recover
            return
        self._signal = signal if self._signal is None else SIGNAL_MEMORY * self._signal + (1 - SIGNAL_MEMORY) * signal
        if not along_and_length:
            return
        along, length = along_and_length
        noise = math.sqrt(noise_power / num_coordinates)
        scale = max(math.sqrt(max(self._signal, 0.0)), DOUBT * noise) * length
        agreement = max(-1.0, min(1.0, along / scale)) if scale > 0 and math.isfinite(along) else 0.0
        self._rate = min(self._rate * math.exp(SPEED * agreement), LARGEST)


def late_decay(step: int, num_steps: int) -> float:
    """Return a factor for the learning rate: 1 for half of the run, then linear to 0.

    >>> [late_decay(step, 6) for step in range(6)]
    [1.0, 1.0, 1.0, 1.0, 0.6666666666666666, 0.3333333333333333]
    """
    half = math.ceil(num_steps / 2)
    return min(1.0, (num_steps - step) / (num_steps - half)) if num_steps > 1 else 1.0


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Return the inner product of two lists of tensors, 0-dim."""
    products = [(x * y).sum(dtype=torch.float32) for x, y in zip(left, right, strict=True)]
    return torch.stack(products).sum()


def require_sgd(optimizers: Sequence[Optimizer]) -> float:
    """Return the momentum of the optimizers; refuse others than SGD, for which the rule does not hold."""
    for optimizer in optimizers:
        if type(optimizer) is not SGD:
            remedy = "pass a number or a schedule, or take torch.optim.SGD, with or without momentum"
            bound = "left out with other optimizers than SGD"
            raise check.refuse("step_size", f"'auto' with {type(optimizer).__name__}", bound, remedy)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(group["maximize"] for group in groups):
        remedy = "negate the loss: the rate grows while steps go down the gradient"
        raise check.refuse("maximize", True, 'False with step_size="auto"', remedy)
    momenta = {float(group["momentum"]) for group in groups}
    if len(momenta) > 1:
        remedy = "give all groups of parameters one momentum"
        raise check.refuse("momentum", sorted(momenta), 'one value with step_size="auto"', remedy)
    return momenta.pop()
