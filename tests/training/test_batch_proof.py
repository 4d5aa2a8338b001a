"""The way from the data set to the model: what mixes examples there is refused, what does not is left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from qclip import Constant, make_private
from qclip.engine import Refusal
from qclip.training.batch_proof import origins

N, D, V = 60, 5, 11


class Texts(Dataset):
    """Token ids of 2 to 9 positions, and a class."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 10, (N,), generator=generator).tolist()
        self.ids = [torch.randint(1, V, (n,), generator=generator) for n in lengths]
        self.labels = torch.randint(3, (N,), generator=generator).tolist()

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.ids[index], self.labels[index]


class Lists(Texts):
    """Reads a list of items at once, as data sets of `datasets` with a transform do."""

    def __getitems__(self, indices):
        ids, labels = padded_to([self[k] for k in indices], max(len(self.ids[k]) for k in indices))
        return list(zip(ids, labels, strict=True))


def padded_to(items, length):
    ids = torch.stack([F.pad(ids[:length], (0, length - len(ids[:length]))) for ids, _ in items])
    return ids, torch.tensor([label for _, label in items])


def longest(items):
    return padded_to(items, max(len(ids) for ids, _ in items))


def public_lengths(items):
    most = max(len(ids) for ids, _ in items)
    return padded_to(items, next(n for n in (4, 7, 10) if n >= most))


def fixed(items):
    return padded_to(items, 10)


class Average(nn.Module):
    """The mean over time, of padding too unless it is masked."""

    def __init__(self, *, masked, dropout=0.0):
        super().__init__()
        self.table, self.head = nn.Embedding(V, 6), nn.Linear(6, 3)
        self.masked, self.dropout = masked, nn.Dropout(dropout)

    def forward(self, ids):
        weights = (ids > 0).float() if self.masked else torch.ones_like(ids, dtype=torch.float32)
        h = self.dropout(self.table(ids)) * weights[..., None]
        return self.head((h.sum(1) / weights.sum(1, keepdim=True)).tanh())


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(V, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.rnn(self.table(ids))[0][:, -1])


def training_of(model, dataset, *, steps=4, batch_size=12, **options):
    options = {"loss": nn.CrossEntropyLoss(), **options} if "per_example_loss" not in options else options
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset,
        batch_size=batch_size,
        steps=steps,
        noise_multiplier=1.0,
        delta=1e-3,
        threshold=Constant(1.0),
        seed=1,
        **options,
    )


def run(training, loop="step"):
    for batch in training.loader:
        if loop == "step":
            training.step(batch)
        else:
            x, y = batch
            training.loss(training._engine.model(x), y).backward()
            for optimizer in training._optimizers:
                optimizer.step()
                optimizer.zero_grad()


LOOPS = pytest.mark.parametrize("loop", ["step", "loss"])


# Padding


class Longer:
    """Pads to a length that is changed between steps; from the third on it pads with a word of the first text."""

    length = 10

    def __call__(self, items):
        ids, labels = padded_to(items, self.length)
        return ids.where((ids > 0) | (self.length < 12), ids[0, 0]), labels


def test_mixing_at_the_third_length_is_found_on_few_examples():
    collate = Longer()
    training = training_of(Average(masked=False), DataLoader(Texts(), collate_fn=collate))
    batches = iter(training.loader)
    for collate.length in 10, 11:
        training.step(next(batches))
    collate.length = 12
    with pytest.raises(Refusal, match="Longer mixes examples"):
        training.step(next(batches))


@LOOPS
@pytest.mark.parametrize("collate", [longest, public_lengths])
@pytest.mark.parametrize("model", [lambda: Average(masked=False), LastState], ids=["average", "last state"])
def test_padding_that_the_model_sees(model, collate, loop):
    training = training_of(model(), DataLoader(Texts(), collate_fn=collate))
    with pytest.raises(Refusal, match=rf"{collate.__name__} mixes examples.*fixed_length.*bucketed_lengths"):
        run(training, loop)
    assert training.epsilon() == 0


