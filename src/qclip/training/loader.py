"""The loader: batches of the data, drawn for each step and cut to size; every physical batch carries a ticket."""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from qclip import _validate as check
from qclip.engine.batch import tensor_leaves, to_device_async
from qclip.engine.randomness import RandomState, seed_all
from qclip.training.dataset import dataset_of, dataset_size, reads_lists
from qclip.training.plan import TrainingPlan
from qclip.training.sampling import Sampler, generator_at


@dataclass(frozen=True)
class Ticket:
    """What a physical batch is: number ``position`` of logical step ``step``, with ``num_examples`` that count."""

    step: int
    position: int
    num_examples: int
    last: bool
    """Whether the logical batch ends here."""
    indices: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """The examples: as secret as the seed."""
    batch: Any = field(default=None, compare=False, repr=False)
    """What the loader gave for it."""

    @property
    def num_slots(self) -> int:
        """How many examples the batch holds: an empty draw holds one, which does not count."""
        return max(self.num_examples, 1)

    def is_counted(self, device: torch.device) -> Tensor:
        """Return which slots count, [num_slots]."""
        return torch.arange(self.num_slots, device=device) < self.num_examples


def cut(indices: NDArray[np.intp], step: int, physical_batch_size: int | None) -> Iterator[tuple[list[int], Ticket]]:
    """Cut a logical batch into physical batches of at most the given size; an empty one is example 0, not counted."""
    if indices.size == 0:
        yield [0], Ticket(step, position=0, num_examples=0, last=True, indices=(0,))
        return
    width = physical_batch_size or indices.size
    starts = range(0, indices.size, width)
    for position, start in enumerate(starts):
        chosen = indices[start : start + width].tolist()
        yield chosen, Ticket(step, position, len(chosen), last=start == starts[-1], indices=tuple(chosen))


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
        lengths = (ticket.num_slots, ticket.num_slots * self._rows_per_example)
        if all(tensor.dim() == 0 or tensor.shape[0] not in lengths for tensor in given):
            remedy = "pass the batches of training.loader whole, one example per row of the first dimension"
            shapes = [tuple(tensor.shape) for tensor in given]
            raise check.refuse("batch", f"tensors of shapes {shapes}", f"of {ticket.num_slots} examples", remedy)
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
    """Batches of the data, drawn by a sampler and cut to size, each with a ticket.

    A pass is the rest of the current epoch, or of the plan when that was given in steps. Beginning a pass ends the one
    before. There is no ``len``: how many physical batches a pass has is random.

    Args:
        source: A map-style data set, or a DataLoader: its data set, collate function, workers and pinning are kept,
            its batch size, shuffling and generator are not.
        sampler: Draws the examples of each step.
        plan: How many steps a pass and the run have.
        done: Its length is the number of logical steps done.
        physical_batch_size: The most examples of a physical batch; None for all of a step.
        rows_per_example: How many rows of a tensor belong to one example.
    """

    def __init__(
        self,
        source: Dataset[Any] | DataLoader[Any],
        sampler: Sampler,
        plan: TrainingPlan,
        *,
        done: Sized,
        physical_batch_size: int | None,
        rows_per_example: int = 1,
    ) -> None:
        self.sampler = sampler
        self.tickets = Tickets(rows_per_example)
        self.num_examples = dataset_size(source)
        """How many there are: not public, where another size was given for that."""
        self.random_state: RandomState | None = None
        """That of the global generators before the first batch of the current logical step was fetched."""
        self._source, self._plan, self._done = source, plan, done
        self._pass: object = None
        self._workers = torch.Generator()
        in_workers = isinstance(source, DataLoader) and source.num_workers > 0
        self._draws = _Draws(sampler, physical_batch_size, seeded=in_workers)
        self._batches = _data_loader(source, self._draws, self._workers)

    def __iter__(self) -> Iterator[Any]:
        steps = self._plan.steps_of_pass(len(self._done))
        self.abandon()
        mine = self._pass = object()
        # A pass gives its workers the same seeds when it is begun again, by a resumed run for instance.
        self._workers.manual_seed(int(generator_at(self.sampler.seed, steps.start).integers(2**63)))
        drawn = self._draws.begin(steps)
        batches, ticket = iter(self._batches), None
        while True:
            if ticket is None or ticket.last:
                self.random_state = RandomState.now()
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
        size = self.num_examples
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
        return (
            generator_at(self.sampler.seed, step, 1).integers(2**63, size=max(1, examples)).tolist()
            if self._seeded
            else []
        )


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
