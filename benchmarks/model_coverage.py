"""Which models of transformers are clipped exactly, in training mode: every class, made tiny.

python benchmarks/model_coverage.py [--out out/coverage --jobs 1 --classes 'Bert*' --page docs/coverage.md]

Each class is built from a tiny configuration (`tiny_configs`) and given a padded batch (`tiny_batches`). Its clipped
sums and norms are held against autograd, one example at a time. A class takes some seconds, all of them hours: each has
a process and a line in rows.jsonl, and a sweep that is begun again leaves out what is in there.
"""

import contextlib
import datetime
import fnmatch
import json
import logging
import multiprocessing
import os
import runpy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
import tyro
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.models.auto import modeling_auto

from model_coverage_page import ALONE, SLOW, Row, page
from qclip.engine import ClippedGradients, Engine, Refusal, explain, oracle
from qclip.engine.driver import call
from qclip.engine.randomness import NoDropout, drawn_call_by_call, seed_all
from tiny_batches import LENGTHS, NotBuilt, Problem, tiny_problem

EXACT: Final = 1e-4
"""The largest relative error of a sum or norm that is called exact."""
CALLS: Final = 6
WRAP: Final = runpy.run_path(str(Path(__file__).parents[1] / "docs/wrap.py"))


def classes() -> list[str]:
    """Return the names of all classes of models that transformers' auto classes know: heads before bare models."""
    found = {
        name
        for mapping, classes in vars(modeling_auto).items()
        if mapping.startswith("MODEL_") and mapping.endswith("MAPPING_NAMES")
        for names in classes.values()
        for name in ([names] if isinstance(names, str) else names)
    }
    return sorted(found, key=lambda name: ("For" not in name, name))


# One class


def losses(outputs: Any, targets: Tensor) -> Tensor:
    """Return one loss per example: cross entropy where there are logits, else a smooth function of the outputs."""
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor) and logits.requires_grad and logits.shape[0] == len(targets) and logits.shape[-1] > 1:
        scores = logits.float().reshape(len(targets), -1, logits.shape[-1])
        wanted = targets[:, torch.arange(scores.shape[1]) % targets.shape[1]] % scores.shape[2]
        return torch.nn.functional.cross_entropy(scores.transpose(1, 2), wanted, reduction="none").mean(1)
    rows = [x for x in _tensors(outputs) if x.is_floating_point() and x.requires_grad and x.dim()]
    rows = [x.float().reshape(len(targets), -1) for x in rows if x.shape[0] % len(targets) == 0]
    if not rows:
        raise NotBuilt("the model returns no tensor with rows of examples that depends on its parameters")
    # Uneven weights: the squares of a layer norm's outputs, for one, always have the same sum.
    return torch.stack([(x.tanh() * torch.arange(x.shape[1]).cos()).mean(1) for x in rows]).sum(0)


def _tensors(outputs: Any) -> list[Tensor]:
    values = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


