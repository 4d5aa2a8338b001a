"""Several processes: is the run the run of one, and what does a private step cost beside a plain one?

    torchrun --nproc-per-node 2 benchmarks/distributed.py                     # gloo, on a CPU
    torchrun --nproc-per-node 2 benchmarks/distributed.py --device cuda       # NCCL, a GPU for each process
    torchrun --nproc-per-node 2 benchmarks/distributed.py --sharded           # fully_shard (FSDP2), plain and private

Checks, each of which ends the script with an error if it fails: all ranks have the same parameters and clip norms, bit
for bit; they are those of a single process, up to rounding, with noise; a run that is saved and resumed goes on as it
would have. Then it times steps of a small transformer in alternating pairs: DistributedDataParallel (or FSDP2), and
qclip.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import qclip
from qclip.apps.data.models import CausalTransformer
from qclip.training.noise import NoiseSource, grid_spacing, noisy_sums
from qclip.training.process_group import joined
from qclip.training.sampling import PoissonSampler

ALPHABET, LENGTH = 256, 64


@dataclass(frozen=True)
class Settings:
    """The settings of the benchmark."""

    device: Literal["cpu", "cuda"] = "cpu"
    batch_size: int = 32
    """Examples of each process."""
    pairs: int = 15
    compile: bool = False
    sharded: bool = False
    """Whether each process has a part of the parameters, by `fully_shard`."""


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the loss of each example: the mean over its tokens."""
    x, y = batch
    return F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1)


def transformer(device: str, *, sharded: bool = False) -> nn.Module:
    """Return a transformer with the same initial weights on every rank."""
    torch.manual_seed(0)
    model = CausalTransformer(ALPHABET, LENGTH, width=256, layers=4).to(device)
    if sharded:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        # Nothing is changed in place here; torch says it at every step.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    return model


def private(model: nn.Module, data: TensorDataset, **options: Any) -> qclip.PrivateTraining:
    """Return a private run on the data."""
    return qclip.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        per_example_loss=losses,
        threshold=qclip.PrivateQuantile(0.5, noise_share=0.5),
        noise_multiplier=1.0,
        delta=1e-5,
        seed=0,
        **options,
    )


def trained(training: qclip.PrivateTraining) -> list[tuple[float, ...]]:
    """Train to the end; return the clip norms."""
    for batch in training.loader:
        training.step(*batch)
    return [record.tau for record in training.history]


def flat(model: nn.Module) -> Tensor:
    """Return all parameters in one tensor."""
    tensors = [x.full_tensor() if isinstance(x, DTensor) else x for x in model.state_dict().values()]
    return torch.cat([x.detach().flatten() for x in tensors])


def check(settings: Settings, data: TensorDataset) -> None:
    """Raise unless the run on all ranks is the run of one process, also when it is resumed."""
    options: dict[str, Any] = {"batch_size": 16, "steps": 6, "physical_batch_size": 5, "compile": settings.compile}
    together, resumed = (transformer(settings.device, sharded=settings.sharded) for _ in range(2))
    alone = transformer(settings.device)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, src=0)
        path = Path(folders[0]) / "run"
        training = private(together, data, **options)
        for batch in training.loader:
            training.step(*batch)
            if training.updated and len(training.history) == 3:
                training.save(path, sharded=settings.sharded)
        taus = [record.tau for record in training.history]
        dist.barrier()
        again = private(resumed, data, **options)
        again.load(path)
        resumed_taus = trained(again)
        dist.barrier()
    alone_taus = trained(private(alone, data, distributed=False, **options))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (taus, flat(together).tolist()))
    assert all(other == everyones[0] for other in everyones), "the ranks differ"
    for name, other, other_taus in (("one process", alone, alone_taus), ("a resumed run", resumed, resumed_taus)):
        distance = float((flat(together) - flat(other)).abs().max())
        off = max(abs(a - b) / b for (a, *_), (b, *_) in zip(taus, other_taus, strict=True))
        assert distance < 1e-4, f"parameters are {distance:.2g} from those of {name}"
        assert off < 1e-4, f"clip norms are {off:.2g} from those of {name}"
        say(f"from {name}: parameters differ by {distance:.2g}, clip norms by {off:.2g}")


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def seconds(step: Callable[[], object], device: str) -> float:
    """Return the time of a step, from and to a moment at which all ranks wait."""
    dist.barrier()
    began = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - began


def compare(settings: Settings, data: TensorDataset) -> None:
    """Time plain and private steps in alternating pairs, on equally many examples."""
    size, rank = dist.get_world_size(), dist.get_rank()
    num_examples = size * settings.batch_size
    part = TensorDataset(*(x[:num_examples] for x in data.tensors))
    mine = [x[rank::size] for x in part.tensors]
    model = transformer(settings.device, sharded=settings.sharded)
    plain = transformer(settings.device, sharded=settings.sharded)
    plain = plain if settings.sharded else nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def plain_step() -> None:
        optimizer.zero_grad()
        losses(plain, mine).mean().backward()
        optimizer.step()

    options: dict[str, Any] = {"batch_size": num_examples, "steps": settings.pairs + 5, "compile": settings.compile}
    options["physical_batch_size"] = settings.batch_size if settings.compile else None
    training = private(model, part, **options)  # at a sample rate of 1, every step has all examples
    batches = iter(training.loader)

    def private_step() -> None:
        training.step(*next(batches))

    for _ in range(5):
        plain_step(), private_step()
    times = [
        (seconds(plain_step, settings.device), seconds(private_step, settings.device)) for _ in range(settings.pairs)
    ]
    ratios = sorted(there / here for here, there in times)
    quarter = len(ratios) // 4
    plain_ms, private_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    ratio, low, high = statistics.median(ratios), ratios[quarter], ratios[-1 - quarter]
    say(
        f"{size} processes, {settings.batch_size} examples each, {num_parameters:,} parameters: plain {plain_ms:.1f} "
        f"ms, private {private_ms:.1f} ms; ratio {ratio:.2f}, half of {settings.pairs} pairs in {low:.2f} to {high:.2f}"
    )


def costs() -> None:
    """Time what every rank does alone on the CPU: the draw of a step, and noise."""
    for num_drawn in (4096, 10**6):
        sampler = PoissonSampler(10**8, num_drawn / 10**8, np.random.SeedSequence(0))
        began = time.perf_counter()
        sampler.draw(0)
        say(f"a draw of {num_drawn:,} examples out of 10^8: {1e3 * (time.perf_counter() - began):.1f} ms")
    sums, began = [torch.zeros(5_000_000)], time.perf_counter()
    noisy_sums(sums, [1.0], [grid_spacing(1.0)], 1.0, NoiseSource().streams(), torch.float32)
    say(f"noise: {1e9 * (time.perf_counter() - began) / sums[0].numel():.0f} ns a number on the CPU")


def main(settings: Settings) -> None:
    """Check, compare, and time what each rank does alone."""
    with joined(settings.device) as ranks:
        torch.manual_seed(1)
        x = torch.randint(ALPHABET, (max(200, ranks.size * settings.batch_size), LENGTH))
        data = TensorDataset(x.to(settings.device), x.roll(-1, 1).to(settings.device))
        say(f"{ranks.size} processes, {dist.get_backend()}, {settings.device}, torch {torch.__version__}")
        check(settings, data)
        compare(settings, data)
        costs()


if __name__ == "__main__":
    main(tyro.cli(Settings))
