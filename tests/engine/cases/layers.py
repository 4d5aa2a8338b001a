"""Attention and recurrent layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cases.case import D, Net, P, Problem, T, family, linear, net, on, raw


def _attention(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(D, 2, **({"batch_first": True} | options))


def _self(n: nn.Module, x: Tensor) -> Tensor:
    return n.attention(x, x, x, need_weights=False)[0]


def _time_first(n: nn.Module, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return n.attention(x, x, x)[0].transpose(0, 1)


def _causal(n: nn.Module, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
    return n.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def _cross(n: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    return n.attention(x, memory, memory)[0]


def _padded(B: int) -> Problem:
    lengths = torch.randint(1, T + 1, (B,))
    function = lambda n, x, padding: n.attention(x, x, x, key_padding_mask=padding)[0]  # noqa: E731
    return Problem(Net(function, attention=_attention()), (torch.randn(B, T, D), torch.arange(T) >= lengths[:, None]))


def _learned_queries(n: nn.Module, x: Tensor) -> Tensor:
    keys, values = n.kv(x).chunk(2, -1)
    return F.scaled_dot_product_attention(n.queries.expand(len(x), -1, -1), keys, values)


def _encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(D, 2, 9, **({"dropout": 0.0, "batch_first": True} | options))


ATTENTION = family(
    "attention",
    {
        "self": net(_self, attention=_attention),
        "self-with-weights": net(lambda n, x: n.attention(x, x, x)[0], attention=_attention),
        "no-bias": net(_self, attention=lambda: _attention(bias=False)),
        "causal": net(_causal, attention=_attention),
        "time-first": net(_time_first, attention=lambda: _attention(batch_first=False)),
        "cross": lambda B: Problem(Net(_cross, attention=_attention()), (torch.randn(B, T, D), torch.randn(B, 5, D))),
        "cross-other-widths": lambda B: Problem(
            Net(_cross, attention=_attention(kdim=4, vdim=4)), (torch.randn(B, T, D), torch.randn(B, 5, 4))
        ),
        "padding-mask": _padded,
        "bias-kv": net(_self, attention=lambda: _attention(add_bias_kv=True)),
        "zero-attention": net(_self, attention=lambda: _attention(add_zero_attn=True)),
        "learned-queries": net(_learned_queries, kv=linear(D, 2 * D), queries=raw(1, 2, D)),
        "encoder-layer": on(_encoder, T, D),
        "encoder-layer-norm-first": on(lambda: _encoder(norm_first=True, activation="gelu"), T, D),
        "encoder-layer-no-bias": on(lambda: _encoder(bias=False), T, D),
        "encoder-two-layers": on(lambda: nn.TransformerEncoder(_encoder(), 2, enable_nested_tensor=False), T, D),
        "decoder-layer": lambda B: Problem(
            nn.TransformerDecoderLayer(D, 2, 9, dropout=0.0, batch_first=True),
            (torch.randn(B, T, D), torch.randn(B, 5, D)),
        ),
    },
) + family(
    "attention",
    {
        "dropout": net(_self, attention=lambda: _attention(dropout=0.4)),
        "dropout-with-weights": net(_time_first, attention=lambda: _attention(batch_first=False, dropout=0.4)),
        "encoder-layer-dropout": on(lambda: _encoder(dropout=0.3), T, D),
    },
    random=True,
)


def _states(n: nn.Module, x: Tensor) -> Tensor:
    return n.rnn(x)[0]


def _time_first_states(n: nn.Module, x: Tensor) -> Tensor:
    return n.rnn(x.transpose(0, 1))[0].transpose(0, 1)


def _last_state(n: nn.Module, x: Tensor) -> Tensor:
    hidden, cell = n.rnn(x)[1]
    return torch.cat([hidden, cell], -1).transpose(0, 1)


def _learned_start(n: nn.Module, x: Tensor) -> Tensor:
    start = n.start.expand(-1, len(x), -1).contiguous()
    return n.rnn(x, start)[0]


def _packed(n: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(n.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def _cell_loop(n: nn.Module, x: Tensor) -> Tensor:
    hidden, states = x.new_zeros(len(x), P), []
    for t in range(x.shape[1]):
        hidden = n.cell(x[:, t], hidden)
        states.append(hidden)
    return torch.stack(states, 1)


def _lstm_cell_loop(n: nn.Module, x: Tensor) -> Tensor:
    state = None
    for t in range(x.shape[1]):
        state = n.cell(x[:, t], state)
    return torch.cat(state, -1)


def _rnn(kind: type[nn.RNNBase], function: Any = _states, **options: Any) -> Any:
    options = {"batch_first": function is not _time_first_states} | options
    return net(function, rnn=lambda: kind(D, P, **options))


RECURRENT = (
    family(
        "recurrent",
        {
            "lstm": _rnn(nn.LSTM),
            "lstm-time-first": _rnn(nn.LSTM, _time_first_states),
            "lstm-two-layers": _rnn(nn.LSTM, num_layers=2),
            "lstm-bidirectional": _rnn(nn.LSTM, bidirectional=True),
            "lstm-two-layers-bidirectional": _rnn(nn.LSTM, num_layers=2, bidirectional=True),
            "lstm-projected": _rnn(nn.LSTM, proj_size=2),
            "lstm-no-bias": _rnn(nn.LSTM, bias=False),
            "lstm-last-state": _rnn(nn.LSTM, _last_state),
            "gru": _rnn(nn.GRU),
            "gru-time-first": _rnn(nn.GRU, _time_first_states),
            "gru-two-layers-bidirectional": _rnn(nn.GRU, num_layers=2, bidirectional=True),
            "gru-no-bias": _rnn(nn.GRU, bias=False),
            "gru-learned-start": net(_learned_start, rnn=lambda: nn.GRU(D, P, batch_first=True), start=raw(1, 1, P)),
            "rnn-tanh": _rnn(nn.RNN),
            "rnn-relu": _rnn(nn.RNN, nonlinearity="relu"),
            "rnn-two-layers-time-first": _rnn(nn.RNN, _time_first_states, num_layers=2),
            "rnn-bidirectional": _rnn(nn.RNN, bidirectional=True),
            "lstm-cell": net(_lstm_cell_loop, cell=lambda: nn.LSTMCell(D, P)),
            "gru-cell": net(_cell_loop, cell=lambda: nn.GRUCell(D, P)),
            "rnn-cell": net(_cell_loop, cell=lambda: nn.RNNCell(D, P)),
            "lstm-between-linears": on(
                lambda: nn.Sequential(
                    nn.Linear(D, 4), Net(_states, rnn=nn.LSTM(4, P, batch_first=True)), nn.Linear(P, 2)
                ),
                T,
                D,
            ),
        },
    )
    + family(
        "recurrent",
        {
            "lstm-dropout": _rnn(nn.LSTM, num_layers=2, dropout=0.4),
            "gru-dropout": _rnn(nn.GRU, num_layers=2, dropout=0.4),
        },
        random=True,
    )
    + family(
        "recurrent",
        {
            "lstm-packed": lambda B: Problem(
                Net(_packed, rnn=nn.LSTM(D, P, batch_first=True)), (torch.randn(B, T, D), torch.randint(1, T + 1, (B,)))
            ),
        },
    )
)

LAYERS = ATTENTION + RECURRENT
