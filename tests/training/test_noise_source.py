"""The source of noise: 128 secret bits, and draws that share nothing."""

import math
from itertools import combinations

import numpy as np
import torch

from qclip.thresholds import PrivateQuantile
from qclip.training.noise import NoiseSource, release
from qclip.training.sums import BoundedSum
from training.test_resume import Run

N = 50_000


def noise(source, size=1000):
    """What a release of this source adds."""
    value = BoundedSum({"a": torch.zeros(size, dtype=torch.float64)}, {"a": 0}, (1.0,), (size,))
    return release(value, 1.0, source).tensors["a"].numpy()


def correlation(a, b):
    return abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a))


def test_without_a_seed_every_bit_of_the_key_is_drawn():
    """Each of 128 bits is seen as 0 and as 1: among 64 keys one is not in 1.4e-17 of all tries."""
    keys = [NoiseSource().state_dict()["key"] for _ in range(64)]
    assert len(set(keys)) == 64
    both = 0
    for key in keys:
        both |= key ^ keys[0]
    assert both == 2**128 - 1


def test_every_bit_of_a_seed_counts():
    """Seeds that agree in their last 32, 64 or 96 bits have noise of their own."""
    found = [noise(NoiseSource(seed)) for seed in (5, 5 + 2**32, 5 + 2**64, 5 + 2**96, 5 + 2**127)]
    for one, other in combinations(found, 2):
        assert not np.array_equal(one, other)
        assert correlation(one, other) < 5  # ten pairs, each fails one seed in 2e6
    assert np.array_equal(noise(NoiseSource(5)), found[0])


def test_every_bit_of_the_key_counts():
    """So there is nothing smaller than the key to search through."""
    source = NoiseSource(0)
    first, words = noise(source, 4), source.words()
    for bit in range(128):
        other = NoiseSource(0)
        other.load_state_dict({"key": source.state_dict()["key"] ^ 1 << bit, "draws": 0})
        assert not np.isin(noise(other, 4), first).any()
        assert set(other.words()).isdisjoint(words)


def test_parts_and_draws_share_nothing():
    source = NoiseSource(1)
    streams = [source.streams() for _ in range(2)]
    found = [stream(part).standard_normal(N) for stream in streams for part in (0, 1, 2**40)]
    assert len(np.unique(np.concatenate(found))) > 0.9999 * 6 * N
    for one, other in combinations(found, 2):
        assert correlation(one, other) < 5  # 15 pairs and their neighbours, each fails one seed in 2e6
        assert correlation(one[1:], other[:-1]) < 5


def test_a_part_is_the_same_whenever_it_is_asked_for():
    stream = NoiseSource(2).streams()
    late = [stream(part).standard_normal(5) for part in (3, 0)]
    assert np.array_equal(late[0], stream(3).standard_normal(5))
    assert np.array_equal(late[1], stream(0).standard_normal(5))


def test_a_kernels_words_are_not_those_that_made_normal_numbers():
    """A run that goes on in another way than it was saved takes the same draw for another purpose."""
    one, other = NoiseSource(3), NoiseSource(3)
    words = one.words()
    assert all(0 <= word < 2**64 for word in words)
    assert set(words).isdisjoint(other.streams()(0).bit_generator.random_raw(1000).tolist())


def test_it_goes_on_where_its_state_was_taken():
    source = NoiseSource(4)
    noise(source)
    state = source.state_dict()
    expected = noise(source), source.words()
    again = NoiseSource(5)
    again.load_state_dict(state)
    assert np.array_equal(noise(again), expected[0])
    assert again.words() == expected[1]
    assert {type(value) for value in state.values()} == {int}


def key(run):
    return run.training.state_dict()["secrets"]["noise"]["key"]


def test_runs_have_keys_of_their_own():
    """Every one of their four words is drawn anew: one of them is the same by chance in one pair of 1e9."""
    first, second = (key(Run(PrivateQuantile(0.5))) for _ in range(2))
    assert all(first >> shift & 0xFFFFFFFF != second >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96))
    seeded = [key(Run(PrivateQuantile(0.5), seed=seed)) for seed in (5, 5, 5 + 2**32, 5 + 2**64)]
    assert seeded[0] == seeded[1]
    assert len(set(seeded)) == 3


def test_gradients_and_counts_have_draws_of_their_own(recorder):
    """No two releases of a run, of either kind, share noise."""
    run = Run(PrivateQuantile(0.5)).go("fused", stop=2)
    assert run.training.state_dict()["secrets"]["noise"]["draws"] == len(recorder.released) == 4


def test_on_another_kind_of_device_a_run_goes_on_with_fresh_noise():
    """Its sums round otherwise, and what two continuations add to different sums can be subtracted."""
    run = Run(PrivateQuantile(0.5), seed=5).go("fused", stop=1)
    state = run.training.state_dict()
    same, moved = Run(PrivateQuantile(0.5)), Run(PrivateQuantile(0.5), seed=5)
    same.training.load_state_dict(state)
    assert key(same) == key(run)
    state["secrets"]["noise"]["kind"] = "cuda"
    moved.training.load_state_dict(state)
    assert key(moved) != key(run)
