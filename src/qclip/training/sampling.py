"""Sampling: who joins each logical step, cut into physical batches; every physical batch carries a ticket."""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import scipy.stats
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from qclip import _validate as check
from qclip.engine.batch import tensor_leaves, to_device_async
from qclip.engine.randomness import seed_all
from qclip.training.fetch import reads_lists


class Sampler(Protocol):
    """Who joins a step: a function of the seed and the step, so there is no state to save and a step can be redrawn."""

    @property
    def seed(self) -> np.random.SeedSequence:
        """What it draws from."""
        ...

    def draw(self, step: int) -> NDArray[np.intp]:
        """The indices of the examples of this step, ascending; there may be none."""
        ...


@dataclass(frozen=True)
class PoissonSampler:
    """Draws each of ``dataset_size`` examples with probability ``sample_rate``, independently, at every step.

    >>> sampler = PoissonSampler(10, 1.0, np.random.SeedSequence(0))
    >>> sampler.draw(step=0)
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    dataset_size: int
    sample_rate: float
    seed: np.random.SeedSequence

    def draw(self, step: int) -> NDArray[np.intp]:
        """The indices of the examples of this step, ascending; there may be none."""
        return np.flatnonzero(_rng(self.seed, step).random(self.dataset_size) < self.sample_rate)


@dataclass(frozen=True)
class UniformSampler:
    """Draws ``batch_size`` different examples of ``dataset_size`` at every step, each subset as likely as any other.

    For training without privacy: the accounting is that of Poisson sampling.

    >>> len(UniformSampler(10, 3, np.random.SeedSequence(0)).draw(step=0))
    3
    """

    dataset_size: int
    batch_size: int
    seed: np.random.SeedSequence

    def draw(self, step: int) -> NDArray[np.intp]:
        """The indices of the examples of this step, ascending."""
        return np.sort(_rng(self.seed, step).choice(self.dataset_size, self.batch_size, replace=False, shuffle=False))


def sampler(kind: str, examples: int, batch_size: int, sample_rate: float, seed: np.random.SeedSequence) -> Sampler:
    """Uniform sampling of ``batch_size`` of the examples, or Poisson sampling at the rate, however many there are."""
    if kind == "uniform":
        return UniformSampler(examples, batch_size, seed)
    return PoissonSampler(examples, sample_rate, seed)


def fixed_size(kind: str, dataset_size: int, batch_size: int) -> int:
    """The largest size of physical batches for which filling each up to that size costs less than a tenth of the work.

    One that holds nearly every draw whole serves large batches; smaller ones are cut, so that only the last is filled.

    >>> fixed_size("poisson", 50_000, 256), fixed_size("poisson", 50_000, 4096), fixed_size("uniform", 50_000, 256)
    (55, 4311, 256)
    """
    if kind == "uniform":
        return batch_size
    rate = batch_size / dataset_size
    spread = (batch_size * (1 - rate)) ** 0.5
    sizes = np.arange(max(0, int(batch_size - 8 * spread)), int(batch_size + 8 * spread) + 2)
    chances = scipy.stats.binom.pmf(sizes, dataset_size, rate)

    def filled(size: int) -> float:
        return float(chances @ (np.maximum(-(-sizes // size), 1) * size)) / batch_size

    whole = (batch_size + 0.5 * room * spread for room in range(2, 8))
    candidates = {max(1, math.ceil(most / parts)) for most in whole for parts in range(1, batch_size + 1)}
    return max((size for size in candidates if filled(size) < _FILLED), default=1)


_FILLED = 1.1
"""How many rows may be computed for one that counts."""


def _rng(seed: np.random.SeedSequence, *place: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *place)))


@dataclass(frozen=True)
class Ticket:
    """What a physical batch is: part number ``part`` of logical step ``step``, with ``size`` examples that count."""

    step: int
    part: int
    size: int
    last: bool
    """Whether the logical batch ends here."""
    indices: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """The examples: as secret as the seed."""
    batch: Any = field(default=None, compare=False, repr=False)
    """What the loader gave for it."""

    @property
    def rows(self) -> int:
        """How many examples the batch holds: an empty draw holds one, which does not count."""
        return max(self.size, 1)

    def mask(self, device: torch.device) -> Tensor:
        """Which rows count, [rows]."""
        return torch.arange(self.rows, device=device) < self.size


def cut(indices: NDArray[np.intp], step: int, physical_batch_size: int | None) -> Iterator[tuple[list[int], Ticket]]:
    """A logical batch in physical batches of at most the given size; an empty one is example 0, masked."""
    if indices.size == 0:
        yield [0], Ticket(step, part=0, size=0, last=True, indices=(0,))
        return
    width = physical_batch_size or indices.size
    starts = range(0, indices.size, width)
    for part, start in enumerate(starts):
        chosen = indices[start : start + width].tolist()
        yield chosen, Ticket(step, part, len(chosen), last=start == starts[-1], indices=tuple(chosen))


class Tickets:
    """The tickets of batches that were handed out and not yet used, in order."""

    def __init__(self, rows_per_example: int = 1) -> None:
        self._rows_per_example = rows_per_example
        self._issued: deque[tuple[Ticket, list[tuple[weakref.ref[Tensor], int]]]] = deque()
        self._spent: list[weakref.ref[Tensor]] = []

    @property
    def front(self) -> Ticket | None:
        """The ticket of the next batch to be used."""
        return self._issued[0][0] if self._issued else None

    def issue(self, ticket: Ticket, batch: Any) -> None:
        """Note that a batch was handed out."""
        versions = [(weakref.ref(tensor), tensor._version) for tensor in tensor_leaves(batch)]
        self._issued.append((replace(ticket, batch=batch), versions))

    def redeem(self, batch: Any) -> Ticket:
        """The ticket of the batch that is now used (or of the outputs and targets that come from it).

        A copy of a batch, on another device for instance, cannot be told from another batch of its size; the very
        tensors of a later batch are recognised, and refused.
        """
        if not self._issued:
            remedy = (
                "use each batch of training.loader once; for other data, call the model and the criterion themselves"
            )
            raise check.refuse(
                "batch", "without a ticket", "one that training.loader gave and that was not used", remedy
            )
        (ticket, versions), *others = self._issued
        own = [ref for ref, _ in versions]
        given = tensor_leaves(batch)
        if not given:
            remedy = (
                "collate to tensors, or tuples, lists and dicts of them (for a BatchEncoding, import the integration)"
            )
            raise check.refuse("batch", type(batch).__name__, "a nest of tensors", remedy)
        ids = {id(tensor) for tensor in given} - _alive(own)  # a collate function may share tensors
        if ids & _alive(ref for _, each in others for ref, _ in each):
            remedy = "use every batch of training.loader, in order: skipping one would change who is sampled"
            raise check.refuse("batch", "a later one", "the first that was not used", remedy)
        self._spent = [ref for ref in self._spent if ref() is not None]
        if ids & _alive(self._spent):
            remedy = "use every batch of training.loader once: an example that counts twice is not protected"
            raise check.refuse("batch", "used or void already", "the first that was not used", remedy)
        lengths = (ticket.rows, ticket.rows * self._rows_per_example)
        if all(tensor.dim() == 0 or tensor.shape[0] not in lengths for tensor in given):
            remedy = "pass the batches of training.loader whole, one example per row of the first dimension"
            shapes = [tuple(tensor.shape) for tensor in given]
            raise check.refuse("batch", f"tensors of shapes {shapes}", f"of {ticket.rows} examples", remedy)
        if any(tensor._version != version for ref, version in versions if (tensor := ref()) is not None):
            remedy = "put what changes it into the model, the loss or the data set, where it can be proven"
            raise check.refuse("batch", "changed in place", "as training.loader gave it", remedy)
        self._issued.popleft()
        self._spent.extend(own)
        return ticket

    def clear(self) -> None:
        """Void them all: none of these batches can be used any more."""
        self._spent.extend(ref for _, each in self._issued for ref, _ in each)
        self._issued.clear()


def _alive(refs: Iterable[weakref.ref[Tensor]]) -> set[int]:
    return {id(tensor) for ref in refs if (tensor := ref()) is not None}


class TicketLoader:
    """Batches as the data set collates them, drawn by the sampler and cut to size, each with a ticket.

    ``source`` is a map-style data set, or a DataLoader: its data set, collate function, workers and pinning are kept,
    its batch size, shuffling and generator are not. ``span`` says which logical steps a pass has, when it begins;
    beginning a pass ends the one before. ``before_step`` is called before the first batch of a logical step is fetched.
    There is no ``len``: how many physical batches a pass has is drawn too.
    """

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any],
        sampler: Sampler,
        *,
        physical_batch_size: int | None,
        span: Callable[[], range],
        before_step: Callable[[], None] = lambda: None,
        rows_per_example: int = 1,
    ) -> None:
        self.sampler = sampler
        self.tickets = Tickets(rows_per_example)
        self.examples = dataset_size(source)
        """How many there are: not public, where another size was given for that."""
        self._source = source
        self._span, self._before_step = span, before_step
        self._pass: object = None
        self._workers = torch.Generator()
        in_workers = isinstance(source, DataLoader) and source.num_workers > 0
        self._draws = _Draws(sampler, physical_batch_size, seeded=in_workers)
        self._batches = _data_loader(source, self._draws, self._workers)

    def __iter__(self) -> Iterator[Any]:
        steps = self._span()
        self.abandon()
        mine = self._pass = object()
        # A pass gives its workers the same seeds when it is begun again, by a resumed run for instance.
        self._workers.manual_seed(int(_rng(self.sampler.seed, steps.start).integers(2**63)))
        drawn = self._draws.begin(steps)
        batches, ticket = iter(self._batches), None
        while True:
            if ticket is None or ticket.last:
                self._before_step()
            try:
                batch = next(batches)
            except StopIteration:
                return
            ticket = drawn.popleft()
            self.tickets.issue(ticket, batch)
            yield batch
            if self._pass is not mine:
                remedy = "start a new one: it begins at the first logical batch that was not completed"
                raise check.refuse("this pass over training.loader", "ended", "the latest, with no error in it", remedy)

    def reseed(self, seed: np.random.SeedSequence) -> None:
        """Draw from another seed from now on."""
        self.abandon()
        self.sampler = self._draws.sampler = replace(self.sampler, seed=seed)  # type: ignore[type-var]

    def everything(self, chunk: int) -> Iterator[Any]:
        """Every example once, in order, in batches of at most ``chunk``; they carry no tickets."""
        size = self.examples
        chunks = [list(range(start, min(start + chunk, size))) for start in range(0, size, chunk)]
        return iter(_data_loader(self._source, chunks, torch.Generator()))

    def abandon(self) -> None:
        """End the pass: its tickets are void, and its next batch is refused."""
        self._pass = None
        self.tickets.clear()


@dataclass(frozen=True)
class _Gathered:
    """What a DataLoader makes of a TensorDataset, by one indexing per tensor instead of one per example."""

    dataset: TensorDataset
    indices: Iterable[list[int]]

    def __iter__(self) -> Iterator[list[Tensor]]:
        for chosen in self.indices:
            index = torch.tensor(chosen)
            yield [tensor.index_select(0, to_device_async(index, tensor.device)) for tensor in self.dataset.tensors]


class Request(NamedTuple):
    """An item asked of a worker process, and the seed of whatever is drawn for it."""

    index: int
    seed: int


class SeededItems(Dataset[Any]):
    """A data set in a worker process: what it draws for an item depends neither on the worker nor on items before.

    So a run that is resumed, with any number of workers, fetches what it would have fetched: else steps that were
    released before would be released again with the same noise and other sums.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, requests: Sequence[int | Request]) -> list[Any]:
        if reads_lists(self.dataset):
            _seed(requests[0])
            return self.dataset.__getitems__([_index(request) for request in requests])
        return [self[request] for request in requests]

    def __getitem__(self, index: int | Request) -> Any:
        _seed(index)
        return self.dataset[_index(index)]


