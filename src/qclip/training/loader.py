"""The loader: physical batches of the data, drawn for each step, each with a ticket."""

import itertools
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
from qclip._validate import Refusal
from qclip.engine.batch import tensor_leaves, to_device_async
from qclip.engine.randomness import RandomState, seed_all
from qclip.training.dataset import dataset_of, dataset_size, reads_lists
from qclip.training.plan import TrainingPlan
from qclip.training.ranks import Ranks
from qclip.training.sampling import Sampler, generator_at


@dataclass(frozen=True)
class Ticket:
    """The mark of a physical batch: number ``position`` of logical step ``step``, with ``num_examples`` examples."""

    step: int
    position: int
    num_examples: int
    last: bool
    """Whether the logical batch ends here."""
    indices: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """The indices of the examples: as secret as the seed."""
    batch: Any = field(default=None, compare=False, repr=False)
    """The batch as the loader yielded it."""

    @property
    def num_slots(self) -> int:
        """The number of examples in the batch: an empty draw holds one, which does not count."""
        return max(self.num_examples, 1)

    def is_counted(self, device: torch.device) -> Tensor:
        """Return the mask of the slots that count, [num_slots]."""
        return torch.arange(self.num_slots, device=device) < self.num_examples


def cut(
    indices: NDArray[np.intp], step: int, physical_batch_size: int | None, largest: int | None = None
) -> Iterator[tuple[list[int], Ticket]]:
    """Cut a logical batch into physical batches.

    Args:
        indices: The examples of the step; an empty batch becomes example 0, which does not count.
        step: The number of the logical step.
        physical_batch_size: The most examples of a physical batch; None for all of the step.
        largest: The most examples that any rank has in this step: all ranks yield as many physical batches. By default
            those of this one.

    Yields:
        The indices of each physical batch, and its ticket.
    """
    most = max(1, indices.size if largest is None else largest)
    size = physical_batch_size or most
    starts = range(0, most, size)
    for position, start in enumerate(starts):
        piece = indices[start : start + size].tolist()
        slots = piece or [0]
        yield slots, Ticket(step, position, len(piece), last=start == starts[-1], indices=tuple(slots))


class Tickets:
    """The tickets of batches that were yielded and not yet used, in order.

    Guarantees:
        * Each ticket is redeemed once, in the order of issue.
        * The tensors of a batch that was used, voided or issued later are refused.
        * The tensors of a batch that were changed in place are refused.

    Edge cases:
        * A copy of a batch, on another device for instance, cannot be told from another batch of the same size: it
          redeems the next ticket.
        * Several batches may share tensors, such as a constant of the collate function.
        * A batch without tensors, or in which no tensor has the right number of rows: refused.

    Args:
        rows_per_example: The number of rows of an example.
    """

    def __init__(self, rows_per_example: int = 1) -> None:
        self._rows_per_example = rows_per_example
        self._issued: deque[tuple[Ticket, list[tuple[weakref.ref[Tensor], int]]]] = deque()
        self._spent: list[weakref.ref[Tensor]] = []

    @property
    def front(self) -> Ticket | None:
        """The ticket of the next batch to be used; None if there is none."""
        return self._issued[0][0] if self._issued else None

    def issue(self, ticket: Ticket, batch: Any) -> None:
        """Record that a batch was yielded."""
        versions = [(weakref.ref(tensor), tensor._version) for tensor in tensor_leaves(batch)]
        self._issued.append((replace(ticket, batch=batch), versions))

    def redeem(self, batch: Any) -> Ticket:
        """Return the ticket of a batch, and mark it as used.

        Args:
            batch: The batch, or the outputs and targets that were computed from it.

        Raises:
            qclip.Refusal: Unless the batch is the next one that the loader yielded, unchanged.
        """
        if not self._issued:
            raise Refusal(
                "batch is not an unused batch of training.loader: use each of its batches once; for other data, call "
                "the model and the criterion directly"
            )
        (ticket, versions), *others = self._issued
        own = [ref for ref, _ in versions]
        batch_tensors = tensor_leaves(batch)
        if not batch_tensors:
            remedy = (
                "collate to tensors, or to tuples, lists and dicts of them (for a BatchEncoding, import "
                "qclip.integrations.transformers)"
            )
            raise check.refuse("batch", type(batch).__name__, "a nest of tensors", remedy)
        ids = {id(tensor) for tensor in batch_tensors} - _alive(own)  # a collate function may share tensors
        if ids & _alive(ref for _, later_versions in others for ref, _ in later_versions):
            raise Refusal(
                "batch is not the next one of training.loader: use every batch, in order; skipping one would change "
                "which examples are sampled"
            )
        self._spent = [ref for ref in self._spent if ref() is not None]
        if ids & _alive(self._spent):
            raise Refusal(
                "batch was used already, or belongs to a pass that has ended: use every batch of training.loader once; "
                "an example that counts twice is not protected"
            )
        num_rows = (ticket.num_slots, ticket.num_slots * self._rows_per_example)
        if all(tensor.dim() == 0 or tensor.shape[0] not in num_rows for tensor in batch_tensors):
            shapes = [tuple(tensor.shape) for tensor in batch_tensors]
            raise Refusal(
                f"batch has tensors of shapes {shapes}, but the next batch of training.loader has {ticket.num_slots} "
                "examples: pass the batches of training.loader whole, with the examples along the first dimension"
            )
        if any(tensor._version != version for ref, version in versions if (tensor := ref()) is not None):
            raise Refusal(
                "batch was changed in place after training.loader yielded it: move the change into the model, the loss "
                "or the data set, where it can be proven"
            )
        self._issued.popleft()
        self._spent.extend(own)
        return ticket

    def clear(self) -> None:
        """Void all tickets: none of their batches can be used any more."""
        self._spent.extend(ref for _, versions in self._issued for ref, _ in versions)
        self._issued.clear()


