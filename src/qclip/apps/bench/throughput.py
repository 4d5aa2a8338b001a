"""The throughput of whole training loops, plain and private, in examples per second.

The plain loop reads batches of one size from a torch DataLoader and takes compiled steps. The private one is that of
`make_private(compile=True)`: its time includes Poisson sampling, physical batches and their padding, clipping, noise,
the private threshold and its counts, accounting and the optimizer. The loops take turns.
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
"""The planned length of the measured run, which determines the cost of its accounting."""
EXAMPLES_OVER_BATCH = 16
WARM_UP = 3


@dataclass(frozen=True)
class ThroughputRow:
    """The throughput of a training loop."""

    case: str
    mode: str
    dtype: str
    batch_size: int
    """Batch size of plain steps; the expected one of private steps."""
    examples_per_second: float
    """Examples drawn per second; the median over rounds."""
    ratio: float
    """Ratio to the plain loop."""
    padding: float
    """Slots computed per example drawn."""


@dataclass(frozen=True)
class Taken:
    """The examples and slots of one update."""

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
    """Measure the plain and the private loop of each case.

    Args:
        device: "cpu", "cuda" or "cuda:1".
        dtype: A name in `PRECISIONS`.
        cases: Names in `CASES`; `THROUGHPUT_CASES` when left out.
        batch_size: Expected batch size.
        rounds: Rounds in which the loops take turns.
        steps_per_round: Updates of each loop in a round.
        compiled: Whether both loops are compiled.
        say: Called with the progress.
    """
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
    speed = {name: median(each) for name, each in rates.items()}
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
    """Run some updates; return the seconds, and the examples and slots of each update."""
    measure.wait(device)
    start = time.perf_counter()
    taken = list(itertools.islice(loop, updates))
    measure.wait(device)
    return time.perf_counter() - start, taken


def plain_loop(work: Workload, dataset: TensorDataset, *, compiled: bool) -> Iterator[Taken]:
    """Train without privacy and without end, on shuffled batches of one size, read by one indexing per tensor."""
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
    """Train privately with the default threshold, to the end of the plan; epsilon is computed after every update."""
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
