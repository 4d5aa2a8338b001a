"""The record of a run: read like a tuple, and not copied to be read."""

import copy
import pickle
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from qclip.thresholds import Constant
from qclip.training.history import History, StepRecord
from qclip.training.make import make_private


def records(count):
    return [StepRecord(step, (1.0 + step,), (0.5,), 0.1) for step in range(count)]


def training(steps=3):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.zeros(20, 2), torch.zeros(20, dtype=torch.long))
    return make_private(
        model, optimizer, data, loss=nn.CrossEntropyLoss(), batch_size=10, steps=steps, noise_multiplier=1.0,
        delta=1e-3, threshold=Constant(1.0), seed=0,
    )  # fmt: skip


def test_it_is_a_view_and_not_a_copy():
    run = training()
    view = run.history
    assert run.history is view
    assert view == ()
    for done, batch in enumerate(run.loader, start=1):
        run.step(*batch)
        assert len(view) == done
    assert view[-1] is run.history[2]
    assert [record.step for record in view] == [0, 1, 2]


def test_it_stays_the_run_s_when_a_state_is_loaded():
    first, second = training(), training()
    for batch in first.loader:
        first.step(*batch)
    view = second.history
    second.load_state_dict(first.state_dict())
    assert second.history is view
    assert view == first.history
    assert len(view) == 3


def test_it_reads_like_a_tuple():
    rows = records(5)
    view, plain = History(rows), tuple(rows)
    assert isinstance(view, Sequence)
    assert (len(view), view[0], view[-2]) == (5, rows[0], rows[3])
    assert view[1:4] == plain[1:4]
    assert view[::-1] == plain[::-1]
    assert isinstance(view[1:4], tuple)
    assert (list(view), list(reversed(view))) == (rows, rows[::-1])
    assert rows[2] in view
    assert view.index(rows[3]) == 3
    assert not History([])
    with pytest.raises(IndexError):
        view[5]


def test_it_equals_what_holds_the_same_records():
    view = History(records(3))
    assert view == History(records(3))
    assert view == tuple(records(3))
    assert tuple(records(3)) == view
    assert view != History(records(2))
    assert view != (1, 2, 3)
    assert view != records(3)  # as a tuple is not a list


def test_it_cannot_be_changed():
    view = History(records(3))
    for change in (
        lambda: view.append(records(1)[0]),
        lambda: view.__setitem__(0, records(1)[0]),
        lambda: view.__delitem__(0),
        lambda: hash(view),  # it grows
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_a_tuple_that_stays_as_it_is(copied):
    rows = records(2)
    kept = copied(History(rows))
    rows.append(records(3)[2])
    assert kept == tuple(records(2))
    assert type(kept) is tuple


def test_it_says_how_long_it_is_and_how_it_ends():
    assert repr(History([])) == "<History: no step>"
    assert repr(History(records(1))) == f"<History: 1 step, the last {records(1)[0]!r}>"
    assert repr(History(records(1000))).startswith("<History: 1000 steps, the last StepRecord(step=999,")
