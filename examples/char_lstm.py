"""A character LSTM learns privately to which kind a text belongs.

    python examples/char_lstm.py                    names in two made-up languages
    python examples/char_lstm.py --data-dir data    speeches of Shakespeare: comedy or tragedy?

`nn.LSTM` is used as it is; recurrent layers need no replacement. Texts are padded to public lengths, and only states
behind their own characters are averaged, so that padding changes nothing. The speeches are
shakespeare/speeches.tsv.gz: play, speaker and text between tabs.
"""

import gzip
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import DataLoader

import qclip

LENGTHS = (32, 64)
"""Public: a batch is padded to the shortest that holds it, and longer texts are cut off."""
COMEDIES = ("as_you_like_it", "twelfth_night", "much_ado_about_nothing", "merry_wives_of_windsor", "loves_labours_lost")
TRAGEDIES = ("hamlet", "macbeth", "lear", "othello", "coriolanus")
SYLLABLES = ("ka ro mi lu na te", "sten burg hof mar wald feld")
Example = tuple[str, int]


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    data_dir: Path | None = None
    steps: int = 150
    batch_size: int = 256
    epsilon: float = 8.0
    lr: float = 0.01
    width: int = 32
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def names(count: int) -> list[Example]:
    """Return names of two made-up languages."""
    draw = random.Random(0)
    kinds = [draw.randrange(2) for _ in range(count)]
    return [("".join(draw.choices(SYLLABLES[kind].split(), k=draw.randint(2, 5))), kind) for kind in kinds]


def speeches(path: Path) -> list[Example]:
    """Return speeches from comedies, 0, and tragedies, 1, shuffled."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    kinds = dict.fromkeys(COMEDIES, 0) | dict.fromkeys(TRAGEDIES, 1)
    examples = [(text, kinds[play]) for play, _, text in rows if play in kinds]
    random.Random(0).shuffle(examples)
    return examples


def collate(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Return codes of characters [B, T], 0 for padding, and the kinds [B]."""
    longest = max(len(text) for text, _ in examples)
    length = next((length for length in LENGTHS if length >= longest), LENGTHS[-1])
    rows = [[min(ord(character), 127) for character in text[:length]] for text, _ in examples]
    padded = [row + [0] * (length - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor([kind for _, kind in examples])


class CharLSTM(nn.Module):
    """A classifier on the mean state over a text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the scores of both kinds, [B, 2]."""
        states, _ = self.lstm(self.embedding(codes))
        real = (codes != 0).unsqueeze(2)
        return self.head((states * real).sum(1) / real.sum(1).clamp_min(1))


def main(settings: Settings) -> tuple[float, float]:
    """Train and return the held-out accuracy and the epsilon spent."""
    torch.manual_seed(0)
    folder = settings.data_dir
    examples = names(3000) if folder is None else speeches(folder / "shakespeare" / "speeches.tsv.gz")
    train, held_out = examples[:-500], examples[-500:]
    model = CharLSTM(settings.width)
    training = qclip.make_private(
        model,
        torch.optim.Adam(model.parameters(), lr=settings.lr),
        DataLoader(train, collate_fn=collate),
        loss=nn.CrossEntropyLoss(),
        batch_size=settings.batch_size,
        steps=settings.steps,
        epsilon=settings.epsilon,
        seed=settings.seed,
    )
    for codes, kinds in training.loader:
        training.step(codes, kinds)
    codes, kinds = collate(held_out)
    with torch.no_grad():
        accuracy = (model(codes).argmax(1) == kinds).float().mean().item()
    print(f"held-out accuracy {accuracy:.3f} at epsilon {training.epsilon():.2f}")
    return accuracy, training.epsilon()


if __name__ == "__main__":
    main(tyro.cli(Settings))
