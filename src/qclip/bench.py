"""Benchmarks: one training step, plain, clipped by qclip, and by Opacus where it is installed, in one run.

Modes take turns, so that a slow moment of the machine meets all of them; the median over rounds is reported. Every
mode includes forward pass, backward pass and the SGD update; the private ones also clipping and noise.
"""

import gc
import importlib.metadata
import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qclip import _validate as check
from qclip.data.models import CausalTransformer, cnn
from qclip.engine import Engine

Step = Callable[[], None]
CLIP_NORM = 1.0
NOISE_STD = 1.0


@dataclass(frozen=True)
class Case:
    """A model, its batch and its per-example loss."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[Tensor], Tensor]
    classes_last: bool = False
    """Whether outputs are [batch, positions, classes]."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[B]."""
        if self.classes_last:
            outputs = outputs.transpose(1, 2)
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    mode: str
    ms: float
    """Median time of a step."""
    peak_bytes: int
    """Most memory in use during a step beyond what was there before it."""
    ratio_time: float
    """To the plain step."""
    ratio_memory: float
    parameters: int


def transformer() -> nn.Module:
    """A small causal language model: 4 layers of width 128."""
    return CausalTransformer(alphabet=1000, positions=64, width=128, layers=4)


def resnet(width: int = 32) -> nn.Module:
    """A small plain stack of 3 x 3 convolutions with group norm, for 32 x 32 images."""
    layers: list[nn.Module] = []
    channels = 3
    for k, out in enumerate((width, width, 2 * width, 2 * width, 4 * width)):
        layers += [
            nn.Conv2d(channels, out, 3, stride=2 if k in (2, 4) else 1, padding=1),
            nn.GroupNorm(8, out),
            nn.ReLU(),
        ]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def mlp() -> nn.Module:
    """784-512-512-10."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def _classes(inputs: Tensor) -> Tensor:
    return torch.randint(10, (len(inputs),))


CASES = (
    Case(
        "transformer",
        transformer,
        lambda: torch.randint(1000, (32, 64)),
        lambda ids: ids.roll(-1, 1),
        classes_last=True,
    ),
    Case("cnn-28", cnn, lambda: torch.randn(256, 1, 28, 28), _classes),
    Case("cnn-32", resnet, lambda: torch.randn(64, 3, 32, 32), _classes),
    Case("mlp", mlp, lambda: torch.randn(256, 784), _classes),
)


def plain_step(case: Case, model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """Ordinary training."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        case.losses(model(inputs), targets).mean().backward()
        optimizer.step()

    return step


def qclip_step(case: Case, model: nn.Module, inputs: Tensor, targets: Tensor, groups: str = "flat") -> Step:
    """Clipped by the engine, noise added, the same update."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    engine = Engine(model, groups=groups)

    def evaluate(batch: tuple[Tensor, Tensor]) -> Tensor:
        return case.losses(model(batch[0]), batch[1])

    def step() -> None:
        result = engine.clipped(evaluate, (inputs, targets), CLIP_NORM)
        for name, parameter in engine.parameters.items():
            parameter.grad = result.sums[name].add_(torch.randn_like(parameter), alpha=NOISE_STD).div_(len(inputs))
        optimizer.step()

    return step


def opacus_step(case: Case, model: nn.Module, inputs: Tensor, targets: Tensor, mode: str) -> Step:
    """Opacus, in one of its modes."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    sgd = torch.optim.SGD(model.parameters(), 1e-3)
    settings: dict[str, Any] = {
        "noise_multiplier": NOISE_STD,
        "max_grad_norm": CLIP_NORM,
        "expected_batch_size": len(inputs),
        "loss_reduction": "mean",
    }
    if mode == "ghost":
        ghost = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(sgd, **settings)
        criterion = DPLossFastGradientClipping(ghost, optimizer, _Criterion(case), "mean")

        def ghost_step() -> None:
            optimizer.zero_grad()
            criterion(ghost(inputs), targets).backward()
            optimizer.step()

        return ghost_step
    wrapped = GradSampleModule(model)
    private = DPOptimizer(sgd, **settings)

    def step() -> None:
        private.zero_grad()
        case.losses(wrapped(inputs), targets).mean().backward()
        private.step()

    return step


class _Criterion(nn.Module):
    """Opacus's ghost clipping reads and sets the reduction of its loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self.case.losses(outputs, targets)
        return losses if self.reduction == "none" else losses.mean()


MODES: dict[str, Callable[..., Step]] = {
    "plain": plain_step,
    "qclip": qclip_step,
    "qclip per-layer": lambda *args: qclip_step(*args, groups="per-layer"),
    "opacus hooks": lambda *args: opacus_step(*args, mode="hooks"),
    "opacus ghost": lambda *args: opacus_step(*args, mode="ghost"),
}


def describe(device: str) -> str:
    """The machine and the versions, for the head of a table."""
    where = (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    )
    opacus = f", opacus {importlib.metadata.version('opacus')}" if importlib.util.find_spec("opacus") else ""
    return f"{where}, torch {torch.__version__}{opacus}, float32"


def run(
    device: str = "cpu", *, rounds: int = 15, cases: Sequence[str] = (), say: Callable[[str], object] | None = None
) -> list[Row]:
    """Measure every case in every mode; ``say`` is told what is being measured."""
    for name in cases:
        check.choice("case", name, [case.name for case in CASES])
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise check.refuse("device", device, "a device of this machine", "torch finds no GPU here; use cpu")
    if not device.startswith(("cpu", "cuda")):
        raise check.refuse("device", device, "cpu or cuda", "other devices have no measure of memory")
    modes = {name: make for name, make in MODES.items() if "opacus" not in name or importlib.util.find_spec("opacus")}
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's, about its own hooks
        for case in CASES:
            if not cases or case.name in cases:
                if say is not None:
                    say(f"measuring {case.name}")
                rows += _measure(case, modes, torch.device(device), rounds)
    return rows


def _measure(case: Case, modes: dict[str, Callable[..., Step]], device: torch.device, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    inputs = case.inputs()
    targets = case.targets(inputs).to(device)
    inputs = inputs.to(device)
    steps, parameters = {}, 0
    for name, make in modes.items():
        torch.manual_seed(0)
        model = case.model().to(device)
        parameters = sum(p.numel() for p in model.parameters())
        steps[name] = make(case, model, inputs, targets)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # proofs, allocator and thread pools
        step()
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_seconds(step, device))
    ms = {name: 1e3 * statistics.median(each) for name, each in times.items()}
    peak = {name: peak_bytes(step, device) for name, step in steps.items()}
    return [
        Row(
            case.name,
            name,
            ms[name],
            peak[name],
            ms[name] / ms["plain"],
            peak[name] / max(peak["plain"], 1),
            parameters,
        )
        for name in steps
    ]


def _seconds(step: Step, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(step: Step, device: torch.device) -> int:
    """The most memory a step has in use beyond what was there before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    used = peak = 0
    results = getattr(profile.profiler, "kineto_results", None)
    events = [] if results is None else [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    return peak
