"""How a model runs: in place, recomputed, in other layouts, with other inputs and outputs."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.cases.case import (
    D,
    Net,
    P,
    Problem,
    T,
    V,
    family,
    ids,
    linear,
    net,
    on,
    param,
    raw,
    squared,
    token_loss,
)
from engine.cases.hidden import Product
from engine.cases.structure import ignored_labels


def _twice_in_place(n: nn.Module, x: Tensor) -> Tensor:
    h = n.one(x)
    other = 3 * h
    return F.relu(h.add_(1.0)) + other.mul_(2.0)


def _checkpointed(n: nn.Module, x: Tensor) -> Tensor:
    return n.out(checkpoint(n.block, x, use_reentrant=False))


def _block(dropout: float = 0.0):
    middle = nn.Dropout(dropout) if dropout else nn.Identity()
    return lambda: nn.Sequential(nn.Linear(D, 7), nn.Tanh(), middle, nn.Linear(7, D))


class _Doubled(torch.autograd.Function):
    """An identity that doubles the gradient, of the sort that knows nothing of vmap."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def _own_teacher(n: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = n.one(x).tanh()
    return n.one(x) - target


def _relu_inside(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(layers[0], nn.ReLU(inplace=True), layers[1])


EXECUTION = family(
    "executed",
    {
        "in-place-relu": on(lambda: _relu_inside(nn.Linear(D, P), nn.Linear(P, 2)), T, D),
        "in-place-relu-conv": on(lambda: _relu_inside(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 2)), 3, 6, 5),
        "in-place-twice": net(_twice_in_place, one=linear()),
        "in-place-residual": net(lambda n, x: n.two(n.one(x).add_(x)), one=linear(D, D), two=linear()),
        "checkpointed": net(_checkpointed, block=_block(), out=linear()),
        "checkpointed-twice": net(lambda n, x: _checkpointed(n, _checkpointed(n, x)), block=_block(), out=linear(D, D)),
        "custom-function": net(lambda n, x: n.two(_Doubled.apply(n.one(x))), one=linear(D, D), two=linear()),
        "no-grad-branch": net(_own_teacher, one=linear()),
        "branch-on-shape": net(lambda n, x: n.one(x) if x.shape[1] > 2 else n.two(x), one=linear(), two=linear()),
        "evaluation-mode": on(lambda: nn.Sequential(nn.Linear(D, P), nn.Dropout(0.5), nn.Linear(P, 2)).eval(), T, D),
        "parameter-list": net(
            lambda n, x: sum(x @ w for w in n.weights),
            weights=lambda: nn.ParameterList([param(D, P) for _ in range(3)]),
        ),
        "parameter-dict": net(
            lambda n, x: x @ n.parts["weight"] + n.parts["bias"],
            parts=lambda: nn.ParameterDict({"bias": param(P), "weight": param(D, P)}),
        ),
        "registered-in-another-order": net(
            lambda n, x: n.last(n.middle(n.first(x).tanh()).tanh()),
            last=linear(7, 2),
            first=linear(D, P),
            middle=linear(P, 7),
        ),
    },
)

RANDOM = family(
    "executed",
    {
        "dropout": on(lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(D, P), nn.Dropout(0.4), nn.Linear(P, 2)), T, D),
        "dropout-after-conv": on(
            lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.Dropout2d(0.4), nn.Conv2d(5, 2, 2)), 3, 6, 5
        ),
        "checkpointed-dropout": net(_checkpointed, block=_block(0.4), out=linear()),
        "noise": net(lambda n, x: n.one(x + n.p * torch.randn_like(x)), one=linear(), p=raw(D)),
    },
    random=True,
)


def _opaque(n: nn.Module, x: Tensor) -> Tensor:
    return Product.apply(n.one(x).tanh(), n.w)


def _looks_at_values(n: nn.Module, x: Tensor) -> Tensor:
    """A branch that no example decides, in the middle of what no capture sees into."""
    h = _opaque(n, x)
    return h if bool((h.abs() >= 0).any()) or bool(h.isnan().any()) else 2 * h


OPAQUE = family(
    "executed",
    {
        "custom-function-of-a-parameter": net(lambda n, x: Product.apply(x, n.w), (D,), w=raw(D, P)),
        "custom-function-behind-a-layer": net(_looks_at_values, one=linear(), w=raw(P, 2)),
    },
) + family(
    "executed",
    {"custom-function-with-dropout": net(lambda n, x: _opaque(n, F.dropout(x, 0.4)), one=linear(), w=raw(P, 2))},
    random=True,
)


