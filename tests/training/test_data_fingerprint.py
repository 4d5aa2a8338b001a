"""A run goes on with the data that it began with: a change is seen, and nothing else is taken for one."""

import hashlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from qclip.engine.randomness import RandomState
from qclip.training import data_fingerprint
from qclip.training.data_fingerprint import SAMPLE, DataFingerprint
from qclip.training.dataset import dataset_parts
from qclip.training.rows import Repeated

SEED = np.random.SeedSequence(5)
CHANGED = r"dataset has changed since the checkpoint .* put back the data that the run began with"


def tensors(size=1000):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, generator=generator), torch.randint(9, (size,), generator=generator)


def digests(dataset, seed=SEED):
    return DataFingerprint(dataset).under(seed)


def same(states, others):
    """Whether generators are where they were."""
    leaves = (pytree.tree_leaves(each) for each in (states, others))
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*leaves, strict=True))


class Items(Dataset):
    """A data set that shows nothing but its items."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, place):
        return self.items[place]


# What is seen


@pytest.mark.parametrize("change", [(0, 0), (999, 2), (517, 1)])
@pytest.mark.parametrize("chunk", [2**24, 100])
def test_one_number_of_a_table_is_enough(change, chunk, monkeypatch):
    x, y = tensors()
    before = digests(TensorDataset(x, y))
    monkeypatch.setattr(data_fingerprint, "_CHUNK", chunk)
    assert digests(TensorDataset(x.clone(), y.clone())) == before
    x[change] += 1e-6
    assert digests(TensorDataset(x, y))["rows"] != before["rows"]


def test_labels_order_length_and_dtype_count():
    x, y = tensors()
    before = digests(TensorDataset(x, y))
    flipped = y.clone()
    flipped[400] = 8 - flipped[400] if flipped[400] != 4 else 0
    for other in [
        (x, flipped),
        (x.flip(0), y.flip(0)),
        (x[:-1], y[:-1]),
        (x.double(), y),
        (x.reshape(-1, 1)[:1000], y),
    ]:
        assert digests(TensorDataset(*other))["rows"] != before["rows"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: Subset(data, range(0, 1000, 2)),
        lambda data: Subset(Subset(data, range(999, -1, -1)), [3, 5, 7]),
        lambda data: ConcatDataset([TensorDataset(*tensors(10)), data]),
        lambda data: ConcatDataset([TensorDataset(*tensors(10)), Subset(data, range(200, 900))]),
        lambda data: Repeated(data, 2),
    ],
)
def test_rows_are_seen_below_wrappers_where_they_are_used(wrap):
    x, y = tensors()
    before = digests(wrap(TensorDataset(x, y)))["rows"]
    used = {int(place) for part in dataset_parts(wrap(TensorDataset(x, y))) if len(part.base) == 1000
            for place in (range(1000) if part.indices is None else part.indices)}  # fmt: skip
    for place in (min(used), max(used)):
        moved = x.clone()
        moved[place] += 1
        assert digests(wrap(TensorDataset(moved, y)))["rows"] != before
    unused = set(range(1000)) - used
    if unused:
        moved = x.clone()
        moved[list(unused)] += 1
        assert digests(wrap(TensorDataset(moved, y)))["rows"] == before


def test_the_order_of_rows_from_several_tables_counts():
    both = [TensorDataset(torch.zeros(2)), TensorDataset(torch.zeros(2))]
    orders = [[0, 1, 2, 3], [0, 2, 1, 3]]
    one, other = (digests(Subset(ConcatDataset(both), order))["rows"] for order in orders)
    assert one != other


KINDS = {
    "tensor": lambda k: torch.full((2,), float(k)),
    "bfloat16": lambda k: torch.tensor(float(k), dtype=torch.bfloat16),
    "array": lambda k: np.full((2,), k),
    "number": lambda k: k / 7,
    "numpy number": np.float32,
    "text": lambda k: f"number {k}",
    "bytes": lambda k: bytes([k % 256]),
    "dict": lambda k: {"x": [torch.tensor(k), None], "y": (k, "text")},
    "array of objects": lambda k: np.array([str(k), None], dtype=object),
    "image": lambda k: pytest.importorskip("PIL.Image").new("L", (3, 3), k % 256),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_any_other_data_set_is_compared(kind):
    before = digests(Items([KINDS[kind](k) for k in range(SAMPLE)]))
    assert list(before) == ["items"]
    assert digests(Items([KINDS[kind](k) for k in range(SAMPLE)])) == before
    for place in (0, 100, SAMPLE - 1):  # as many as are looked at
        other = [KINDS[kind](k if k != place else k + 1) for k in range(SAMPLE)]
        assert digests(Items(other)) != before


def test_a_change_of_one_item_in_a_hundred_is_seen():
    """Missed with probability 0.99^256 = 0.08 for a key; with this one it is not."""
    before = digests(Items([torch.tensor(k) for k in range(5000)]))
    other = [torch.tensor(-k if k % 100 == 0 else k) for k in range(5000)]
    assert digests(Items(other)) != before


# What is not taken for a change


class Augmented(TensorDataset):
    """Draws from the global generators when an item is fetched."""

    def __getitem__(self, place):
        x, y = super().__getitem__(place)
        return x + torch.randn(3) + np.random.normal() + random.random(), y  # noqa: NPY002


def test_random_transforms_by_global_generators_come_again_and_leave_them_alone():
    x, y = tensors()
    torch.manual_seed(1)
    states = RandomState.now().state_dict()
    before = digests(Augmented(x, y))
    assert set(before) == {"rows", "items"}
    assert same(RandomState.now().state_dict(), states)
    torch.manual_seed(2)
    assert digests(Augmented(x, y)) == before
    assert digests(Augmented(x + 1, y))["items"] != before["items"]


class Own(Items):
    """Flips items by a generator of its own, whose state nobody knows."""

    def __init__(self, items):
        super().__init__(items)
        self._rng = np.random.default_rng()

    def __getitem__(self, place):
        return self.items[place] * int(self._rng.choice([-1, 1]))


def test_what_does_not_come_again_is_left_out():
    """All of 256 items come twice alike with probability 2^-256."""
    data = [torch.tensor(k) for k in range(1, 500)]
    assert digests(Own(data)) == {}
    DataFingerprint(Own(data)).require_same(SEED, digests(Items(data)))


class InWorkers(Items):
    def __getitem__(self, place):
        raise RuntimeError("no file is open")


def test_what_cannot_be_fetched_here_is_left_out():
    states = RandomState.now().state_dict()
    assert digests(InWorkers([0, 1])) == {}
    assert same(RandomState.now().state_dict(), states)


def test_tensors_without_plain_bytes_are_left_to_the_items():
    sparse = TensorDataset(torch.eye(4).to_sparse(), torch.arange(4))
    assert "rows" not in digests(sparse)


def test_a_change_is_refused():
    x, y = tensors()
    known = digests(TensorDataset(x, y))
    DataFingerprint(TensorDataset(x, y)).require_same(SEED, known)
    with pytest.raises(ValueError, match=CHANGED):
        DataFingerprint(TensorDataset(x, 8 - y)).require_same(SEED, known)


# The key


def test_digests_need_the_secret_and_do_not_hold_it():
    x, y = tensors()
    known = digests(TensorDataset(x, y))
    other = digests(TensorDataset(x, y), np.random.SeedSequence(6))
    assert all(known[name] != other[name] for name in known)
    unkeyed = hashlib.blake2b(x.numpy().tobytes()).hexdigest()
    assert unkeyed not in known.values()


def test_a_step_of_sampling_has_another_seed():
    key = data_fingerprint._key(SEED)
    for step in range(300):
        drawn = np.random.SeedSequence(SEED.entropy, spawn_key=(*SEED.spawn_key, step))
        assert drawn.generate_state(8, np.uint64).tobytes() != key


def test_another_process_finds_the_same():
    code = """
import numpy as np, torch
from qclip.training.data_fingerprint import DataFingerprint
items = [{"x": torch.tensor(k), "text": str(k)} for k in range(300)]
print(DataFingerprint(items).under(np.random.SeedSequence(5))["items"])
"""
    here = digests([{"x": torch.tensor(k), "text": str(k)} for k in range(300)])["items"]
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert there == here


def test_it_is_computed_once(monkeypatch):
    found = DataFingerprint(TensorDataset(*tensors()))
    first = found.under(SEED)
    monkeypatch.setattr(data_fingerprint, "_rows_digest", lambda *_: pytest.fail("again"))
    assert found.under(np.random.SeedSequence(5)) == first
