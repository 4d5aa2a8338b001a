"""The models of tables: small, without dropout or batch statistics."""

from itertools import pairwise
from typing import Final, Literal, get_args

from torch import nn

from qclip import _validate as check

Kind = Literal["linear", "mlp"]
KINDS: Final = get_args(Kind)
HIDDEN: Final = 64
"""Hidden units of a perceptron."""


def build(kind: Kind, inputs: int, outputs: int) -> nn.Module:
    """Return a fresh model that takes [..., inputs] to [..., outputs].

    >>> build("linear", 3, 2)
    Linear(in_features=3, out_features=2, bias=True)
    """
    check.choice("model", kind, KINDS)
    return linear(inputs, outputs) if kind == "linear" else perceptron(inputs, HIDDEN, outputs)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear model whose weights and biases start at zero."""
    model = nn.Linear(inputs, outputs)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def perceptron(inputs: int, hidden: int, outputs: int, *, layers: int = 1) -> nn.Module:
    """Return a perceptron with hidden layers of one width, and tanh."""
    widths = [inputs, *[hidden] * layers]
    steps = [step for pair in pairwise(widths) for step in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*steps, nn.Linear(hidden, outputs))
