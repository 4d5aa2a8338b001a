"""Sums of physical batches that nobody has looked at yet: where one is spoilt they are computed again, once."""

from dataclasses import replace

import pytest
import torch

from qclip.engine import ClippedGradients
from qclip.thresholds import Question
from qclip.thresholds.threshold import Count, Slack
from qclip.training.sums import MOST_HELD, BoundedSum, Key, Query, raw_sums

W = Key("gradient", "w")


def clipped(value, *, clean=None, recompute=None, is_view=False, memory=None):
    """A physical batch of two examples whose sum is one number, repeated."""
    w = torch.full((3,), float(value)) if memory is None else memory
    norms, mask = torch.tensor([[0.5], [2.0]]), torch.ones(2, dtype=torch.bool)
    found = ClippedGradients.of({"w": w}, norms, (1.0,), torch.zeros(2), mask)
    calls = []

    def repair():
        calls.append(value)
        return ClippedGradients.of({"w": torch.full((3,), float(recompute))}, norms, (1.0,), torch.zeros(2), mask)

    known = {} if clean is None else {"all_finite": torch.tensor(clean), "recompute": repair}
    result = ClippedGradients(**{**vars(found), **known, "is_view": is_view})
    return result, calls


def added(batches, question=None, **changes):
    """The sums of physical batches, of which the first is kept, as others are added to it."""
    query = Query((1.0,), question or Question(), {W: 0}, (3,), **changes)
    total = None
    for k, batch in enumerate(batches):
        raw = raw_sums(batch, 2, query, keep=k == 0 and len(batches) > 1)
        if total is None:
            total = raw
        else:
            total += raw
    return total


def total(batches):
    return added(batches).gradient.resolve().tensors[W]


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_clean_batches_are_added_as_they_are(batches):
    made = [clipped(k + 1, clean=True, recompute=100) for k in range(batches)]
    assert torch.equal(total([gradients for gradients, _ in made]), torch.full((3,), float(sum(range(batches + 1)))))
    assert not any(calls for _, calls in made)


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_one_spoilt_batch_is_repaired(spoilt):
    """Nothing of NaN is left, whichever batch it was in."""
    values = [torch.nan if k == spoilt else k + 1 for k in range(3)]
    made = [clipped(value, clean=k != spoilt, recompute=10 * (k + 1)) for k, value in enumerate(values)]
    raw = added([gradients for gradients, _ in made]).gradient.resolve()
    assert torch.equal(raw.tensors[W], torch.full((3,), 60.0))  # computed again by the same rule, all of them
    assert torch.equal(raw.resolve().tensors[W], torch.full((3,), 60.0))
    assert all(len(calls) == 1 for _, calls in made)  # and not a second time


def test_batches_that_are_known_follow_those_that_are_not():
    """As where one batch ran eager: what came before is resolved first."""
    first, known = clipped(torch.nan, clean=False, recompute=5)[0], clipped(2)[0]
    spoilt, calls = clipped(torch.nan, clean=False, recompute=30)
    clean, unneeded = clipped(400, clean=True, recompute=1)
    assert torch.equal(total([first, known, spoilt, clean]), torch.full((3,), 437.0))
    assert len(calls) == 1
    assert not unneeded


@pytest.mark.parametrize("keep", [True, False])
def test_only_sums_that_others_are_added_to_are_copied(keep):
    memory = torch.full((3,), 1.0)
    query = Query((1.0,), Question(), {W: 0}, (3,))
    raw = raw_sums(clipped(1, is_view=True, memory=memory)[0], 2, query, keep=keep)
    assert (raw.gradient.tensors[W] is memory) == (not keep)


def test_memory_that_the_next_step_overwrites_is_copied():
    memory = torch.full((3,), 1.0)
    query = Query((1.0,), Question(), {W: 0}, (3,))
    raw = raw_sums(clipped(1, clean=True, recompute=0, is_view=True, memory=memory)[0], 2, query)
    memory.fill_(2.0)
    raw += raw_sums(clipped(2, clean=True, recompute=0, is_view=True, memory=memory)[0], 2, query, keep=False)
    memory.fill_(torch.nan)
    assert torch.equal(raw.gradient.resolve().tensors[W], torch.full((3,), 3.0))


def test_counts_do_not_wait():
    """They come from norms, which are right whether the sums are or not."""
    spoilt = [clipped(torch.nan, clean=False, recompute=1)[0] for _ in range(3)]
    raw = added(spoilt, Question(count=Count(radii=((1.0,),), centre=0.0)))
    assert raw.counts is not None
    assert raw.counts.tensors[Key("counts")].tolist() == [[3.0]]
    assert not raw.hopeless


