"""The examples of a table: its rows, or its units with several rows each, as a data set."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from qclip.tables.schema import Schema
from qclip.tables.table import Table

ROWS_PER_UNIT = 8
"""The most rows of a unit that count. Their losses are averaged, so that more cost time, but no epsilon."""
HELD_OUT_SHARE = 6
"""One unit in so many is held out."""
NO_CLASS = -100
"""The class of an absent row; an absent number is NaN."""
_DENSE = 2**25
"""Numbers up to which inputs are kept as they are; beyond, only those that are not 0."""


def rows_of_units(units: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """Return the rows of each unit, [units, most], -1 where there is none.

    Guarantees:
        - The rows of a unit follow from their number and their order alone: no other unit has a say, so that a table
          without one unit has the same examples but for that one.
        - Of more than ``most`` rows, that many are drawn by public random numbers: the same ones in every run, so that
          a run that is resumed has the same data, and none of the first rows of a file is preferred.

    >>> rows_of_units(np.array([0, 1, 0, 2]), 2)
    array([[ 0,  2],
           [ 1, -1],
           [ 3, -1]])

    Args:
        units: The unit of each row, counted from 0, [rows].
        most: The most rows of a unit.
    """
    sizes = np.bincount(units)
    order = np.argsort(units, kind="stable")
    starts = np.cumsum(sizes) - sizes
    chosen = np.full((len(sizes), most), -1, dtype=np.intp)
    positions = np.arange(len(units)) - np.repeat(starts, sizes)
    few = np.repeat(sizes <= most, sizes)
    chosen[units[order][few], positions[few]] = order[few]
    for unit in np.flatnonzero(sizes > most):
        drawn = np.random.default_rng(int(sizes[unit])).choice(sizes[unit], most, replace=False)
        chosen[unit] = order[starts[unit] + np.sort(drawn)]
    return chosen


def is_held_out(names: Sequence[str]) -> NDArray[np.bool_]:
    """Return which units are held out, [units]: about one in six, by a hash of the name.

    The same unit is on the same side in every file, whatever the other units.

    >>> is_held_out(["P1", "P2", "P3"]).tolist()
    [False, False, False]
    """
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.array([int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0 for digest in digests], dtype=bool)


def examples(schema: Schema, table: Table, rows: NDArray[np.intp]) -> TensorDataset:
    """Return the data set of some rows of a table, or of some units.

    An item is (inputs, target): of a row, [width] and its target; of a unit of K rows, [K, width] and [K], where absent
    rows have inputs 0 and the target `NO_CLASS` or NaN.

    Args:
        schema: The schema.
        table: The table.
        rows: The rows, [examples]; or those of each unit, [units, K], -1 where there is none.
    """
    used, cells = rows[rows >= 0], torch.from_numpy(np.flatnonzero(rows.ravel() >= 0))
    targets = _targets(schema, table.take(used), rows, cells)
    if rows.size * schema.width <= _DENSE:
        inputs = torch.zeros(rows.size, schema.width)
        inputs[cells] = schema.inputs(table, used)
        return TensorDataset(inputs.reshape(*rows.shape, schema.width), targets)
    places, values = (flat.reshape(*rows.shape, -1) for flat in _nonzero(schema, table, used, cells, rows.size))
    return SparseInputs(places, values, targets, schema.width)


def _targets(schema: Schema, table: Table, rows: NDArray[np.intp], cells: Tensor) -> Tensor:
    """Return the targets of ``rows``, of whose cells some are taken by the rows of a table, in order."""
    known = schema.targets(table)
    if rows.ndim == 1:
        return known
    targets = known.new_full((rows.size,), torch.nan if known.is_floating_point() else NO_CLASS)
    targets[cells] = known.flatten()
    return targets.reshape(rows.shape)


class SparseInputs(TensorDataset):
    """A data set whose inputs are kept without their zeros: most inputs of a table are zero.

    Its items are those of a TensorDataset of the whole inputs, exactly.

    Args:
        places: The places of numbers, [examples, m] or [units, K, m].
        values: The numbers, of the same shape; 0 where there are fewer than m.
        targets: The targets.
        width: The number of inputs.
    """

    def __init__(self, places: Tensor, values: Tensor, targets: Tensor, width: int) -> None:
        super().__init__(places, values, targets)
        self._width = width

    def batch(self, index: Any) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of some examples: a slice or indices."""
        places, values, targets = (tensor[index] for tensor in self.tensors)
        inputs = torch.zeros(*values.shape[:-1], self._width)
        return inputs.scatter_add_(-1, places.long(), values), targets

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return self.batch(index)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        return list(zip(*self.batch(indices), strict=True))


def batch_of(dataset: TensorDataset, index: Any) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of some examples of a data set of `examples`."""
    inputs, targets = dataset.batch(index) if isinstance(dataset, SparseInputs) else dataset[index]
    return inputs, targets


def _nonzero(schema: Schema, table: Table, rows: NDArray[np.intp], cells: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the places and the values of the inputs of some rows that are not 0, [size, m], each row in its cell."""
    dtype = torch.int16 if schema.width < 2**15 else torch.int32
    blocks = []
    for block in schema.blocks(table, rows):
        most = max(1, int((block != 0).sum(1).max()))
        places = block.abs().topk(most, dim=1, sorted=False).indices
        blocks.append((places.to(dtype), block.gather(1, places)))
    most = max(values.shape[1] for _, values in blocks)
    places, values = torch.zeros(size, most, dtype=dtype), torch.zeros(size, most)
    done = 0
    for k, (own_places, own_values) in enumerate(blocks):
        blocks[k] = (torch.empty(0), torch.empty(0))  # what is copied is let go
        own = cells[done : done + len(own_values)]
        places[own, : own_places.shape[1]] = own_places
        values[own, : own_values.shape[1]] = own_values
        done += len(own_values)
    return places, values


def mean_over_rows(losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a criterion of units from one of rows: the mean of the losses over the rows that are there, [units].

    It is taken before gradients are clipped, so that what is clipped, and bounded, is the contribution of a unit.

    Args:
        losses: Returns one loss for each row, [n], from outputs [n, outputs] and targets [n] or [n, 1].
    """

    def of_units(outputs: Tensor, targets: Tensor) -> Tensor:
        present = ~targets.isnan() if targets.is_floating_point() else targets != NO_CLASS
        known = targets.masked_fill(~present, 0)
        rows = known.flatten().unsqueeze(1) if targets.is_floating_point() else known.flatten()
        each = losses(outputs.flatten(0, 1), rows).reshape(targets.shape)
        return each.masked_fill(~present, 0).sum(1) / present.sum(1).clamp(min=1)

    return of_units
