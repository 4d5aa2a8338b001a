"""How parameters are shared, frozen and derived from each other."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from engine.cases.case import D, Net, P, Problem, T, V, family, frozen, ids, linear, net, on, param, raw, token_loss


def _tied(embedding_first: bool = True) -> nn.Module:
    model = Net(lambda n, i: n.head(n.body(n.embedding(i)).tanh()))
    parts = {"embedding": nn.Embedding(V, D), "body": nn.Linear(D, D), "head": nn.Linear(D, V, bias=False)}
    for name in parts if embedding_first else reversed(parts):
        setattr(model, name, parts[name])
    model.head.weight = model.embedding.weight
    return model


def _functionally_tied(**options: int) -> nn.Module:
    return Net(
        lambda n, i: F.linear(n.body(n.embedding(i)).tanh(), n.embedding.weight),
        embedding=nn.Embedding(V, D, **options),
        body=nn.Linear(D, D),
    )


def ignored_labels(batch_size: int) -> Tensor:
    """The first position is kept, so that no example is empty; others are ignored at random."""
    labels = ids(batch_size, T)
    return labels.where((torch.rand(batch_size, T) < 0.5) | (torch.arange(T) == 0), -100)


def _pair(*shape: int):
    return lambda B: (torch.randn(B, T, D), torch.randn(B, *shape))


def _biased_by_a_table(n: nn.Module, i: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, n.w, n.embedding.weight[0]) + n.embedding(i)


def _two_sizes(n: nn.Module, x: Tensor) -> Tensor:
    return n.conv(x).mean((2, 3)) + n.conv(x[..., ::2]).mean((2, 3))


TIES = family(
    "tied",
    {
        "by-module": lambda B: Problem(_tied(), ids(B, T), ids(B, T), token_loss),
        "registered-backwards": lambda B: Problem(_tied(embedding_first=False), ids(B, T), ids(B, T), token_loss),
        "functional": lambda B: Problem(_functionally_tied(), ids(B, T), ids(B, T), token_loss),
        "few-words": lambda B: Problem(_functionally_tied(), ids(B, 6, high=2), ids(B, 6, high=2), token_loss),
        "ignored-labels": lambda B: Problem(_functionally_tied(), ids(B, T), ignored_labels(B), token_loss),
        "padding": lambda B: Problem(_functionally_tied(padding_idx=1), ids(B, T, high=3), ids(B, T), token_loss),
        "linear-and-its-transpose": net(lambda n, x: F.linear(n.one(x).tanh(), n.one.weight.T), one=linear()),
        "siamese-linear": lambda B: Problem(
            Net(lambda n, x, y: n.layer(x) - n.layer(y).tanh(), layer=nn.Linear(D, P)), _pair(T, D)(B)
        ),
        "siamese-embedding": lambda B: Problem(
            Net(lambda n, i, j: n.embedding(i) * n.embedding(j), embedding=nn.Embedding(V, D)), (ids(B, T), ids(B, 1))
        ),
        "layer-three-times": net(lambda n, x: n.one(n.one(n.one(x).tanh()).tanh()), one=linear(D, D)),
        "layer-on-other-lengths": lambda B: Problem(
            Net(lambda n, x, y: n.layer(x).mean(1) + n.layer(y), layer=nn.Linear(D, P)), _pair(D)(B)
        ),
        "conv-twice": net(lambda n, x: n.conv(n.conv(x).relu()), (3, 4, 5), conv=lambda: nn.Conv2d(3, 3, 3, padding=1)),
        "conv-on-other-sizes": net(_two_sizes, (3, 4, 6), conv=lambda: nn.Conv2d(3, 4, 2)),
        "norm-twice": net(lambda n, x: n.norm(n.norm(x).sin() * n.p), norm=lambda: nn.LayerNorm(D), p=raw(D)),
        "shared-bias": net(
            lambda n, x: F.linear(x, n.w, n.b) + F.linear(x.sin(), n.v, n.b), w=raw(P, D), v=raw(P, D), b=raw(P)
        ),
        "bias-from-a-table": lambda B: Problem(
            Net(_biased_by_a_table, w=param(D, P), embedding=nn.Embedding(V, D)), (ids(B, T), torch.randn(B, T, P))
        ),
        "matrix-as-linear-and-scale": net(lambda n, x: F.linear(x, n.w) * n.w.sum(1), w=raw(P, D)),
    },
)


def _lora(n: nn.Module, x: Tensor) -> Tensor:
    return n.base(x) + 2.0 * (x @ n.a @ n.b)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, P), nn.LayerNorm(P), nn.Tanh(), nn.Linear(P, 2))


def _zero_head() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, P), nn.Tanh(), nn.Linear(P, 2))
    nn.init.zeros_(model[2].weight)
    return model


def _partly_frozen_attention() -> nn.Module:
    model = Net(lambda n, x: n.attention(x, x, x)[0], attention=nn.MultiheadAttention(D, 2, batch_first=True))
    return frozen(model, "attention.out_proj.weight", "attention.in_proj_bias")


FREEZING = family(
    "frozen",
    {
        "first-layer": on(lambda: nn.Sequential(frozen(nn.Linear(D, P)), nn.Tanh(), nn.Linear(P, 2)), T, D),
        "last-layer": on(lambda: nn.Sequential(nn.Linear(D, P), nn.Tanh(), frozen(nn.Linear(P, 2))), T, D),
        "embedding": lambda B: Problem(nn.Sequential(frozen(nn.Embedding(V, D)), nn.Linear(D, P)), ids(B, T)),
        "all-but-biases": on(lambda: frozen(_mlp(), "0.weight", "1.weight", "3.weight"), T, D),
        "biases": on(lambda: frozen(_mlp(), "0.bias", "1.bias", "3.bias"), T, D),
        "conv-weight": on(lambda: frozen(nn.Conv2d(3, 5, 3), "weight"), 3, 4, 5),
        "conv-bias": on(lambda: frozen(nn.Conv2d(3, 5, 3), "bias"), 3, 4, 5),
        "lora": net(_lora, base=lambda: frozen(nn.Linear(D, P)), a=raw(D, 2), b=raw(2, P)),
        "lora-at-the-start": net(
            _lora, base=lambda: frozen(nn.Linear(D, P)), a=raw(D, 2), b=lambda: nn.Parameter(torch.zeros(2, P))
        ),
        "half-an-attention": on(_partly_frozen_attention, T, D),
        "unused-parameter": net(lambda n, x: n.used(x), used=linear(), unused=linear(), alone=raw(3)),
        "output-discarded": net(lambda n, x: (n.used(x), n.spare(x))[0], used=linear(), spare=linear()),
        "zero-gradient": on(_zero_head, T, D),
        "times-zero": net(lambda n, x: n.one(x) + 0.0 * n.two(x), one=linear(), two=linear()),
        "stop-gradient": net(lambda n, x: n.one(x) * F.linear(x, n.one.weight.detach()), one=linear()),
    },
)


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(D, P))


def _weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(D, P)), nn.Tanh(), nn.Linear(P, 2))


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


def _symmetric() -> nn.Module:
    layer = nn.Linear(D, D)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return layer


def _split(n: nn.Module, x: Tensor) -> Tensor:
    first, second = n.w.chunk(2)
    return F.linear(x, first) * F.linear(x, second)


REPARAMETRISED = family(
    "reparametrised",
    {
        "weight-norm": on(_weight_norm, T, D),
        "weight-norm-old": on(_old_weight_norm, T, D),
        "weight-norm-conv": on(lambda: parametrizations.weight_norm(nn.Conv1d(4, 6, 3, groups=2), dim=2), 4, 8),
        "spectral-norm-eval": on(lambda: parametrizations.spectral_norm(nn.Linear(D, P)).eval(), T, D),
        "orthogonal": on(lambda: parametrizations.orthogonal(nn.Linear(D, D)), T, D),
        "symmetric": on(_symmetric, T, D),
        "concatenated": net(
            lambda n, x: F.linear(x, torch.cat([n.q, n.k, n.v])), q=raw(2, D), k=raw(3, D), v=raw(1, D)
        ),
        "split": net(_split, w=raw(2 * P, D)),
    },
)

STRUCTURE = TIES + FREEZING + REPARAMETRISED
