"""Trainings that were accepted once and moved more than epsilon covers, and what `qclip.audit.replay` says of them.

Today they are refused. With the refusal taken out of the sources (`mutants`), replay must find them:

    python -m audit.holes "5: outputs are centred in place"
"""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import qclip
from qclip import audit

SIZE, WIDTH = 80, 4
TAU = qclip.Constant(0.05)


def table():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(3, (SIZE,), generator=generator))


def texts():
    """Items of other lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 6, (SIZE,), generator=generator).tolist()
    return [(torch.randn(n, WIDTH, generator=generator), k % 3) for k, n in enumerate(lengths)]


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def made(model, dataset, loss=None, **changes):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    settings = {"batch_size": 40, "steps": 3, "noise_multiplier": 0.8, "delta": 1e-4, "threshold": TAU} | changes
    loss = nn.CrossEntropyLoss() if loss is None else loss
    return qclip.make_private(model, optimizer, dataset, loss=loss, **settings), optimizer


def stepped(model, dataset, loss=None, **changes):
    training, _ = made(model, dataset, loss, **changes)
    for batch in training.loader:
        training.step(*batch)


def plain(dataset):
    stepped(mlp(), dataset, threshold=qclip.BalancedThreshold())


def paid(dataset):
    stepped(mlp(), dataset, threshold=qclip.PrivateQuantile(0.5, initial=3.0, noise_share=0.3), steps=4)


def batch_norm(dataset):
    stepped(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)), dataset)


def raw_gradient(dataset):
    model = mlp()
    training, optimizer = made(model, dataset)
    for x, y in training.loader:
        training.loss(model(x), y).backward()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def padded(dataset):
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()

        def forward(self, x):
            return self.layers(x.mean(1))

    def collate(items):
        return pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])

    stepped(Average(), DataLoader(dataset, collate_fn=collate))


def standardised(dataset):
    training, _ = made(mlp(), dataset)
    for x, y in training.loader:
        training.step((x - x.mean(0)) / x.std(0), y)


class Centring(nn.Module):
    """Centres by the batch from the moment when a buffer says so."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, x):
        out = self.layers(x)
        return out - self.weight * out.detach().mean(0)


def switched(dataset):
    model = Centring()
    training, _ = made(model, dataset, steps=4)
    for step, batch in enumerate(training.loader):
        model.weight.fill_(20.0 * (step > 1))
        training.step(*batch)


def in_place(dataset):
    model = mlp()
    training, optimizer = made(model, dataset)
    for x, y in training.loader:
        out = model(x)
        with torch.no_grad():
            out -= 20 * out.mean(0)
        training.loss(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def a_little(dataset):
    """With an outlier of a million, a ten-thousandth of the others is a hundred times an example's own."""

    def loss(outputs, targets):
        return (outputs - 5e-5 * outputs.detach().mean(0)).square().sum(1) + 0.0 * targets

    stepped(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 3)), dataset, loss)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x):
        self.mean.data.copy_(x.mean(0))
        return self.layers(x)


def frozen(dataset):
    stepped(Frozen(), dataset)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, outputs, targets):
        self.mean.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


def criterion(dataset):
    stepped(mlp(), dataset, Remembering())


LONG = (torch.ones(40, WIDTH), 0)
SOUND = {"plain": (plain, table, None), "paid": (paid, table, None)}
HOLES = {
    "batch norm": (batch_norm, table, None),
    "raw gradient": (raw_gradient, table, None),
    "1: a collate function pads to the longest": (padded, texts, [audit.replaced(i, LONG) for i in range(4)]),
    "1: the loop standardises by the batch": (standardised, table, None),
    "3: a buffer switches centring on": (switched, table, None),
    "5: outputs are centred in place": (in_place, table, None),
    "7: a thousandth of the others": (a_little, table, [audit.enlarged(i, 1e6) for i in range(4)]),
    "9: a frozen parameter keeps the mean": (frozen, table, None),
    "9: a criterion keeps the mean": (criterion, table, None),
}
"""Each a training, its data, and the neighbours to compare with."""


def outcome(name):
    """Return "refused", "nothing", or what was found."""
    train, data, neighbours = (SOUND | HOLES)[name]

    def seeded(dataset):
        torch.manual_seed(0)
        train(dataset)

    try:
        found = audit.replay(seeded, data(), neighbours, examples=2)
    except qclip.Refusal:
        return "refused"
    return "nothing" if found.holds else f"found: {found.findings[0]}"


def attacked():
    """Return whether the attacker on the joint release shows more than is claimed."""
    found = audit.white_box(qclip.Constant(1.0), epsilon=4.0, steps=2, runs=200, confidence=0.999)
    return "nothing" if found.holds else f"found: {found.lower_bound:.2f} where 4 is claimed"


if __name__ == "__main__":
    print(attacked() if sys.argv[1] == "white box" else outcome(sys.argv[1]))
