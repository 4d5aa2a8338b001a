"""A run on several ranks is the run on one: sums, counts, thresholds, noise and checkpoints."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import qclip
from qclip import accounting
from qclip.training.process_group import GroupRanks
from qclip.training.sums import BoundedSum, RawSums
from ranks import Failed, on_ranks

THRESHOLDS = {
    "balanced": qclip.BalancedThreshold(),
    "quantile": qclip.PrivateQuantile(0.5, noise_share=0.5),
    "constant": qclip.Constant(0.5),
}


def made(seed=3, threshold="quantile", nan=False, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 5))
    x = torch.randn(500, 20)
    y = (x[:, :5] + 0.3 * torch.randn(500, 5)).argmax(1)
    x[::7, 3] = torch.nan if nan else x[::7, 3]
    options = {"batch_size": 40, "steps": 12, "noise_multiplier": 1.0, "delta": 1e-5} | changes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training = qclip.make_private(
        model,
        optimizer,
        TensorDataset(x, y),
        loss=nn.CrossEntropyLoss(),
        seed=seed,
        threshold=THRESHOLDS[threshold],
        **options,
    )
    return model, training


def finished(model, training):
    """Train to the end; return the flat parameters, the clip norms and the number of physical batches."""
    parts = 0
    for batch in training.loader:
        training.step(*batch)
        parts += 1
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat.tolist(), [record.tau for record in training.history], parts


def run(rank, changes):
    return finished(*made(**changes))


CASES = {
    "noisy": {},
    "without noise": {"noise_multiplier": 0.0},
    "per layer, cut": {"groups": "per-layer", "physical_batch_size": 7},
    "empty shares": {"batch_size": 2, "groups": "per-layer"},
    "balanced, own rate": {"threshold": "balanced", "step_size": "auto"},
}


def assert_one_run(ranks, alone):
    parameters, taus, _ = alone
    for other_parameters, other_taus, parts in ranks:
        assert parts == ranks[0][2]  # or a collective in the forward pass would hang
        assert other_taus == ranks[0][1]
        assert other_parameters == ranks[0][0]
        torch.testing.assert_close(torch.tensor(other_taus), torch.tensor(taus), rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.tensor(other_parameters), torch.tensor(parameters), rtol=1e-5, atol=1e-6)


def every(rank, cases):
    return [run(rank, changes) for changes in cases]


def test_two_ranks_are_one():
    cases = [CASES["per layer, cut"], CASES["balanced, own rate"], {"seed": None, "steps": 2}]
    *by_case, (one, other) = zip(*on_ranks(2, every, cases), strict=True)
    for changes, ranks in zip(cases, by_case, strict=False):
        assert_one_run(ranks, run(0, changes))
    assert one == other  # rank 0 chose the seed


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_are_one(size):
    by_rank = on_ranks(size, every, list(CASES.values()))
    for changes, *ranks in zip(CASES.values(), *by_rank, strict=True):
        assert_one_run(ranks, run(0, changes))


def on_two_threads(rank):
    torch.set_num_threads(1 + rank)
    return run(rank, CASES["balanced, own rate"])


@pytest.mark.slow
def test_ranks_may_have_other_numbers_of_threads():
    assert_one_run(on_ranks(2, on_two_threads), run(0, CASES["balanced, own rate"]))


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["flat", "per-layer"])
def test_compiled_ranks_are_one(groups):
    changes = {"compile": True, "groups": groups, "physical_batch_size": 7}
    assert_one_run(on_ranks(2, run, changes, timeout=400), run(0, changes))


# What one example can change, and the noise


def one_step(rank, lost):
    """The sum of a step of all 60 examples, without noise, one of them perhaps lost: not finite."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), torch.randn(60, 6)
    if lost is not None:
        x[lost] = torch.nan
    training = qclip.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.0), TensorDataset(x, torch.arange(60) % 3), batch_size=60,
        steps=1, noise_multiplier=0.0, loss=nn.CrossEntropyLoss(), threshold=qclip.Constant(0.25), seed=0,
    )  # fmt: skip
    for batch in training.loader:
        training.loss(model(batch[0]), batch[1]).backward()
    return 60 * torch.cat([p.grad.flatten() for p in model.parameters()])