@LOOPS
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("collate", [longest, public_lengths, fixed])
def test_padding_that_the_model_masks(collate, dropout, loop):
    run(training_of(Average(masked=True, dropout=dropout), DataLoader(Texts(), collate_fn=collate)), loop)


@pytest.mark.parametrize("model", [lambda: Average(masked=False), LastState], ids=["average", "last state"])
def test_a_fixed_length(model):
    run(training_of(model(), DataLoader(Texts(), collate_fn=fixed)))


def test_a_data_set_that_reads_lists():
    with pytest.raises(Refusal, match=r"Lists.__getitems__ mixes examples"):
        run(training_of(Average(masked=False), DataLoader(Lists())))
    run(training_of(Average(masked=True), DataLoader(Lists())))
    with pytest.raises(Refusal, match="mixes examples"):
        run(training_of(Average(masked=False), DataLoader(Subset(Lists(), range(40)))))


@pytest.mark.parametrize(
    "options", [{"physical_batch_size": 4}, pytest.param({"compile": "default"}, marks=pytest.mark.slow)]
)
def test_physical_batches_and_compiled_steps(options):
    with pytest.raises(Refusal, match="mixes examples"):
        run(training_of(Average(masked=False), DataLoader(Texts(), collate_fn=longest), **options))


# Statistics, counts, blends


def table():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, D, generator=generator), torch.randint(3, (N,), generator=generator))


def mlp():
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3))


def standardised(items):
    x, y = default_collate(items)
    return (x - x.mean(0)) / (x.std(0) + 1e-3), y


def ranked(items):
    x, y = default_collate(items)
    return x.argsort(0).argsort(0).float() / len(x), y


def blended(items):
    x, y = default_collate(items)
    weight = torch.distributions.Beta(0.2, 0.2).sample()
    return weight * x + (1 - weight) * x.roll(1, 0), y


def relabelled(items):
    x, y = default_collate(items)
    return x, y.roll(1, 0)


def over_255(items):
    x, y = default_collate(items)
    return x / 255, y


def augmented(items):
    x, y = default_collate(items)
    return x + 0.1 * torch.randn_like(x), y


MIXING = [standardised, ranked, blended, relabelled]


@LOOPS
@pytest.mark.parametrize("collate", MIXING)
def test_a_collate_function_that_mixes(collate, loop):
    torch.manual_seed(0)  # a random blend may be no blend at all
    with pytest.raises(Refusal, match=rf"{collate.__name__} mixes examples.*treat every example by itself"):
        run(training_of(mlp(), DataLoader(table(), collate_fn=collate)), loop)


@LOOPS
@pytest.mark.parametrize("collate", [over_255, augmented, default_collate, lambda items: tuple(default_collate(items))])
def test_a_collate_function_that_does_not(collate, loop):
    training = training_of(mlp(), DataLoader(table(), collate_fn=collate))
    run(training, loop)
    assert len(training.history) == 4


@pytest.mark.parametrize("kind", [torch.tensor, int], ids=["tensor", "number"])
def test_a_number_of_the_whole_batch(kind):
    """What a trainer passes to divide a mean loss by."""

    def collate(items):
        ids, labels = fixed(items)
        return {"ids": ids, "labels": labels, "num_items_in_batch": kind(int((ids > 0).sum()))}

    def loss(model, batch):
        losses = F.cross_entropy(model(batch["ids"]), batch["labels"], reduction="none")
        return losses / batch["num_items_in_batch"]

    with pytest.raises(Refusal, match=r"collate mixes examples"):
        run(
            training_of(Average(masked=True), DataLoader(Texts(), collate_fn=collate), loss=None, per_example_loss=loss)
        )


