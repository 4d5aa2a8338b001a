"""The models of the tasks: small, without dropout or batch statistics."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qclip.tables.models import linear


def autoencoder(inputs: int, hidden: int, code: int) -> nn.Module:
    """Return an autoencoder with tanh, and one hidden layer on each side of its code."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, code), nn.Tanh(),
        nn.Linear(code, hidden), nn.Tanh(), nn.Linear(hidden, inputs),
    )  # fmt: skip


def mnist_cnn() -> nn.Module:
    """Return the CNN of Tramer and Boneh (2021) for one-channel 28 x 28 images in 10 classes: 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def cifar_cnn() -> nn.Module:
    """Return the CNN of Tramer and Boneh (2021) for colour 32 x 32 images in 10 classes: 550,570 parameters."""
    layers: list[nn.Module] = []
    for inputs, channels in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.Tanh(), nn.Linear(128, 10))


class TextClassifier(nn.Module):
    """A linear model, zero at first, of the mean of an encoder's outputs over the tokens that are not padding (0)."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the classes, [B, classes], from token ids [B, T]."""
        mask = ids != 0
        outputs = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(outputs.dtype)
        return self.head((outputs * weights).sum(1) / weights.sum(1).clamp(min=1))


def next_character(alphabet: int, context: int, *, width: int = 8, hidden: int = 64) -> nn.Module:
    """Return a perceptron that scores the next character, [B, alphabet], from those before it, [B, context]."""
    return nn.Sequential(
        nn.Embedding(alphabet, width), nn.Flatten(), nn.Linear(context * width, hidden), nn.Tanh(),
        nn.Linear(hidden, alphabet),
    )  # fmt: skip


class CausalTransformer(nn.Module):
    """A small causal language model over a fixed alphabet, with learned positions."""

    def __init__(self, alphabet: int, positions: int, *, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the next characters, [B, T, alphabet], from characters [B, T]."""
        # One row of positions per example: Opacus, which the benchmarks compare with, needs it.
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
        x = self.characters(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """A pre-norm transformer block: causal or full attention, and a feed-forward layer."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, [B, T, width], from inputs of the same shape."""
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attend(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))
