"""An item of the data set is one example: held several times, it would be protected once."""

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from qclip.training.dataset import dataset_parts
from qclip.training.make import make_private
from qclip.training.rows import Repeated


def table(size=40):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))


def make(dataset, **changes):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"batch_size": 10, "steps": 3, "noise_multiplier": 1.0, "delta": 1e-4} | changes
    return make_private(model, optimizer, dataset, loss=nn.CrossEntropyLoss(), **settings)


class Named(Dataset):
    """Items by name."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, name):
        return self.items[name]


class Transformed(Subset):
    """As people write it, to give a part transforms of its own."""

    def __getitem__(self, place):
        x, y = super().__getitem__(place)
        return -x, y

    def __getitems__(self, places):
        return [self[place] for place in places]


DATA = table()
SEVERAL = {
    "oversampled": (Subset(DATA, [*range(40)] + [0] * 64), r"item 0 of TensorDataset 65 times"),
    "a tensor of indices": (Subset(DATA, torch.tensor([*range(20), 3])), "item 3 of TensorDataset 2 times"),
    "counted from the end": (Subset(DATA, [*range(40), -1]), "item 39 of TensorDataset 2 times"),
    "nested": (Subset(Subset(DATA, [5, 6, 7] * 5), range(15)), "item 5 of TensorDataset 5 times"),
    "twice the same": (ConcatDataset([DATA, DATA]), "item 0 of TensorDataset 2 times"),
    "overlapping": (ConcatDataset([Subset(DATA, range(30)), Subset(DATA, range(29, 40))]), "item 29 of Tens.* 2 times"),
    "inside a subclass": (Transformed(DATA, [*range(20), 4]), "item 4 of TensorDataset 2 times"),
    "inside a loader": (DataLoader(Subset(DATA, [1] * 20)), "item 1 of TensorDataset 20 times"),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_an_item_that_comes_several_times_is_refused(kind):
    dataset, message = SEVERAL[kind]
    with pytest.raises(ValueError, match=rf"dataset has {message}: keep each item once, .*rows_per_example"):
        make(dataset)
    make(dataset, noise_multiplier=0)  # nothing is promised there


def test_below_augmentations_too():
    with pytest.raises(ValueError, match="item 2 of TensorDataset 3 times"):
        make(Repeated(Subset(DATA, [1] + [2] * 3 + [*range(3, 20)]), 2), rows_per_example=2)


@pytest.mark.parametrize(
    "dataset",
    [
        DATA,
        Subset(DATA, range(0, 40, 2)),
        Subset(Subset(DATA, range(39, -1, -1)), range(20)),
        ConcatDataset([Subset(DATA, range(20)), Subset(DATA, range(20, 40)), table()]),
        Subset(ConcatDataset([DATA, table()]), range(10, 70)),
        ConcatDataset([ConcatDataset([DATA, table()]), Subset(table(), [0, 1])]),
    ],
)
def test_items_that_come_once_are_not(dataset):
    training = make(dataset)
    for batch in training.loader:
        training.step(batch)


def test_places_below_wrappers_are_those_of_the_items():
    first, second = TensorDataset(torch.arange(10)), TensorDataset(torch.arange(100, 110))
    whole = Subset(ConcatDataset([Subset(first, [7, 3, 1]), ConcatDataset([second, first])]), [15, 0, 4, 2, 3])
    found = {}
    for part in dataset_parts(whole):
        for index, position in zip(part.indices, part.positions, strict=True):
            found[int(position)] = part.base[index]
    assert [found[k] for k in range(len(whole))] == [whole[k] for k in range(len(whole))]


def test_names_are_no_places():
    (part,) = dataset_parts(Subset(Named({"a": 1, "b": 2}), ["b", "a"]))
    assert part.indices is None
