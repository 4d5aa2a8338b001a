"""The modes of a training step. Each includes the forward pass, the backward pass and the SGD update.

Private modes also clip, add noise by `qclip.training.noise.release` and divide by the batch size.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qclip import _validate as check
from qclip.apps.bench import peers
from qclip.apps.bench.cases import Batch, BenchCase
from qclip.apps.bench.workload import CLIP_NORM, NOISE_MULTIPLIER, Step, Workload
from qclip.engine import CostModel, Engine
from qclip.engine.compiled.driver import Compiled
from qclip.training import noise
from qclip.training.noise import NoiseSource


def plain(workload: Workload, compile_mode: str | None = None) -> Step:
    """Return a step of ordinary training; compiled, where a mode of ``torch.compile`` is given."""
    optimizer = workload.optimizer()

    def mean_loss(batch: Batch) -> Tensor:
        return workload.losses(workload.model, batch).mean()

    compute = mean_loss if compile_mode is None else torch.compile(mean_loss, mode=compile_mode, dynamic=False)

    def step() -> None:
        if compile_mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()  # the outputs of the last step may be overwritten
        optimizer.zero_grad()
        compute(workload.batch).backward()
        optimizer.step()

    return step


def qclip(
    workload: Workload, compile_mode: str | None = None, groups: str = "flat", costs: CostModel | None = None
) -> Step:
    """Return a step clipped by the engine; compiled, where a mode of `Compiled` is given."""
    optimizer = workload.optimizer()
    engine = Engine(workload.model, groups=groups, costs=costs)
    # As in a private run, which does not wait for the device before the end of a logical batch.
    clipped = engine.clipped if compile_mode is None else partial(Compiled(engine, compile_mode).clipped, wait=False)
    source = NoiseSource(0)
    dims = noise.group_dims(engine.parameters, engine.groups.members, len(engine.groups))
    dtypes = {name: parameter.dtype for name, parameter in engine.parameters.items()}

    def evaluate(batch: Batch) -> Tensor:
        return workload.losses(workload.model, batch)

    def step() -> None:
        optimizer.zero_grad()
        result = clipped(evaluate, workload.batch, CLIP_NORM)
        raw_sum = noise.BoundedSum(result.sums, engine.groups.members, result.clip_norms, dims)
        noisy = noise.release(raw_sum, NOISE_MULTIPLIER, source, divisor=workload.case.batch, dtypes=dtypes)
        for name, parameter in engine.parameters.items():
            parameter.grad = noisy.tensors[name]
        optimizer.step()

    return step


@dataclass(frozen=True)
class Mode:
    """A named way to take a training step."""

    name: str
    make: Callable[[Workload], Step]
    device: str | None = None
    """The only kind of device that the mode runs on; None for any."""
    package: str | None = None
    """The package that the mode needs."""
    cases: tuple[str, ...] = ()
    """The cases that the mode is meant for, if not all; chosen by name, it runs on any."""

    def runs_on(self, device: torch.device) -> bool:
        """Return whether this machine can run the mode."""
        installed = self.package is None or importlib.util.find_spec(self.package) is not None
        return installed and self.device in (None, device.type)


_per_layer = partial(qclip, groups="per-layer")
_low_memory = partial(qclip, costs=CostModel(kept_bytes=0))

MODES = {
    mode.name: mode
    for mode in (
        Mode("plain", plain),
        Mode("compiled", partial(plain, compile_mode="default")),
        Mode("compiled graphs", partial(plain, compile_mode="reduce-overhead"), device="cuda"),
        Mode("qclip", qclip),
        Mode("qclip compiled", partial(qclip, compile_mode="default")),
        Mode("qclip compiled graphs", partial(qclip, compile_mode="reduce-overhead"), device="cuda"),
        Mode("qclip per-layer", _per_layer),
        Mode("qclip per-layer compiled", partial(_per_layer, compile_mode="default")),
        Mode("qclip per-layer compiled graphs", partial(_per_layer, compile_mode="reduce-overhead"), device="cuda"),
        Mode("qclip low-memory", partial(_low_memory, compile_mode="reduce-overhead"), cases=("wrn",)),
        Mode("opacus hooks", peers.opacus_hooks, package="opacus"),
        Mode("opacus ghost", peers.opacus_ghost, package="opacus"),
    )
}
BASELINES = ("plain", "compiled", "compiled graphs")


def chosen(names: Sequence[str], case: BenchCase, device: torch.device) -> list[Mode]:
    """Return the modes of these names, or all that suit the case and the machine.

    The plain step is added where no baseline is among the names.
    """
    possible = [mode.name for mode in MODES.values() if mode.runs_on(device)]
    for name in names:
        check.choice("mode", name, MODES)
        if name not in possible:
            needed = MODES[name].package or MODES[name].device
            raise check.Refusal(f"mode = {name!r} cannot run on this machine: it needs {needed}; leave it out")
    suited = [name for name in possible if not MODES[name].cases or case.name in MODES[name].cases]
    wanted = [*names] if names else suited
    if not {*wanted}.intersection(BASELINES):
        wanted.append("plain")
    return [mode for mode in MODES.values() if mode.name in wanted]