def _mlp(turn, turn_back):
    """A network whose rows are arranged otherwise inside."""
    return net(
        lambda n, x: turn_back(n.two(n.norm(n.one(turn(x)).tanh())), x),
        one=linear(),
        norm=lambda: nn.LayerNorm(P),
        two=linear(P, 2),
    )


def _transposed(x: Tensor, like: Tensor | None = None) -> Tensor:
    return x.transpose(0, 1)


def _words_and_places(combine, **parts) -> nn.Module:
    """Embeddings of words and of positions; ``combine`` is a function of the net and the ids."""
    return Net(combine, words=nn.Embedding(V, D), places=nn.Embedding(8, D), out=nn.Linear(D, P), **parts)


def _placed(positions):
    """Words plus the places that a function of the ids names."""
    return lambda B: Problem(_words_and_places(lambda n, i: n.out(n.words(i) + n.places(positions(i)))), ids(B, T))


def _order(i: Tensor) -> Tensor:
    return torch.arange(i.shape[1], device=i.device)


def _buffered_places(n: nn.Module, i: Tensor) -> Tensor:
    return n.out(n.words(i) + n.places(n.order[:, : i.shape[1]]))


def _relative_bias(n: nn.Module, i: Tensor) -> Tensor:
    """As in T5: the bias of a pair of positions comes from a table, without a batch dimension."""
    words, order = n.words(i), _order(i)
    bias = n.places((order[:, None] - order) % 8).sum(-1)
    return n.out((words @ words.mT + bias).softmax(-1) @ words)


def _routed(n: nn.Module, x: Tensor) -> Tensor:
    """Each token goes to one expert; how many tokens an expert sees depends on the data."""
    flat = x.reshape(-1, D)
    choice = n.router(flat).argmax(-1)
    out = flat.new_zeros(len(flat), P)
    for e, expert in enumerate(n.experts):
        rows = (choice == e).nonzero().squeeze(1)
        out = out.index_add(0, rows, expert(flat[rows]))
    return out.view(*x.shape[:2], P)


def _gated(n: nn.Module, x: Tensor) -> Tensor:
    outputs = torch.stack([expert(x) for expert in n.experts], -1)
    return (outputs * n.router(x).softmax(-1).unsqueeze(-2)).sum(-1)


def _pooling_head() -> nn.Module:
    """A query of its own for every example; the attention is time-first inside."""
    pool = lambda n, x: n.attention(n.probe.repeat(len(x), 1, 1), x, x)[0][:, 0]  # noqa: E731
    return Net(pool, probe=param(1, 1, D), attention=nn.MultiheadAttention(D, 2, batch_first=True))


def _unread(n: nn.Module, x: Tensor) -> Tensor:
    """As in classifiers that pool by a mean, with a pooling head that the model has anyway."""
    n.head(x)
    return n.out(x.mean(1))


def _switched_off(n: nn.Module, x: Tensor) -> Tensor:
    """A time-first branch that gets no gradient, though the loss depends on it."""
    return n.out(x + n.off * n.branch(x.transpose(0, 1)).transpose(0, 1))


def _experts(function):
    experts = lambda: nn.ModuleList([nn.Linear(D, P), nn.Linear(D, P)])  # noqa: E731
    return net(function, router=linear(D, 2), experts=experts)


LAYOUTS = family(
    "rows",
    {
        "flattened": _mlp(lambda x: x.reshape(-1, D), lambda h, x: h.view(-1, x.shape[1], 2)),
        "position-ids-as-input": lambda B: Problem(
            _words_and_places(lambda n, ids, positions: n.out(n.words(ids) + n.places(positions))),
            {"ids": ids(B, T), "positions": torch.arange(T)[None]},
        ),
        "position-ids-2d-inside": _placed(lambda i: _order(i)[None]),
        "position-ids-1d-inside": _placed(_order),
        "position-ids-expanded": _placed(lambda i: _order(i).expand_as(i)),
        "position-ids-repeated": _placed(lambda i: torch.tensor([0, 2, 0], device=i.device)),
        "position-ids-shifted-by-example": _placed(lambda i: _order(i) + i[:, :1] % 4),
        "position-ids-buffer": lambda B: Problem(
            _words_and_places(_buffered_places, order=nn.Buffer(torch.arange(8)[None])), ids(B, T)
        ),
        "relative-bias": lambda B: Problem(_words_and_places(_relative_bias), ids(B, T)),
        "linear-of-a-constant": net(
            lambda n, x: x * n.one(n.buffer), buffer=lambda: nn.Buffer(torch.randn(T, 4)), one=linear(4, D)
        ),
        "norm-of-a-parameter": net(lambda n, x: x @ n.norm(n.w), w=raw(D, P), norm=lambda: nn.LayerNorm(P)),
        "token-mixing": net(lambda n, x: n.two(n.one(x.mT).mT.tanh()), one=linear(T, T), two=linear()),
        "gated-experts": _experts(_gated),
        "pooled": net(lambda n, x: n.two(n.one(x).tanh().max(1).values), one=linear(), two=linear(P, 2)),
        "pooled-by-attention": net(lambda n, x: n.out(n.head(x)), head=_pooling_head, out=linear()),
        "pooled-by-attention-unread": net(_unread, head=_pooling_head, out=linear()),
        "time-first-switched-off": net(
            _switched_off, branch=linear(D, D), off=lambda: nn.Buffer(torch.zeros(D)), out=linear()
        ),
        "one-token-read": net(lambda n, x: n.two(n.one(x)[:, 0]), one=linear(), two=linear(P, 2)),
    },
)

