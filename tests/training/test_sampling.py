"""Poisson sampling as it is accounted for, cut into physical batches whose tickets cannot be mixed up."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from qclip.training import sampling
from qclip.training.dataset import dataset_size
from qclip.training.loader import Ticket, TicketLoader, Tickets, cut
from qclip.training.plan import TrainingPlan
from qclip.training.sampling import PoissonSampler, UniformSampler, fixed_size

N, RATE = 200, 0.1


def sampler(size=N, rate=RATE, seed=0):
    return PoissonSampler(size, rate, np.random.SeedSequence(seed))


def numbers(size=N):
    return TensorDataset(torch.arange(size), torch.arange(size) % 3)


def loader(source, *, drawn=None, physical_batch_size=None, steps=range(5)):
    plan = TrainingPlan(N, 20, steps.stop, steps_per_pass=max(steps.stop, 1), noise_multiplier=0.0, delta=1e-5)
    done = range(steps.start)
    return TicketLoader(source, drawn or sampler(), plan, done=done, physical_batch_size=physical_batch_size)


@pytest.mark.parametrize("many", [N + 1, N], ids=["example by example", "number first"])
def test_examples_join_independently_with_the_stated_probability(many, monkeypatch):
    monkeypatch.setattr(sampling, "_MANY", many)
    steps = 4000
    joined = np.zeros((steps, N))
    for step in range(steps):
        joined[step, sampler().draw(step)] = 1
    standard = (joined - RATE) / math.sqrt(RATE * (1 - RATE))
    # Under the null each of these is close to a standard normal; 6 fails one seed in 1e6 over all of them together.
    each_example = standard.sum(0) / math.sqrt(steps)
    assert np.abs(each_example).max() < 6
    pairs = np.triu(standard.T @ standard / math.sqrt(steps), k=1)
    assert np.abs(pairs).max() < 7  # 2e4 pairs, skewed
    consecutive = (standard[1:] * standard[:-1]).sum(0) / math.sqrt(steps - 1)
    assert np.abs(consecutive).max() < 6
    sizes = np.bincount(joined.sum(1).astype(int), minlength=N + 1)
    expected = steps * stats.binom.pmf(np.arange(N + 1), N, RATE)
    usual = expected > 20
    statistic = ((sizes - expected)[usual] ** 2 / expected[usual]).sum()
    assert stats.chi2.sf(statistic, usual.sum()) > 1e-5


def test_a_draw_of_a_hundred_million_costs_what_it_draws():
    drawn = PoissonSampler(10**8, 1e-5, np.random.SeedSequence(0)).draw(0)  # 800 MB if it cost a number per example
    assert (np.diff(drawn) > 0).all()
    assert drawn.min() >= 0
    assert drawn.max() < 10**8
    assert abs(len(drawn) - 1000) < 6 * math.sqrt(1000)
    quarters = np.bincount(drawn // (10**8 // 4), minlength=4)
    assert stats.chisquare(quarters).pvalue > 1e-5


@pytest.mark.parametrize("physical_batch_size", [None, 3])
def test_tensors_are_gathered_as_a_data_loader_collates_them(physical_batch_size):
    dataset = TensorDataset(torch.randn(N, 2, 3), torch.arange(N), torch.arange(N) % 2 == 0)
    quick = loader(dataset, physical_batch_size=physical_batch_size)
    usual = loader(DataLoader(dataset), physical_batch_size=physical_batch_size)
    for a, b in zip(quick, usual, strict=True):
        assert type(a) is type(b)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert not any(
            x.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for x in a for t in dataset.tensors
        )
        assert quick.tickets.front == usual.tickets.front
        quick.tickets.clear()
        usual.tickets.clear()


def test_uniform_batches_have_one_size_and_every_example_as_often_as_any_other():
    steps, drawn = 4000, UniformSampler(N, 20, np.random.SeedSequence(1))
    joined = np.zeros((steps, N))
    for step in range(steps):
        joined[step, drawn.draw(step)] = 1
    assert (joined.sum(1) == 20).all()
    standard = (joined - 0.1) / math.sqrt(0.1 * 0.9)
    # Close to standard normals, 200 of them and 2e4 pairs: 6 and 7 fail one seed in 1e6.
    assert np.abs(standard.sum(0) / math.sqrt(steps)).max() < 6
    pairs = np.triu(standard.T @ standard / math.sqrt(steps), k=1)
    assert np.abs(pairs).max() < 7
    assert (drawn.draw(3) == drawn.draw(3)).all()
    assert (drawn.draw(3) != drawn.draw(4)).any()


def test_a_draw_is_a_function_of_the_seed_and_the_step():
    assert np.array_equal(sampler().draw(3), sampler().draw(3))
    assert not np.array_equal(sampler().draw(3), sampler().draw(4))
    assert not np.array_equal(sampler().draw(3), sampler(seed=1).draw(3))
    assert len(sampler(rate=1.0).draw(0)) == N


@given(size=st.integers(0, 40), width=st.none() | st.integers(1, 50))
def test_a_logical_batch_is_cut_without_loss(size, width):
    indices = np.arange(size) * 3
    parts = list(cut(indices, 7, width))
    tickets = [ticket for _, ticket in parts]
    assert [ticket.last for ticket in tickets] == [False] * (len(parts) - 1) + [True]
    assert [(ticket.step, ticket.position) for ticket in tickets] == [(7, part) for part in range(len(parts))]
    assert sum(ticket.num_examples for ticket in tickets) == size
    assert all(len(chosen) == ticket.num_slots <= (width or 40) for chosen, ticket in parts)
    if size:
        assert [index for chosen, _ in parts for index in chosen] == indices.tolist()
    else:
        assert [chosen for chosen, _ in parts] == [[0]]
        assert not tickets[0].is_counted(torch.device("cpu")).any()


def test_batches_are_those_that_were_drawn():
    batches = list(loader(numbers(), physical_batch_size=8))
    drawn = np.concatenate([sampler().draw(step) for step in range(5)])
    assert torch.equal(torch.cat([x for x, _ in batches]), torch.from_numpy(drawn))
    assert max(len(x) for x, _ in batches) <= 8


def pairs(examples):
    return {"double": torch.stack([x for x, _ in examples]) * 2}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_a_data_loader_keeps_its_collate_function_and_workers(workers):
    source = DataLoader(numbers(), batch_size=7, shuffle=True, collate_fn=pairs, **workers)
    again = loader(source, physical_batch_size=8)
    plain = [x * 2 for x, _ in loader(numbers(), physical_batch_size=8)]
    for _ in range(2):
        found = []
        for batch in again:
            ticket = again.tickets.redeem(batch)
            assert ticket.num_slots == len(batch["double"])
            found.append(batch["double"])
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_the_global_stream_is_left_alone():
    before = torch.get_rng_state()
    list(loader(numbers()))
    assert torch.equal(torch.get_rng_state(), before)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Stream(), r"dataset = 'Stream' must be map-style"),
        (
            DataLoader(numbers(), sampler=SubsetRandomSampler([1, 2])),
            "with SubsetRandomSampler.* torch.utils.data.Subset",
        ),
        (DataLoader(numbers(), sampler=WeightedRandomSampler([1.0] * N, N)), "with WeightedRandomSampler"),
        (DataLoader(numbers(), batch_sampler=[[0, 1], [2]]), "a DataLoader with list"),
        (DataLoader(numbers(), batch_size=None), "a DataLoader with NoneType"),
    ],
)
def test_what_cannot_be_sampled_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        dataset_size(source)


def test_the_size_is_that_of_the_data_set():
    assert dataset_size(numbers()) == N
    assert dataset_size(DataLoader(Subset(numbers(), [1, 2, 3]), batch_size=2, shuffle=True)) == 3


def test_a_batch_without_a_ticket_is_refused():
    tickets = Tickets()
    with pytest.raises(
        ValueError, match=r"batch is not an unused batch of training.loader: use each of its batches once"
    ):
        tickets.redeem(torch.zeros(3))


def test_a_batch_of_another_size_is_refused():
    tickets = Tickets()
    tickets.issue(Ticket(0, 0, 5, last=True), torch.zeros(5, 2))
    with pytest.raises(ValueError, match=r"tensors of shapes \[\(4, 2\)\], but .* has 5 examples"):
        tickets.redeem(torch.zeros(4, 2))
    assert tickets.redeem((torch.zeros(5, 9), torch.tensor(1))).num_examples == 5


def test_a_skipped_batch_is_noticed():
    tickets, first, second = Tickets(), torch.zeros(5), torch.ones(5)
    shared = torch.arange(3)
    tickets.issue(Ticket(0, 0, 5, last=True), (first, shared))
    tickets.issue(Ticket(1, 0, 5, last=True), (second, shared))
    with pytest.raises(ValueError, match=r"batch is not the next one of training.loader: use every batch, in order"):
        tickets.redeem((second, shared))
    assert tickets.redeem((first, shared)).step == 0
    assert tickets.redeem((second, shared)).step == 1


def test_a_wrapper_may_fetch_ahead():
    source = loader(numbers(), physical_batch_size=8)
    ahead = iter(source)
    held = [next(ahead), next(ahead)]
    for batch in ahead:
        held.append(batch)
        assert source.tickets.redeem(held.pop(0)[0].clone()).num_slots
    assert source.tickets.redeem(held.pop(0)).last is False
    assert source.tickets.redeem(held.pop(0)).last is True


def test_a_new_pass_ends_the_one_before():
    source = loader(numbers())
    old = iter(source)
    next(old)
    new = iter(source)
    batch = next(new)
    with pytest.raises(ValueError, match=r"this pass over training.loader has ended, .* start a new one"):
        next(old)
    assert source.tickets.redeem(batch).step == 0


def filled(dataset_size, batch_size, size):
    """How many rows are computed for one that counts, when every physical batch is filled up to one size."""
    drawn = np.arange(dataset_size + 1)
    chances = stats.binom.pmf(drawn, dataset_size, batch_size / dataset_size)
    rows = np.array([max(1, math.ceil(n / size)) * size for n in drawn])
    return float(chances @ rows) / batch_size


@pytest.mark.parametrize(
    ("dataset_size", "batch_size"),
    [(250, 100), (100, 100), (1000, 30), (10_000, 64), (10_000, 256), (50_000, 1024), (50_000, 4096), (60_000, 30_000)],
)
def test_physical_batches_of_one_size_are_filled_by_less_than_a_tenth(dataset_size, batch_size):
    size = fixed_size("poisson", dataset_size, batch_size)
    assert 1 <= size <= dataset_size
    assert filled(dataset_size, batch_size, size) < 1.1
    assert filled(dataset_size, batch_size, 3 * batch_size // 2) > 1.1  # what is computed here can be too much


def test_larger_batches_are_cut_into_larger_parts():
    sizes = [fixed_size("poisson", 50_000, batch_size) for batch_size in (16, 64, 256, 1024, 4096, 16384)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 16384  # a draw as a whole


def test_batches_of_one_size_and_of_every_example_are_not_cut():
    assert fixed_size("uniform", 1000, 30) == 30
    assert fixed_size("poisson", 30, 30) == 30


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_tiny_batches_go_one_by_one(batch_size):
    """Where no draw is likely to be the expected one, only parts of one example fill nothing up."""
    assert fixed_size("poisson", 1000, batch_size) == 1