def one_step_without(rank, everyone):
    return [one_step(rank, lost).tolist() for lost in everyone]


@pytest.mark.slow
def test_an_example_on_any_rank_moves_the_sum_by_its_clip_norm_at_most():
    everyone = [None, 0, 1, 2, 3]
    one, other = on_ranks(2, one_step_without, everyone)
    assert one == other
    whole, *without = map(torch.tensor, one)
    torch.testing.assert_close(whole, one_step(0, None), rtol=1e-4, atol=1e-5)
    for left in without:
        distance = float((whole - left).norm())
        assert 0.249 < distance < 0.25 * (1 + 1e-5)  # all of these gradients are longer than 0.25


def noise_alone(rank):
    """A release of 20,000 coordinates whose gradient is 0."""
    torch.manual_seed(0)
    model = nn.Linear(200, 100, bias=False)
    training = qclip.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.0), TensorDataset(torch.zeros(50, 200), torch.zeros(50, 100)),
        loss=nn.MSELoss(), batch_size=10, steps=1, noise_multiplier=2.0, delta=1e-3, threshold=qclip.Constant(0.5),
    )  # fmt: skip
    for batch in training.loader:
        training.loss(model(batch[0]), batch[1]).backward()
    return model.weight.grad.flatten().tolist()


@pytest.mark.slow
def test_noise_is_added_once():
    one, other = on_ranks(2, noise_alone)
    assert one == other
    expected = 2.0 * 0.5 / 10
    assert abs(torch.tensor(one).std() / expected - 1) < 0.03  # 6 standard errors


# Mutants: what `assert_one_run` must notice


def mutated(rank, name):
    from qclip.training import loader, noise, process_group

    if name == "counts are not added up":
        summed = process_group.GroupRanks._summed
        process_group.GroupRanks._summed = lambda ranks, raw: raw if len(raw.tensors) == 1 else summed(ranks, raw)
    if name == "parts of the own share only":
        cut = loader.cut
        loader.cut = lambda indices, step, size, largest: cut(indices, step, size)
    model, training = made(physical_batch_size=3, batch_size=8)
    if name == "noise of each rank":
        training._noise = noise.NoiseSource(rank)
    if name == "no noise":
        training._rule = replace(training._rule, noise=accounting.split(0.0, 0.5))
    return finished(model, training)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["counts are not added up", "parts of the own share only", "noise of each rank", "no noise"]
)
def test_mutants_are_noticed(name):
    outcomes = on_ranks(2, mutated, name)
    if not any(isinstance(outcome, Failed) for outcome in outcomes):
        with pytest.raises(AssertionError):
            assert_one_run(outcomes, run(0, {"physical_batch_size": 3, "batch_size": 8}))


def test_the_mutants_start_from_a_run_that_is_right():
    assert mutated(0, "") == run(0, {"physical_batch_size": 3, "batch_size": 8})


def added_up(rank):
    sums = BoundedSum({"x": torch.full((3,), 1.0 + rank)}, {"x": 0}, (1.0,), (3,))
    ranks = GroupRanks(None, torch.device("cpu"))
    total = ranks.add_up(RawSums(sums, None, 5 * rank, torch.tensor(rank == 1)), 0, ())
    return total.gradient.tensors["x"].tolist(), total.num_examples, total.hopeless


@pytest.mark.slow
def test_no_rank_decides_alone_that_a_step_is_hopeless():
    assert on_ranks(2, added_up) == [([3.0] * 3, 5, False)] * 2


# Checkpoints


def begun(rank, path):
    _, training = made()
    for batch in training.loader:
        training.step(*batch)
        if len(training.history) == 5:
            break
    training.save(path)


def resumed(rank, path):
    model, training = made()
    training.load(path)
    assert len(training.history) == 5
    return finished(model, training)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_resumes_on_any_number_of_ranks(size, tmp_path):
    path = tmp_path / "run.pt"
    assert on_ranks(2, begun, path) == [None, None]
    outcomes = [resumed(0, path)] if size == 1 else on_ranks(size, resumed, path)
    assert_one_run(outcomes, run(0, {}))


