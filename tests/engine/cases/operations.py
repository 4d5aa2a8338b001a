"""Products, convolutions, embeddings and norms: one row for each way to call them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.cases.case import D, Net, P, Problem, T, V, family, ids, linear, net, on, param, raw


def _transformers_conv1d() -> nn.Module:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(P, D)


def _transposed(forward):
    """Examples in the second dimension inside, in the first outside."""
    return lambda n, x: forward(n, x.transpose(0, 1)).transpose(0, 1)


LINEAR = family(
    "linear",
    {
        "2d": on(lambda: nn.Linear(D, P), D),
        "2d-no-bias": on(lambda: nn.Linear(D, P, bias=False), D),
        "3d": on(lambda: nn.Linear(D, P), T, D),
        "3d-no-bias": on(lambda: nn.Linear(D, P, bias=False), T, D),
        "4d": on(lambda: nn.Linear(D, P), 2, T, D),
        "4d-no-bias": on(lambda: nn.Linear(D, P, bias=False), 2, T, D),
        "5d": on(lambda: nn.Linear(D, P), 2, T, 1, D),
        "few-positions-wide": on(lambda: nn.Linear(24, 20), 2, 24),
        "many-positions-narrow": on(lambda: nn.Linear(3, 2), 24, 3),
        "one-output": on(lambda: nn.Linear(D, 1), T, D),
        "transposed-input": net(lambda n, x: n.layer(x.transpose(1, 2)), layer=linear(T, P)),
        "two-layers": on(lambda: nn.Sequential(nn.Linear(D, P), nn.Tanh(), nn.Linear(P, 7)), T, D),
        "functional": net(lambda n, x: F.linear(x, n.w, n.b), w=raw(P, D), b=raw(P)),
        "functional-keywords": net(lambda n, x: F.linear(input=x, weight=n.w, bias=n.b), w=raw(P, D), b=raw(P)),
    },
)

PRODUCTS = family(
    "product",
    {
        "transformers-conv1d": on(_transformers_conv1d, T, D),
        "addmm": net(lambda n, x: torch.addmm(n.b, x, n.w), (D,), w=raw(D, P), b=raw(P)),
        "addmm-scaled": net(lambda n, x: torch.addmm(n.b, x, n.w, beta=0.5, alpha=2.0), (D,), w=raw(D, P), b=raw(P)),
        "right-2d": net(lambda n, x: x @ n.w, (D,), w=raw(D, P)),
        "right-3d": net(lambda n, x: x @ n.w, w=raw(D, P)),
        "right-vector": net(lambda n, x: x @ n.w, w=raw(D)),
        "right-broadcast": net(lambda n, x: x @ n.w, (2, T, D), w=raw(2, D, P)),
        "left": net(lambda n, x: n.w @ x, w=raw(P, T)),
        "left-square": net(lambda n, x: torch.matmul(n.w, x), w=raw(T, T)),
        "transposed-table": lambda B: Problem(
            Net(lambda n, i, x: n.emb(i) + x @ n.emb.weight @ n.emb.weight.T @ n.emb.weight, emb=nn.Embedding(V, D)),
            (ids(B, T), torch.randn(B, T, V)),
        ),
        "logits-of-table": net(lambda n, x: x @ n.emb.weight.T, emb=lambda: nn.Embedding(V, D)),
        "einsum": net(lambda n, x: torch.einsum("bti,io->bto", x, n.w), w=raw(D, P)),
        "einsum-heads": net(lambda n, x: torch.einsum("btd,dhk->bhtk", x, n.w), w=raw(D, 2, 4)),
        "einsum-three": net(lambda n, x: torch.einsum("bti,io,bto->bt", x, n.w, x), w=raw(D, D)),
        "tensordot": net(lambda n, x: torch.tensordot(x, n.w, dims=2), w=raw(T, D, P)),
        "bmm-experts": net(_transposed(lambda n, x: torch.bmm(x, n.w)), w=raw(T, D, P)),
        "baddbmm-experts": net(_transposed(lambda n, x: torch.baddbmm(n.b, x, n.w)), w=raw(T, D, P), b=raw(T, 1, P)),
        "bmm-expanded": net(lambda n, x: torch.bmm(n.w.expand(len(x), -1, -1), x), w=raw(1, P, T)),
        "bilinear-module": lambda B: Problem(nn.Bilinear(D, P, 3), (torch.randn(B, T, D), torch.randn(B, T, P))),
        "bilinear-functional": lambda B: Problem(
            Net(lambda n, x, y: F.bilinear(x, y, n.w), w=param(3, D, P)), (torch.randn(B, D), torch.randn(B, P))
        ),
        "cdist-prototypes": net(lambda n, x: torch.cdist(x, n.w), w=raw(P, D)),
        "cosine-prototypes": net(lambda n, x: F.normalize(x, dim=-1) @ F.normalize(n.w, dim=0), w=raw(D, P)),
        "kron": net(lambda n, x: x @ torch.kron(n.a, n.b), a=raw(2, 3), b=raw(3, 2)),
    },
)

CONVOLUTIONS = family(
    "conv",
    {
        "1d": on(lambda: nn.Conv1d(4, 6, 3), 4, 8),
        "1d-no-bias": on(lambda: nn.Conv1d(4, 6, 3, bias=False), 4, 8),
        "1d-stride-padding-dilation": on(lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2), 4, 9),
        "1d-groups": on(lambda: nn.Conv1d(4, 6, 3, groups=2), 4, 8),
        "1d-depthwise": on(lambda: nn.Conv1d(4, 4, 3, groups=4, padding=1), 4, 8),
        "1d-same": on(lambda: nn.Conv1d(4, 6, 3, padding="same"), 4, 8),
        "1d-same-even-kernel": on(lambda: nn.Conv1d(4, 6, 4, padding="same"), 4, 8),
        "1d-same-dilated": on(lambda: nn.Conv1d(4, 6, 3, padding="same", dilation=3), 4, 8),
        "1d-valid": on(lambda: nn.Conv1d(4, 6, 3, padding="valid"), 4, 8),
        "1d-causal": net(lambda n, x: n.conv(F.pad(x, (2, 0))), (4, 8), conv=lambda: nn.Conv1d(4, 6, 3)),
        "1d-reflect": on(lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="reflect"), 4, 8),
        "1d-replicate": on(lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="replicate"), 4, 8),
        "1d-circular": on(lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular"), 4, 8),
        "1d-same-circular": on(lambda: nn.Conv1d(4, 6, 3, padding="same", padding_mode="circular"), 4, 8),
        "2d": on(lambda: nn.Conv2d(3, 5, 3), 3, 6, 5),
        "2d-no-bias": on(lambda: nn.Conv2d(3, 5, 3, bias=False), 3, 6, 5),
        "2d-asymmetric": on(lambda: nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), 3, 7, 6),
        "2d-stride-leaves-a-rest": on(lambda: nn.Conv2d(3, 5, 3, stride=2), 3, 6, 6),
        "2d-groups": on(lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), 4, 5, 5),
        "2d-depthwise-multiplier": on(lambda: nn.Conv2d(3, 6, 3, groups=3), 3, 5, 5),
        "2d-pointwise": on(lambda: nn.Conv2d(3, 5, 1), 3, 4, 5),
        "2d-patches": on(lambda: nn.Conv2d(3, 5, 2, stride=2), 3, 6, 4),
        "2d-whole-image": on(lambda: nn.Conv2d(3, 5, (4, 5)), 3, 4, 5),
        "2d-same": on(lambda: nn.Conv2d(3, 5, (3, 5), padding="same"), 3, 6, 5),
        "2d-valid": on(lambda: nn.Conv2d(3, 5, 3, padding="valid"), 3, 6, 5),
        "2d-reflect": on(lambda: nn.Conv2d(3, 5, 3, padding=(1, 2), padding_mode="reflect"), 3, 6, 5),
        "2d-replicate": on(lambda: nn.Conv2d(3, 5, 3, padding=(1, 2), padding_mode="replicate"), 3, 6, 5),
        "2d-circular": on(lambda: nn.Conv2d(3, 5, 3, padding=(1, 2), padding_mode="circular"), 3, 6, 5),
        "2d-channels-last": net(
            lambda n, x: n.conv(x.contiguous(memory_format=torch.channels_last)),
            (3, 6, 5),
            conv=lambda: nn.Conv2d(3, 5, 3),
        ),
        "2d-functional": net(lambda n, x: F.conv2d(x, n.w, n.b, 2, 1), (3, 6, 5), w=raw(5, 3, 3, 3), b=raw(5)),
        "2d-frames-in-the-batch": net(
            lambda n, x: n.conv(x.flatten(0, 1)).unflatten(0, (len(x), T)),
            (T, 2, 4, 5),
            conv=lambda: nn.Conv2d(2, 5, 3),
        ),
        "2d-stack": on(
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(10, 7)
            ),
            3,
            6,
            8,
        ),
        "3d": on(lambda: nn.Conv3d(2, 3, 2), 2, 3, 4, 3),
        "3d-everything": on(
            lambda: nn.Conv3d(2, 4, (2, 3, 2), stride=(1, 2, 1), padding=(1, 2, 0), dilation=(1, 1, 2), groups=2),
            2,
            3,
            4,
            4,
        ),
        "3d-same": on(lambda: nn.Conv3d(2, 3, 3, padding="same"), 2, 3, 4, 3),
        "3d-replicate": on(lambda: nn.Conv3d(2, 3, 3, padding=1, padding_mode="replicate", bias=False), 2, 3, 4, 3),
        "3d-reflect": on(lambda: nn.Conv3d(2, 3, 3, padding=1, padding_mode="reflect"), 2, 3, 4, 3),
        "3d-circular": on(lambda: nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular"), 2, 3, 4, 3),
        "transpose-1d": on(lambda: nn.ConvTranspose1d(4, 6, 3), 4, 5),
        "transpose-1d-stride": on(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), 4, 5),
        "transpose-2d": on(lambda: nn.ConvTranspose2d(3, 5, 3), 3, 4, 3),
        "transpose-2d-everything": on(
            lambda: nn.ConvTranspose2d(
                4, 6, (3, 2), stride=2, padding=1, output_padding=(1, 0), groups=2, dilation=2, bias=False
            ),
            4,
            4,
            3,
        ),
        "transpose-3d": on(lambda: nn.ConvTranspose3d(2, 3, 2), 2, 2, 3, 2),
    },
)


def _ragged_bag(n: nn.Module, words: Tensor, lengths: Tensor) -> Tensor:
    """The first words of each example in one flat list, with the places where each bag begins."""
    flat = words[torch.arange(words.shape[1], device=words.device) < lengths[:, None]]
    return n.bag(flat, lengths.cumsum(0) - lengths)


def _flat_bag(n: nn.Module, words: Tensor) -> Tensor:
    return n.bag(words.flatten(), torch.arange(0, words.numel(), words.shape[1], device=words.device))


EMBEDDINGS = family(
    "embedding",
    {
        "1d-ids": lambda B: Problem(nn.Embedding(V, D), ids(B)),
        "2d-ids": lambda B: Problem(nn.Embedding(V, D), ids(B, T)),
        "3d-ids": lambda B: Problem(nn.Embedding(V, D), ids(B, 2, T)),
        "padding": lambda B: Problem(nn.Embedding(V, D, padding_idx=1), ids(B, 6, high=3)),
        "negative-padding": lambda B: Problem(nn.Embedding(3, D, padding_idx=-1), ids(B, 6, high=3)),
        "all-padding": lambda B: Problem(nn.Embedding(V, D, padding_idx=1), torch.ones(B, T, dtype=torch.long)),
        "repeated-ids": lambda B: Problem(nn.Embedding(V, D), ids(B, 8, high=2)),
        "int32-ids": lambda B: Problem(nn.Embedding(V, D), ids(B, T).int()),
        "functional": lambda B: Problem(Net(lambda n, i: F.embedding(i, n.table), table=param(V, D)), ids(B, T)),
        "indexed": lambda B: Problem(Net(lambda n, i: n.table[i], table=param(V, D)), ids(B, 6, high=4)),
        "indexed-negative": lambda B: Problem(Net(lambda n, i: n.table[i - V], table=param(V, D)), ids(B, T)),
        "indexed-twice": lambda B: Problem(
            Net(lambda n, i, j: n.table[i, j], table=param(V, 7, D)), (ids(B, T), ids(B, T, high=7))
        ),
        "indexed-columns": lambda B: Problem(
            Net(lambda n, i: n.table[:, i].movedim(0, -1), table=param(D, V)), ids(B, T)
        ),
        "index-select": lambda B: Problem(
            Net(lambda n, i: n.table.index_select(0, i.flatten()).view(*i.shape, D), table=param(V, D)), ids(B, T)
        ),
        "gather": lambda B: Problem(
            Net(lambda n, i: n.table.expand(len(i), V).gather(1, i), table=param(V)), ids(B, 5)
        ),
        "one-hot": lambda B: Problem(Net(lambda n, i: F.one_hot(i, V).float() @ n.table, table=param(V, D)), ids(B, T)),
        "bag-sum": lambda B: Problem(nn.EmbeddingBag(V, D, mode="sum"), ids(B, T)),
        "bag-mean": lambda B: Problem(nn.EmbeddingBag(V, D, mode="mean"), ids(B, T)),
        "bag-max": lambda B: Problem(nn.EmbeddingBag(V, D, mode="max"), ids(B, T)),
        "bag-padding": lambda B: Problem(nn.EmbeddingBag(4, D, mode="mean", padding_idx=1), ids(B, 6, high=4)),
        "bag-repeated": lambda B: Problem(nn.EmbeddingBag(V, D, mode="mean"), ids(B, 8, high=2)),
        "bag-weights": lambda B: Problem(
            Net(lambda n, i, w: n.bag(i, per_sample_weights=w), bag=nn.EmbeddingBag(V, D, mode="sum")),
            (ids(B, T), torch.randn(B, T)),
        ),
        "bag-learned-weights": lambda B: Problem(
            Net(
                lambda n, i, x: n.bag(i, per_sample_weights=n.gate(x)),
                bag=nn.EmbeddingBag(V, D, mode="sum"),
                gate=nn.Linear(D, T),
            ),
            (ids(B, T), torch.randn(B, D)),
        ),
        "bag-offsets": lambda B: Problem(Net(_flat_bag, bag=nn.EmbeddingBag(V, D, mode="mean")), ids(B, T)),
    },
) + family(
    "embedding",
    {
        "bag-ragged": lambda B: Problem(
            Net(_ragged_bag, bag=nn.EmbeddingBag(V, D, mode="mean")), (ids(B, 5), torch.randint(1, 6, (B,)))
        ),
        "scaled-by-frequency": lambda B: Problem(nn.Embedding(V, D, scale_grad_by_freq=True), ids(B, 6, high=3)),
        "sparse": lambda B: Problem(nn.Embedding(V, D, sparse=True), ids(B, 6, high=3)),
    },
    may_refuse=True,
)


def _randomised(norm: nn.Module) -> nn.Module:
    """The norm with affine parameters and running statistics that are not ones and zeros; in evaluation mode."""
    for tensor in norm.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    return norm.eval()


def _rms(n: nn.Module, x: Tensor) -> Tensor:
    """As in Llama: normalised in float32, scaled in the input's precision."""
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return n.weight * scaled.to(x.dtype)


