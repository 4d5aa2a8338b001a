"""Record and replay, of clients: what one of them can move in a round, over every private threshold and grouping.

As `test_replay` does for examples: a run is recorded, and its releases are replayed to the run without one client.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from federated import rounds
from qclip.engine.gradients import clipping
from shards import every

Z = 0.5
GONE = [*rounds.ODD, 20, 21]
MALFORMED = {
    "names": lambda update: {"other": torch.ones(3)} | update,
    "missing": lambda update: dict(list(update.items())[1:]),
    "shape": lambda update: {name: x[None] for name, x in update.items()},
    "integers": lambda update: {name: torch.ones(x.shape, dtype=torch.long) for name, x in update.items()},
    "arrays": lambda update: {name: np.ones(x.shape) for name, x in update.items()},
    "nothing": lambda update: None,
    "sparse": lambda update: {name: x.to_sparse() for name, x in update.items()},
    "complex": lambda update: {name: x.to(torch.complex64) for name, x in update.items()},
}


def run(threshold, groups, path, gone=(), breaks=None):
    """The history of a run without some clients, or with a malformed update from them."""
    aggregator = rounds.aggregator(rounds.PRIVATE[threshold], groups, noise_multiplier=Z, num_clients=102)
    for number in range(2):
        drawn = [client for client in aggregator.sample() if breaks or client not in gone]
        updates = [rounds.update_of(client, number) for client in drawn]
        if breaks:
            pairs = zip(drawn, updates, strict=True)
            updates = [MALFORMED[breaks](update) if client in gone else update for client, update in pairs]
        if path == "streamed":
            aggregator.aggregate(updates, malformed="drop" if breaks else "refuse")
        elif path == "stacked":
            aggregator.aggregate_stacked(rounds.stacked(updates))
        else:
            aggregator.aggregate_answered(rounds.answers_of(aggregator, updates))
    return aggregator.history


def moved(a, b):
    """By how much each group of a raw sum differs."""
    squares = np.zeros(len(a.group_bounds))
    for name, tensor in a.tensors.items():
        squares[a.members[name]] += (tensor - b.tensors[name]).double().square().sum().item()
    return np.sqrt(squares)


def costs_without(make_recorder, whole, history, run_without):
    """The squared shift of each round in units of its noise, [rounds]; every value is held against its own bound."""
    other = make_recorder(whole.released)
    assert run_without() == history
    per_round = len(whole.values) // len(history)
    costs = np.zeros(len(history))
    for i, (a, b) in enumerate(zip(whole.values, other.values, strict=True)):
        shift = moved(a, b)
        assert (shift <= np.array(a.group_bounds) * (1 + 1e-5)).all()
        costs[i // per_round] += (shift**2 / np.square(whole.stds[i])).sum()
    return costs


TURNS = [
    (*pair, path)
    for i, pair in enumerate(itertools.product(rounds.PRIVATE, rounds.GROUPS))
    for path in (["streamed", "stacked", "answered"] * 2)[i % 3 : i % 3 + 3]
]


@pytest.mark.parametrize(("threshold", "groups", "path"), every(10, TURNS, name="-".join))
def test_removing_a_client_moves_a_round_by_what_is_accounted_for(make_recorder, threshold, groups, path):
    whole = make_recorder()
    history = run(threshold, groups, path)
    for client in GONE if path != "answered" else GONE[::2]:  # it takes longer
        costs = costs_without(
            make_recorder, whole, history, lambda client=client: run(threshold, groups, path, gone=[client])
        )
        # Sum and counts together are one Gaussian release at z: the squared shift in units of noise is at most 1/z^2.
        assert (costs <= (1 + 1e-4) / Z**2).all()
        if client >= 20:
            assert costs.max() > 0


LIES = {
    "not clipped": lambda update, answer: ({name: 1e6 * x for name, x in update.items()}, answer),
    "loud answer": lambda update, answer: (update, 1e6 * (answer + 1)),
    "louder answer": lambda update, answer: (update, torch.full_like(answer, 3e38)),
    "both at their bounds": lambda update, answer: (update, answer.abs() + 1),
    "undefined answer": lambda update, answer: (update, torch.full_like(answer, math.nan)),
    "undefined update": lambda update, answer: ({name: x * math.inf for name, x in update.items()}, answer),
    "short answer": lambda update, answer: (update, answer[1:]),
    "no tensor": lambda update, answer: (update, None),
    "integers": lambda update, answer: (update, answer.long()),
}


def run_with_liar(threshold, groups, lie, liar=20, gone=()):
    aggregator = rounds.aggregator(rounds.PRIVATE[threshold], groups, noise_multiplier=Z, num_clients=102)
    for number in range(2):
        drawn = [client for client in aggregator.sample() if client not in gone]
        replies = rounds.answers_of(aggregator, [rounds.update_of(client, number) for client in drawn])
        pairs = zip(drawn, replies, strict=True)
        replies = [LIES[lie](*reply) if client == liar else reply for client, reply in pairs]
        aggregator.aggregate_answered(replies, malformed="drop")
    return aggregator.history


@pytest.mark.parametrize(("threshold", "groups", "lie"), every(
    13, itertools.product([name for name in rounds.PRIVATE if "geo" not in name], rounds.GROUPS, LIES), name="-".join
))  # fmt: skip
def test_a_client_that_lies_moves_a_round_by_no_more(make_recorder, threshold, groups, lie):
    whole = make_recorder()
    history = run_with_liar(threshold, groups, lie)
    costs = costs_without(make_recorder, whole, history, lambda: run_with_liar(threshold, groups, lie, gone=[20]))
    assert (costs <= (1 + 1e-4) / Z**2).all()
    if lie in ("not clipped", "both at their bounds"):
        assert costs.max() > 0.2 / Z**2


@pytest.mark.parametrize("breaks", MALFORMED)
def test_a_malformed_update_is_a_client_that_did_not_reply(make_recorder, breaks):
    whole = make_recorder()
    history = run("private quantile", "per-layer", "streamed", gone=[20, 21, 22])
    other = make_recorder(whole.released)
    assert run("private quantile", "per-layer", "streamed", gone=[20, 21, 22], breaks=breaks) == history
    for a, b in zip(whole.values, other.values, strict=True):
        assert all(torch.equal(a.tensors[key], b.tensors[key]) for key in a.tensors)


def test_the_comparison_can_fail(monkeypatch, make_recorder):
    """An aggregator that does not clip is caught."""
    unclipped = lambda norms, clip_norms: [norms.is_usable.to(clip_norms.dtype)]  # noqa: E731
    whole = make_recorder()
    monkeypatch.setattr(clipping, "clip_factors", unclipped)
    run("constant", "flat", "streamed")
    other = make_recorder(whole.released)
    monkeypatch.setattr(clipping, "clip_factors", unclipped)
    run("constant", "flat", "streamed", gone=[0])
    assert max(moved(a, b)[0] for a, b in zip(whole.values, other.values, strict=True)) > 100 * 0.7
