"""A language model adapts to private text by LoRA, in Hugging Face's Trainer: first plain, then private.

    python examples/gpt2_trainer.py                    made-up sentences
    python examples/gpt2_trainer.py --data-dir data    Shakespeare: comedies are public, speeches of Hamlet private

Fine-tuning of GPT-2 goes in two stages: what is public is learnt without noise by `Trainer`, then `peft` adds adapters,
and `PrivateTrainer` trains only these. The unit of privacy is a speech. The speeches are shakespeare/speeches.tsv.gz:
play, speaker and text between tabs.
"""

import gzip
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from qclip.integrations.transformers import PrivateTrainer, bucketed_lengths

COMEDIES = ("as_you_like_it", "twelfth_night", "much_ado_about_nothing")
PUBLIC = ("the a my", "old red big shy", "fox hen owl bear", "runs eats sings sleeps")
PRIVATE = ("the a our", "new fast tall dry", "van ship oak tower", "stops falls grows moves")
LENGTHS = (32, 64)
"""In characters; public."""
Texts = list[list[int]]


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    data_dir: Path | None = None
    out: Path = Path("gpt2_trainer")
    public_steps: int = 300
    steps: int = 60
    batch_size: int = 128
    epsilon: float = 8.0
    lr: float = 2e-2
    width: int = 64
    rank: int = 4
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def codes(text: str) -> list[int]:
    """Return the characters of a text as numbers below 128, with a line feed at both ends."""
    return [min(ord(character), 127) for character in f"\n{text}\n"[: LENGTHS[-1]]]


def sentences(words: tuple[str, ...], count: int) -> Texts:
    """Return made-up sentences of these words."""
    draw = random.Random(0)
    return [codes(" ".join(draw.choice(some.split()) for some in words) + ".") for _ in range(count)]


def speeches(path: Path, plays: tuple[str, ...]) -> Texts:
    """Return the speeches of some plays, shuffled."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    texts = [codes(text.replace("\\n", "\n")) for play, _, text in rows if play in plays]
    random.Random(0).shuffle(texts)
    return texts


def main(settings: Settings) -> tuple[float, float, float]:
    """Train; return the held-out bits per character before and after the private stage, and the epsilon it cost."""
    if settings.data_dir is None:
        public, private = sentences(PUBLIC, 2000), sentences(PRIVATE, 1000)
    else:
        path = settings.data_dir / "shakespeare" / "speeches.tsv.gz"
        public, private = speeches(path, COMEDIES), speeches(path, ("hamlet",))

    def arguments(steps: int, lr: float) -> TrainingArguments:
        return TrainingArguments(
            str(settings.out),
            max_steps=steps,
            learning_rate=lr,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=settings.batch_size // 32,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
        )

    config = GPT2Config(
        vocab_size=128, n_positions=LENGTHS[-1], n_embd=settings.width, n_layer=2, n_head=4, bos_token_id=10,
        eos_token_id=10,
    )  # fmt: skip
    both: dict[str, Any] = {"data_collator": bucketed_lengths(LENGTHS), "eval_dataset": private[-200:]}
    plain = Trainer(GPT2LMHeadModel(config), arguments(settings.public_steps, 5e-3), train_dataset=public, **both)
    plain.train()
    adapters = LoraConfig(r=settings.rank, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    trainer = PrivateTrainer(  # instead of Trainer
        get_peft_model(plain.model, adapters),
        arguments(settings.steps, settings.lr),
        train_dataset=private[:-200],
        epsilon=settings.epsilon,  # the budget
        privacy_seed=settings.seed,
        **both,
    )
    before = trainer.evaluate()["eval_loss"] / math.log(2)
    trainer.train()
    after, epsilon = trainer.evaluate()["eval_loss"] / math.log(2), trainer.epsilon()
    print(f"held-out bits per character {after:.2f} (before {before:.2f}) at epsilon {epsilon:.2f}")
    trainer.model.print_trainable_parameters()
    return before, after, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