def _index(request: int | Request) -> int:
    return request.index if isinstance(request, Request) else request


def _seed(request: int | Request) -> None:
    if isinstance(request, Request):
        seed_all(request.seed)


class _Draws:
    """The index lists of a pass, for a DataLoader that may ask ahead of what it yields; tickets wait here, in order."""

    def __init__(self, sampler: Sampler, physical_batch_size: int | None, *, seeded: bool) -> None:
        self.sampler = sampler
        self._physical_batch_size = physical_batch_size
        self._seeded = seeded
        self._steps = range(0)
        self._drawn: deque[Ticket] = deque()

    def begin(self, steps: range) -> deque[Ticket]:
        """Start a pass; the deque returned fills as the DataLoader asks."""
        self._steps, self._drawn = steps, deque()
        return self._drawn

    def __iter__(self) -> Iterator[Sequence[int | Request]]:
        drawn = self._drawn
        for step in self._steps:
            examples = self.sampler.draw(step)
            seeds = iter(self._seeds(step, len(examples)))
            for indices, ticket in cut(examples, step, self._physical_batch_size):
                drawn.append(ticket)
                yield [Request(index, next(seeds)) for index in indices] if self._seeded else indices

    def _seeds(self, step: int, examples: int) -> list[int]:
        """One for each example of the step, in order: they do not depend on how it is cut."""
        return _rng(self.sampler.seed, step, 1).integers(2**63, size=max(1, examples)).tolist() if self._seeded else []


