"""Models of `fully_shard` whose blocks FSDP2's own hooks gather: the run of one process, and what is whole when."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, default_collate

import qclip
from ranks import on_ranks

pytestmark = pytest.mark.slow

WORDS, WIDTH, LENGTH = 23, 10, 6


class Block(nn.Module):
    """Pre-norm attention and a small network; perhaps with a weight norm, or computed again in the backward pass."""

    def __init__(self, weight_norm=False, again=False):
        super().__init__()
        self.a, self.m, self.again = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), again
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
        if weight_norm:
            parametrizations.weight_norm(self.up)

    def compute(self, x):
        q, k, v = self.qkv(self.a(x)).chunk(3, -1)
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(torch.tanh(self.up(self.m(x))))

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.again else self.compute(x)


class Language(nn.Module):
    def __init__(self, tied=False, frozen=False, **options):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, ids):
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Texts(Dataset):
    """Sentences; one of them has a target that makes its loss NaN, where that is wanted."""

    def __init__(self, count=120):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(WORDS, (count, LENGTH + 1), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return self.ids[index, :-1], self.ids[index, 1:]


def shard(model, policy=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    options = {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    if policy is not None:
        options["mp_policy"] = replace(policy, output_dtype=torch.float32)
    fully_shard(model, mesh=mesh, **options)


def per_token(outputs, targets):
    return nn.functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def unstacked(items):
    """A collate function that has to be proven."""
    return default_collate(list(items))


def made(policy=None, data=None, collate=None, optimizer=torch.optim.SGD, model=None, device="cpu", **changes):
    torch.manual_seed(0)
    model = Language(**(model or {})).to(device)
    if torch.distributed.is_initialized():
        shard(model, policy)
    options = {"batch_size": 16, "steps": 5, "noise_multiplier": 0.5, "physical_batch_size": 5} | changes
    options.setdefault("threshold", qclip.PrivateQuantile(0.5, noise_share=0.5))
    data = Texts() if data is None else data
    source = data if collate is None else DataLoader(data, collate_fn=collate)
    trained = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return model, trained, qclip.make_private(model, trained, source, loss=per_token, delta=1e-5, seed=0, **options)


def flat(model):
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.state_dict().values()]
    return torch.cat([p.detach().flatten() for p in parts])


def run(rank, save=None, resume=None, loop="step", **changes):
    model, optimizer, training = made(**changes)
    if resume is not None:
        training.load(resume)
    for batch in training.loader:
        if loop == "step":
            training.step(*batch)
        else:
            inputs, targets = (x.to(changes.get("device", "cpu")) for x in batch)
            training.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if training.updated and len(training.history) == 3 and save is not None:
            training.save(save, sharded=True)
    return flat(model).tolist(), [record.tau for record in training.history]


def several(rank, changes):
    return [run(rank, **each) for each in changes]


def assert_one_run(ranks, alone, atol=2e-6):
    for parameters, taus in ranks:
        assert (parameters, taus) == tuple(ranks[0])
        torch.testing.assert_close(torch.tensor(taus), torch.tensor(alone[1]), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(parameters), torch.tensor(alone[0]), rtol=1e-4, atol=atol)


CASES = [
    {},
    {"groups": "per-layer"},
    {"model": {"frozen": True}},
    {"model": {"tied": True}},
    {"model": {"again": True}},
    {"model": {"weight_norm": True}},  # reads values of parameters after the backward pass
    {"collate": unstacked},
    {"loop": "ordinary"},
    {"batch_size": 2, "physical_batch_size": None},  # empty shares
    {"threshold": qclip.BalancedThreshold(), "step_size": "auto"},
]


@pytest.mark.parametrize("size", [2, 3])
def test_blocks_make_the_run_of_one(size):
    for changes, *ranks in zip(CASES, *on_ranks(size, several, CASES, timeout=300), strict=True):
        assert_one_run(ranks, run(0, **changes), atol=2e-4 if "step_size" in changes else 2e-6)


# What is whole when


def is_there(parameter):
    return parameter.untyped_storage().size() > 0


def watched(rank):
    """For each step, whether all was gathered, which blocks have values as each of them begins, and what is left."""
    model, _, training = made(steps=12, data=Texts(400), batch_size=90, physical_batch_size=None)
    wholes = dict(training._shards.named_parameters(model))
    present = []

    def see(k):
        there = {name.split(".")[1] for name, x in wholes.items() if name.startswith("blocks.") and is_there(x)}
        present.append((str(k), there))

    for k, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, k=k: see(k))  # after FSDP2's own
    steps, gathered = [], []
    training._shards.require_all_well = lambda: gathered.append(training._shards._is_awaited)
    for batch in training.loader:
        present.clear()
        gathered.clear()
        training.step(*batch)
        steps.append((any(gathered), list(present), any(map(is_there, wholes.values()))))
    kept = sum(x.numel() for x in training._shards.resident({}).values())
    return steps, kept / sum(x.numel() for x in wholes.values())


def test_blocks_are_whole_only_while_they_run():
    for steps, kept in on_ranks(2, watched):
        assert kept < 0.6
        assert [gathered for gathered, _, _ in steps[:2]] == [True, True]  # to prove the model
        assert sum(gathered for gathered, _, _ in steps) < 8
        for gathered, present, left in steps:
            assert not left
            if not gathered:  # one forward pass, in which the other blocks are not there
                assert present == [("0", {"0"}), ("1", {"1"}), ("2", {"2"})]


def local_sums(rank):
    """The largest number of elements of the sums of a step, which are parts."""
    _, _, training = made(steps=1)
    sizes = []
    take = training._take
    training._take = lambda ticket, gradients: (
        sizes.append(sum(x.numel() for x in gradients.sums.values())),
        take(ticket, gradients),
    )
    for batch in training.loader:
        training.step(*batch)
    return max(sizes), sum(p.numel() for p in training._engine.parameters.values())


def test_sums_are_parts():
    for part, whole in on_ranks(2, local_sums):
        assert part < 0.6 * whole


# Precision


def sixteen_bits(rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, _, training = made(
        policy, steps=1, noise_multiplier=0.0, batch_size=120, physical_batch_size=None, threshold=qclip.Constant(0.5)
    )
    before = flat(model)
    for batch in training.loader:
        training.step(*batch)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    return ((before - flat(model)) / 0.05).tolist(), [str(p.dtype) for p in training._engine.parameters.values()]


def test_mixed_precision_gives_the_sums_of_the_model_in_16_bits():
    torch.manual_seed(0)
    model = Language().bfloat16()
    data = Texts()
    expected = qclip.clipped_gradients(
        model, lambda outputs, targets: per_token(outputs.float(), targets), data.ids[:, :-1], data.ids[:, 1:], 0.5
    )
    mean = torch.cat([expected.sums[name].flatten() for name, _ in model.named_parameters()]) / 120
    for found, dtypes in on_ranks(2, sixteen_bits):
        assert set(dtypes) == {"torch.bfloat16"}
        difference = torch.linalg.vector_norm(torch.tensor(found) - mean)
        assert difference < 5e-3 * torch.linalg.vector_norm(mean)


# Failures


def failing(rank):
    model, _, training = made(steps=40, physical_batch_size=None)

    def fail(module, args):
        if rank == 1 and len(training.history) == 4:
            raise ValueError("this rank is tired")

    model.blocks[1].register_forward_pre_hook(fail)
    try:
        for batch in training.loader:
            start = time.monotonic()
            training.step(*batch)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start, len(training.history)
    return "finished"


def test_a_rank_that_fails_in_a_forward_pass_stops_the_others():
    first, second = on_ranks(2, failing)
    assert second[:2] == ("ValueError", "this rank is tired")
    assert first[0] == "LostRank", first
    assert first[2] < 10
    assert first[3] == second[3] == 4  # nothing was released


class Mixing(Language):
    def forward(self, ids):
        return super().forward(ids) * ids.float().mean()


def mixes_on_one(rank):
    """A model that mixes examples only on one rank is refused there, and the others hear of it."""
    torch.manual_seed(0)
    model = Mixing() if rank == 1 else Language()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = qclip.make_private(
        model, optimizer, Texts(), loss=per_token, batch_size=16, steps=3, noise_multiplier=1.0, delta=1e-5, seed=0
    )
    try:
        for batch in training.loader:
            training.step(*batch)
    except qclip.Refusal as refusal:
        return type(refusal).__name__, str(refusal)
    return None


def test_a_refusal_on_one_rank_is_told_to_the_others():
    first, second = on_ranks(2, mixes_on_one)
    assert "mix" in second[1]
    assert first[0] == "LostRank"
    assert "rank 1 failed" in first[1]


def test_nan_examples_on_one_rank():
    class_of = {"data": Spoilt()}
    (ranks,) = zip(*on_ranks(2, several, [class_of]), strict=True)
    assert_one_run(ranks, run(0, **class_of))


class Spoilt(Texts):
    """Every ninth sentence has a word that gives NaN."""

    def __getitem__(self, index):
        ids, targets = super().__getitem__(index)
        return (ids, torch.full_like(targets, -100)) if index % 9 == 0 else (ids, targets)


# Checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a run on two ranks, with Adam, and where the run ended."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    changes = {"save": folder, "optimizer": torch.optim.Adam}
    (ranks,) = zip(*on_ranks(2, several, [changes]), strict=True)
    alone = run(0, optimizer=torch.optim.Adam)
    assert_one_run(ranks, alone, atol=1e-4)
    return folder, alone


def test_a_sharded_checkpoint_resumes_on_three_ranks_and_on_one(saved):
    folder, alone = saved
    changes = {"resume": folder, "optimizer": torch.optim.Adam}
    (ranks,) = zip(*on_ranks(3, several, [changes]), strict=True)
    assert_one_run(ranks, alone, atol=1e-4)
    assert_one_run([run(0, **changes)], alone, atol=1e-4)
    assert sorted(path.name.partition("-")[0] for path in folder.iterdir()) == ["checkpoint", "current"]


def auto_saved(rank, folder, compiled):
    changes = {"threshold": qclip.BalancedThreshold(), "step_size": "auto", "noise_multiplier": 0.1, "steps": 8}
    return run(rank, save=folder, **changes), run(rank, resume=folder, compile=compiled, **changes)


def test_a_sharded_checkpoint_holds_the_learning_rate(tmp_path):
    for whole, resumed in on_ranks(2, auto_saved, tmp_path / "run", False):
        assert whole == resumed


def test_damage_is_refused(saved, tmp_path):
    import shutil

    folder, _ = saved
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (part,) = copy.glob("checkpoint-*/__1_0.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(qclip.Refusal, match="a whole sharded checkpoint"):
        run(0, resume=copy, optimizer=torch.optim.Adam)


def test_nothing_is_executed(saved, tmp_path):
    import io

    from qclip.training.sharded_checkpoint import _SafeUnpickler

    with pytest.raises(qclip.Refusal, match=r"posix\.system|nt\.system"):
        _SafeUnpickler(io.BytesIO(b"cposix\nsystem\n(Vtrue\ntR.")).load()


def test_whole_models_have_no_sharded_checkpoints(tmp_path):
    _, _, training = made()
    with pytest.raises(qclip.Refusal, match="one file holds everything"):
        training.save(tmp_path / "run", sharded=True)
