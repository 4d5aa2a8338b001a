"""The common layers at shapes that hypothesis chooses, from batch 0 upward."""

import torch
import torch.nn.functional as F
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

from engine.cases import Case, Net, Problem
from engine.compare import assert_same, fast, middle, slow

batch_sizes = st.integers(0, 5)
few = st.integers(1, 4)
booleans = st.booleans()
seeds = st.integers(0, 2**31)


def check(model, inputs, seed, grouping="flat"):
    case = Case("shape", lambda batch_size: Problem(model, inputs))
    problem = case.build(inputs.shape[0], seed)
    clip_norm = middle(case, problem, grouping)
    found, expected = (run(case, problem, clip_norm, groups=grouping) for run in (fast, slow))
    assert_same(found, expected, rtol=2e-5)
    assert found.norms.shape == (len(inputs),)
    if not len(inputs):
        assert all(not sum_.any() for sum_ in found.sums.values())


@given(batch_sizes, st.lists(few, max_size=3), few, few, booleans, booleans, seeds)
def test_linear(batch_size, positions, width, out, bias, per_layer, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, out, bias=bias), nn.Tanh(), nn.Linear(out, 3))
    check(model, torch.randn(batch_size, *positions, width), seed, "per-layer" if per_layer else "flat")


@given(batch_sizes, st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), seeds)
def test_linear_on_either_side_of_the_gram_product(batch_size, length, width, out, seed):
    torch.manual_seed(seed)
    check(nn.Linear(width, out), torch.randn(batch_size, length, width), seed)


@given(
    dimensions=st.sampled_from([1, 2]),
    batch_size=batch_sizes,
    groups=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    kernel=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    stride=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    padding=st.lists(st.integers(0, 2), min_size=2, max_size=2) | st.sampled_from(["same", "valid"]),
    dilation=st.lists(st.integers(1, 2), min_size=2, max_size=2),
    size=st.lists(st.integers(1, 6), min_size=2, max_size=2),
    mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    bias=booleans,
    seed=seeds,
)
def test_convolution(
    dimensions, batch_size, groups, channels, kernel, stride, padding, dilation, size, mode, bias, seed
):
    kernel, dilation, size = kernel[:dimensions], dilation[:dimensions], size[:dimensions]
    stride = [1] * dimensions if padding == "same" else stride[:dimensions]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if padding == "same":
        assume(all(r % 2 == 0 for r in reach))
        pads = [r // 2 for r in reach]
    else:
        padding = padding if padding == "valid" else padding[:dimensions]
        pads = [0] * dimensions if padding == "valid" else padding
    assume(all(n + 2 * p > r for n, p, r in zip(size, pads, reach, strict=True)))
    assume(mode in ("zeros", "replicate") or all(p < n for n, p in zip(size, pads, strict=True)))
    assume(batch_size or mode == "zeros")  # torch pads no empty batch
    torch.manual_seed(seed)
    layer = (nn.Conv1d, nn.Conv2d)[dimensions - 1](
        groups * channels[0], groups * channels[1], kernel, stride, padding, dilation, groups, bias, mode
    )
    check(layer, torch.randn(batch_size, groups * channels[0], *size), seed)


@given(
    batch_sizes, st.lists(st.integers(1, 6), max_size=2), st.integers(1, 6), few, st.none() | st.integers(0, 5), seeds
)
def test_embedding(batch_size, positions, words, width, padding, seed):
    assume(padding is None or padding < words)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(words, width, padding_idx=padding), nn.Linear(width, 3))
    check(model, torch.randint(words, (batch_size, *positions)), seed)


@given(batch_sizes, st.integers(1, 6), st.integers(1, 6), few, seeds)
def test_tied_embedding_and_head(batch_size, length, words, width, seed):
    torch.manual_seed(seed)
    model = Net(
        lambda n, i: F.linear(n.body(n.words(i)), n.words.weight),
        words=nn.Embedding(words, width),
        body=nn.Linear(width, width),
    )
    check(model, torch.randint(words, (batch_size, length)), seed)


@example(2, [], 2, True, True, "layer", 0)  # of width 2 a gradient is what larger terms leave, and rounding
@example(2, [], 2, False, False, "layer", 0)
@given(
    batch_sizes,
    st.lists(few, max_size=2),
    st.integers(2, 6),
    booleans,
    booleans,
    st.sampled_from(["layer", "rms"]),
    seeds,
)
def test_layer_norm(batch_size, positions, width, affine, bias, kind, seed):
    torch.manual_seed(seed)
    norm = (
        nn.RMSNorm(width, elementwise_affine=affine)
        if kind == "rms"
        else nn.LayerNorm(width, elementwise_affine=affine, bias=bias)
    )
    check(nn.Sequential(nn.Linear(4, width), norm, nn.Linear(width, 2)), torch.randn(batch_size, *positions, 4), seed)


@given(st.integers(0, 5), few, few, st.lists(st.integers(2, 4), min_size=1, max_size=2), booleans, seeds)
def test_group_norm(batch_size, groups, per_group, size, affine, seed):
    torch.manual_seed(seed)
    norm = nn.GroupNorm(groups, groups * per_group, affine=affine)
    check(nn.Sequential(norm, nn.Linear(size[-1], 3)), torch.randn(batch_size, groups * per_group, *size), seed)


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]), booleans, booleans, seeds)
def test_recurrent(batch_size, length, kind, batch_first, bidirectional, seed):
    torch.manual_seed(seed)
    rnn = kind(3, 2, batch_first=batch_first, bidirectional=bidirectional)
    turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    check(Net(lambda n, x: turn(n.rnn(turn(x))[0]), rnn=rnn), torch.randn(batch_size, length, 3), seed)
