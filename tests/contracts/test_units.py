"""The unit of privacy: a file without one person, with all rows of it, moves no sum by more than its bound."""

import csv

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from qclip.apps.data import load
from qclip.engine import clipped_gradients
from qclip.tables.examples import is_held_out
from qclip.thresholds import BalancedThreshold, Constant
from qclip.training.make import make_private
from qclip.training.sampling import PoissonSampler

CLIP_NORM = 0.05
OPTIONS = {
    "target": "result", "unit": "person", "rows_per_unit": 3, "classes": ("no", "yes"),
    "columns": {"age": "0:100", "value": "number", "note": "text"},
}  # fmt: skip
PERSONS = [f"p{k}" for k in range(60)]


def rows():
    """1 to 9 rows of each person, scattered over the file, and person 7 with 40."""
    rng = np.random.default_rng(1)
    made = []
    for k, person in enumerate(PERSONS):
        for _ in range(40 if k == 7 else 1 + k % 9):
            value = 10.0 ** rng.integers(-2, 6) * (k + 1)
            made.append((person, rng.integers(18, 99), value, rng.choice(["red", "blue", ""]), ["no", "yes"][k % 2]))
    return [made[k] for k in rng.permutation(len(made))]


@pytest.fixture
def task_without(tmp_path):
    """Loads the task of a file without some persons."""

    def make(*gone):
        path = tmp_path / f"table{'-'.join(gone)}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("person", "age", "value", "note", "result"))
            writer.writerows(row for row in rows() if row[0] not in gone)
        return load(str(path), **OPTIONS)

    return make


def places(task, other):
    """The place in ``task`` of each training example of ``other``."""
    x, y = task.train.tensors
    found = []
    for inputs, targets in other.train:
        same = (x == inputs).flatten(1).all(1) & (y == targets).all(1)
        found.append(int(same.nonzero()[0]))
    return found


def clipped_sum(task):
    model = task.build_model()
    torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
    x, y = task.train.tensors
    found = clipped_gradients(model, task.loss, x, y, CLIP_NORM)
    return torch.cat([tensor.flatten() for tensor in found.sums.values()])


def training_persons():
    names = list(dict.fromkeys(row[0] for row in rows()))
    return [name for name, held in zip(names, is_held_out(names), strict=True) if not held]


def test_a_file_without_a_person_has_one_example_less_and_the_others_as_they_were(task_without):
    whole = task_without()
    names = training_persons()
    assert len(whole.train) == len(names)
    for gone in ("p7", names[0], names[-1]):
        other = task_without(gone)
        assert places(whole, other) == [k for k, name in enumerate(names) if name != gone]
        assert all(torch.equal(a, b) for a, b in zip(whole.held_out.tensors, other.held_out.tensors, strict=True))


def test_removing_a_person_with_all_rows_moves_the_clipped_sum_by_at_most_the_bound(task_without):
    whole = clipped_sum(task_without())
    some = {"p7", *training_persons()[::6]}
    shifts = [(whole - clipped_sum(task_without(gone))).norm().item() for gone in sorted(some)]
    assert max(shifts) <= CLIP_NORM * (1 + 1e-5)
    assert max(shifts) >= CLIP_NORM * 0.99  # the bound is attained: clipping did something


def test_without_the_unit_a_person_moves_it_further(tmp_path, task_without):
    """The same file by rows: the test above would fail without units."""
    task_without()
    options = {name: value for name, value in OPTIONS.items() if name not in ("unit", "rows_per_unit")}
    options["columns"] = OPTIONS["columns"] | {"person": "drop"}
    by_row = load(str(tmp_path / "table.csv"), **options)
    model = by_row.build_model()
    torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
    kept = [row for k, row in enumerate(rows()) if k % 6]
    of_p7 = [k for k, row in enumerate(kept) if row[0] == "p7"]
    x, y = (tensor[of_p7] for tensor in by_row.train.tensors)
    found = clipped_gradients(model, by_row.loss, x, y, CLIP_NORM)
    assert torch.cat([tensor.flatten() for tensor in found.sums.values()]).norm() > 2 * CLIP_NORM


@pytest.mark.parametrize("threshold", [Constant(CLIP_NORM), BalancedThreshold()], ids=["constant", "balanced"])
def test_replayed_on_the_file_without_a_person_no_release_moves_by_more_than_is_accounted_for(
    monkeypatch, make_recorder, task_without, threshold
):
    task, names = task_without(), training_persons()
    draw = PoissonSampler.draw

    def run(task):
        model = task.build_model()
        training = make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.5), task.train, loss=task.loss, batch_size=25, steps=3,
            noise_multiplier=0.5, delta=1e-3, dataset_size=len(names), threshold=threshold, seed=5,
        )  # fmt: skip
        for batch in training.loader:
            training.step(*batch)
        return training.history

    whole = make_recorder()
    history = run(task)
    per_step, most = len(whole.values) // len(history), 0.0
    for gone in ("p7", *names[:3]):
        place = names.index(gone)

        def without(self, step, place=place):
            full = draw(PoissonSampler(len(names), self.sample_rate, self.seed), step)
            left = full[full != place]
            return left - (left > place)

        other = make_recorder(whole.released)
        monkeypatch.setattr(PoissonSampler, "draw", without)
        assert run(task_without(gone)) == history
        monkeypatch.setattr(PoissonSampler, "draw", draw)
        costs = np.zeros(len(history))
        for i, (a, b) in enumerate(zip(whole.values, other.values, strict=True)):
            squares = np.zeros(len(a.group_bounds))
            for name, tensor in a.tensors.items():
                squares[a.members[name]] += (tensor - b.tensors[name]).double().square().sum().item()
            assert (np.sqrt(squares) <= np.array(a.group_bounds) * (1 + 1e-5)).all()
            costs[i // per_step] += (squares / np.square(whole.stds[i])).sum()
        assert (costs <= (1 / 0.5) ** 2 * (1 + 1e-5)).all()
        most = max(most, costs.max())
    assert most > 0.5 / 0.5**2  # something was removed from what was drawn, and it mattered


def test_every_unit_is_an_example(task_without):
    task = task_without()
    assert isinstance(task.train, TensorDataset)
    assert task.unit == "all rows of one person (at most 3 of them count)"
    x, y = task.train.tensors
    assert x.shape[:2] == y.shape == (len(training_persons()), 3)
    held = [row for row in rows() if row[0] not in training_persons()]
    assert len(task.held_out) == len(held)
