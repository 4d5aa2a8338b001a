"""The cases of the benchmark: a model, the shape of its examples, and a batch size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qclip import _validate as check
from qclip.apps.bench import models
from qclip.apps.data.models import mnist_cnn

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True)
class BenchCase:
    """A model and a batch of random examples."""

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of one example."""
    classes: int
    batch: int
    tokens: bool = False
    """Whether an example is a sequence of tokens, each predicted from those before it."""
    device: str = "cpu"
    """The device that the size is meant for."""

    def examples(self, count: int, seed: int = 0) -> Batch:
        """Return random inputs [count, *shape] and targets, the same for the same seed."""
        rng = torch.Generator().manual_seed(seed)
        if self.tokens:
            ids = torch.randint(self.classes, (count, *self.shape), generator=rng)
            return ids, ids.roll(-1, 1)
        inputs = torch.randn(count, *self.shape, generator=rng)
        return inputs, torch.randint(self.classes, (count,), generator=rng)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of [B, classes] scores, or the mean over positions for [B, T, classes]: [B]."""
        each = F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten(), reduction="none")
        return each.unflatten(0, (len(targets), -1)).mean(1)


def gpt2(positions: int, batch: int) -> BenchCase:
    """Return a case of the shape of GPT-2 small, with this many positions."""
    return BenchCase(
        f"gpt2-{positions}",
        partial(models.gpt2, positions),
        shape=(positions,),
        classes=50257,
        batch=batch,
        tokens=True,
        device="cuda",
    )


CASES = {
    case.name: case
    for case in (
        BenchCase("transformer", models.transformer, shape=(64,), classes=1000, batch=32, tokens=True),
        BenchCase("cnn-28", mnist_cnn, shape=(1, 28, 28), classes=10, batch=256),
        BenchCase("cnn-32", models.convolutions, shape=(3, 32, 32), classes=10, batch=64),
        BenchCase("mlp", partial(models.mlp, 512), shape=(784,), classes=10, batch=256),
        gpt2(128, 32),
        gpt2(512, 16),
        gpt2(1024, 8),
        BenchCase("vit", models.VisionTransformer, shape=(3, 224, 224), classes=1000, batch=64, device="cuda"),
        BenchCase("wrn", models.wide_resnet, shape=(3, 32, 32), classes=10, batch=512, device="cuda"),
        BenchCase("mlp-2048", partial(models.mlp, 2048), shape=(784,), classes=10, batch=4096, device="cuda"),
    )
}


def chosen(names: Sequence[str], device: torch.device) -> list[BenchCase]:
    """Return the cases of these names, or all that are sized for this device."""
    for name in names:
        check.choice("case", name, CASES)
    return [case for case in CASES.values() if (case.name in names if names else case.device == device.type)]