def with_dropout(rank, path):
    """A model that draws: 2 steps, saved; 2 more; then the run is resumed and takes these 2 again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)

    def make():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return qclip.make_private(
            model, optimizer, data, loss=nn.CrossEntropyLoss(), batch_size=16, steps=4, noise_multiplier=1.0,
            delta=1e-3, seed=1, threshold=qclip.PrivateQuantile(0.5, noise_share=0.5),
        )  # fmt: skip

    torch.manual_seed(rank)
    training = make()
    for batch in training.loader:
        training.step(*batch)
        if len(training.history) == 2:
            training.save(path)
    torch.distributed.barrier()  # rank 0 has written it
    again = make()
    again.load(path)
    for batch in again.loader:
        again.step(*batch)
    return [[record.noisy_unclipped for record in each.history] for each in (training, again)]


@pytest.mark.slow
def test_noise_does_not_serve_twice_where_random_numbers_are_each_ranks_own(tmp_path):
    (first, again), (other, other_again) = on_ranks(2, with_dropout, tmp_path / "run.pt")
    assert (first, again) == (other, other_again)
    assert first[:2] == again[:2]
    assert first[2:] != again[2:]


def with_adam(rank, path, how):
    """Adam, its state in parts where there are several ranks: 3 steps, saved, and 3 more; or resumed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
    x = torch.randn(200, 20)
    if torch.distributed.is_initialized():
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = qclip.make_private(
        model, optimizer, TensorDataset(x, x[:, :5].argmax(1)), loss=nn.CrossEntropyLoss(), batch_size=20, steps=6,
        noise_multiplier=1.0, delta=1e-5, seed=0,
    )  # fmt: skip
    if how == "resumed":
        training.load(path)
    for xb, yb in training.loader:
        training.loss(model(xb), yb).backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(training.history) == 3 and how != "resumed" and path is not None:
            training.save(path)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat.tolist(), [record.tau for record in training.history], 0


@pytest.mark.slow
def test_the_state_of_an_optimizer_may_be_in_parts(tmp_path):
    path, alone = tmp_path / "run.pt", with_adam(0, None, "whole")
    assert_one_run(on_ranks(2, with_adam, path, "whole"), alone)
    assert_one_run(on_ranks(3, with_adam, path, "resumed"), alone)


# Refusals


def refused(rank, changes_of_rank_1):
    return run(rank, changes_of_rank_1 if rank == 1 else {})


def other_parameters(rank):
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.zeros(50, 3), torch.zeros(50, dtype=torch.long))
    common = {"batch_size": 10, "steps": 1, "noise_multiplier": 1.0, "delta": 1e-3}
    qclip.make_private(model, torch.optim.SGD(model.parameters()), data, loss=nn.CrossEntropyLoss(), **common)


def other_data(rank):
    model = nn.Linear(3, 2)
    model.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    data = TensorDataset(torch.full((50, 3), float(rank)), torch.zeros(50, dtype=torch.long))
    common = {"batch_size": 10, "steps": 1, "noise_multiplier": 1.0, "delta": 1e-3}
    qclip.make_private(model, torch.optim.SGD(model.parameters()), data, loss=nn.CrossEntropyLoss(), **common)


def assert_refused(outcomes, *words):
    for outcome in outcomes:
        assert outcome.kind == "Refusal"
        for word in (*words, "distributed=False"):
            assert word in outcome.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, ["seed = 3 on rank 0, but 4 on rank 1"]),
        ({"steps": 13}, ["plan"]),
        ({"threshold": "constant"}, ["threshold"]),
        ({"groups": "per-layer"}, ["groups"]),
        ({"physical_batch_size": 7}, ["physical_batch_size = None on rank 0, but 7 on rank 1"]),
    ],
)
def test_other_arguments_are_refused_by_name(changes, words):
    assert_refused(on_ranks(2, refused, changes), *words)


@pytest.mark.slow
def test_other_parameters_and_data_are_refused_by_name():
    assert_refused(on_ranks(2, other_parameters), "checksum of 'weight'", "torch.manual_seed")
    assert_refused(on_ranks(2, other_data), "dataset")


