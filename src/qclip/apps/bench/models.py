"""The models of the benchmark: the usual shapes of comparisons of private training, built from plain layers."""

import torch
from torch import Tensor, nn

from qclip.apps.data.models import Block, CausalTransformer


def transformer() -> nn.Module:
    """Return a small causal language model: 4 layers of width 128."""
    return CausalTransformer(alphabet=1000, positions=64, width=128, layers=4)


def gpt2(positions: int, *, layers: int = 12, width: int = 768, heads: int = 12) -> nn.Module:
    """Return a model of the shape of GPT-2, small by default; the head has weights of its own."""
    return CausalTransformer(alphabet=50257, positions=positions, width=width, layers=layers, heads=heads)


class VisionTransformer(nn.Module):
    """A vision transformer with mean pooling over the patches: ViT-B/16 by default."""

    def __init__(
        self,
        *,
        side: int = 224,
        patch: int = 16,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Embedding((side // patch) ** 2, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores, [B, classes], of images [B, 3, side, side]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        # One row of positions per example: Opacus, which the benchmarks compare with, needs it.
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]).contiguous()
        x = x + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class WideBlock(nn.Module):
    """A residual block of two 3 x 3 convolutions, each after group norm and ReLU."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.GroupNorm(16, channels), nn.GroupNorm(16, out)
        self.first = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut = None if channels == out else nn.Conv2d(channels, out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, [B, out, height / stride, width / stride], of x [B, channels, height, width]."""
        h = self.first_norm(x).relu()
        beside = x if self.shortcut is None else self.shortcut(h)
        return self.second(self.second_norm(self.first(h)).relu()) + beside


def wide_resnet(*, depth: int = 16, widen: int = 4, classes: int = 10) -> nn.Module:
    """Return a wide residual network with group norm, for 32 x 32 images: WRN-16-4 by default."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    channels = 16
    for out, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
        for k in range((depth - 4) // 6):
            layers.append(WideBlock(channels, out, stride if k == 0 else 1))
            channels = out
    head = (nn.GroupNorm(16, channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*layers, *head)


def convolutions(width: int = 32) -> nn.Module:
    """Return a small stack of 3 x 3 convolutions with group norm, for 32 x 32 images."""
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


def mlp(hidden: int) -> nn.Module:
    """Return a perceptron of widths 784, hidden, hidden and 10, with ReLU."""
    first, second, head = nn.Linear(784, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 10)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), head)