def _before_linear(norm: nn.Module, width: int = D) -> nn.Module:
    return nn.Sequential(norm, nn.Linear(width, P))


def _image(tokens: Tensor, *sizes: int) -> Tensor:
    """[B, positions, channels] -> [B, channels, *sizes], where it lies: channels last, by what no stride of 1 tells."""
    return tokens.mT.unflatten(2, sizes)


def _of_tokens(norm, *sizes):
    """The norm of an image made of tokens; the gradient lies in the order of the image's dimensions."""
    return net(
        lambda n, x: n.norm(_image(n.one(x), *sizes)),
        (math.prod(sizes), D),
        one=linear(),
        norm=lambda: _randomised(norm(P)),
    )


def _time_first(function, tokens: Tensor) -> Tensor:
    return function(tokens.transpose(0, 1).contiguous()).transpose(0, 1)


def _to_tokens(norm, *sizes):
    """The other way round: an image in the order of its dimensions is normed, and the gradient is one of tokens."""
    return net(
        lambda n, x: _time_first(n.one, n.norm(x * n.scale).flatten(2).mT),
        (P, *sizes),
        scale=raw(P, *sizes),
        norm=lambda: _randomised(norm(P)),
        one=linear(P, 2),
    )


def _checkpointed_norm(n: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(n.norm, _image(n.one(x), 2, 3), use_reentrant=False)


NORMS = family(
    "norm",
    {
        "layer-2d": on(lambda: nn.LayerNorm(D), D),
        "layer-3d": on(lambda: nn.LayerNorm(D), T, D),
        "layer-4d": on(lambda: nn.LayerNorm(D), 2, T, D),
        "layer-two-dimensions": on(lambda: nn.LayerNorm((T, D)), 2, T, D),
        "layer-no-bias": on(lambda: nn.LayerNorm(D, bias=False), T, D),
        "layer-no-affine": on(lambda: _before_linear(nn.LayerNorm(D, elementwise_affine=False)), T, D),
        "layer-functional": net(lambda n, x: F.layer_norm(x, (D,), weight=n.w, bias=n.b), w=raw(D), b=raw(D)),
        "layer-within": on(
            lambda: nn.Sequential(nn.Linear(D, 8), _randomised(nn.LayerNorm(8)), nn.GELU(), nn.Linear(8, P)), T, D
        ),
        "rms": on(lambda: _before_linear(_randomised(nn.RMSNorm(D))), T, D),
        "rms-no-affine": on(lambda: _before_linear(nn.RMSNorm(D, elementwise_affine=False)), T, D),
        "rms-by-hand": on(lambda: _before_linear(Net(_rms, weight=param(D))), T, D),
        "group-2d": on(lambda: _before_linear(_randomised(nn.GroupNorm(2, D))), D),
        "group-3d": on(lambda: _before_linear(_randomised(nn.GroupNorm(3, 6)), 7), 6, 7),
        "group-4d": on(lambda: _before_linear(_randomised(nn.GroupNorm(2, 4)), 5), 4, 3, 5),
        "group-no-affine": on(lambda: _before_linear(nn.GroupNorm(2, 4, affine=False), 5), 4, 3, 5),
        "instance-1d": on(lambda: _before_linear(_randomised(nn.InstanceNorm1d(4, affine=True)), 7), 4, 7),
        "instance-2d": on(lambda: _before_linear(_randomised(nn.InstanceNorm2d(4, affine=True)), 5), 4, 3, 5),
        "instance-no-affine": on(lambda: _before_linear(nn.InstanceNorm2d(4), 5), 4, 3, 5),
        "batch-1d-eval": on(lambda: _before_linear(_randomised(nn.BatchNorm1d(D))).eval(), D),
        "batch-1d-3d-eval": on(lambda: _before_linear(_randomised(nn.BatchNorm1d(4)), 7).eval(), 4, 7),
        "batch-2d-eval": on(lambda: _before_linear(_randomised(nn.BatchNorm2d(4)), 5).eval(), 4, 3, 5),
        "batch-frozen-in-training": on(
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), _randomised(nn.BatchNorm2d(4)), nn.ReLU()), 3, 4, 5
        ),
        "batch-2d-of-tokens": _of_tokens(nn.BatchNorm2d, 2, 3),
        "batch-2d-to-tokens": _to_tokens(nn.BatchNorm2d, 2, 3),
        "batch-2d-one-line": _of_tokens(nn.BatchNorm2d, 1, 3),
        "batch-3d-to-tokens": _to_tokens(nn.BatchNorm3d, 2, 1, 3),
        "batch-2d-no-affine": _of_tokens(lambda width: nn.BatchNorm2d(width, affine=False), 2, 3),
        "batch-2d-checkpointed": net(
            _checkpointed_norm, (6, D), one=linear(), norm=lambda: _randomised(nn.BatchNorm2d(P))
        ),
    },
)

OPERATIONS = LINEAR + PRODUCTS + CONVOLUTIONS + EMBEDDINGS + NORMS
