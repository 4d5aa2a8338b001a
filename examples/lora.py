"""Private fine-tuning by LoRA: a model that was trained on public text adapts to private text.

    python examples/lora.py --rank 4

The small GPT-2 is first trained on public sentences, without noise. Then `peft` freezes it and adds adapters, and only
these are trained, privately. Neither the model nor the adapters need changes or registration.
"""

import math
import random
from dataclasses import dataclass

import torch
import tyro
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import qclip
from qclip.integrations.transformers import causal_lm_loss, fixed_length

ALPHABET = "\n abcdefghijklmnopqrstuvwxyz."
PUBLIC = ("the a my", "old red big shy", "fox hen owl bear", "runs eats sings sleeps")
PRIVATE = ("the a our", "new fast tall dry", "van ship oak tower", "stops falls grows moves")
collate = fixed_length(ALPHABET.index("\n"), length=24)


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    public_steps: int = 80
    rank: int = 4
    sentences: int = 800
    steps: int = 50
    batch_size: int = 100
    epsilon: float = 4.0
    lr: float = 2e-2
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def sentences(words: tuple[str, ...], count: int) -> list[list[int]]:
    """Return sentences of these words, as ids of characters, with a line break at both ends."""
    draw = random.Random(0)
    texts = ["\n" + " ".join(draw.choice(some.split()) for some in words) + ".\n" for _ in range(count)]
    return [[ALPHABET.index(character) for character in text] for text in texts]


def pretrained(steps: int) -> GPT2LMHeadModel:
    """Return a small GPT-2 that was trained on public text, in an ordinary loop."""
    config = GPT2Config(
        vocab_size=len(ALPHABET), n_positions=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    examples = sentences(PUBLIC, 64 * steps)
    for k in range(steps):
        causal_lm_loss(model, collate(examples[64 * k : 64 * (k + 1)])).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def bits_per_character(model: nn.Module, examples: list[list[int]]) -> float:
    """Return the mean cross entropy of the examples, in bits."""
    model.eval()
    with torch.no_grad():
        losses = causal_lm_loss(model, collate(examples))
    model.train()
    return losses.mean().item() / math.log(2)


def main(settings: Settings) -> tuple[float, float, float]:
    """Train and return the held-out bits per character before and after the adaptation, and the epsilon it cost."""
    torch.manual_seed(0)
    base = pretrained(settings.public_steps)
    adapters = LoraConfig(
        r=settings.rank, lora_alpha=2 * settings.rank, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True
    )
    model = get_peft_model(base, adapters).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings.lr)

    examples = sentences(PRIVATE, settings.sentences + 200)
    train, held_out = examples[:-200], examples[-200:]
    training = qclip.make_private(
        model,
        optimizer,
        DataLoader(train, collate_fn=collate),
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
    count, total = sum(p.numel() for p in trainable), sum(p.numel() for p in model.parameters())
    print(f"held-out bits per character {after:.2f} (before {before:.2f}) at epsilon {epsilon:.2f}")
    print(f"{count} of {total} parameters were trained on private text")
    return before, after, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
