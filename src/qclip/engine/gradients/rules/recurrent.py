"""Decompositions of recurrent layers: a fused LSTM, GRU or RNN becomes linear layers, which have a rule.

They compute the same function as torch's kernels, but slower (one step at a time). Packed sequences are left to the
fallbacks: their examples have no fixed number of rows.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Cell = Callable[[Tensor, tuple[Tensor, ...], Tensor, Tensor | None], tuple[Tensor, ...]]
"""(input gates at this step, state, hidden weight, hidden bias) -> state, whose first entry is the output."""


def _lstm_step(gates: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    hidden, memory = state
    i, f, g, o = (gates + F.linear(hidden, weight, bias)).chunk(4, -1)
    memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
    return o.sigmoid() * memory.tanh(), memory


def _gru_step(gates: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    (hidden,) = state
    (ir, iz, new), (hr, hz, hn) = gates.chunk(3, -1), F.linear(hidden, weight, bias).chunk(3, -1)
    reset, update = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (new + reset * hn).tanh()
    return (new + update * (hidden - new),)


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Cell:
    def step(gates: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        return (activation(gates + F.linear(state[0], weight, bias)),)

    return step


def _layers(cell: Cell, *args: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run all layers; the arguments come in torch's order, and are named below."""
    if isinstance(args[3], (list, tuple)):  # data, batch_sizes, state, weights, ...
        raise NotImplementedError(
            "a packed sequence has no fixed number of rows per example (padded ones, with a masked loss, are faster)"
        )
    x, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = args
    x = x.transpose(0, 1) if batch_first else x
    states = state if isinstance(state, (list, tuple)) else (state,)
    directions = 2 if bidirectional else 1
    per_direction = len(weights) // (num_layers * directions)
    final = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            own = weights[k * per_direction : (k + 1) * per_direction]
            out, last = _direction(cell, x, tuple(s[k] for s in states), own, has_biases, backward=direction == 1)
            outputs.append(out)
            final.append(last)
        x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
        if layer < num_layers - 1:
            x = F.dropout(x, dropout, train)
    x = x.transpose(0, 1) if batch_first else x
    return x, tuple(torch.stack(states) for states in zip(*final, strict=True))


def _direction(
    cell: Cell, x: Tensor, state: tuple[Tensor, ...], weights: list[Tensor], has_biases: bool, *, backward: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    input_weight, hidden_weight = weights[:2]
    input_bias, hidden_bias = weights[2:4] if has_biases else (None, None)
    projection = weights[-1] if len(weights) % 2 else None
    gates = F.linear(x, input_weight, input_bias)
    outputs: list[Tensor] = [x] * len(x)
    for t in reversed(range(len(x))) if backward else range(len(x)):
        state = cell(gates[t], state, hidden_weight, hidden_bias)
        if projection is not None:
            state = (F.linear(state[0], projection), *state[1:])
        outputs[t] = state[0]
    return torch.stack(outputs), state


def _lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, (hidden, memory) = _layers(_lstm_step, *args)
    return x, hidden, memory


def _single_state(cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    def layers(*args: Any) -> tuple[Tensor, Tensor]:
        x, (hidden,) = _layers(cell, *args)
        return x, hidden

    return layers


def _cell(step: Cell) -> Callable[..., Any]:
    def call(
        x: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        states = state if isinstance(state, (list, tuple)) else (state,)
        out = step(F.linear(x, w_ih, b_ih), tuple(states), w_hh, b_hh)
        return out if isinstance(state, (list, tuple)) else out[0]

    return call


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _single_state(_gru_step),
    torch.rnn_tanh: _single_state(_rnn_step(torch.tanh)),
    torch.rnn_relu: _single_state(_rnn_step(torch.relu)),
    torch.lstm_cell: _cell(_lstm_step),
    torch.gru_cell: _cell(_gru_step),
    torch.rnn_tanh_cell: _cell(_rnn_step(torch.tanh)),
    torch.rnn_relu_cell: _cell(_rnn_step(torch.relu)),
}
