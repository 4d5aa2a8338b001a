"""Stopping anywhere and going on gives the run that would have been, bit for bit."""

import copy
import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from qclip.thresholds import (
    BalancedThreshold,
    Constant,
    ExactQuantile,
    GeometricQuantile,
    HistogramQuantile,
    PrivateQuantile,
    RollingQuantile,
    SlackQuantile,
)
from qclip.training.make import make_private
from shards import every

THRESHOLDS = {
    "constant": Constant(0.5),
    "private": PrivateQuantile(0.5),
    "geometric": GeometricQuantile(0.5),
    "histogram": HistogramQuantile(0.5),
    "slack": SlackQuantile(0.5),
    "exact": ExactQuantile(0.5),
    "exact over all": ExactQuantile(0.5, over="dataset"),
    "rolling": RollingQuantile(0.5, window=50),
    "balanced": BalancedThreshold(),
}


DOORS = ["fused", "ordinary"]


def dataset():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(400, 4, generator=generator), torch.randint(3, (400,), generator=generator))


class Run:
    """A training with dropout, momentum, a scheduler and an average of the weights: all that a checkpoint must hold."""

    def __init__(self, threshold, *, data=None, seed=None, physical_batch_size=None, kind=torch.optim.SGD, **changes):
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
        momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.optimizer = kind(self.model.parameters(), lr=0.1, **momentum)
        self.scheduler = StepLR(self.optimizer, 3)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        settings = {"batch_size": 150, "epochs": 2, "noise_multiplier": 1.0, "delta": 1e-4} | changes
        self.training = make_private(
            self.model, self.optimizer, data or dataset(), loss=nn.CrossEntropyLoss(), threshold=threshold, seed=seed,
            physical_batch_size=physical_batch_size, **settings,
        )  # fmt: skip

    @property
    def others(self):
        return {"scheduler": self.scheduler, "average": self.average}

    def go(self, door, stop=math.inf):
        """Go on until this many physical batches have been used, or to the end."""
        used = 0
        while len(self.training.history) < self.training.num_steps:
            for x, y in self.training.loader:
                if door == "fused":
                    self.training.step(x, y)
                else:
                    self.training.loss(self.model(x), y).backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if self.training.updated:
                    self.scheduler.step()
                    self.average.update_parameters(self.model)
                used += 1
                if used >= stop:
                    return self
        return self

    def result(self):
        tensors = {**self.model.state_dict(), **{f"average {k}": v for k, v in self.average.state_dict().items()}}
        return {k: v.clone() for k, v in tensors.items()}, self.training.history, self.optimizer.param_groups[0]["lr"]


def same(a, b):
    assert a[1:] == b[1:]
    assert a[0].keys() == b[0].keys()
    for name in a[0]:
        assert torch.equal(a[0][name], b[0][name]), name


@pytest.mark.parametrize(
    ("name", "door"),
    every(7, [(name, door) for i, name in enumerate(THRESHOLDS) for door in (DOORS if i % 2 else DOORS[::-1])]),
)
def test_a_resumed_run_is_the_run_that_would_have_been(name, door, tmp_path):
    threshold = THRESHOLDS[name]
    whole = Run(threshold, seed=5).go(door).result()
    path = tmp_path / "run.pt"
    first = Run(threshold, seed=5).go(door, stop=4)
    first.training.save(path, **first.others)
    second = Run(threshold)  # no seed: everything comes from the file
    second.training.load(path, **second.others)
    assert second.training.epsilon() == first.training.epsilon()
    same(second.go(door).result(), whole)


@pytest.mark.parametrize(
    ("stop", "kind", "door"), every(5, itertools.product([1, 5, 9], [torch.optim.SGD, torch.optim.Adam], DOORS))
)
def test_a_run_stopped_inside_a_logical_batch_begins_that_batch_anew(stop, kind, door, tmp_path):
    settings = {"physical_batch_size": 40, "kind": kind}
    whole = Run(PrivateQuantile(0.5), seed=5, **settings).go(door).result()
    first = Run(PrivateQuantile(0.5), seed=5, **settings).go(door, stop=stop)
    steps = len(first.training.history)
    first.training.save(tmp_path / "run.pt", **first.others)
    second = Run(PrivateQuantile(0.5), **settings)
    second.training.load(tmp_path / "run.pt", **second.others)
    assert len(second.training.history) == steps
    same(second.go(door).result(), whole)


def test_an_epoch_goes_on_where_it_stopped(tmp_path):
    first = Run(Constant(1.0), epochs=2).go("fused", stop=4)
    first.training.save(tmp_path / "run.pt")
    second = Run(Constant(1.0), epochs=2)
    second.training.load(tmp_path / "run.pt")
    assert [len(first.training.history), first.training.steps_per_epoch] == [4, 3]
    for batch in second.training.loader:
        second.training.step(batch)
    assert len(second.training.history) == second.training.num_steps == 6


