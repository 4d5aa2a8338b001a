"""Models of `fully_shard`: the run of one process, noise included, with each rank's part of the parameters."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import qclip
from qclip._validate import Refusal
from ranks import on_ranks

pytestmark = pytest.mark.slow


class Tied(nn.Module):
    """Uneven sizes, a tied weight, a frozen layer and a buffer."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(7, 13), nn.Linear(13, 7, bias=False)
        self.two.weight = nn.Parameter(torch.randn(7, 13) / 4)
        self.norm, self.frozen, self.head = nn.LayerNorm(13), nn.Linear(13, 13), nn.Linear(13, 5)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(13))

    def forward(self, x):
        h = torch.tanh(self.one(x))
        h = torch.tanh(self.one(self.two(h)))  # `one` is used twice
        return self.head(self.frozen(self.norm(h)) * self.scale)


def made(optimizer=torch.optim.SGD, mesh_dims=1, **changes):
    torch.manual_seed(0)
    model = Tied()
    if torch.distributed.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        size = torch.distributed.get_world_size()
        shape, names = ((size,), ("ranks",)) if mesh_dims == 1 else ((1, size), ("replicas", "ranks"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for module in (model.one, model.head):
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.randn(200, 7)
    options = {"batch_size": 20, "steps": 6, "noise_multiplier": 1.0, "physical_batch_size": 6} | changes
    options["threshold"] = qclip.PrivateQuantile(0.5, noise_share=0.5)
    trained = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = TensorDataset(x, x[:, :5].argmax(1))
    training = qclip.make_private(model, trained, data, loss=nn.CrossEntropyLoss(), delta=1e-5, seed=0, **options)
    return model, trained, training


def whole(model):
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.state_dict().values()]
    return torch.cat([p.detach().flatten() for p in parameters])


def run(rank, loop="step", resume=None, save=None, **changes):
    model, optimizer, training = made(**changes)
    if resume is not None:
        training.load(resume)
    for x, y in training.loader:
        if loop == "step":
            training.step(x, y)
        else:
            training.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if training.updated and len(training.history) == 3 and save is not None:
            training.save(save)
    kept = sum(p.to_local().numel() for p in model.parameters() if hasattr(p, "to_local"))
    return whole(model).tolist(), [record.tau for record in training.history], kept


def several(rank, changes):
    return [run(rank, **each) for each in changes]


def assert_one_run(ranks, alone, atol=1e-6):
    for parameters, taus, _ in ranks:
        assert parameters == ranks[0][0]
        assert taus == ranks[0][1]
        torch.testing.assert_close(torch.tensor(taus), torch.tensor(alone[1]), rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.tensor(parameters), torch.tensor(alone[0]), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_parameters_make_the_run_of_one(size):
    changes = [{}, {"loop": "ordinary"}, {"noise_multiplier": 0.0, "groups": "per-layer"}, {"step_size": "auto"}]
    for each, *ranks in zip(changes, *on_ranks(size, several, changes), strict=True):
        assert_one_run(ranks, run(0, **each), atol=1e-4 if "step_size" in each else 1e-6)  # steps of length 3
        parts = [kept for _, _, kept in ranks]
        assert max(parts) < sum(parts)  # each rank keeps a part


def test_a_sharded_run_resumes_on_other_ranks_and_on_one(tmp_path):
    path, adam = tmp_path / "run.pt", {"optimizer": torch.optim.Adam}
    alone = run(0, **adam)
    (ranks,) = zip(*on_ranks(2, several, [{"save": path, **adam}]), strict=True)
    assert_one_run(ranks, alone)
    (ranks,) = zip(*on_ranks(3, several, [{"resume": path, **adam}]), strict=True)
    assert_one_run(ranks, alone)
    assert_one_run([run(0, resume=path, **adam)], alone)


def refused(rank):
    messages = []
    for changes in ({"mesh_dims": 2}, {"distributed": False}):
        with pytest.raises(Refusal) as refusal:
            made(**changes)
        messages.append(str(refusal.value))
    return messages


def test_meshes_of_two_dimensions_and_runs_of_one_rank_are_refused():
    for two_dimensions, one_rank in on_ranks(2, refused):
        assert "mesh of one dimension" in two_dimensions
        assert "sharded over 2 ranks, but the run has 1" in one_rank


def compiled(rank):
    return run(rank, compile=True)


def test_compiled_steps():
    assert_one_run(on_ranks(2, compiled, timeout=400), compiled(0))
