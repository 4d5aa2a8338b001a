"""Rows and units as examples: a unit's own rows decide what becomes of it, and zeros need not be kept."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from qclip.tables import Schema, Table
from qclip.tables.examples import (
    NO_CLASS,
    SparseInputs,
    batch_of,
    examples,
    is_held_out,
    mean_over_rows,
    rows_of_units,
)

UNITS = st.lists(st.integers(0, 5), min_size=1, max_size=40).map(lambda ids: np.unique(ids, return_inverse=True)[1])


@given(UNITS, st.integers(1, 9))
def test_a_unit_has_its_own_rows_each_once_and_at_most_so_many(units, most):
    chosen = rows_of_units(units, most)
    for unit, rows in enumerate(chosen):
        kept = rows[rows >= 0]
        assert len(kept) == min(most, (units == unit).sum())
        assert len(set(kept)) == len(kept)
        assert (units[kept] == unit).all()


@given(UNITS, st.integers(1, 4))
def test_no_unit_has_a_say_in_which_rows_of_another_count(units, most):
    chosen = rows_of_units(units, most)
    for gone in range(units.max() + 1):
        kept = np.flatnonzero(units != gone)
        if not len(kept):
            continue
        others = np.unique(units[kept], return_inverse=True)[1]
        left = rows_of_units(others, most)
        assert np.array_equal(np.where(left >= 0, kept[left], -1), np.delete(chosen, gone, axis=0))


def test_rows_beyond_the_most_are_drawn_from_all():
    (chosen,) = rows_of_units(np.zeros(1000, dtype=np.intp), 200)
    assert 350 < chosen.mean() < 650  # not the first ones; fixed random numbers, so this does not vary
    assert (np.diff(chosen) > 0).all()


def test_the_same_units_are_held_out_in_every_file():
    names = [f"patient {k}" for k in range(6000)]
    held_out = is_held_out(names)
    assert 900 < held_out.sum() < 1100  # 1000 expected, with a standard deviation of 29; fixed names do not vary
    assert np.array_equal(is_held_out(names[::-2]), held_out[::-2])
    assert np.flatnonzero(is_held_out([f"P{k}" for k in range(12)])).tolist() == [
        4,
        5,
        11,
    ]  # `b2sum -l 64` is divisible by 6


@pytest.fixture(params=["classes", "numbers"])
def made(request):
    rng = np.random.default_rng(0)
    frame = {
        "who": rng.integers(0, 40, 200).astype(str),
        "size": np.where(rng.random(200) < 0.1, np.nan, rng.normal(0, 50, 200)),
        "note": [" ".join(rng.choice(list("abcdef"), 1 + k % 5)) for k in range(200)],
        "colour": rng.choice(["red", "blue", ""], 200),
        "y": rng.choice(["a", "b"], 200) if request.param == "classes" else rng.random(200),
    }
    columns = {"note": "words"} | ({} if request.param == "classes" else {"y": "0:1"})
    table = Table.of_frame(frame)
    return table, Schema.of(table, target="y", unit="who", columns=columns)


def both(monkeypatch, *arguments):
    dense = examples(*arguments)
    monkeypatch.setattr("qclip.tables.examples._DENSE", 0)
    monkeypatch.setattr("qclip.tables.schema._CHUNK", 32)
    sparse = examples(*arguments)
    assert type(dense) is TensorDataset
    assert isinstance(sparse, SparseInputs)
    return dense, sparse


def equal(a, b):
    return torch.equal(a, b) or torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize("of", ["rows", "units"])
def test_inputs_without_zeros_are_the_same_inputs(monkeypatch, made, of):
    table, schema = made
    rows = np.arange(3, 150) if of == "rows" else rows_of_units(schema.units(table), 3)[5:]
    dense, sparse = both(monkeypatch, schema, table, rows)
    assert len(dense) == len(sparse) == len(rows)
    for index in (slice(None), slice(4, 9), [3, 1, 1]):
        assert all(map(equal, batch_of(dense, index), batch_of(sparse, index)))
    for a, b in zip(DataLoader(dense, 16), DataLoader(sparse, 16), strict=True):
        assert all(map(equal, a, b))
    assert all(map(equal, dense[7], sparse[7]))
    assert sparse.tensors[0].shape[-1] < schema.width / 4


def test_units_are_padded_with_rows_that_are_absent(made):
    table, schema = made
    rows = rows_of_units(schema.units(table), 20)
    inputs, targets = examples(schema, table, rows).tensors
    absent = torch.from_numpy(rows < 0)
    assert absent.any()
    assert not inputs[absent].any()
    marks = targets.isnan() if targets.is_floating_point() else targets == NO_CLASS
    assert torch.equal(marks, absent)
    flat = torch.from_numpy(rows[rows >= 0])
    assert torch.equal(inputs[~absent], schema.inputs(table)[flat])
    assert torch.equal(targets[~absent], schema.targets(table).reshape(-1)[flat])


def test_the_loss_of_a_unit_is_the_mean_of_its_rows(made):
    table, schema = made
    rows = rows_of_units(schema.units(table), 6)
    inputs, targets = examples(schema, table, rows).tensors
    numbers = targets.is_floating_point()

    def losses(outputs, targets):
        return (
            (outputs - targets).square().squeeze(1) if numbers else F.cross_entropy(outputs, targets, reduction="none")
        )

    model = torch.nn.Linear(schema.width, schema.outputs)
    outputs = model(inputs)
    found = mean_over_rows(losses)(outputs, targets)
    for unit, row in enumerate(rows):
        own, kept = outputs[unit, row >= 0], targets[unit, row >= 0]
        expected = losses(own, kept.unsqueeze(1) if numbers else kept).mean()
        assert torch.allclose(found[unit], expected)
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    assert gradient.isfinite().all()
    assert not gradient[torch.from_numpy(rows < 0)].any()
