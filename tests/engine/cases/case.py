"""What a row of the engine's suite is made of.

Sizes: B examples, T positions, D features in, P features out, V ids. B is 4 unless a test says otherwise, T is 3, so
that a test can also set B = T; no other two sizes agree.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, T, D, P, V = 4, 3, 6, 5, 11


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared distance of the weighted outputs to the example's target: no two outputs have the same gradient."""
    flat = outputs.flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat * weights - targets[:, None]).square().mean(1)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each example's tokens, a mean over those whose label is not -100."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="none")
    return losses.view(labels.shape).sum(1) / (labels != -100).sum(1).clamp_min(1)


@dataclass(frozen=True)
class Problem:
    """The arguments of one call to the engine."""

    model: nn.Module
    inputs: Any
    targets: Any = None
    loss: Callable[[Any, Any], Tensor] = squared


@dataclass(frozen=True)
class Case:
    """One row: a model, a batch of any size, and how the engine may treat it."""

    id: str
    make: Callable[[int], Problem]
    random: bool = False
    """The model draws random numbers: the oracle must share the batch's forward pass."""
    may_refuse: bool = False
    """The engine may refuse this row with a ValueError; if it answers, the answer must be right."""
    rtol: float = 2e-5

    def build(self, batch_size: int = B, seed: int = 0) -> Problem:
        """The row's problem; targets are random numbers where it names none."""
        torch.manual_seed(seed)
        problem = self.make(batch_size)
        return problem if problem.targets is not None else replace(problem, targets=2 * torch.randn(batch_size))


class Net(nn.Module):
    """Parts (modules, parameters, buffers) by name, and a forward function of the net and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def family(name: str, makers: Mapping[str, Callable[[int], Problem]], **flags: Any) -> list[Case]:
    """Rows that share a prefix and flags."""
    return [Case(f"{name}-{variant}", make, **flags) for variant, make in makers.items()]


def on(build: Callable[[], nn.Module], *shape: int) -> Callable[[int], Problem]:
    """A maker: a fresh model on random inputs of this shape per example."""
    return lambda batch_size: Problem(build(), torch.randn(batch_size, *shape))


def net(function: Callable[..., Any], shape: tuple[int, ...] = (T, D), **parts: Callable[[], Any]) -> Any:
    """A maker: a net with a fresh part from each function, on random inputs of this shape per example."""
    return on(lambda: Net(function, **{name: part() for name, part in parts.items()}), *shape)


def linear(width: int = D, out: int = P) -> Callable[[], nn.Module]:
    """A part of a net: a linear layer."""
    return lambda: nn.Linear(width, out)


def raw(*shape: int) -> Callable[[], nn.Parameter]:
    """A part of a net: a parameter."""
    return lambda: param(*shape)


def param(*shape: int, scale: float = 0.5) -> nn.Parameter:
    """A random parameter."""
    return nn.Parameter(scale * torch.randn(shape))


def ids(batch_size: int, *shape: int, high: int = V) -> Tensor:
    """Random ids."""
    return torch.randint(high, (batch_size, *shape))


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """The module with the named parameters, or all of them, frozen."""
    for name, parameter in module.named_parameters():
        if not names or name in names:
            parameter.requires_grad_(False)
    return module
