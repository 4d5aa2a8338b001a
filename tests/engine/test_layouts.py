"""Layouts: every one shows a tensor as [B, *what the function would see for one example]."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from qclip.engine.gradients.layouts import Axis, Flat, Single, candidates

B = 3


def arranged(layout, examples):
    """The tensor that holds these examples in this layout; ``examples`` is [B, *what the function sees]."""
    if isinstance(layout, Axis):
        return torch.cat(list(examples), layout.axis)
    if isinstance(layout, Flat):
        return (examples.transpose(0, 1) if layout.interleaved else examples).flatten(0, 1)
    return examples[0]


LAYOUTS = {
    "first": (Axis(0), (1, 4, 5)),
    "second": (Axis(1), (4, 1, 5)),
    "last": (Axis(2), (4, 5, 1)),
    "vector": (Axis(0), (1,)),
    "flat": (Flat(4), (4, 5)),
    "interleaved": (Flat(4, interleaved=True), (4, 5)),
    "flat-one-row": (Flat(1), (1, 5)),
}

layouts = pytest.mark.parametrize(("layout", "shape"), LAYOUTS.values(), ids=LAYOUTS)


@layouts
def test_by_example_is_what_the_function_sees_for_one_example(layout, shape):
    examples = torch.randn(B, *shape)
    x = arranged(layout, examples)
    assert layout.holds(x, B)
    assert torch.equal(layout.by_example(x, B), examples)


def test_single_owns_everything():
    x = torch.randn(4, 5)
    assert Single().holds(x, 1)
    assert Single().holds(torch.tensor(1.0), 1)
    assert torch.equal(Single().by_example(x, 1), x[None])


@layouts
def test_a_function_of_one_example_is_the_function_of_all(layout, shape):
    """A linear layer on the last dimension, where that does not hold the examples."""
    if shape[-1] != 5:
        return
    weight, examples = torch.randn(2, 5), torch.randn(B, *shape)
    out = F.linear(arranged(layout, examples), weight)
    torch.testing.assert_close(layout.by_example(out, B), F.linear(examples, weight))


@layouts
def test_by_example_copies_nothing(layout, shape):
    x = arranged(layout, torch.randn(B, *shape))
    assert layout.by_example(x, B).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("layout", "shape", "answer"),
    [
        (Axis(0), (3, 5), True),
        (Axis(0), (3,), True),
        (Axis(0), (4, 3), False),
        (Axis(0), (), False),
        (Axis(1), (5, 3), True),
        (Axis(1), (3,), False),
        (Axis(1), (3, 1), False),
        (Flat(2), (6, 5), True),
        (Flat(2), (6,), True),
        (Flat(2), (3, 5), False),
        (Flat(2), (), False),
        (Flat(2, interleaved=True), (6, 5), True),
    ],
)
def test_holds(layout, shape, answer):
    assert layout.holds(torch.zeros(shape), B) is answer


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((3, 5), [Axis(0)]),
        ((5, 3), [Axis(1)]),
        ((3, 3, 5), [Axis(0), Axis(1)]),
        ((6, 5), [Flat(2), Flat(2, interleaved=True)]),
        ((6, 3), [Axis(1), Flat(2), Flat(2, interleaved=True)]),
        ((5, 7), []),
        ((), []),
        ((0, 5), []),
        ((1, 5), []),
    ],
)
def test_candidates(shape, found):
    assert list(candidates(torch.Size(shape), B)) == found


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (7, 1)])
def test_one_example_has_one_candidate(shape):
    assert list(candidates(torch.Size(shape), 1)) == [Single()]


@given(st.lists(st.integers(0, 8), max_size=4), st.integers(1, 5))
def test_every_candidate_holds_and_splits_evenly(shape, batch_size):
    x = torch.zeros(shape)
    for layout in candidates(x.shape, batch_size):
        assert layout.holds(x, batch_size)
        split = layout.by_example(x, batch_size)
        assert split.shape[0] == batch_size
        assert split.numel() == x.numel()
        assert split[0].dim() == x.dim()
