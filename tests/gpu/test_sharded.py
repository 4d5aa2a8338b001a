"""Models of `fully_shard` on a GPU: one process, whose part of every parameter is all of it, makes the plain run."""

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("dp_accounting")

import qclip
from gpu.device import DEVICE, ON_GPU
from training.test_blocks import made, run

pytestmark = pytest.mark.gpu


@pytest.fixture
def group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl" if ON_GPU else "gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


CHANGES = [
    {},
    {"groups": "per-layer", "loop": "ordinary"},
    {"model": {"tied": True, "again": True}, "threshold": qclip.BalancedThreshold(), "step_size": "auto"},
    {"model": {"weight_norm": True}},
]


@pytest.fixture
def plain():
    return [run(0, device=DEVICE, **changes) for changes in CHANGES]


def test_it_is_the_plain_run(plain, group):
    for changes, (parameters, taus) in zip(CHANGES, plain, strict=True):
        found, found_taus = run(0, device=DEVICE, **changes)
        torch.testing.assert_close(torch.tensor(found_taus), torch.tensor(taus), rtol=1e-4, atol=0)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(parameters), rtol=1e-3, atol=1e-4)


def test_a_sharded_checkpoint_goes_on(group, tmp_path):
    whole = run(0, device=DEVICE, save=tmp_path / "run")
    assert run(0, device=DEVICE, resume=tmp_path / "run") == whole


def test_blocks_are_freed(group):
    model, _, training = made(device=DEVICE)
    wholes = [x for _, x in training._shards.named_parameters(model)]
    for batch in training.loader:
        training.step(*batch)
        assert not any(x.untyped_storage().size() for x in wholes)
