"""Record and replay: what one example moves in a training, held against what the accountant charges for.

A run is recorded. Then it is made again on neighbouring data sets with the same randomness, and every release of the
recorded run is replayed to it, so that both runs have the same parameters and thresholds at every step. The raw sums
may then differ by their declared bounds, and nothing else may differ at all.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from qclip import _validate as check
from qclip import accounting
from qclip._validate import Refusal
from qclip.audit.neighbours import Neighbour, enlarged, replaced, require_index, without
from qclip.engine.batch import tensor_leaves
from qclip.training import noise
from qclip.training.recording import recorded_by
from qclip.training.sums import BoundedSum, NoisySum

ROUNDING: Final = 1e-5
"""How far rounding may take a sum beyond its bound, relative to it."""


@dataclass(frozen=True)
class Finding:
    """Something that one example moved and that nobody pays for."""

    neighbour: str
    """The data set on which it was seen; empty if it was seen without one."""
    what: str
    step: int | None = None
    """The logical step at which it was first seen."""
    moved: float = math.nan
    """By how much a sum moved, in units of one example's bound."""
    allowed: float = math.nan

    def __str__(self) -> str:
        place = " at the end" if self.step is None else f" at step {self.step}"
        sizes = "" if math.isnan(self.moved) else f" by {self.moved:.4g}, where {self.allowed:.4g} is accounted for"
        return f"{self.neighbour or 'every run'}: {self.what}{sizes}{place}"