def saved(tmp_path, stop=2, **settings):
    run = Run(PrivateQuantile(0.5), **settings).go("fused", stop=stop)
    run.training.save(tmp_path / "run.pt", **run.others)
    return tmp_path / "run.pt"


@pytest.mark.parametrize(
    ("threshold", "changes", "message"),
    [
        (PrivateQuantile(0.6), {}, r"threshold\['p'\] = 0.6 must be 0.5, as in the checkpoint"),
        (Constant(0.5), {}, r"threshold\['name'\] = 'Constant' must be 'PrivateQuantile'"),
        (PrivateQuantile(0.5), {"noise_multiplier": 0.5}, r"plan\['noise_multiplier'\] = 0.5 must be 1.0"),
        (PrivateQuantile(0.5), {"batch_size": 140}, r"plan\['batch_size'\] = 140 must be 150"),
        (PrivateQuantile(0.5), {"epochs": 3}, r"plan\['num_steps'\] = 9 must be 6"),
        (PrivateQuantile(0.5), {"delta": 1e-3}, r"plan\['delta'\] = 0.001 must be 0.0001"),
        (PrivateQuantile(0.5), {"accountant": "rdp"}, r"plan\['accountant'\] = 'rdp' must be 'pld'"),
        (PrivateQuantile(0.5), {"groups": "per-layer"}, r"groups\['3.weight'\] = 1 must be 0"),
    ],
)
def test_a_checkpoint_of_another_plan_is_refused_and_nothing_is_touched(threshold, changes, message, tmp_path):
    path = saved(tmp_path)
    before = path.read_bytes()
    other = Run(threshold, **changes)
    start = copy.deepcopy(other.result())
    with pytest.raises(ValueError, match=message):
        other.training.load(path, **other.others)
    same(other.result(), start)
    assert path.read_bytes() == before


def test_another_model_or_other_names_are_refused(tmp_path):
    path = saved(tmp_path)
    run = Run(PrivateQuantile(0.5))
    with pytest.raises(
        ValueError, match=r"others = \['scheduler'\] must be \['average', 'scheduler'\], as in the file"
    ):
        run.training.load(path, scheduler=run.scheduler)
    wide = nn.Linear(4, 3)
    training = make_private(
        wide, torch.optim.SGD(wide.parameters(), lr=0.1), dataset(), loss=nn.CrossEntropyLoss(), batch_size=150,
        epochs=2, noise_multiplier=1.0, delta=1e-4, threshold=PrivateQuantile(0.5),
    )  # fmt: skip
    with pytest.raises(ValueError, match="groups"):
        training.load(path, **run.others)


CHANGED = r"dataset has changed since the checkpoint .*: put back the data that the run began with"


@pytest.mark.parametrize("flipped", [1, 399])
def test_changed_data_are_refused_and_nothing_is_touched(flipped, tmp_path):
    path = saved(tmp_path)
    before = path.read_bytes()
    x, y = dataset().tensors
    y[:flipped] = (y[:flipped] + 1) % 3
    other = Run(PrivateQuantile(0.5), data=TensorDataset(x, y))
    start = copy.deepcopy(other.result())
    with pytest.raises(ValueError, match=CHANGED):
        other.training.load(path, **other.others)
    with pytest.raises(ValueError, match=CHANGED):
        other.training.load_state_dict(torch.load(path, weights_only=True)["training"])
    same(other.result(), start)
    assert path.read_bytes() == before


def test_data_that_changed_after_a_complete_run_are_nobodys_business(tmp_path):
    run = Run(PrivateQuantile(0.5)).go("fused")
    run.training.save(tmp_path / "run.pt", **run.others)
    x, y = dataset().tensors
    again = Run(PrivateQuantile(0.5), data=TensorDataset(-x, y))
    again.training.load(tmp_path / "run.pt", **again.others)
    assert again.training.finished


def test_going_back_in_a_run_is_refused(tmp_path):
    path = saved(tmp_path, stop=2)
    run = Run(PrivateQuantile(0.5)).go("fused", stop=4)
    with pytest.raises(ValueError, match="steps of the state = 2 must be >= 4"):
        run.training.load_state_dict(torch.load(path, weights_only=True)["training"])
    assert len(run.training.history) == 4


def test_a_complete_run_keeps_no_secrets_and_cannot_go_on(tmp_path):
    run = Run(PrivateQuantile(0.5), seed=5).go("fused")
    assert run.training.state_dict()["secrets"] is None
    run.training.save(tmp_path / "run.pt", **run.others)
    again = Run(PrivateQuantile(0.5))
    again.training.load(tmp_path / "run.pt", **again.others)
    assert again.training.epsilon() == run.training.epsilon() > 0
    with pytest.raises(ValueError, match="the budget is spent"):
        next(iter(again.training.loader))
    same(again.result(), run.result())


