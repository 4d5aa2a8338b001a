"""What is not supported is refused as the table of docs/guarantees.md says, row by row."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

import qclip
from qclip.engine.capture import checks
from qclip.federated import Aggregator

PAGE = (Path(__file__).parents[1] / "docs" / "guarantees.md").read_text(encoding="utf-8")
SIZE = 40


def table():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SIZE, 4, generator=generator), torch.randint(3, (SIZE,), generator=generator))


def make(model=None, dataset=None, optimizer=None, **changes):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model.parameters())
    settings = {"loss": nn.CrossEntropyLoss(), "batch_size": 20, "steps": 2, "noise_multiplier": 1.0, "delta": 1e-4}
    dataset = table() if dataset is None else dataset
    return qclip.make_private(model, optimizer, dataset, **(settings | changes)), model, optimizer


def step(*args, **changes):
    training, _, _ = make(*args, **changes)
    for batch in training.loader:
        training.step(*batch)


class Stream(IterableDataset):
    def __iter__(self):
        yield from table()


class Pairs(Dataset):
    """Items with a blend of two, as MixUp makes them in the collate function."""

    @staticmethod
    def mixed(items):
        x, y = torch.stack([x for x, _ in items]), torch.tensor([int(y) for _, y in items])
        return 0.7 * x + 0.3 * x.roll(1, 0), y


def quantized():
    Linear4bit = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    make(nn.Sequential(Linear4bit(4, 4), nn.Linear(4, 3)))


def elsewhere():
    parameter = SimpleNamespace(
        requires_grad=True, device=torch.device("mps"), dtype=torch.float32, _backward_hooks=None
    )
    checks.trainable([("weight", parameter)])


def closure():
    training, model, optimizer = make()
    x, y = next(iter(training.loader))
    training.loss(model(x), y).backward()
    optimizer.step(lambda: 0.0)


def hooked():
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda grad: 2 * grad)
    make(model)


def scaled():
    training, model, _ = make()
    x, y = next(iter(training.loader))
    iter(training.loss(model(x), y))


def federated(**changes):
    Aggregator({"w": torch.zeros(2)}, num_clients=100, cohort_size=10, rounds=2, delta=1e-3, **changes)


REFUSED = {
    "QLoRA: weights in 4 or 8 bits": quantized,
    "weighted sampling": lambda: make(dataset=DataLoader(table(), sampler=WeightedRandomSampler([1.0] * SIZE, SIZE))),
    "streaming data": lambda: make(dataset=Stream()),
    "MPS and other devices than CPUs and CUDA GPUs": elsewhere,
    "float16": lambda: make(nn.Linear(4, 3).half()),
    "GradScaler": scaled,
    "closures, and with them automatic optimization in Lightning": closure,
    "LBFGS": lambda: make(optimizer=torch.optim.LBFGS),
    "batch norm in training mode": lambda: step(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))),
    "DataParallel": lambda: make(nn.DataParallel(nn.Linear(4, 3))),
    "scripted models": lambda: make(torch.jit.script(nn.Linear(4, 3))),
    "hooks on the gradients of parameters": hooked,
    "MixUp, CutMix and other blends of examples": lambda: step(
        dataset=DataLoader(table(), collate_fn=Pairs.mixed, batch_size=20)
    ),
    "oversampling by hand": lambda: make(dataset=Subset(table(), [*range(SIZE), 0, 0])),
    "shuffled batches of one size, with noise": lambda: make(sampling="uniform"),
    "weighted means over the batch": lambda: make(loss=nn.CrossEntropyLoss(weight=torch.ones(3))),
    "exact quantiles with an epsilon": lambda: make(
        threshold=qclip.ExactQuantile(0.5), noise_multiplier=None, epsilon=1.0
    ),
    "sparse inputs": lambda: step(
        dataset=DataLoader(
            table(), collate_fn=lambda items: (torch.stack([x for x, _ in items]).to_sparse(), torch.tensor([0]))
        )
    ),
    "cohorts of fixed size, with noise": lambda: federated(sampling="fixed", noise_multiplier=1.0),
}
"""Each does what is not supported."""


def rows():
    """The rows of the page: what, the words of the refusal, and what to do instead."""
    (section,) = re.findall(r"## What is not supported\n(.*?)(?:\n## |\Z)", PAGE, re.DOTALL)
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {what: words.strip("`") for what, words, _ in lines[1:]}


def test_the_table_has_these_rows():
    assert list(rows()) == list(REFUSED)


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_it_is_refused_as_the_table_says(what):
    with pytest.raises(qclip.Refusal) as refusal:
        REFUSED[what]()
    assert rows()[what] in str(refusal.value)