def raw_norms(rank):
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), TensorDataset(torch.randn(50, 3), torch.zeros(50, dtype=torch.long))
    common = {"batch_size": 10, "steps": 2, "noise_multiplier": 0.0, "threshold": qclip.ExactQuantile(0.5)}
    common |= {"loss": nn.CrossEntropyLoss(), "seed": rank}
    optimizer = torch.optim.SGD(model.parameters())
    training = qclip.make_private(model, optimizer, data, distributed=False, **common)  # of its own, with its own seed
    for batch in training.loader:
        training.step(*batch)
    qclip.make_private(model, optimizer, data, **common)


@pytest.mark.slow
def test_thresholds_that_see_raw_norms_are_refused():
    assert_refused(on_ranks(2, raw_norms), "ExactQuantile", "2 ranks")


def test_a_group_without_processes_is_refused():
    with pytest.raises(qclip.Refusal, match="init_process_group first"):
        made(distributed=True)


def test_processes_that_nothing_brings_together_are_warned(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="RANK = 1 and WORLD_SIZE = 2, but no process group") as warned:
        made()
    assert warned[0].filename == __file__
    made(distributed=False)


# Failures


def misbehaving(rank, how):
    """One rank fails at its 4th physical batch; return what the others see, and after how many seconds."""
    model, training = made(steps=8)
    fails = rank == (0 if how == "Ctrl-C on rank 0" else 1)
    for number, batch in enumerate(training.loader):
        began = time.monotonic()
        try:
            if fails and number == 3:
                if how == "dies":
                    os._exit(1)
                if how == "raises in the model":
                    model[0].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGFPE))
                    signal.signal(signal.SIGFPE, lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
                if how.startswith("Ctrl-C"):
                    model[0].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
                if how == "another batch":
                    training.step(batch[0].clone()[:1], batch[1].clone()[:1])
            training.step(*batch)
        except BaseException as error:
            return type(error).__name__, str(error), time.monotonic() - began, len(training.history)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", "has ended or cannot be reached"),
        ("raises in the model", "rank 1 failed in step 3"),
        ("Ctrl-C", "rank 1 failed in step 3"),
        ("Ctrl-C on rank 0", "rank 0 failed in step 3"),
        ("another batch", "rank 1 failed in step 3"),
    ],
)
def test_all_ranks_stop_when_one_fails(how, words):
    outcomes = on_ranks(3, misbehaving, how)
    failing = outcomes.pop(0 if how == "Ctrl-C on rank 0" else 1)
    for kind, message, seconds, done in outcomes:
        assert kind == "LostRank"
        assert words in message
        assert seconds < 30  # the timeout of the group is 60
        assert done == 3
    assert failing is None if how == "dies" else failing[0] != "LostRank"


def with_nan(rank):
    return finished(*made(nan=True))


@pytest.mark.slow
def test_an_example_without_a_finite_gradient_is_left_out_on_its_rank():
    assert_one_run(on_ranks(2, with_nan), with_nan(0))


# Loops that people have


def in_a_loop(rank):
    """The ordinary loop around DistributedDataParallel, with a buffer that it broadcasts in every forward pass."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 5))
    model = nn.parallel.DistributedDataParallel(inner) if torch.distributed.is_initialized() else inner
    x = torch.randn(200, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training = qclip.make_private(
        model, optimizer, TensorDataset(x, x[:, :5].argmax(1)), loss=nn.CrossEntropyLoss(), batch_size=20, steps=6,
        noise_multiplier=1.0, delta=1e-5, seed=0, physical_batch_size=4,
    )  # fmt: skip
    parts = 0
    for xb, yb in training.loader:
        training.loss(model(xb), yb).backward()
        optimizer.step()
        optimizer.zero_grad()
        parts += 1
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat.tolist(), [record.tau for record in training.history], parts


@pytest.mark.slow
def test_a_wrapped_model_in_an_ordinary_loop():
    assert_one_run(on_ranks(2, in_a_loop), in_a_loop(0))
