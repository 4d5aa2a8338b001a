"""Batches: how many examples there are, which tensors hold them, and how some of them are picked out."""

import pytest
import torch

from qclip.engine import batch as batches

X, IDS = torch.arange(12.0).view(4, 3), torch.arange(4)
POSITIONS = torch.arange(3)[None]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (X, 4),
        ((X, IDS), 4),
        ([X, {"ids": IDS, "name": "words"}], 4),
        ({"positions": POSITIONS, "ids": IDS}, 4),
        ((torch.tensor(2.0), X), 4),
        ((POSITIONS, torch.zeros(1, 5)), 1),
        ((X[:0], POSITIONS), 0),
        ((POSITIONS, X[:0]), 0),
    ],
)
def test_size_is_the_shared_first_dimension(batch, size):
    assert batches.size(batch) == size


def test_a_mask_says_how_many_examples_there_are():
    assert batches.size(X, mask=torch.ones(4)) == 4


@pytest.mark.parametrize("batch", [(), {}, torch.tensor(1.0), ("words", 3), (torch.tensor(1.0), torch.tensor(2))])
def test_size_refuses_a_batch_without_examples(batch):
    with pytest.raises(
        ValueError, match=r"inputs = 'no tensors' must be a batch with at least one tensor.*; pass tensors, or tuples"
    ):
        batches.size(batch)


def test_tensors_are_found_wherever_they_are():
    found = batches.tensor_leaves({"a": (X, [IDS]), "b": None, "c": 3})
    assert [id(leaf) for leaf in found] == [id(X), id(IDS)]


@pytest.mark.parametrize(
    ("leaf", "answer"),
    [(X, True), (IDS, True), (POSITIONS, False), (torch.tensor(4), False), ("four", False), (4, False)],
)
def test_example_wise(leaf, answer):
    assert batches.is_example_wise(leaf, 4) is answer


@pytest.mark.parametrize("index", [slice(1, 3), torch.tensor([1, 2]), torch.tensor([False, True, True, False])])
def test_select_takes_rows_and_leaves_what_is_shared(index):
    chosen = batches.select(({"x": X, "positions": POSITIONS}, IDS, "words"), index, 4)
    assert torch.equal(chosen[0]["x"], X[1:3])
    assert torch.equal(chosen[0]["positions"], POSITIONS)
    assert chosen[1].tolist() == [1, 2]
    assert chosen[2] == "words"


def test_map_examples_keeps_the_nest():
    doubled = batches.map_examples((X, [POSITIONS, {"ids": IDS}]), lambda leaf: 2 * leaf, 4)
    assert torch.equal(doubled[0], 2 * X)
    assert doubled[1][0] is POSITIONS
    assert torch.equal(doubled[1][1]["ids"], 2 * IDS)


@pytest.mark.parametrize(
    "mask", [torch.tensor([1, 0, 1, 1]), torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([True, False, True, True])]
)
def test_full_mask_is_boolean(mask):
    assert batches.full_mask(4, mask, torch.device("cpu")).tolist() == [True, False, True, True]


def test_full_mask_is_all_true_without_one():
    assert batches.full_mask(3, None, torch.device("cpu")).tolist() == [True] * 3
    assert batches.full_mask(0, None, torch.device("cpu")).shape == (0,)


def test_full_mask_refuses_other_dimensions():
    with pytest.raises(
        ValueError, match=r"mask = \(4, 1\) must be one flag per example, of shape \[batch\]; drop the other dimensions"
    ):
        batches.full_mask(4, torch.ones(4, 1), torch.device("cpu"))