def dataset_size(source: Dataset[Any] | DataLoader[Any]) -> int:
    """How many examples a data set or a DataLoader has; what cannot be sampled by index is refused."""
    dataset = dataset_of(source)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        remedy = "Poisson sampling asks for any example by its index"
        raise check.refuse("dataset", type(dataset).__name__, "map-style, with __len__ and __getitem__", remedy)
    if isinstance(source, DataLoader):
        batches = source.batch_sampler
        sampler = batches.sampler if type(batches) is BatchSampler else batches
        if type(sampler) not in (RandomSampler, SequentialSampler):
            remedy = "Poisson sampling takes its place; choose examples, each once, by torch.utils.data.Subset"
            raise check.refuse("dataset", f"a DataLoader with {type(sampler).__name__}", "without a sampler", remedy)
    if len(dataset) == 0:
        raise check.refuse("dataset", "empty", "of at least one example", "check where it was read from")
    return len(dataset)


def dataset_of(source: Dataset[Any] | DataLoader[Any]) -> Dataset[Any]:
    """The data set itself."""
    return source.dataset if isinstance(source, DataLoader) else source


def _data_loader(
    source: Dataset[Any] | DataLoader[Any], indices: Iterable[Any], generator: torch.Generator
) -> Iterable[Any]:
    dataset = dataset_of(source)
    if not isinstance(source, DataLoader):
        if type(dataset) is TensorDataset:
            return _Gathered(dataset, indices)
        return DataLoader(dataset, batch_sampler=indices, generator=generator)
    return DataLoader(
        dataset if source.num_workers == 0 else SeededItems(dataset),
        batch_sampler=indices,
        num_workers=source.num_workers,
        collate_fn=source.collate_fn,
        pin_memory=source.pin_memory,
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        generator=generator,
        prefetch_factor=source.prefetch_factor,
        persistent_workers=source.persistent_workers,
    )
