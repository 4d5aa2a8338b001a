"""Rows that data move: experts, images among words, sorted batches; attributed by the indices that moved them."""

import warnings

import pytest
import torch
from torch import nn

from engine.cases import Net
from engine.cases.case import ids, param, raw, squared
from engine.compare import assert_same
from qclip.engine import Engine, Refusal, explain, oracle

B, T, D, E, K = 4, 5, 8, 3, 2


@pytest.fixture(autouse=True)
def _no_warning():
    """A model that is proven at every step, or run one example at a time, says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def grouped(n, x, change=lambda order: order):
    """Tokens are sorted by expert, go through grouped products and a table of the experts' own, and come back."""
    flat = x.reshape(-1, D)
    shares, chosen = n.router(flat).softmax(-1).topk(K, -1)
    experts, order = chosen.flatten().sort()
    order = change(order)
    ends = torch.bincount(experts, minlength=E).cumsum(0).to(torch.int32)
    rows = torch._grouped_mm(flat[order // K], n.up, offs=ends) + n.bias[experts]
    rows = torch._grouped_mm(rows.tanh(), n.down.mT, offs=ends) * shares.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return n.out(rows[back].view(len(flat), K, D).sum(1).view(x.shape))


def experts(function=grouped, **parts):
    torch.manual_seed(0)
    sizes = {"router": nn.Linear(D, E), "up": raw(E, D, 2 * D)(), "bias": raw(E, 2 * D)(), "down": raw(E, D, 2 * D)()}
    return Net(function, **sizes, out=nn.Linear(D, D), **parts)


def sample(seed, size=B):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, T, D, generator=generator), torch.randn(size, generator=generator)


def check(engine, inputs, targets, clip_norm=0.1):
    def evaluate(batch):
        return squared(engine.model(*batch[0]), batch[1])

    found = engine.clipped(evaluate, (inputs, targets), clip_norm)
    assert_same(found, oracle.clipped(engine.model, evaluate, (inputs, targets), clip_norm), rtol=2e-5)


def test_experts_by_grouped_products():
    """By rules, and proven at the 1st and the 2nd batch only, wherever the rows of later ones go."""
    model = experts()
    engine = Engine(model)
    for seed in range(6):
        x, targets = sample(seed)
        check(engine, (x,), targets)
    assert engine.proofs == 2
    for size in (7, 1):
        x, targets = sample(6, size)
        check(engine, (x,), targets)
    rows = explain(model, x, loss=squared, targets=targets).parameters
    assert {row.strategy for row in rows} == {"rule"}


@pytest.mark.parametrize("sides", [(D, D), (D, 2 * D)])
@pytest.mark.parametrize("clip_norm", [0.01, 1.0])
def test_as_many_experts_as_rows(sides, clip_norm):
    """No two lengths are told apart by their size: B = E = T K, and each row may have any expert."""
    torch.manual_seed(1)
    model = Net(
        lambda n, x: torch._grouped_mm(
            x.flatten(0, 1)[(order := (x[..., 0] > 0).flatten().int().argsort())],
            n.w,
            offs=(x[..., 0] <= 0).sum().int() * torch.ones(4, dtype=torch.int32)
            + torch.tensor([0, 0, 0, 1]).int() * 99,
        )[order.argsort()].view(len(x), -1),
        w=param(4, *sides),
    )
    x = torch.randn(4, 1, D)
    check(Engine(model), (x,), torch.randn(4), clip_norm)


def sorted_by_length(n, x, lengths):
    order = lengths.argsort()
    return n.two(n.one(x[order]).tanh()[order.argsort()])


def test_a_sorted_batch():
    """Sorted already, and not."""
    torch.manual_seed(0)
    engine = Engine(Net(sorted_by_length, one=nn.Linear(D, D), two=nn.Linear(D, 2)))
    for seed, lengths in enumerate(([1, 2, 3, 4], [4, 1, 3, 2], [2, 4, 1, 3], [1, 2, 3, 4], [3, 4, 2, 1])):
        x, targets = sample(seed)
        check(engine, (x[:, 0], torch.tensor(lengths)), targets)
    assert engine.proofs == 4  # twice where rows move, twice where they do not


def with_images(n, words, images):
    """As in vision-language models: the features of images take the places of some words."""
    texts = n.words(words)
    features = n.vision(images).flatten(0, 1)
    marked = (words == 0).unsqueeze(-1).expand_as(texts)
    return n.out(texts.masked_scatter(marked, features)).flatten(1)


def with_images_indexed(n, words, images):
    texts = n.words(words).clone()
    texts[words == 0] = n.vision(images).flatten(0, 1)
    return n.out(texts).flatten(1)


def with_images_added(n, words, images):
    """As where features of several layers of an image are used."""
    texts = n.words(words).clone()
    texts[words == 0, :] = texts[words == 0, :] + n.vision(images).flatten(0, 1)
    return n.out(texts).flatten(1)


def words_with_places(*places):
    """Words, with 0 in two places of each example."""
    words = 1 + ids(len(places), T, high=9)
    for row, own in zip(words, places, strict=True):
        row[list(own)] = 0
    return words


@pytest.mark.parametrize("function", [with_images, with_images_indexed, with_images_added])
def test_images_among_words(function):
    torch.manual_seed(0)
    engine = Engine(Net(function, words=nn.Embedding(10, D), vision=nn.Linear(6, D), out=nn.Linear(D, 2)))
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        places = [torch.randperm(T, generator=generator)[:2].tolist() for _ in range(B)]
        check(engine, (words_with_places(*places), torch.randn(B, 2, 6)), torch.randn(B))
    assert engine.proofs == 2
    uneven = words_with_places((0, 1, 2), (0,), (1, 2), (3, 4))  # the second example's image in the first one's words
    with pytest.raises(Refusal):
        check(engine, (uneven, torch.randn(B, 2, 6)), torch.randn(B))


def marked_tokens(n, words, marks):
    """The same number of tokens of each example."""
    return n.out(n.words(words)[marks].view(len(words), -1, D)).flatten(1)


def test_chosen_tokens():
    torch.manual_seed(0)
    engine = Engine(Net(marked_tokens, words=nn.Embedding(10, D), out=nn.Linear(D, 2)))
    for seed in range(4):
        order = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)).argsort(1)
        check(engine, (ids(B, T, high=9), order < 2), torch.randn(B))
    assert engine.proofs == 2


