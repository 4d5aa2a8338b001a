"""Large models: the search for the largest batch, and recomputed blocks."""

from functools import partial

import pytest
import torch
from torch import nn

import large
from large import Attempt, Search
from qclip.apps.bench import modes
from qclip.apps.bench.cases import BenchCase
from qclip.apps.bench.models import gpt2
from qclip.apps.bench.precision import PRECISIONS


def searched(capacity, fixed, each, start):
    """The search on a machine where a batch takes ``fixed + each * batch`` bytes, and what was tried."""
    tried = []

    def attempt(batch):
        tried.append(batch)
        need = fixed + each * batch
        return Attempt(batch, 1.0, need) if need <= capacity else None

    return large.largest_batch(attempt, capacity, start=start), tried


@pytest.mark.parametrize(
    ("fixed", "each", "start", "best", "tried"),
    [
        (0, 10, 1, 8, [1, 8, 16, 12]),  # 2 and 4 are sure to fit
        (0, 8, 1, 12, [1, 8, 16, 12]),
        (60, 4, 1, 8, [1, 2, 4, 8, 16, 12]),
        (0, 30, 8, 3, [8, 4, 2, 3]),  # begun too large
        (0, 60, 2, 1, [2, 1]),
        (0, 200, 4, None, [4, 2, 1]),
    ],
)
def test_search(fixed, each, start, best, tried):
    found, seen = searched(100, fixed, each, start)
    assert (found.best and found.best.batch, found.limit) == (best, "memory")
    assert seen == tried


def test_no_attempt_after_the_deadline():
    assert large.largest_batch(lambda batch: pytest.fail("begun"), 100, deadline=0.0) == Search(None, "time")


def test_out_of_memory_is_no_fit_and_other_errors_are_raised(monkeypatch):
    tiny = BenchCase("tiny", partial(nn.Linear, 3, 2), shape=(3,), classes=2, batch=4)
    arguments = (tiny, "plain", PRECISIONS["float32"], torch.device("cpu"))
    assert large.try_batch(*arguments).batch == 4

    def step_that_raises(error):
        def make(work):
            raise error

        monkeypatch.setitem(modes.MODES, "plain", modes.Mode("plain", make))

    step_that_raises(torch.OutOfMemoryError("CUDA out of memory"))
    assert large.try_batch(*arguments) is None
    step_that_raises(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes"):
        large.try_batch(*arguments)


def test_recomputed_blocks_give_the_same_gradients():
    shape = {"layers": 2, "width": 8, "heads": 2}
    plain, again = gpt2(4, **shape), large.recomputed_gpt2(4, **shape)
    again.load_state_dict(
        {
            name.replace("blocks.0.", "blocks.0.module.").replace("blocks.1.", "blocks.1.module."): value
            for name, value in plain.state_dict().items()
        }
    )
    ids = torch.randint(50257, (2, 4))
    for model in (plain, again):
        model(ids).logsumexp(-1).sum().backward()
    for p, q in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match="device = 'cpu' must be cuda"):
        large.measure_large("cpu")
