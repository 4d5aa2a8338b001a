"""The runs of the accuracy experiment: what each one trains, and the file that remembers those that are finished."""

import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import qclip
from qclip import _validate as check
from qclip.apps.data import Task, load
from qclip.apps.experiments.accuracy_settings import AccuracySettings
from qclip.apps.experiments.scores import held_out_scores
from qclip.apps.experiments.task_training import train_privately
from qclip.engine.torch_settings import fp32_precision
from qclip.thresholds import BalancedThreshold, Constant, PrivateQuantile, Threshold
from qclip.training.auto_step_size import late_decay
from qclip.training.dataset import dataset_size
from qclip.training.lost_threshold import LostThreshold
from qclip.training.plan import plan_training
from qclip.training.run import PrivateTraining

Family = Literal["balanced", "quantile", "constant", "unclipped"]


@dataclass(frozen=True)
class Job:
    """What decides the result of a run, up to rounding."""

    data: str
    batch_size: int
    epochs: int
    delta: float
    epsilon: float | None
    """None without privacy: Adam on gradients that are not clipped."""
    family: Family
    """The kind of threshold."""
    value: float | None
    """Its p or C."""
    rate: float | None
    """The learning rate, in units of the threshold; None for the one that the run finds."""
    seed: int

    @property
    def threshold(self) -> Threshold[Any]:
        """The threshold of the run."""
        if self.family == "balanced":
            return BalancedThreshold()
        assert self.value is not None
        return (PrivateQuantile if self.family == "quantile" else Constant)(self.value)

    def __str__(self) -> str:
        rate = "rate found" if self.rate is None else f"rate {self.rate:g}"
        value = "" if self.value is None else f" {self.value:g}"
        budget = "no privacy" if self.epsilon is None else f"epsilon {self.epsilon:g}"
        return f"{self.family}{value}, {rate}, {budget}, seed {self.seed}"


@dataclass(frozen=True)
class Run:
    """A finished run."""

    job: Job
    accuracy: float = math.nan
    """Held-out accuracy after the last step; nan if the run failed."""
    loss: float = math.nan
    auc: float | None = None
    """Only for two classes."""
    tau: float | None = None
    """The threshold at the last step."""
    unclipped: float | None = None
    """The noisy fraction of unclipped examples, averaged over the second half, where the threshold estimates it."""
    rate_at_half: float | None = None
    """The learning rate in the middle of the run, in units of the threshold, from where on it decays."""
    noise_multiplier: float = 0.0
    noise_power: float = 0.0
    """S, the squared norm of the noise over the squared threshold."""
    steps: int = 0
    seconds: float = 0.0
    machine: str = ""
    error: str = ""
    """Why the run failed; empty if it did not."""

    def __str__(self) -> str:
        result = self.error or f"accuracy {100 * self.accuracy:.2f}, loss {self.loss:.4f}"
        return f"{self.job}: {result} ({self.seconds:.0f} s)"


@dataclass(frozen=True)
class LateDecay:
    """The schedule of the automatic learning rate: constant for half of the run, then linear to 0."""

    rate: float
    num_steps: int

    def __call__(self, step: int) -> float:
        """Return the learning rate of this step."""
        return self.rate * late_decay(step, self.num_steps)