def test_the_model_and_the_optimizer_may_be_named_too(tmp_path):
    run = Run(PrivateQuantile(0.5)).go("fused", stop=1)
    run.training.save(tmp_path / "run.pt", model=run.model, optimizer=run.optimizer)
    run.training.load(tmp_path / "run.pt", optimizer=run.optimizer)


def test_batches_handed_out_before_a_load_are_void(tmp_path):
    path = saved(tmp_path)
    run = Run(PrivateQuantile(0.5))
    batch = next(iter(run.training.loader))
    run.training.load(path, **run.others)
    with pytest.raises(ValueError, match=r"batch is not an unused batch of training.loader"):
        run.training.step(batch)


def test_raw_sums_are_not_in_the_state():
    run = Run(PrivateQuantile(0.5), physical_batch_size=40).go("fused", stop=2)
    assert not run.training.updated
    state = run.training.state_dict()
    assert state["history"] == []
    assert set(state) == {
        "plan", "threshold", "groups", "rows_per_example", "rescale_to_unit_norm", "schedules",
        "execution", "seeded", "threshold_state", "history", "departure", "momentum", "auto_step_size",
        "secrets",
    }  # fmt: skip


def test_a_gradient_that_is_released_and_not_applied_is_not_lost(tmp_path):
    run = Run(PrivateQuantile(0.5))
    x, y = next(iter(run.training.loader))
    run.training.loss(run.model(x), y).backward()
    with pytest.raises(
        ValueError, match=r"released gradient was not applied before the state is taken: call optimizer.step"
    ):
        run.training.save(tmp_path / "run.pt")
    run.optimizer.step()
    run.training.save(tmp_path / "run.pt")
    run.optimizer.zero_grad()
    run.training.save(tmp_path / "run.pt")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_released_gradient_that_was_thrown_away_is_paid_for_and_saved_without(tmp_path, set_to_none):
    run = Run(PrivateQuantile(0.5))
    x, y = next(iter(run.training.loader))
    run.training.loss(run.model(x), y).backward()
    spent = run.training.epsilon()
    run.optimizer.zero_grad(set_to_none)
    run.training.save(tmp_path / "run.pt", **run.others)
    assert run.training.epsilon() == spent > 0
    whole = run.go("ordinary").result()
    again = Run(PrivateQuantile(0.5))
    again.training.load(tmp_path / "run.pt", **again.others)
    assert again.training.epsilon() == spent
    same(again.go("ordinary").result(), whole)


def augmented(items):
    x, y = torch.utils.data.default_collate(items)
    return x + 0.1 * torch.randn_like(x), y


def some_steps(stop, path=None, *, dropout=(), collate=None, **settings):
    """A run of this many steps, saved to the path or begun from it; its released gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *map(nn.Dropout, dropout), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = dataset() if collate is None else DataLoader(dataset(), collate_fn=collate)
    training = make_private(
        model, optimizer, data, loss=nn.CrossEntropyLoss(), batch_size=100, steps=6, noise_multiplier=1.0,
        delta=1e-4, **settings,
    )  # fmt: skip
    if path is not None and path.exists():
        training.load(path)
    released = []
    optimizer.register_step_pre_hook(
        lambda *_: released.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
    )
    while len(training.history) < stop:
        for batch in training.loader:
            training.step(*batch)
            if len(training.history) == stop:
                break
    if path is not None and not path.exists():
        training.save(path)
    return training, released


DRAWING = {
    "dropout": {"dropout": (0.5, 0.5)},
    "collate function": {"collate": augmented},
}


@pytest.mark.parametrize("draws", DRAWING.values(), ids=DRAWING)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"physical_batch_size": 17},
            r"physical_batch_size = 17 must be None, as in the checkpoint; pass the same value",
        ),
        ({"compile": "default", "physical_batch_size": 60}, "physical_batch_size = 60 must be None"),
    ],
)
def test_random_numbers_of_the_forward_pass_are_not_drawn_otherwise(draws, settings, message, tmp_path):
    """The steps since the checkpoint would be released again, with the same noise and other sums."""
    path = tmp_path / "run.pt"
    some_steps(3, path, **draws)
    with pytest.raises(ValueError, match=message):
        some_steps(4, path, **draws, **settings)
    again, _ = some_steps(4, path, **draws)
    again.save(tmp_path / "later.pt")
    with pytest.raises(ValueError, match=message):
        some_steps(5, tmp_path / "later.pt", **draws, **settings)


def test_compile_is_not_changed_under_random_numbers(tmp_path):
    path = tmp_path / "run.pt"
    some_steps(3, path, dropout=(0.5,), physical_batch_size=60)
    with pytest.raises(ValueError, match=r"compile = True must be False, as in the checkpoint"):
        some_steps(4, path, dropout=(0.5,), physical_batch_size=60, compile="default")


def test_without_random_numbers_a_step_may_be_cut_otherwise(tmp_path):
    """The sums, and so what is released, are the same to rounding."""
    path = tmp_path / "run.pt"
    some_steps(3, path)
    _, (whole,) = some_steps(4, path)
    _, (cut,) = some_steps(4, path, physical_batch_size=17)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)


class Noisy(TensorDataset):
    """Draws from the global generator when an example is fetched."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