def _alive(refs: Iterable[weakref.ref[Tensor]]) -> set[int]:
    return {id(tensor) for ref in refs if (tensor := ref()) is not None}


class TicketLoader:
    """An iterable of physical batches, drawn by a sampler, each with a ticket.

    One pass yields the rest of the current epoch, or of the plan if its length was given in steps. A new pass ends the
    one before. ``len`` is the number of batches of a whole pass; there is none where it is random.

    Args:
        source: A map-style data set, or a DataLoader. The data set, collate function, workers and pinning of a
            DataLoader are kept; its batch size, shuffling and generator are not.
        sampler: Draws the examples of each step.
        plan: The number of steps of a pass and of the run.
        done: The records of the steps done; only their number is read.
        physical_batch_size: The most examples of a physical batch; None for all of a step.
        rows_per_example: The number of rows of an example.
        ranks: The processes that share each step.
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
        ranks: Ranks | None = None,
    ) -> None:
        self.sampler = sampler
        self.tickets = Tickets(rows_per_example)
        self.num_examples = dataset_size(source)
        """The true number of examples: not public if the plan has another ``dataset_size``."""
        self.random_state: RandomState | None = None
        """That of the global generators before the first batch of the current logical step was fetched."""
        self._source, self._plan, self._done = source, plan, done
        self._physical_batch_size = physical_batch_size
        self._pass: object = None
        self._workers = torch.Generator()
        in_workers = isinstance(source, DataLoader) and source.num_workers > 0
        self._draws = _Draws(sampler, physical_batch_size, seeded=in_workers, ranks=ranks or Ranks())
        self._batches = _data_loader(source, self._draws, self._workers)

    @property
    def dataset(self) -> Dataset[Any]:
        """The data set."""
        return dataset_of(self._source)

    @property
    def batch_size(self) -> int:
        """The expected number of examples of a logical step."""
        return self._plan.batch_size

    @property
    def num_workers(self) -> int:
        """The number of worker processes of the DataLoader."""
        return self._source.num_workers if isinstance(self._source, DataLoader) else 0

    def __len__(self) -> int:
        """Return the number of batches of a whole pass, where every logical step is one physical batch.

        Otherwise the number of batches is random, and there is no length: loops that count to it, and schedulers that
        take it for a number of steps, would be wrong.
        """
        largest_draw = self._plan.batch_size if self._plan.sampling == "uniform" else self.num_examples
        if self._physical_batch_size is not None and self._physical_batch_size < largest_draw:
            # A TypeError, as of any iterable without a length: progress bars go on without a total.
            raise TypeError(
                f"training.loader has no len() with physical_batch_size = {self._physical_batch_size}: the number of "
                "physical batches of a pass is random. For a scheduler, which steps when training.updated is True, use "
                "training.steps_per_epoch; for a progress bar, tqdm(total=training.num_steps) and "
                "bar.update(training.updated)"
            )
        return self._plan.steps_per_pass

    def __iter__(self) -> Iterator[Any]:
        steps = self._plan.steps_of_pass(len(self._done))
        self.abandon()
        current_pass = self._pass = object()
        # A pass that is begun again, by a resumed run for instance, must seed its workers as before.
        self._workers.manual_seed(int(generator_at(self.sampler.seed, steps.start).integers(2**63)))
        queue = self._draws.begin(steps)
        batches, ticket = iter(self._batches), None
        while True:
            if ticket is None or ticket.last:
                self.random_state = RandomState.now()
            try:
                batch = next(batches)
            except StopIteration:
                return
            ticket = queue.popleft()
            self.tickets.issue(ticket, batch)
            yield batch
            if self._pass is not current_pass:
                raise Refusal(
                    "this pass over training.loader has ended, by an error or by a newer pass: start a new one, which "
                    "begins at the first logical batch that was not completed"
                )

    def reseed(self, seed: np.random.SeedSequence) -> None:
        """End the pass, and draw all later steps from another seed."""
        self.abandon()
        self.sampler = self._draws.sampler = replace(self.sampler, seed=seed)  # type: ignore[type-var]

    def everything(self, chunk: int) -> Iterator[Any]:
        """Iterate over every example once, in order, in batches of at most ``chunk`` examples without tickets."""
        size = self.num_examples
        chunks = [list(range(start, min(start + chunk, size))) for start in range(0, size, chunk)]
        return iter(_data_loader(self._source, chunks, torch.Generator()))

    def abandon(self) -> None:
        """End the pass: void its tickets, and refuse its next batch."""
        self._pass = None
        self.tickets.clear()


@dataclass(frozen=True)
class _Gathered:
    """The batches of a DataLoader over a TensorDataset, by one index_select per tensor instead of one per example."""

    dataset: TensorDataset
    indices: Iterable[list[int]]

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch_indices in self.indices:
            index = torch.tensor(batch_indices)
            yield [tensor.index_select(0, to_device_async(index, tensor.device)) for tensor in self.dataset.tensors]


class Request(NamedTuple):
    """The index of an item that a worker process reads, and the seed of its random transforms."""

    index: int
    seed: int


class SeededItems(Dataset[Any]):
    """A data set in a worker process, seeded for each item.

    The random numbers of an item depend neither on the worker nor on earlier items. So a resumed run fetches the same
    data with any number of workers. Otherwise, steps that were released before would be released again with the same
    noise and other sums.
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
    """The index lists of a pass, as the batch sampler of a DataLoader.

    A DataLoader reads ahead of what it yields; the tickets wait in a queue until then.
    """

    def __init__(self, sampler: Sampler, physical_batch_size: int | None, *, seeded: bool, ranks: Ranks) -> None:
        self.sampler = sampler
        self._ranks = ranks
        self._physical_batch_size = physical_batch_size
        self._seeded = seeded
        self._steps = range(0)
        self._queue: deque[Ticket] = deque()

    def begin(self, steps: range) -> deque[Ticket]:
        """Start a pass; return its queue of tickets, which fills as the DataLoader reads."""
        self._steps, self._queue = steps, deque()
        return self._queue

    def __iter__(self) -> Iterator[Sequence[int | Request]]:
        queue = self._queue
        for step in self._steps:
            drawn, ranks = self.sampler.draw(step), self._ranks
            seeds = itertools.chain(self._seeds(step, len(drawn)), itertools.repeat(0))  # 0: an example without weight
            largest = ranks.largest_share(len(drawn))
            for indices, ticket in cut(ranks.share(drawn), step, self._physical_batch_size, largest):
                queue.append(ticket)
                yield [Request(index, next(seeds)) for index in indices] if self._seeded else indices

    def _seeds(self, step: int, num_examples: int) -> list[int]:
        """Return a seed for each example of this rank, in order: independent of how the step is cut and shared."""
        if not self._seeded:
            return []
        seeds = generator_at(self.sampler.seed, step, 1).integers(2**63, size=max(1, num_examples))
        return self._ranks.share(seeds).tolist()


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