class RunFile:
    """The file of finished runs, a line for each. A line that was cut off by a kill is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[Job, Run] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            os.truncate(path, len(whole.encode()))
        for line in whole.splitlines():
            row = json.loads(line)
            run = Run(**row | {"job": Job(**row["job"])})
            self._runs[run.job] = run

    def get(self, job: Job) -> Run | None:
        """Return the run of a job; None if it is not finished."""
        return self._runs.get(job)

    def add(self, run: Run) -> None:
        """Add a run, and write it at once."""
        self._runs[run.job] = run
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(run)) + "\n")


class Runner:
    """Runs jobs that are not in the file yet, several at a time; the processes live as long as its context."""

    def __init__(self, settings: AccuracySettings, say: Callable[[str], object]) -> None:
        settings.out.mkdir(parents=True, exist_ok=True)
        self._settings, self._say = settings, say
        self._file = RunFile(settings.out / "runs.jsonl")
        self._pool: ProcessPoolExecutor | None = None
        self.missing = 0
        """The number of jobs that were asked for and are not finished."""

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def finish(self, jobs: Sequence[Job]) -> None:
        """Run the jobs that are not finished.

        An error that is not a refusal, as of a device without memory, is no result. It is raised, by several workers
        once the other jobs are done.
        """
        to_do = [job for job in dict.fromkeys(jobs) if self._file.get(job) is None]
        if self._settings.table_only:
            self.missing += len(to_do)
            return
        errors = []
        for number, future in enumerate(self._start(to_do), start=1):
            error = future.exception()
            if error is not None:
                errors.append(error)
                self._say(f"{number}/{len(to_do)}  {error!r}")
                continue
            run = future.result()
            self._file.add(run)
            self._say(f"{number}/{len(to_do)}  {run}")
        if errors:
            raise errors[0]

    def results(self, jobs: Sequence[Job]) -> list[Run]:
        """Return the runs of those jobs that are finished."""
        return [run for job in jobs if (run := self._file.get(job)) is not None]

    def _start(self, jobs: Sequence[Job]) -> Iterator[Future[Run]]:
        settings = self._settings
        num_examples = dataset_size(task_of(settings).train)
        noise = {job: noise_multiplier(job, num_examples) for job in jobs}  # once for all processes
        if settings.workers == 1:
            for job in jobs:
                future: Future[Run] = Future()
                future.set_result(train(settings, job, noise[job]))
                yield future
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(settings.workers, get_context("spawn"), _prepare_process)
        yield from as_completed([self._pool.submit(train, settings, job, noise[job]) for job in jobs])


def _prepare_process() -> None:
    """Leave the other cores to the other processes, and end with the one that started this, however that ends."""
    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def noise_multiplier(job: Job, num_examples: int) -> float:
    """Return the noise multiplier that meets the budget of a job; 0 without privacy."""
    if job.epsilon is None:
        return 0.0
    plan = plan_training(num_examples, job.batch_size, epochs=job.epochs, epsilon=job.epsilon, delta=job.delta)
    return plan.noise_multiplier


def task_of(settings: AccuracySettings) -> Task:
    """Return the task, loaded once in each process."""
    return _task(settings.data, settings.data_dir)


@cache
def _task(name: str, data_dir: Path | None) -> Task:
    return load(name, data_dir=data_dir)


def examples(settings: AccuracySettings) -> TensorDataset:
    """Return the training examples, moved to the device once in each process."""
    return _examples(settings.data, settings.data_dir, settings.device)


@cache
def _examples(name: str, data_dir: Path | None, device: str) -> TensorDataset:
    train = _task(name, data_dir).train
    assert isinstance(train, TensorDataset)
    return TensorDataset(*(tensor.to(device) for tensor in train.tensors))


def train(settings: AccuracySettings, job: Job, noise_multiplier: float) -> Run:
    """Train one run and score it; a refusal and a loss that is not finite are failures of the run."""
    start = time.monotonic()
    gpu = settings.device.startswith("cuda")
    run = Run(job, noise_multiplier=noise_multiplier, machine=_machine(settings.device))
    try:
        # On a GPU, products of float32 numbers use TF32, which is several times as fast.
        with warnings.catch_warnings(), fp32_precision("tf32") if gpu else nullcontext():
            warnings.simplefilter("ignore", LostThreshold)  # the table shows what it leads to
            run = _trained(settings, run)
    except check.Refusal as refusal:
        run = replace(run, error=str(refusal))
    if not run.error and not math.isfinite(run.loss):
        run = replace(run, accuracy=math.nan, auc=None, error=f"diverged: the held-out loss is {run.loss}")
    return replace(run, seconds=time.monotonic() - start)


def _trained(settings: AccuracySettings, run: Run) -> Run:
    job, task = run.job, task_of(settings)
    torch.manual_seed(job.seed)
    model = task.build_model().to(settings.device)
    if job.epsilon is None:
        steps = _train_without_privacy(model, task, examples(settings), job)
        return _scored(run, task, model, steps=steps)
    training = _train_privately(settings, model, task, run)
    history = training.history
    second_half = [record.noisy_unclipped[0] for record in history[len(history) // 2 :] if record.noisy_unclipped]
    middle = history[(len(history) - 1) // 2]  # the last step before the decay
    return _scored(
        run,
        task,
        model,
        tau=history[-1].tau[0],
        unclipped=sum(second_half) / len(second_half) if second_half else None,
        rate_at_half=middle.step_size * middle.tau[0],
        noise_power=history[-1].noise_power[0],
        steps=len(history),
    )


def _scored(run: Run, task: Task, model: nn.Module, **facts: Any) -> Run:
    scores = held_out_scores(task, model)
    return replace(run, accuracy=scores["accuracy"], loss=scores["loss"], auc=scores.get("auc"), **facts)


def _train_privately(settings: AccuracySettings, model: nn.Module, task: Task, run: Run) -> PrivateTraining:
    job, data = run.job, examples(settings)
    plan = plan_training(
        len(data), job.batch_size, epochs=job.epochs, noise_multiplier=run.noise_multiplier, delta=job.delta
    )
    return train_privately(
        task,
        model,
        threshold=job.threshold,
        step_size="auto" if job.rate is None else LateDecay(job.rate, plan.num_steps),
        batch_size=job.batch_size,
        epochs=job.epochs,
        seed=job.seed,
        data=data,
        noise_multiplier=run.noise_multiplier,
        delta=job.delta,
        physical_batch_size=settings.physical_batch_size,
    )


def _train_without_privacy(model: nn.Module, task: Task, data: TensorDataset, job: Job) -> int:
    """Train by Adam on shuffled batches of the same size, and return the number of steps."""
    assert job.rate is not None
    inputs, targets = data.tensors
    order = torch.Generator().manual_seed(job.seed)
    num_steps = job.epochs * math.ceil(len(data) / job.batch_size)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=job.rate)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, LateDecay(1.0, num_steps))
    for _ in range(job.epochs):
        for rows in torch.randperm(len(data), generator=order).to(inputs.device).split(job.batch_size):
            optimizer.zero_grad()
            task.loss(model(inputs[rows]), targets[rows]).mean().backward()
            optimizer.step()
            decay.step()
    return num_steps


def _machine(device: str) -> str:
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    return f"{where}, torch {torch.__version__}, qclip {qclip.__version__}"