def test_nobody_is_finite():
    norms = torch.full((2, 1), torch.inf)
    found = ClippedGradients.of({"w": torch.zeros(3)}, norms, (1.0,), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    assert added([found]).hopeless


def test_one_finite_batch_is_enough():
    norms = torch.full((2, 1), torch.inf)
    spoilt = ClippedGradients.of({"w": torch.zeros(3)}, norms, (1.0,), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    for batches in ([spoilt, clipped(1)[0]], [clipped(1)[0], spoilt]):
        assert not added(batches).hopeless
    assert added([spoilt, spoilt]).hopeless


def test_batches_are_clipped_alike():
    other = ClippedGradients(**{**vars(clipped(1)[0]), "clip_norms": (2.0,)})
    with pytest.raises(AssertionError, match="clipped at different norms"):
        added([clipped(1)[0], other])


def test_sums_that_are_repaired_in_between_are_copied():
    """A step that overwrites its own result comes before and after one that does not."""
    memory = torch.zeros(3)
    norms, mask = torch.tensor([[0.5], [2.0]]), torch.ones(2, dtype=torch.bool)
    query = Query((1.0,), Question(), {W: 0}, (3,))

    def replayed(value, recompute, *, clean):
        memory.fill_(value)
        found = replace(ClippedGradients.of({"w": memory}, norms, (1.0,), torch.zeros(2), mask), is_view=True)

        def repair():
            memory.fill_(recompute)
            return found

        return replace(found, all_finite=torch.tensor(clean), recompute=repair)

    raw = raw_sums(replayed(torch.nan, 1, clean=False), 2, query)
    raw += raw_sums(clipped(10)[0], 2, query, keep=False)
    raw += raw_sums(replayed(100, 0, clean=True), 2, query, keep=False)
    assert torch.equal(raw.gradient.resolve().tensors[W], torch.full((3,), 111.0))


def test_not_all_batches_of_a_long_step_are_held():
    raw = added([clipped(1, clean=True, recompute=1)[0] for _ in range(MOST_HELD + 8)])
    assert raw.gradient.recompute is None
    assert torch.equal(raw.gradient.tensors[W], torch.full((3,), MOST_HELD + 8.0))


def test_the_slack_does_not_depend_on_how_a_step_is_cut():
    """In float32 seven times a third is not a third seven times."""
    question = Question(slack=Slack(((2.0,),)))
    slack = {"members": {W: 0, Key("slack", 0): 0}, "coefficients": ((1 / 3,),)}
    query = Query((3.0,), question, dims=(4,), **slack)
    raw = raw_sums(clipped(1)[0], 2, query)
    for _ in range(6):
        raw += raw_sums(clipped(1)[0], 2, query)
    released = raw.reduced().gradient.tensors[Key("slack", 0)]
    assert released.dtype == torch.float32
    assert torch.equal(released, 14 * torch.tensor([1 / 3]))


def test_the_slack_of_batches_that_are_computed_again_counts_once():
    question = Question(slack=Slack(((1.0,),)))
    query = Query((2.0,), question, {W: 0, Key("slack", 0): 0}, (4,), coefficients=((0.5,),))
    raw = raw_sums(clipped(1, clean=True, recompute=1)[0], 2, query)
    raw += raw_sums(clipped(torch.nan, clean=False, recompute=2)[0], 2, query)
    raw = raw.reduced()
    assert raw.gradient.tensors[Key("slack", 0)].tolist() == [1.0]  # one example of each batch is within the radius
    assert raw.gradient.tensors[W].tolist() == [3.0] * 3


def test_plus_leaves_both_sides_as_they_were():
    a, b = (BoundedSum({W: torch.full((2,), float(k))}, {W: 0}, (1.0,), (2,)) for k in (1, 2))
    assert (a + b).tensors[W].tolist() == [3.0, 3.0]
    assert a.tensors[W].tolist() == [1.0, 1.0]
    a += b
    assert a.tensors[W].tolist() == [3.0, 3.0]
    assert b.tensors[W].tolist() == [2.0, 2.0]


def test_each_precision_is_added_in_its_own():
    keys = (W, Key("gradient", "b"), Key("slack", 0))
    dtypes = (torch.float32, torch.float64, torch.float64)
    a, b = (
        BoundedSum(
            {key: torch.full((2,), k, dtype=dtype) for key, dtype in zip(keys, dtypes, strict=True)},
            dict.fromkeys(keys, 0),
            (1.0,),
            (6,),
        )
        for k in (1, 2)
    )
    for total in (a + b, a.__iadd__(b)):
        assert [(x.dtype, x.tolist()) for x in total.tensors.values()] == [(dtype, [3.0, 3.0]) for dtype in dtypes]


def test_sums_of_other_parameters_do_not_add_up():
    a, b = (BoundedSum({key: torch.zeros(2)}, {key: 0}, (1.0,), (2,)) for key in (W, Key("slack", 0)))
    with pytest.raises(AssertionError, match="different parameters"):
        a += b
