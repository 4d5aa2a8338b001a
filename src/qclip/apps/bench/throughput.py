"""Throughput: examples per second of a whole training loop, plain and private.

The plain loop reads batches of one size from a torch DataLoader and takes compiled steps. The private one is that of
`make_private(compile=True)`: Poisson sampling, physical batches and their padding, clipping, noise, the private
threshold and its counts, accounting and the optimizer are all in its time. The loops take turns.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from qclip import _validate as check
from qclip.apps.bench import measure
from qclip.apps.bench.cases import CASES, Batch, BenchCase
from qclip.apps.bench.comparison import device_named
from qclip.apps.bench.measure import Say, silent
from qclip.apps.bench.precision import Precision, precision_named
from qclip.apps.bench.workload import Workload, workload
from qclip.training.make import make_private

THROUGHPUT_CASES = {"cpu": ("transformer", "cnn-28"), "cuda": ("gpt2-128",)}
EXPECTED_BATCH = 256
PLANNED_STEPS = 10_000
"""The length of the run that the measured steps begin: accounting costs what it costs in a run of this length."""
EXAMPLES_OVER_BATCH = 16
WARM_UP = 3


@dataclass(frozen=True)
class ThroughputRow:
    """A training loop."""

    case: str
    mode: str
    dtype: str
    batch_size: int
    """Of every plain step; the expected one of private steps."""
    examples_per_second: float
    """Examples drawn, over seconds; the median over rounds."""
    ratio: float
    """To the plain loop."""
    padding: float
    """Slots computed over examples drawn."""


@dataclass(frozen=True)
class Taken:
    """What one update has taken in."""

    examples: int
    slots: int


def measure_throughput(
    device: str = "cpu",
    *,
    dtype: str = "float32",
    cases: Sequence[str] = (),
    batch_size: int = EXPECTED_BATCH,
    rounds: int = 5,
    steps_per_round: int = 4,
    compiled: bool = True,
    say: Say = silent,
) -> list[ThroughputRow]:
    """Measure the plain and the private loop of each case; ``compiled=False`` leaves both eager."""
    place, precision = device_named(device), precision_named(dtype)
    check.count("rounds", rounds)
    names = [check.choice("case", name, CASES) for name in cases or THROUGHPUT_CASES[place.type]]
    rows = []
    with measure.quietly(), precision.settings():
        for name in names:
            case = replace(CASES[name], batch=check.count("batch_size", batch_size))
            rows += _measure(case, precision, place, rounds, steps_per_round, compiled, say)
    return rows


def _measure(
    case: BenchCase,
    precision: Precision,
    device: torch.device,
    rounds: int,
    steps_per_round: int,
    compiled: bool,
    say: Say,
) -> list[ThroughputRow]:
    measure.forget(device)
    inputs, targets = case.examples(EXAMPLES_OVER_BATCH * case.batch)
    dataset = TensorDataset(precision.place(inputs, torch.device("cpu")), targets)
    plain, private = ("compiled", "qclip compiled") if compiled else ("plain", "qclip")
    loops = {
        plain: plain_loop(workload(case, precision, device), dataset, compiled=compiled),
        private: private_loop(workload(case, precision, device), dataset, compiled=compiled),
    }
    for name, loop in loops.items():
        say(f"preparing {case.name}, {name}")
        _advance(loop, WARM_UP, device)
    say(f"timing {case.name}")
    rates: dict[str, list[float]] = {name: [] for name in loops}
    taken: dict[str, list[Taken]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            seconds, updates = _advance(loop, steps_per_round, device)
            rates[name].append(sum(update.examples for update in updates) / seconds)
            taken[name] += updates
    speed = {name: median(found) for name, found in rates.items()}
    return [
        ThroughputRow(
            case=case.name,
            mode=name,
            dtype=precision.name,
            batch_size=case.batch,
            examples_per_second=speed[name],
            ratio=speed[name] / speed[plain],
            padding=sum(t.slots for t in taken[name]) / max(sum(t.examples for t in taken[name]), 1),
        )
        for name in loops
    ]


def _advance(loop: Iterator[Taken], updates: int, device: torch.device) -> tuple[float, list[Taken]]:
    """Seconds, and what each update took in."""
    measure.wait(device)
    start = time.perf_counter()
    taken = list(itertools.islice(loop, updates))
    measure.wait(device)
    return time.perf_counter() - start, taken


def plain_loop(work: Workload, dataset: TensorDataset, *, compiled: bool) -> Iterator[Taken]:
    """Ordinary training, without end: shuffled batches of one size, each read by one indexing per tensor."""
    optimizer = work.optimizer()

    def mean_loss(batch: Batch) -> Tensor:
        return work.losses(work.model, batch).mean()

    compute = torch.compile(mean_loss, dynamic=False) if compiled else mean_loss
    batches = BatchSampler(RandomSampler(dataset), work.case.batch, drop_last=True)
    while True:
        for batch in DataLoader(dataset, sampler=batches, batch_size=None):
            optimizer.zero_grad()
            compute(work.place(batch)).backward()
            optimizer.step()
            yield Taken(work.case.batch, work.case.batch)


def private_loop(work: Workload, dataset: TensorDataset, *, compiled: bool) -> Iterator[Taken]:
    """Private training with the default threshold, as long as is planned; epsilon is asked for after every update."""
    widest = 0

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal widest
        widest = max(widest, len(batch[1]))
        return work.losses(model, batch)

    options: dict[str, Any] = {"compile": True} if compiled else {}
    training = make_private(
        work.model,
        work.optimizer(),
        dataset,
        per_example_loss=losses,
        batch_size=work.case.batch,
        steps=PLANNED_STEPS,
        noise_multiplier=1.0,
        delta=1e-5,
        seed=0,
        **options,
    )
    examples = slots = 0
    for batch in training.loader:
        ticket = training.loader.tickets.front
        assert ticket is not None
        training.step(batch)
        examples += ticket.num_examples
        slots += widest if compiled else ticket.num_slots  # a compiled step has as many slots as it was traced with
        if training.updated:
            training.epsilon_curve(len(training.history))
            yield Taken(examples, slots)
            examples = slots = 0
