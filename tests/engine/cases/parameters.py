"""Raw parameters: tensors that a model uses without a layer around them."""

import torch
from torch import Tensor, nn

from engine.cases.case import D, Net, P, Problem, T, family, ids, linear, net, on, param, raw
from engine.cases.hidden import Product


def _class_token(n: nn.Module, x: Tensor) -> Tensor:
    return n.out(torch.cat([n.token.expand(len(x), -1, -1), x], 1))


def _repeated_token(n: nn.Module, x: Tensor) -> Tensor:
    return n.out(torch.cat([n.token.repeat(len(x), 1, 1), x], 1))


def _mask_token(n: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
    return n.out(torch.where(hidden[..., None], n.token, x))


def _assigned_token(n: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
    h = n.out(x)
    h[hidden] = n.token
    return h.tanh()


def _prompt(n: nn.Module, x: Tensor) -> Tensor:
    """Prompt tuning: a prompt is prepended, mixed with the sequence and read off at the end."""
    h = torch.cat([n.prompt[None].expand(len(x), -1, -1), x], 1)
    return n.out(h.softmax(1) * h)[:, -1:]


def _spectral_filter(n: nn.Module, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(n.filter), n=x.shape[1], dim=1)


def _hypernetwork(n: nn.Module, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, n.hyper(n.code).view(P, D))


def _own_weights(n: nn.Module, x: Tensor) -> Tensor:
    """Each example computes its own weight."""
    return torch.bmm(x, n.hyper(x.mean(1)).view(len(x), D, P))


def _by_an_identity(eye):
    """As in DoRA of `peft`: the weight of two layers, found by an identity, sets a scale that has no gradient."""

    def forward(n: nn.Module, x: Tensor) -> Tensor:
        weight = n.two(n.one(eye(x.device).to(n.scale.dtype))).T
        return n.two(n.one(x)) * (n.scale / weight.detach().norm(dim=1))

    return net(forward, one=linear(D, 2), two=linear(2, P), scale=raw(P))


def _written_into_zeros(n: nn.Module, x: Tensor) -> Tensor:
    """As in OFT and FourierFT of `peft`: few numbers make a matrix."""
    weight = torch.zeros(D, P, device=x.device, dtype=n.p.dtype)
    weight[n.places[0], n.places[1]] = n.p
    weight[0] = 2 * n.p[0]
    return x @ weight


def _best_of_a_bank(n: nn.Module, x: Tensor) -> Tensor:
    """As in VB-LoRA of `peft`: the largest scores choose vectors of a bank."""
    scores, best = n.scores.topk(2, dim=-1)
    return x @ (scores.softmax(-1)[..., None] * n.bank[best]).sum(1)


def _tokens_of_an_attribute(n: nn.Module, x: Tensor) -> Tensor:
    """As in prompt tuning of `peft`: the ids are a plain tensor, not a buffer."""
    prompt = n.table(n.tokens.to(x.device)).expand(len(x), -1, -1)
    h = torch.cat([prompt, x], 1)
    return n.out(h.softmax(1) * h)


def _written_at(*index: object):
    """A token that is written at a place, or at several."""

    def forward(n: nn.Module, x: Tensor) -> Tensor:
        h = n.out(x)
        h[(slice(None), *index)] = n.token
        return h.cumsum(1).tanh()

    return forward


def _augmented(n: nn.Module, h: Tensor) -> Tensor:
    h += n.p
    h *= n.p
    return h.tanh()


def _linear_and(function, **parts):
    """A linear layer, then the function of its outputs, so that gradient also flows past the parameter."""
    return net(lambda n, x: function(n, n.linear(x)), linear=linear(), **parts)


def _positive(*shape: int):
    return lambda: nn.Parameter(0.5 + torch.rand(shape))


def _mask(*shape: int):
    return lambda: nn.Buffer((torch.rand(shape) < 0.6).float())


TOKENS = family(
    "parameter",
    {
        "class-token-expand": net(_class_token, token=raw(1, 1, D), out=linear()),
        "class-token-repeat": net(_repeated_token, token=raw(1, 1, D), out=linear()),
        "prompt": net(_prompt, prompt=raw(2, D), out=linear()),
        "mask-token-where": lambda B: Problem(
            Net(_mask_token, token=param(D), out=nn.Linear(D, P)), (torch.randn(B, T, D), torch.rand(B, T) < 0.5)
        ),
        "positions": net(lambda n, x: n.out(x + n.table), table=raw(1, T, D), out=linear()),
        "positions-sliced": net(lambda n, x: n.out(x + n.table[: x.shape[1]]), table=raw(8, D), out=linear()),
        "positions-sliced-3d": net(lambda n, x: n.out(x + n.table[:, : x.shape[1]]), table=raw(1, 8, D), out=linear()),
        "type-row": lambda B: Problem(
            Net(lambda n, i, x: n.table[1] + n.table[i] + x, table=param(4, D)),
            (ids(B, T, high=4), torch.randn(B, T, D)),
        ),
        "output-is-the-parameter": net(lambda n, x: n.p.expand(len(x), -1) + 0 * x, (D,), p=raw(D)),
        "mask-token-assigned": lambda B: Problem(
            Net(_assigned_token, token=param(P), out=nn.Linear(D, P)), (torch.randn(B, T, D), torch.rand(B, T) < 0.5)
        ),
        "token-at-a-place": net(_written_at(1), token=raw(P), out=linear()),
        "tokens-at-places": net(_written_at(slice(1, None)), token=raw(2, P), out=linear()),
        "token-in-columns": net(_written_at(..., slice(0, 2)), token=raw(1), out=linear()),
        "tokens-of-an-attribute": net(
            _tokens_of_an_attribute, table=lambda: nn.Embedding(3, D), tokens=lambda: torch.arange(3), out=linear()
        ),
    },
)

ARITHMETIC = family(
    "parameter",
    {
        "layer-scale": _linear_and(lambda n, h: h.detach() + n.p * h, p=raw(P)),
        "scale-alone": net(lambda n, x: x * n.p, p=raw(D)),
        "shift-alone": net(lambda n, x: x + n.p, p=raw(D)),
        "subtract-from": _linear_and(lambda n, h: n.p - h, p=raw(P)),
        "add-alpha": _linear_and(lambda n, h: torch.add(h, n.p, alpha=0.3), p=raw(P)),
        "channel-scale": net(lambda n, x: x * n.p[:, None, None], (4, 3, 5), p=raw(4)),
        "temperature": _linear_and(lambda n, h: (h * n.p).softmax(-1), p=_positive()),
        "temperature-exp": _linear_and(lambda n, h: h * n.p.exp(), p=raw()),
        "divided-by": _linear_and(lambda n, h: h / n.p, p=_positive(P)),
        "divides": _linear_and(lambda n, h: n.p / (1 + h.square()), p=raw(P)),
        "times-exp": _linear_and(lambda n, h: h * n.p.exp(), p=raw(P)),
        "power": _linear_and(lambda n, h: (1 + h.square()) ** n.p, p=raw(P)),
        "exponentiated": _linear_and(lambda n, h: n.p ** h.tanh(), p=_positive(P)),
        "pruned": net(lambda n, x: x @ (n.w * n.mask), w=raw(D, P), mask=_mask(D, P)),
        "masked-shift": _linear_and(lambda n, h: h + n.p * n.mask, p=raw(T, P), mask=_mask(T, P)),
        "where": _linear_and(lambda n, h: torch.where(h > 0, h, n.p), p=raw(P)),
        "where-scalar": _linear_and(lambda n, h: torch.where(h > 0, h, n.p * h), p=raw()),
        "lerp": _linear_and(lambda n, h: torch.lerp(h, h.square(), n.p), p=_positive(P)),
        "lerp-end": _linear_and(lambda n, h: torch.lerp(h, n.p.expand_as(h), 0.3), p=raw(P)),
        "addcmul": _linear_and(lambda n, h: torch.addcmul(n.shift, h, n.scale, value=0.5), shift=raw(P), scale=raw(P)),
        "maximum": _linear_and(lambda n, h: torch.maximum(h, n.p), p=raw(P)),
        "clamp": _linear_and(lambda n, h: h.clamp(min=n.p), p=raw(P)),
        "gate": _linear_and(lambda n, h: n.p.sigmoid() * h + (1 - n.p.sigmoid()) * h.square(), p=raw(P)),
        "cumsum": _linear_and(lambda n, h: h + n.p.cumsum(0), p=raw(P)),
        "sorted": _linear_and(lambda n, h: h * n.p.sort().values, p=raw(P)),
        "by-an-identity": _by_an_identity(lambda device: torch.eye(D, device=device)),
        "by-a-diagonal": _by_an_identity(lambda device: torch.ones(D, device=device).diag()),
        "written-into-zeros": net(
            _written_into_zeros, p=raw(4), places=lambda: torch.stack([torch.randperm(D)[:4], torch.randperm(P)[:4]])
        ),
        "best-of-a-bank": net(_best_of_a_bank, scores=raw(D, 4), bank=raw(4, P)),
        "custom-function": net(lambda n, x: x @ Product.apply(n.p, n.q), p=raw(D, 2), q=raw(2, P)),
        "one-by-one": net(lambda n, x: sum(x @ w for w in n.weights), weights=raw(3, D, P)),
        "softmax-mixture": net(lambda n, x: (n.p.softmax(0)[:, None] * x).sum(1), p=raw(T)),
        "stacked": _linear_and(lambda n, h: h * torch.stack([n.p, n.q]).mean(0), p=raw(P), q=raw(P)),
        "normalised": _linear_and(lambda n, h: h * n.p / n.p.norm(), p=raw(P)),
        "outer": _linear_and(lambda n, h: h + torch.outer(n.p, n.q), p=raw(T), q=raw(P)),
        "prelu": on(lambda: nn.Sequential(nn.Linear(D, P), nn.PReLU()), D),
        "prelu-channels": on(lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.PReLU(6)), 4, 8),
        "spectral-filter": net(_spectral_filter, (4, D), filter=raw(3, D, 2)),
        "hypernetwork": net(_hypernetwork, code=raw(2), hyper=linear(2, P * D)),
        "hypernetwork-of-the-example": net(_own_weights, hyper=linear(D, D * P)),
        "in-place-add": _linear_and(lambda n, h: h.add_(n.p).tanh(), p=raw(P)),
        "in-place-mul": _linear_and(lambda n, h: h.mul_(n.p).tanh(), p=raw(P)),
        "in-place-operator": _linear_and(_augmented, p=raw(P)),
    },
)


PARAMETERS = TOKENS + ARITHMETIC
