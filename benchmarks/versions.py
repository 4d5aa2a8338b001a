"""Compare the time of a private step in two versions of the sources, each in a process of its own, taking turns.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before/src src --case mlp --case cnn-28

Each line gives the median time of a whole logical step (sampling, clipping, noise, threshold, optimizer), and the ratio
of the two versions: the median and the quartiles over the rounds. A third process runs the first version again: its
ratio shows the noise of the measurement. Proofs are made before the clock starts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, help="the folder that holds the package qclip of the first version")
    parser.add_argument("after", type=Path, help="that of the second")
    parser.add_argument("--case", action="append", help="of `qclip bench`; several are taken in turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="logical steps of each version in a round")
    parser.add_argument("--warm-up", type=int, default=18, help="steps before: proofs are made at the 1st, 2nd, 16th")
    return parser.parse_args()


@dataclass
class Worker:
    """The process of a version."""

    source: Path
    process: Any = field(init=False)

    def begin(self, case: str, options: argparse.Namespace) -> None:
        """Start the process, which warms up."""
        arguments = [case, options.device, options.dtype, str(int(options.compile)), str(options.warm_up)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *arguments],
            env=os.environ | {"PYTHONPATH": f"{self.source.resolve()}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        """Wait until the process has warmed up."""
        self._answer()

    def steps(self, count: int) -> list[float]:
        """Run some steps and return the seconds of each."""
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.source}: the worker has failed")
        return json.loads(line)


def work(case: str, device: str, dtype: str, compiled: str, warm_up: str) -> None:
    """Run in the worker: take steps on demand, with one line of JSON for each demand."""
    import torch
    from torch.utils.data import TensorDataset

    import qclip

    bench = "qclip.apps.bench" if find_spec("qclip.apps") else "qclip.bench"  # its name in older versions
    cases, precision, workload = (import_module(f"{bench}.{name}") for name in ("cases", "precision", "workload"))
    place = torch.device(device)
    (row,) = cases.chosen([case], place)
    job = workload.workload(row, precision.precision_named(dtype), place)
    inputs, targets = job.place(row.examples(16 * row.batch))
    training = qclip.make_private(
        job.model,
        job.optimizer(),
        TensorDataset(inputs, targets),
        per_example_loss=job.losses,
        batch_size=row.batch,
        steps=10**6,
        noise_multiplier=1.0,
        delta=1e-6,
        compile=compiled == "1",
    )
    batches = iter(training.loader)

    def one() -> float:
        start = time.perf_counter()
        while True:
            training.step(next(batches))
            if training.updated:
                break
        if place.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(int(warm_up)):
        one()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps([one() for _ in range(int(line))]), flush=True)


def main(options: argparse.Namespace) -> None:
    """Let the versions take turns, and print their ratios."""
    for case in options.case or ["mlp", "cnn-28", "transformer"]:
        workers = {"before": Worker(options.before), "after": Worker(options.after), "again": Worker(options.before)}
        for worker in workers.values():
            worker.begin(case, options)
            worker.ready()
        medians: dict[str, list[float]] = {name: [] for name in workers}
        for turn in range(options.rounds):
            names = list(workers) if turn % 2 else list(workers)[::-1]
            for name in names:
                medians[name].append(statistics.median(workers[name].steps(options.steps)))
        for worker in workers.values():
            worker.end()
        print(f"{case:12} before {1e3 * statistics.median(medians['before']):8.2f} ms", end="")
        for name in ("after", "again"):
            ratios = [mine / before for mine, before in zip(medians[name], medians["before"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"   {name} {middle:.3f} ({low:.3f} to {high:.3f})", end="")
        print(flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main(options())