@dataclass(frozen=True)
class Replay:
    """What a replay found."""

    findings: tuple[Finding, ...]
    neighbours: tuple[str, ...]
    """The data sets that were compared."""
    steps: int
    most_moved: float
    """The most that an example moved the releases of a step together, over what is accounted for; at most 1."""
    epsilon: float
    """The epsilon that the run says it spent."""
    skipped: tuple[str, ...] = ()
    """Comparisons that were left out, with the reason."""

    @property
    def holds(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        size = f"{len(self.neighbours)} neighbouring data sets, {self.steps} steps"
        if self.holds:
            lines = [f"nothing found on {size}; an example moved a step by at most {self.most_moved:.4f} of its cost"]
        else:
            lines = [f"{len(self.findings)} findings on {size}:", *(f"  {finding}" for finding in self.findings)]
        return "\n".join([*lines, *(f"  left out: {reason}" for reason in self.skipped)])


def replay(
    train: Callable[[Dataset[Any]], Any],
    dataset: Dataset[Any],
    neighbours: Sequence[Neighbour] | None = None,
    *,
    examples: int = 3,
    seed: int = 0,
) -> Replay:
    """Train on neighbouring data sets with identical randomness, and compare all that is raw, released or public.

        def train(dataset):
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            training = qclip.make_private(model, optimizer, dataset, loss=..., batch_size=64, steps=10, epsilon=3)
            for x, y in training.loader:
                training.step(x, y)

        print(qclip.audit.replay(train, dataset))

    Compared, step by step: the distance of the raw sums with their bounds; all releases of a step together with the one
    Gaussian release that epsilon is computed for; the noise with its declared size; parameters, buffers, optimizer,
    records and epsilon, which must be equal; and how the runs end. It sees faults of your code, of your model and of
    qclip: a collate function that standardises by the batch, a normalisation by the mean of the data set, a raw
    gradient applied. It sees no more than these data sets show: a fault that needs other data passes.

    Args:
        train: Makes one short run with `qclip.make_private` on the data set that it is given, a few steps long. What it
            returns is taken for public, and must be the same for all; so do not return raw losses.
        dataset: A map-style data set.
        neighbours: The data sets to compare with (`without`, `replaced`, `enlarged`); by default, for ``examples``
            examples that take part: without it, with another in its place, and with it a thousand times as large.
        examples: The number of examples of the default neighbours.
        seed: The seed of all random generators, and of runs that are given none.

    Raises:
        qclip.Refusal: If the training makes no private run or several, adds no noise, or is not the same twice.
    """
    size = len(dataset)  # type: ignore[arg-type]
    tape = _Tape(seed)
    public = _run(train, dataset, tape)
    tape.require_private()
    again = _Tape(seed, follows=tape)
    _compare_public(again, public, _run(train, dataset, again), "")
    if again.findings:
        raise Refusal(
            "the training is not the same twice on the same data with the same seeds, so nothing can be compared "
            f"({again.findings[0]}): seed its own random generators inside train, and run it on one process"
        )
    if neighbours is None:
        neighbours = _usual_neighbours(tape, dataset, check.count("examples", examples), seed)
    skipped: list[str] = []
    findings = list(tape.findings)
    compared: list[str] = []
    most = 0.0
    for neighbour in neighbours:
        require_index(neighbour.index, size)
        if neighbour.change is None and tape.training._engine.draws:
            skipped.append(f"{neighbour.name}: the model draws random numbers, which would be dealt out differently")
            continue
        other = _Tape(seed, follows=tape, neighbour=neighbour)
        _compare_public(other, public, _run(train, neighbour.of(dataset), other), neighbour.name)
        findings += other.findings
        most = max(most, other.most_moved)
        compared.append(neighbour.name)
    epsilon = tape.training.epsilon()
    return Replay(tuple(findings), tuple(compared), len(tape.training.history), most, epsilon, tuple(skipped))


@dataclass
class _Entry:
    """A release: the raw sum, what was released, and a mark of all that was public just before."""

    step: int
    raw: BoundedSum
    released: NoisySum
    state: dict[str, bytes]


@dataclass
class _Tape:
    """A recording of one run, alone or beside the recording of the run that it follows."""

    seed: int
    follows: "_Tape | None" = None
    neighbour: Neighbour | None = None
    entries: list[_Entry] = field(default_factory=list)
    draws: dict[int, NDArray[np.intp]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    most_moved: float = 0.0
    training: Any = None
    _squares: dict[int, float] = field(default_factory=dict)
    """The squared shift of each step's releases, in units of their noise."""

    def begin(self, training: Any) -> None:
        if self.training is not None:
            raise Refusal("train made a second private run: audit one run at a time, since budgets add up")
        self.training = training

    def drawn(self, step: int, indices: NDArray[np.intp]) -> NDArray[np.intp]:
        self.draws[step] = indices
        gone = self.neighbour is not None and self.neighbour.change is None
        return indices[indices != self.neighbour.index] if gone and self.neighbour else indices

    def release(self, value: BoundedSum, noise_multiplier: float, source: Any, **settings: Any) -> NoisySum:
        value = value.resolve()
        step = len(self.training.history)
        if self.follows is None:
            released = noise.release(value, noise_multiplier, source, **settings)
            kept = replace(value, tensors={key: x.clone() for key, x in value.tensors.items()})
            self.entries.append(_Entry(step, kept, _copy(released), self._state()))
            return released
        place = len(self.entries)
        if place == len(self.follows.entries):
            raise _Diverged("a release more than in the recorded run", step)
        entry = self.follows.entries[place]
        self.entries.append(entry)
        self._compare(entry, value, noise_multiplier, step)
        return _copy(entry.released)

    def require_private(self) -> None:
        """Refuse a training that promises nothing; note releases that cost more than the accountant is told."""
        if self.training is None:
            raise Refusal("train made no private run: call qclip.make_private inside, on the data set that it is given")
        z = self.training.plan.noise_multiplier
        if z == 0 or not self.training.threshold.private:
            raise Refusal("the run promises nothing (no noise, or a threshold that is not private): nothing to audit")
        if not self.entries:
            raise Refusal("the run released nothing: let train take a few steps")
        costs: dict[int, float] = {}
        for entry in self.entries:
            pairs = zip(entry.raw.group_bounds, entry.released.stds, strict=True)
            costs[entry.step] = costs.get(entry.step, 0.0) + sum((b / s) ** 2 if s else math.inf for b, s in pairs)
        for step, cost in costs.items():
            if cost > (1 + ROUNDING) / z**2:
                what = "the releases cost more than the accountant is told,"
                self.findings.append(Finding("", what, step, math.sqrt(cost) * z, 1.0))
                break
        plan = self.training.plan
        spent = accounting.epsilon(
            noise_multiplier=z,
            sample_rate=plan.sample_rate,
            steps=len(costs),
            delta=plan.delta,
            accountant=plan.accountant,
        )
        reported = self.training.epsilon()
        if reported < spent * (1 - ROUNDING):
            what = f"epsilon = {reported:.4g} is reported for {len(costs)} releases, which spend {spent:.4g}"
            self.findings.append(Finding("", what))

    def _compare(self, entry: _Entry, value: BoundedSum, noise_multiplier: float, step: int) -> None:
        name = "" if self.neighbour is None else self.neighbour.name
        if step != entry.step or set(value.tensors) != set(entry.raw.tensors):
            raise _Diverged("another release than in the recorded run", step)
        moved = [what for what, mark in self._state().items() if entry.state.get(what) != mark]
        stds = noise.noise_stds(value, noise_multiplier)
        if value.group_bounds != entry.raw.group_bounds or stds != entry.released.stds:
            moved.append("the bound of a sum or the size of its noise")
        if moved:
            raise _Diverged(f"{', '.join(moved)} differ{'s' if len(moved) == 1 else ''}", step)
        shift = np.zeros(len(value.group_bounds))
        for key, x in value.tensors.items():
            shift[value.members[key]] += float((x.double() - entry.raw.tensors[key].double()).square().sum())
        shift = np.sqrt(shift)
        allowed = 0 if self.neighbour is None else self.neighbour.distance
        for group, (distance, bound) in enumerate(zip(shift, value.group_bounds, strict=True)):
            if not distance <= bound * (allowed + ROUNDING) and not self._noted("a raw sum"):
                kind = next(iter(value.tensors)).kind
                what = f"a raw sum ({'counts' if kind == 'counts' else f'gradient, group {group}'}) moved"
                self.findings.append(Finding(name, what, step, distance / bound, allowed))
        sizes = np.array(stds)  # a release without noise costs nothing only if nothing moved
        square = float((np.divide(shift, sizes, out=np.where(shift > 0, np.inf, 0), where=sizes > 0) ** 2).sum())
        total = self._squares[step] = self._squares.get(step, 0.0) + square
        relative = math.sqrt(total) * self.training.plan.noise_multiplier
        if allowed:
            self.most_moved = max(self.most_moved, relative / allowed)
        if not relative <= allowed + 10 * ROUNDING and not self._noted("all releases"):
            self.findings.append(Finding(name, "all releases of a step together moved", step, relative, allowed))

    def _noted(self, beginning: str) -> bool:
        return any(finding.what.startswith(beginning) for finding in self.findings)

    def _state(self) -> dict[str, bytes]:
        """Return a mark of each public tensor of the run: parameters and buffers, those of the criterion included."""
        criterion = self.training._evaluation.criterion
        modules = {"": self.training._engine.model}
        if isinstance(criterion, nn.Module):
            modules["criterion."] = criterion
        return {
            f"{kind} {prefix}{name}": _mark(x)
            for prefix, module in modules.items()
            for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
            for name, x in named
        }


class _Diverged(Exception):
    """Two runs have become different in public, so nothing after that can be compared."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(what)
        self.what, self.step = what, step


def _run(train: Callable[[Dataset[Any]], Any], dataset: Dataset[Any], tape: _Tape) -> Any:
    """Run the training on a tape; return all that is public at its end, or what it raised."""
    random.seed(tape.seed)
    np.random.seed(tape.seed % 2**32)  # noqa: NPY002 - the generator that users' data sets draw from
    torch.manual_seed(tape.seed)
    try:
        with recorded_by(tape):
            result = train(dataset)
    except _Diverged as end:
        return end
    except Exception as error:
        if tape.follows is None:
            raise
        return error
    if tape.training is None:
        return None
    run = tape.training
    optimizers = [optimizer.state_dict() for optimizer in run._optimizers]
    return {
        **tape._state(),
        "the record of steps": repr(tuple(run.history)).encode(),
        "epsilon": repr(run.epsilon()).encode(),
        "the optimizer": b"".join([repr(_plain(optimizers)).encode(), *map(_mark, tensor_leaves(optimizers))]),
        "what train returned": b"".join([repr(_plain(result)).encode(), *map(_mark, tensor_leaves(result))]),
    }


def _compare_public(tape: _Tape, recorded: Any, public: Any, name: str) -> None:
    if isinstance(public, _Diverged):
        if not tape.findings:
            tape.findings.append(Finding(name, public.what, public.step))
        return
    if isinstance(public, Exception):
        step = len(tape.training.history) if tape.training is not None else 0
        tape.findings.append(Finding(name, f"the run ended by {type(public).__name__}: {str(public)[:120]}", step))
        return
    assert tape.follows is not None
    if public is None or len(tape.entries) != len(tape.follows.entries):
        tape.findings.append(Finding(name, "the run made other releases than the recorded one"))
        return
    tape.findings += [Finding(name, f"{what} differs") for what, mark in recorded.items() if public.get(what) != mark]


def _usual_neighbours(tape: _Tape, dataset: Any, examples: int, seed: int) -> list[Neighbour]:
    """Return neighbours in examples that take part in the run, those that do so most often first."""
    draws = [draw for draw in tape.draws.values() if draw.size]
    if not draws:
        raise Refusal("no step of the run drew an example: take a larger batch_size or more steps")
    indices, counts = np.unique(np.concatenate(draws), return_counts=True)
    generator = np.random.default_rng(seed)
    order = np.lexsort((generator.random(len(indices)), -counts))
    chosen = [int(i) for i in indices[order][:examples]]
    others = [int(i) for i in generator.permutation(len(dataset)) if int(i) not in chosen] or chosen[::-1]
    return [
        neighbour
        for k, index in enumerate(chosen)
        for neighbour in (without(index), replaced(index, dataset[others[k % len(others)]]), enlarged(index))
    ]


def _copy(released: NoisySum) -> NoisySum:
    return replace(released, tensors={key: x.clone() for key, x in released.tensors.items()})


def _mark(x: Tensor) -> bytes:
    """Return a mark of the bits of a tensor."""
    raw = x.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b"", digest_size=16).digest()


def _plain(value: Any) -> Any:
    """Return a nest without its tensors, for comparison."""

    def visit(x: Any) -> Iterator[Any]:
        if isinstance(x, dict):
            yield from ((key, tuple(visit(item))) for key, item in x.items())
        elif isinstance(x, (tuple, list)):
            yield from (tuple(visit(item)) for item in x)
        elif isinstance(x, (bool, int, float, str, type(None), np.generic)):
            yield x

    return tuple(visit(value))
