"""A small GPT-2 from Hugging Face learns to write sentences privately, one character at a time.

    python examples/gpt2.py --epsilon 4

The unit of privacy is a sentence. The model is used unchanged: tied embeddings, Conv1D layers and dropout need no
replacement. The sentences are synthetic; nothing is downloaded.
"""

import math
import random
from dataclasses import dataclass

import torch
import tyro
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import qclip
from qclip.integrations.transformers import causal_lm_loss, fixed_length

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz."
LENGTH = 24
"""Length of every example, in characters: public, so that the shape of a batch reveals nothing."""


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    sentences: int = 800
    steps: int = 50
    batch_size: int = 100
    epsilon: float = 4.0
    lr: float = 1e-2
    width: int = 32
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def sentences(count: int) -> list[list[int]]:
    """Return sentences such as "the old fox sings.", as ids of characters, with a line break at both ends."""
    draw = random.Random(0)
    words = ("the a my", "old red big shy", "fox hen owl bear", "runs eats sings sleeps")
    texts = ["\n" + " ".join(draw.choice(some.split()) for some in words) + ".\n" for _ in range(count)]
    return [[ALPHABET.index(character) for character in text] for text in texts]


def bits_per_character(model: torch.nn.Module, examples: list[list[int]]) -> float:
    """Return the mean cross entropy of the examples, in bits."""
    model.eval()
    with torch.no_grad():
        losses = causal_lm_loss(model, fixed_length(0, LENGTH)(examples))
    model.train()
    return losses.mean().item() / math.log(2)


def main(settings: Settings) -> tuple[float, float, float]:
    """Train and return the held-out bits per character before and after, and the epsilon spent."""
    torch.manual_seed(0)
    examples = sentences(settings.sentences + 200)
    train, held_out = examples[:-200], examples[-200:]
    config = GPT2Config(
        vocab_size=len(ALPHABET), n_positions=LENGTH, n_embd=settings.width, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    training = qclip.make_private(
        model,
        optimizer,
        DataLoader(train, collate_fn=fixed_length(0, LENGTH)),
        per_example_loss=causal_lm_loss,
        batch_size=settings.batch_size,
        steps=settings.steps,
        epsilon=settings.epsilon,
        seed=settings.seed,
    )
    before = bits_per_character(model, held_out)
    for batch in training.loader:
        training.step(batch)
    after, epsilon = bits_per_character(model, held_out), training.epsilon()
    print(f"held-out bits per character {after:.2f} (before {before:.2f}) at epsilon {epsilon:.2f}")
    print(write(model))
    return before, after, epsilon


def write(model: GPT2LMHeadModel) -> str:
    """Return a sentence sampled from the model."""
    model.eval()
    ids = model.generate(torch.zeros(1, 1, dtype=torch.long), max_length=LENGTH, do_sample=False, pad_token_id=0)
    return "".join(ALPHABET[i] for i in ids[0]).strip()


if __name__ == "__main__":
    main(tyro.cli(Settings))