def test_rows_of_an_example():
    """Items of several rows go the same way."""
    data = TensorDataset(torch.randn(N, 2, D), torch.randint(3, (N, 2)))
    run(training_of(mlp(), DataLoader(data, collate_fn=over_255), rows_per_example=2))
    with pytest.raises(Refusal, match="mixes examples"):
        run(training_of(mlp(), DataLoader(data, collate_fn=standardised), rows_per_example=2))


def test_a_collate_function_that_cannot_be_called_again():
    class Once(Dataset):
        def __init__(self):
            self.seen = set()

        def __len__(self):
            return N

        def __getitem__(self, index):
            if index in self.seen:
                raise ValueError("gone")
            self.seen.add(index)
            return torch.randn(D), 0

    with pytest.raises(Refusal, match=r"could not be called again, in this process.*gone"):
        run(training_of(mlp(), DataLoader(Once(), collate_fn=over_255)))


def test_the_proof_leaves_no_trace():
    """Parameters, random numbers, items and training flags are as without it."""
    found = []
    for collate in (default_collate, lambda items: default_collate(list(items))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        training = training_of(model, DataLoader(table(), collate_fn=collate))
        run(training)
        found.append(([p.detach().clone() for p in model.parameters()], torch.rand(3), model[1].training))
    (parameters, draws, mode), (others, other_draws, other_mode) = found
    assert all(map(torch.equal, parameters, others))
    assert torch.equal(draws, other_draws)
    assert mode == other_mode


# What a loop does to a batch


CHANGES = {
    "standardised": lambda x, y: ((x - x.mean(0)) / x.std(0), y),
    "targets of the batch": lambda x, y: (x, y.roll(1, 0)),
    "scaled": lambda x, y: (x / 255, y),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@LOOPS
def test_what_a_loop_computes_from_a_batch(change, loop):
    model = mlp()
    training = training_of(model, table())
    (x, y) = next(iter(training.loader))
    x, y = change(x, y)
    with pytest.raises(ValueError, match=r"batch has .* that training.loader did not yield: compute it in the model"):
        training.step(x, y) if loop == "step" else training.loss(model(x), y)


@LOOPS
def test_a_batch_changed_in_place(loop):
    model = mlp()
    training = training_of(model, table())
    for step, (x, y) in enumerate(training.loader):
        if step == 3:  # at a pass that is not proven, too
            x.sub_(x.mean(0))
            with pytest.raises(ValueError, match=r"batch was changed in place after training.loader yielded it"):
                training.step(x, y) if loop == "step" else training.loss(model(x), y)
            return
        training.step(x, y)


HONEST = {
    "cast": lambda x, y: (x.double().float(), y.int().long()),
    "reshaped": lambda x, y: (x.view(len(x), 1, -1).squeeze(1).clone(), y),
    "copied": lambda x, y: (x.clone(), y.clone()),
    "a part": lambda x, y: (x, y),
}


@pytest.mark.parametrize("change", HONEST.values(), ids=HONEST)
@LOOPS
def test_what_a_loop_may_do(change, loop):
    model = mlp()
    training = training_of(model, table(), steps=3)
    for batch in training.loader:
        x, y = change(*batch)
        if loop == "step":
            training.step(x, y)
        else:
            training.loss(model(x), y).backward()
            for optimizer in training._optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert len(training.history) == 3


def test_where_leaves_come_from():
    x, y, n = torch.randn(4, 3), torch.arange(4), torch.tensor(7)
    given = {"x": x, "y": y, "n": n, "m": 5}
    used = (x.T.contiguous(), x.reshape(-1), y.float(), 7, 5, None, True, "text")
    assert [None if o is None else o.leaf_index for o in origins(used, given)] == [0, 0, 1, 2, 3, None, None, None]
    for stranger in (x + 1, x[:2], 6, 5.0, torch.tensor(8)):
        with pytest.raises(ValueError, match=r"that training.loader did not yield"):
            origins((stranger,), given)