class Measurement:
    """One class, measured.

    Args:
        name: The name of the class.
    """

    def __init__(self, name: str) -> None:
        problem: Problem = tiny_problem(getattr(transformers, name))
        self.name, self.model = name, problem.model
        targets = torch.randint(1000, (len(LENGTHS), 16), generator=torch.Generator().manual_seed(2))
        self.batch = dict(problem.inputs), targets
        self._calm = False
        """Whether dropout is left out, and Python's and numpy's numbers are drawn call by call."""

    def row(self) -> Row:
        """Return what was found."""
        self._require_finite()
        plain = self._plain_seconds()
        engine = Engine(self.model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                first, result = self._timed(lambda: self._clipped(engine, 1.0))
                others = [self._timed(lambda: self._clipped(engine, 1.0))[0] for _ in range(CALLS - 1)]
            except Refusal as refusal:
                return self._found("refused", reason=str(refusal), mixes=self._mixes())
        expected = self._expected(1.0)
        middle = float(expected.norms.median())  # half of the examples are clipped
        result, expected = self._clipped(engine, middle), self._expected(middle)
        if engine.own_draws:  # the oracle's examples draw those of the batch
            self._calm = True
            result, expected = self._clipped(Engine(self.model), middle), self._expected(middle)
            self._calm = False
        errors = _errors(result, expected)
        proofs = engine.proofs
        messages = dict.fromkeys(str(w.message) for w in caught)
        said = " ".join(text for text in messages if any(word in text for word in (ALONE, "proven", "proof")))
        lengths = self._other_length(engine)
        row = self._found(
            "exact" if max(errors) <= EXACT else "differs",
            sum_error=errors[0],
            norm_error=errors[1],
            proofs=proofs,
            calls=CALLS + 1,
            said=said,
            first=first / plain,
            fifth=others[3] / plain,
            plain=plain,
            new_length=lengths[0] / plain,
            seen_length=lengths[1] / plain,
        )
        return row if row.fifth <= SLOW else row.with_reason(self._slow_parts())

    def _found(self, status: str, **fields: Any) -> Row:
        config = type(self.model.config).__name__
        return Row(self.name, config, status, parameters=sum(p.numel() for p in self.model.parameters()), **fields)

    def _evaluate(self, batch: tuple[dict[str, Any], Tensor]) -> Tensor:
        with contextlib.ExitStack() as stack:
            if self._calm:
                stack.enter_context(NoDropout())
                stack.enter_context(drawn_call_by_call())
            return losses(call(self.model, batch[0]), batch[1])

    def _clipped(self, engine: Engine, clip_norm: float) -> ClippedGradients:
        seed_all(3)
        return engine.clipped(self._evaluate, self.batch, clip_norm)

    def _expected(self, clip_norm: float) -> ClippedGradients:
        seed_all(3)
        return oracle.clipped(self.model, self._evaluate, self.batch, clip_norm, shared_forward=True)

    def _gradients(self) -> list[Tensor]:
        seed_all(3)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(self._evaluate(self.batch).sum(), parameters, allow_unused=True)
        return [grad for grad in grads if grad is not None]

    def _require_finite(self) -> None:
        if not all(bool(grad.isfinite().all()) for grad in self._gradients()):
            raise NotBuilt("gradients are not finite, with autograd alone")

    def _plain_seconds(self) -> float:
        return statistics.median(self._timed(self._gradients)[0] for _ in range(5))

    def _timed(self, function: Callable[[], Any]) -> tuple[float, Any]:
        start = time.process_time()
        result = function()
        return time.process_time() - start, result

    def _mixes(self) -> float | None:
        """Return how far an example's gradient alone is from that in the batch, in evaluation mode; None if unknown."""
        self.model.eval()
        try:
            alone, together = (
                oracle.clipped(self.model, self._evaluate, self.batch, 1e9, shared_forward=shared)
                for shared in (False, True)
            )
            return max(_errors(alone, together))
        except Exception:  # whatever a model raises for one example
            return None
        finally:
            self.model.train()

    def _other_length(self, engine: Engine) -> tuple[float, float]:
        """Return the seconds of the first and third call on texts padded to another length; 0 for other inputs."""
        usual, targets = self.batch
        if not usual.keys() <= {"input_ids", "attention_mask", "token_type_ids"} or usual["input_ids"].dim() != 2:
            return 0.0, 0.0
        padded = {name: torch.cat([x, x[:, -1:].expand(-1, 2) * (name == "input_ids")], 1) for name, x in usual.items()}
        self.batch = padded, targets
        try:
            self._timed(self._gradients)
            first, _, third = (self._timed(lambda: self._clipped(engine, 1.0))[0] for _ in range(3))
            return first, third
        except (Refusal, RuntimeError, ValueError, IndexError):  # a model of one length
            return 0.0, 0.0
        finally:
            self.batch = usual, targets

    def _slow_parts(self) -> str:
        """Return which parameters are clipped neither by a rule nor by a vmap of a function."""
        try:
            rows = explain(self.model, self.batch[0], loss=losses, targets=self.batch[1]).parameters
        except Exception as error:  # a reason is worth having, not a failure
            return f"explain: {error}"
        slow = [row for row in rows if row.strategy not in ("rule", "unused", "frozen")]
        return "; ".join(f"{row.name}: {row.strategy}, {row.detail}" for row in slow[:4])


def _errors(found: ClippedGradients, expected: ClippedGradients) -> tuple[float, float]:
    """Return the relative errors of the sums, all together, and of the norms, of the worst example."""
    pairs = [(found.sums[name].double(), sum_.double()) for name, sum_ in expected.sums.items()]
    apart = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    length = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    norms = (found.norms - expected.norms).abs() / expected.norms.clamp_min(1e-6 * float(expected.norms.max()) + 1e-30)
    return apart / max(length, 1e-30), float(norms.max())


# All classes


@dataclass(frozen=True)
class Options:
    """Which classes to measure, and how."""

    out: Path = Path("out/coverage")
    """The folder of rows.jsonl."""
    jobs: int = 1
    limit: float = 600.0
    """The most seconds for a class."""
    classes: tuple[str, ...] = ("*",)
    """Patterns of the names of classes."""
    per_config: int = 0
    """The most classes of one configuration; 0 for all."""
    page: Path | None = None
    """Where to write the table; without it nothing is written."""
    only_page: bool = False
    """Whether to write the table of what is measured already."""


def main(options: Options) -> None:
    """Measure what is not measured yet, and write the table."""
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "rows.jsonl"
    wanted = [name for name in classes() if any(fnmatch.fnmatchcase(name, each) for each in options.classes)]
    if options.per_config:
        wanted = list(_some_of_each(wanted, options.per_config))
    done = {row.name for row in rows_of(file)}
    if not options.only_page:
        todo = [name for name in wanted if name not in done]
        with file.open("a", encoding="utf-8") as lines:
            for k, row in enumerate(sweep(todo, options.jobs, options.limit)):
                lines.write(json.dumps(asdict(row)) + "\n")
                lines.flush()
                print(f"{k + 1} of {len(todo)}: {row}", flush=True)
    if options.page is not None:
        rows = rows_of(file)
        names = {row.name for row in rows}
        left_out = sorted(set(classes()) - names)
        is_whole = options.classes == Options.classes and all(name in names for name in _some_of_each(classes(), 2))
        note = "The first two classes of every configuration, its heads first, were run." * is_whole
        about = {"size": len(LENGTHS), "exact": EXACT, "transformers": transformers.__version__}
        text = page(rows, left_out, note, **about, torch=torch.__version__, date=f"{datetime.date.today():%B %Y}")
        options.page.write_text(WRAP["wrapped"](text), encoding="utf-8")


def _some_of_each(names: Sequence[str], most: int) -> Iterator[str]:
    counts: dict[Any, int] = {}
    for name in names:
        try:
            config = getattr(transformers, name).config_class
        except (ImportError, AttributeError):  # a package that it needs is not there, or it is not public
            config = name
        counts[config] = counts.get(config, 0) + 1
        if counts[config] <= most:
            yield name


def rows_of(file: Path) -> list[Row]:
    """Return the rows of a file, the latest of each class."""
    if not file.exists():
        return []
    rows = [Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return list({row.name: row for row in rows}.values())


def sweep(names: Sequence[str], jobs: int, limit: float) -> Iterator[Row]:
    """Measure classes, each in a process of its own, and yield their rows as they come.

    Args:
        names: The classes.
        jobs: How many at a time.
        limit: The most seconds for each.
    """
    context = multiprocessing.get_context("fork")  # what is imported is there at once
    waiting, running = list(reversed(names)), dict[str, tuple[Any, Any, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_measure, args=(name, there), daemon=True)
            process.start()
            there.close()
            running[name] = process, here, time.monotonic() + limit
        for name, (process, pipe, deadline) in list(running.items()):
            row = _received(name, process, pipe, is_late=time.monotonic() > deadline)
            if row is not None:
                del running[name]
                yield row
        time.sleep(0.02)


def _received(name: str, process: Any, pipe: Any, *, is_late: bool) -> Row | None:
    """Return the row of a process that has ended, or is late; None if it still runs."""
    if pipe.poll():
        try:
            row = Row(**pipe.recv())
        except EOFError:
            row = Row(name, "", "crashed", reason=f"the process ended with {process.exitcode}")
    elif is_late:
        process.kill()
        row = Row(name, "", "late", reason="it took longer than the limit")
    else:
        return None
    process.join()
    return row


def _measure(name: str, pipe: Any) -> None:
    """Measure a class, in its own process."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.close(2)
    try:
        row = Measurement(name).row()
    except NotBuilt as error:
        row = Row(name, "", "unbuilt", reason=str(error))
    except Exception as error:  # whatever a model raises
        row = Row(name, "", "failed", reason=f"{type(error).__name__}: {error}")
    pipe.send(asdict(row))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Options))
