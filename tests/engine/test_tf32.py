"""TF32 is read as torch's products use it, whichever way it was chosen; proofs are made without it."""

import threading

import pytest
import torch
from torch import nn

from engine.cases import Net, squared
from engine.driven import Pair, as_traced, batch
from qclip.engine import clipped_gradients, torch_settings
from qclip.engine.kernels.products import relative_error_bound

MATMUL = torch.backends.cuda.matmul
OLDER = {
    "allow_tf32": lambda: setattr(MATMUL, "allow_tf32", True),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
}
NEWER = {"fp32_precision": lambda: setattr(MATMUL, "fp32_precision", "tf32")}


def used():
    """By torch's products, at this moment."""
    return tuple(switch.fp32_precision for switch in torch_settings._tf32_switches())


@pytest.fixture(autouse=True)
def _as_before():
    before = torch_settings.tf32_settings()
    yield
    torch.set_float32_matmul_precision("highest")
    for switch, setting in zip(torch_settings._tf32_switches(), before, strict=True):
        switch.fp32_precision = setting
    assert torch.get_float32_matmul_precision() == "highest"


def test_by_default_convolutions_use_it_and_products_do_not():
    assert not torch_settings.tf32_in_products()
    assert torch_settings.tf32_anywhere(torch.device("cuda"))
    assert not torch_settings.tf32_anywhere(torch.device("cpu"))


@pytest.mark.parametrize("choose", (OLDER | NEWER).values(), ids=OLDER | NEWER)
def test_it_is_read_whichever_way_it_was_chosen(choose):
    choose()
    before = torch_settings.tf32_settings()
    assert torch_settings.tf32_in_products()
    with torch_settings.without_tf32():
        assert set(used()) == {"ieee"}
        assert torch_settings.tf32_settings() == before  # as it was chosen: norms of other threads' steps allow for it
    assert used() == torch_settings.tf32_settings() == before


def test_a_model_that_reads_it_by_the_older_name():
    """As `torch.backends.cudnn.flags` does, around a CTC loss or a codec."""
    model = Net(lambda n, x: n.two(flagged(n.one, x)), one=nn.Linear(4, 3), two=nn.Linear(3, 2))

    def flagged(layer, x):
        with torch.backends.cudnn.flags(enabled=False):
            return layer(x)

    before = used()
    clipped_gradients(model, squared, torch.randn(4, 4), torch.randn(4), 1.0)
    assert used() == before
    with torch.backends.cudnn.flags():
        pass


def test_threads_do_not_put_back_what_others_have_set():
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with torch_settings.without_tf32():
            inside.set()
            leave.wait()

    before = used()
    with torch_settings.without_tf32():
        other = threading.Thread(target=stay)
        other.start()
        inside.wait()
    assert set(used()) == {"ieee"}
    leave.set()
    other.join()
    assert used() == before


@pytest.mark.parametrize("choose", OLDER.values(), ids=OLDER)
def test_the_older_names_still_work_afterwards(choose):
    choose()
    with torch_settings.without_tf32():
        pass
    assert MATMUL.allow_tf32
    assert torch.get_float32_matmul_precision() == "high"


def test_proofs_are_made_without_it():
    seen = []

    def forward(n, x):
        seen.append(used())
        return n.one(x)

    before = used()
    clipped_gradients(Net(forward, one=nn.Linear(6, 5)), squared, *batch(7, 6), 1.0)
    assert "tf32" in before
    assert seen[0] == before  # the step's own forward pass
    assert {setting for each in seen[1:] for setting in each} == {"ieee"}


@pytest.mark.parametrize("choose", NEWER.values(), ids=NEWER)
def test_a_compiled_step_is_compiled_for_it(choose, monkeypatch):
    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)
    pair = Pair(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))
    pair.compiled(*batch(7, 6))
    choose()
    pair.compiled(*batch(7, 6))
    assert len(pair.driver._steps) == 2


def test_on_a_cpu_it_does_not_change_the_error_bound():
    exact = relative_error_bound(torch.zeros(1))
    MATMUL.fp32_precision = "tf32"
    assert relative_error_bound(torch.zeros(1)) == exact
