"""Record and replay: what one example can move, against what is accounted for, over every threshold and grouping.

A run is recorded; its releases are replayed, value by value, to a run on the data without one example, so that both
have the same parameters, thresholds and noise at every step. Every raw value of the two is then compared with its
declared bound, and all of a step's together with the one Gaussian release that epsilon is computed for.
"""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from engine.driven import as_traced
from qclip.engine.gradients import clipping
from qclip.thresholds import (
    BalancedThreshold,
    Constant,
    GeometricQuantile,
    HistogramQuantile,
    PrivateQuantile,
    SlackQuantile,
)
from qclip.training.make import make_private
from qclip.training.sampling import PoissonSampler
from shards import every

THRESHOLDS = {
    "constant": Constant(0.05),
    "scheduled": Constant(lambda step: 0.5 / (1 + step)),
    "private quantile": PrivateQuantile(0.5),
    "private quantile, high": PrivateQuantile(0.9, initial=3.0),
    "geometric": GeometricQuantile(0.5),
    "geometric, off centre": GeometricQuantile(0.9, centre=0.1),
    "histogram": HistogramQuantile(0.5),
    "slack": SlackQuantile(0.5, initial=1.0),
    "balanced": BalancedThreshold(),
}
GROUPS = {"flat": "flat", "per-layer": "per-layer", "named": {"head": "2.*", "rest": "*"}}
Z = 0.5
"""Small enough for the slack's limits at this batch size."""


def data():
    """Examples with no gradient at all, large ones, infinite and undefined ones among usual ones."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(250, 4, generator=generator), torch.randint(3, (250,), generator=generator)
    x[0], x[1], x[2], x[3] = 1e6, math.nan, math.inf, 1e-20
    return TensorDataset(x, y)


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def fused(training, model, optimizer):
    for x, y in training.loader:
        training.step(x, y)


def ordinary(training, model, optimizer):
    for x, y in training.loader:
        training.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled(training, model, optimizer):
    """By compiled steps, which are traced here and not made into machine code."""
    with mock.patch("qclip.engine.compiled.driver.compile_graph", as_traced):
        fused(training, model, optimizer)


def without_reduction(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def run(threshold, groups, physical_batch_size, door, momentum=0.0, **changes):
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=momentum)
    settings = {"loss": nn.CrossEntropyLoss(), "batch_size": 100, "steps": 3, "noise_multiplier": Z} | changes
    training = make_private(
        network, optimizer, data(), delta=1e-4, threshold=threshold, groups=GROUPS[groups], compile=door is compiled,
        physical_batch_size=physical_batch_size, seed=5, **settings,  # it draws each of those that are removed
    )  # fmt: skip
    door(training, network, optimizer)
    return training


def moved(a, b):
    """By how much each group of a raw sum differs."""
    squares = np.zeros(len(a.group_bounds))
    for name, tensor in a.tensors.items():
        squares[a.members[name]] += (tensor - b.tensors[name]).double().square().sum().item()
    return np.sqrt(squares)


def compare(monkeypatch, make_recorder, run, gone):
    """For each example removed, the squared shift of each step in units of its noise, [steps].

    Every value is held against its own bound on the way.
    """
    draw = PoissonSampler.draw
    whole = make_recorder()
    history = run().history
    per_step = len(whole.values) // len(history)
    for example in gone:
        other = make_recorder(whole.released)
        without = lambda self, step, example=example: (full := draw(self, step))[full != example]  # noqa: E731
        monkeypatch.setattr(PoissonSampler, "draw", without)
        assert run().history == history
        costs = np.zeros(len(history))
        for i, (a, b) in enumerate(zip(whole.values, other.values, strict=True)):
            shift = moved(a, b)
            assert (shift <= np.array(a.group_bounds) * (1 + 1e-5)).all()
            costs[i // per_step] += (shift**2 / np.square(whole.stds[i])).sum()
        yield example, costs


DOORS = {"whole": (None, fused), "fused": (40, fused), "ordinary": (40, ordinary), "compiled": (40, compiled)}


TURNS = [
    (*pair, door)
    for i, pair in enumerate(itertools.product(THRESHOLDS, GROUPS))
    for door in (list(DOORS) * 2)[i % 4 : i % 4 + 4]
]
"""Every threshold with every grouping, by one door after the other, and then by the other three."""


@pytest.mark.parametrize(("threshold", "groups", "door"), every(len(DOORS), TURNS, name="-".join))
def test_removing_an_example_moves_a_step_by_what_is_accounted_for(monkeypatch, make_recorder, threshold, groups, door):
    run_it = lambda: run(THRESHOLDS[threshold], groups, *DOORS[door])  # noqa: E731
    for example, costs in compare(monkeypatch, make_recorder, run_it, gone=[0, 1, 3, 40]):
        # Gradient and counts together are one Gaussian release at z: the squared shift in units of noise is at most
        # 1/z^2.
        assert (costs <= (1 + 1e-4) / Z**2).all()
        if example != 1:  # one that is not finite adds nothing to the gradient
            assert costs.max() > 0


@pytest.mark.parametrize(
    ("threshold", "groups", "momentum"),
    [("balanced", "flat", 0.0), ("balanced", "per-layer", 0.9), ("private quantile", "named", 0.0)],
)
def test_a_learning_rate_that_finds_itself_depends_on_releases_only(
    monkeypatch, make_recorder, threshold, groups, momentum
):
    """The history of each run without an example is compared with the whole one's, learning rates and all."""
    runs = []

    def run_it():
        runs.append(run(THRESHOLDS[threshold], groups, None, fused, steps=8, step_size="auto", momentum=momentum))
        return runs[-1]

    for _, costs in compare(monkeypatch, make_recorder, run_it, gone=[0, 40]):
        assert (costs <= (1 + 1e-4) / Z**2).all()
        assert costs.max() > 0
    rates = [record.step_size * math.hypot(*record.tau) for record in runs[0].history]
    assert len(set(rates[1:4])) == 3  # they were learnt
    for other in runs[1:]:
        assert [record.step_size for record in other.history] == [record.step_size for record in runs[0].history]


@pytest.mark.parametrize("loss", [without_reduction, nn.CrossEntropyLoss(reduction="sum")])
def test_whatever_the_loss_is_made_of(monkeypatch, make_recorder, loss):
    run_it = lambda: run(PrivateQuantile(0.5), "flat", None, fused, loss=loss)  # noqa: E731
    ((_, costs),) = compare(monkeypatch, make_recorder, run_it, gone=[0])
    assert (costs <= (1 + 1e-4) / Z**2).all()
    assert costs.max() > 0


@pytest.mark.parametrize("door", [fused, compiled])
def test_the_comparison_can_fail(monkeypatch, make_recorder, door):
    """An engine that does not clip is caught: the shift of the large example is beyond its bound."""
    unclipped = lambda norms, clip_norms, **_: [norms.is_usable.to(clip_norms.dtype)]  # noqa: E731
    whole, draw = make_recorder(), PoissonSampler.draw
    monkeypatch.setattr(clipping, "clip_factors", unclipped)
    run(Constant(0.05), "flat", None, door)
    other = make_recorder(whole.released)
    monkeypatch.setattr(clipping, "clip_factors", unclipped)
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: (full := draw(self, step))[full != 0])
    run(Constant(0.05), "flat", None, door)
    shifts = [moved(a, b)[0] for a, b in zip(whole.values, other.values, strict=True)]
    assert max(shifts) > 1.0