# Routing by which examples meet


def limited(n, x):
    """An expert takes no more than so many tokens of the whole batch."""

    def drop(order):
        is_over = torch.arange(len(order)) >= len(order) - 3
        return torch.where(is_over, order[0], order)

    return grouped(n, x, drop)


def chosen_by_experts(n, x):
    """Each expert chooses the tokens that suit it best, of all examples."""
    flat = x.reshape(-1, D)
    chosen = n.router(flat).topk(B, 0).indices.T  # [E, B]
    rows = torch._grouped_mm(flat[chosen.flatten()], n.up, offs=B * torch.arange(1, E + 1, dtype=torch.int32))
    out = torch.zeros(len(flat), 2 * D).index_add(0, chosen.flatten(), rows)
    return (out + n.bias[0]).view(*x.shape[:2], -1) * n.down.sum()


def brought_home_to_others(n, x):
    """Rows come back one example further."""
    return grouped(n, x).roll(1, 0)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("function", [limited, chosen_by_experts, brought_home_to_others])
def test_routing_in_which_examples_meet(function):
    x, targets = sample(0)
    with pytest.raises(Refusal):
        check(Engine(experts(function)), (x,), targets)


def frozen_rows_left_moved(n, x, lengths):
    """Rows sorted by length, without a gradient, that stay where they are."""
    return n.one(x[lengths.argsort()].detach())


def test_rows_that_do_not_come_home():
    """Each loss is of another example than its target."""
    engine = Engine(Net(frozen_rows_left_moved, one=nn.Linear(D, 2)))
    x, targets = sample(0)
    with pytest.raises(Refusal):
        check(engine, (x[:, 0], torch.tensor([4, 1, 3, 2])), targets)
