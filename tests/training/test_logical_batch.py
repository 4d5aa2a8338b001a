"""A logical batch whose parts nobody has looked at yet: sums that are spoilt are computed again, once."""

from dataclasses import replace

import pytest
import torch

from qclip.engine import ClippedGradients
from qclip.thresholds import Question
from qclip.thresholds.threshold import Count, Slack
from qclip.training.logical_batch import LogicalBatch

MEMBERS = {"w": 0}


def part(value, *, clean=None, recompute=None, is_view=False, memory=None):
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


def batch(question=None):
    return LogicalBatch((1.0,), question or Question(), keep_norms=False)


def total(logical):
    return logical.gradient(MEMBERS, (3,)).tensors["w"]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_clean_parts_are_added_as_they_are(parts):
    logical = batch()
    made = [part(k + 1, clean=True, recompute=100) for k in range(parts)]
    for k, (gradients, _) in enumerate(made):
        logical.add(gradients, 2, last=k == parts - 1)
    assert torch.equal(total(logical), torch.full((3,), float(sum(range(parts + 1)))))
    assert not any(calls for _, calls in made)


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_one_spoilt_part_is_repaired(spoilt):
    """Nothing of NaN is left, whichever part it was in."""
    logical = batch()
    values = [torch.nan if k == spoilt else k + 1 for k in range(3)]
    for k, value in enumerate(values):
        gradients, _ = part(value, clean=k != spoilt, recompute=10 * (k + 1))
        logical.add(gradients, 2, last=k == 2)
    assert torch.equal(total(logical), torch.full((3,), 60.0))  # computed again by the same rule, all of them
    assert torch.equal(total(logical), torch.full((3,), 60.0))  # and not a second time


def test_parts_that_are_known_follow_those_that_are_not():
    """As where one part ran eager: what came before is settled first."""
    logical = batch()
    logical.add(part(torch.nan, clean=False, recompute=5)[0], 2)
    logical.add(part(2)[0], 2)
    gradients, calls = part(torch.nan, clean=False, recompute=30)
    logical.add(gradients, 2)
    clean, unneeded = part(400, clean=True, recompute=1)
    logical.add(clean, 2, last=True)
    assert torch.equal(total(logical), torch.full((3,), 437.0))
    assert len(calls) == 1
    assert not unneeded


def test_memory_that_the_next_step_overwrites_is_copied():
    memory = torch.full((3,), 1.0)
    logical = batch()
    logical.add(part(1, clean=True, recompute=0, is_view=True, memory=memory)[0], 2)
    memory.fill_(2.0)
    logical.add(part(2, clean=True, recompute=0, is_view=True, memory=memory)[0], 2, last=True)
    memory.fill_(torch.nan)
    assert torch.equal(total(logical), torch.full((3,), 3.0))


def test_counts_do_not_wait():
    """They come from norms, which are right whether the sums are or not."""
    logical = batch(Question(count=Count(radii=((1.0,),), centre=0.0)))
    for k in range(3):
        logical.add(part(torch.nan, clean=False, recompute=1)[0], 2, last=k == 2)
    counts = logical.counts()
    assert counts is not None
    assert counts.tensors["counts"].tolist() == [[3.0]]
    assert not logical.hopeless


def test_nobody_is_finite():
    logical = batch()
    norms = torch.full((2, 1), torch.inf)
    found = ClippedGradients.of({"w": torch.zeros(3)}, norms, (1.0,), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    logical.add(found, 2, last=True)
    assert logical.hopeless


def test_parts_are_clipped_alike():
    logical = batch()
    logical.add(part(1)[0], 2)
    other = ClippedGradients(**{**vars(part(1)[0]), "clip_norms": (2.0,)})
    with pytest.raises(AssertionError, match="clipped at other norms"):
        logical.add(other, 2)


def test_sums_that_are_repaired_in_between_are_copied():
    """A step that overwrites its own result comes before and after one that does not."""
    memory = torch.zeros(3)
    norms, mask = torch.tensor([[0.5], [2.0]]), torch.ones(2, dtype=torch.bool)

    def replayed(value, recompute, *, clean):
        memory.fill_(value)
        found = replace(ClippedGradients.of({"w": memory}, norms, (1.0,), torch.zeros(2), mask), is_view=True)

        def repair():
            memory.fill_(recompute)
            return found

        return replace(found, all_finite=torch.tensor(clean), recompute=repair)

    logical = batch()
    logical.add(replayed(torch.nan, 1, clean=False), 2)
    logical.add(part(10)[0], 2)
    logical.add(replayed(100, 0, clean=True), 2, last=True)
    assert torch.equal(total(logical), torch.full((3,), 111.0))


def test_not_all_parts_of_a_long_batch_are_held():
    logical = batch()
    held = [part(1, clean=True, recompute=1)[0] for _ in range(40)]
    for k, gradients in enumerate(held):
        logical.add(gradients, 2, last=k == 39)
    assert len(logical._repaired) < 40
    assert torch.equal(total(logical), torch.full((3,), 40.0))


def test_the_dimensions_of_a_sum_are_those_of_the_run_and_of_the_slack():
    logical = batch(Question(slack=Slack(((0.25, 0.5),))))
    logical.add(part(1.0)[0], 2)
    assert logical.gradient(MEMBERS, (12,)).group_dims == (14,)  # of which this process holds 3 and the slack