ODD_LAYOUTS = family(
    "rows",
    {
        "time-first": _mlp(_transposed, _transposed),
        "time-flattened": _mlp(
            lambda x: x.transpose(0, 1).reshape(-1, D), lambda h, x: h.view(x.shape[1], -1, 2).transpose(0, 1)
        ),
        "routed-experts": _experts(_routed),
    },
)


def _penalised(B: int) -> Problem:
    """The penalty is in the loss function, outside the model."""
    model = nn.Linear(D, P)
    loss = lambda outputs, targets: squared(outputs, targets) + 0.1 * model.weight.square().sum()  # noqa: E731
    return Problem(model, torch.randn(B, T, D), loss=loss)


def _returning(function, loss, **parts):
    """A net whose outputs are not one tensor, and a loss that knows them."""
    return lambda B: Problem(
        Net(function, **{name: part() for name, part in parts.items()}), torch.randn(B, T, D), loss=loss
    )


def _two_losses(outputs, targets):
    return squared(outputs[0], targets) + 0.3 * squared(outputs[1].tanh(), targets)


def _words_to_words() -> nn.Module:
    return nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V))


def _doubles(batch_size: int, *shape: int) -> Tensor:
    return torch.randn(batch_size, *shape, dtype=torch.float64)


INTERFACES = family(
    "interface",
    {
        "two-inputs": lambda B: Problem(
            Net(lambda n, x, i: n.one(x) + n.embedding(i), one=nn.Linear(D, P), embedding=nn.Embedding(V, P)),
            (torch.randn(B, T, D), ids(B, T)),
        ),
        "dict-inputs": lambda B: Problem(
            Net(lambda n, *, x, scale: n.one(x) * scale[:, None, None], one=nn.Linear(D, P)),
            {"x": torch.randn(B, T, D), "scale": torch.randn(B)},
        ),
        "dict-outputs": _returning(
            lambda n, x: {"logits": n.one(x), "hidden": x},
            lambda outputs, targets: squared(outputs["logits"], targets),
            one=linear(),
        ),
        "object-outputs": _returning(
            lambda n, x: SimpleNamespace(logits=n.one(x)),
            lambda outputs, targets: squared(outputs.logits, targets),
            one=linear(),
        ),
        "two-heads": _returning(
            lambda n, x: (n.one(n.body(x)), n.two(n.body(x))),
            _two_losses,
            body=linear(D, 7),
            one=linear(7, 2),
            two=linear(7, P),
        ),
        "ignored-labels": lambda B: Problem(_words_to_words(), ids(B, T), ignored_labels(B), token_loss),
        "all-labels-ignored": lambda B: Problem(_words_to_words(), ids(B, T), torch.full((B, T), -100), token_loss),
        "cross-entropy-module": lambda B: Problem(
            nn.Linear(D, P), torch.randn(B, D), ids(B, high=P), nn.CrossEntropyLoss(reduction="none")
        ),
        "penalty-in-the-model": net(lambda n, x: n.one(x) + 0.1 * n.one.weight.square().sum(), one=linear()),
        "float64": lambda B: Problem(nn.Linear(D, P).double(), _doubles(B, T, D), 2 * _doubles(B)),
        "scalars": net(lambda n, x: n.one(x) * n.scalar + n.row, one=linear(D, 1), scalar=raw(), row=raw(1, 1)),
    },
) + family("interface", {"penalty-in-the-loss": _penalised}, may_refuse=True)

WIRING = EXECUTION + RANDOM + OPAQUE + LAYOUTS + ODD_LAYOUTS + INTERFACES