@pytest.mark.smoke
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_random_transforms_come_again_when_saved_with_a_batch_in_hand(stop, tmp_path):
    """Saved at the top of the loop, when the next batch is fetched already; at 0 in the first logical batch."""

    def start(seed=None):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
        training = make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), Noisy(*dataset().tensors), loss=nn.CrossEntropyLoss(),
            batch_size=100, steps=3, noise_multiplier=1.0, delta=1e-4, physical_batch_size=40, seed=seed,
        )  # fmt: skip
        return training, model

    def finish(training, model, path=None):
        for k, batch in enumerate(training.loader):
            if k == stop and path is not None:
                training.save(path)
            training.step(*batch)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    path = tmp_path / "run.pt"
    whole = finish(*start(seed=3), path)
    training, model = start()
    training.load(path)
    assert torch.equal(finish(training, model), whole)


class Augmented(TensorDataset):
    """Draws from all global generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(4) + random.random() + np.random.rand(), y  # noqa: NPY002


class AugmentedLists(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", [Augmented, AugmentedLists])
def test_random_transforms_in_workers_come_again_in_the_middle_of_an_epoch(kind, tmp_path):
    """Whatever the number of workers: else the noise of the steps since the checkpoint could be subtracted."""

    def start(workers, seed=None):
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        loader = DataLoader(kind(*dataset().tensors), num_workers=workers)
        training = make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=nn.CrossEntropyLoss(),
            batch_size=100, steps=4, noise_multiplier=1.0, delta=1e-4, physical_batch_size=60, seed=seed,
        )  # fmt: skip
        return training, model

    def finish(training, model, path=None):
        for batch in training.loader:
            training.step(*batch)
            if path is not None and training.updated and len(training.history) == 2:
                training.save(path)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    path = tmp_path / "run.pt"
    whole = finish(*start(2, seed=3), path)
    training, model = start(1)
    training.load(path)
    assert torch.equal(finish(training, model), whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_size": 0.02}, r"schedules\['step_size'\] = \[0.02\] must be \[0.01\]"),
        ({"step_size": lambda t: 0.01 + t}, r"schedules\['step_size'\]"),
    ],
)
def test_another_schedule_is_another_run(changes, message, tmp_path):
    first = Run(PrivateQuantile(0.5), step_size=0.01).go("fused", stop=2)
    first.training.save(tmp_path / "run.pt")
    with pytest.raises(ValueError, match=message):
        Run(PrivateQuantile(0.5), **changes).training.load(tmp_path / "run.pt")
    rising = Run(Constant(lambda step: 1.0 + step)).go("fused", stop=2)
    rising.training.save(tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"schedules\['tau'\]"):
        Run(Constant(lambda step: 1.0 + 2 * step)).training.load(tmp_path / "run.pt")


def test_another_optimizer_is_refused_and_nothing_is_touched(tmp_path):
    path = saved(tmp_path)
    other = Run(PrivateQuantile(0.5), kind=torch.optim.Adam)
    start = copy.deepcopy(other.result())
    with pytest.raises(ValueError, match=r"optimizers = \[\('Adam', \[4\]\)\] must be \[\('SGD', \[4\]\)\]"):
        other.training.load(path, **other.others)
    same(other.result(), start)


def test_an_older_checkpoint_is_refused_and_nothing_is_touched(tmp_path):
    path = saved(tmp_path, stop=2, seed=5)
    run = Run(PrivateQuantile(0.5), seed=5).go("fused", stop=4)
    start = copy.deepcopy(run.result())
    with pytest.raises(ValueError, match="steps of the state = 2 must be >= 4"):
        run.training.load(path, **run.others)
    same(run.result(), start)


def test_numbers_of_numpy_can_be_saved(tmp_path):
    run = Run(Constant(np.float64(0.5)), noise_multiplier=np.float64(1.0)).go("fused", stop=1)
    run.training.save(tmp_path / "run.pt")
    Run(Constant(0.5)).training.load(tmp_path / "run.pt")
