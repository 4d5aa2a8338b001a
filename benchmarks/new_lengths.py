"""Texts of a new length: what does the proof of their batch cost, in plain steps?

    python benchmarks/new_lengths.py           # the third length is proven on a few examples
    python benchmarks/new_lengths.py --whole   # every length is proven on all examples, as the first two are

A small BERT of `transformers` with dropout is trained on batches of fixed size, eager, each of another length. Times
are CPU seconds of this process, forward and backward of an ordinary step against a step of `training.step`.
"""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import qclip
from qclip.engine import driver
from qclip.integrations.transformers import classification_loss, fixed_length
from qclip.training import batch_proof


@dataclass(frozen=True)
class Settings:
    """The settings of the benchmark."""

    batch_size: int = 32
    lengths: tuple[int, ...] = (40, 48, 64)
    whole: bool = False


class Cut:
    """A collate function that cuts every text to the length of the moment."""

    length = 0

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        return fixed_length(0, self.length)(items)


def seconds(function: Callable[..., object], *args: object) -> float:
    """Return the CPU seconds of a call."""
    before = time.process_time()
    function(*args)
    return time.process_time() - before


def main(settings: Settings) -> None:
    """Print the times of plain steps, of private steps, and of the first private step of each length."""
    logging.getLogger("qclip").setLevel(logging.ERROR)
    torch.manual_seed(0)
    if settings.whole:
        vars(driver)["_OF_ALL_EXAMPLES"] = vars(batch_proof)["LATER_EXAMPLES"] = 10**9
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForSequenceClassification(BertConfig(vocab_size=1000, **sizes)).train()
    texts = torch.randint(1, 1000, (1000, max(settings.lengths))).tolist()
    rows: Any = [{"input_ids": text, "labels": k % 2} for k, text in enumerate(texts)]
    cut = Cut()
    training = qclip.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        DataLoader(rows, collate_fn=cut),
        per_example_loss=classification_loss,
        batch_size=settings.batch_size,
        steps=6 * len(settings.lengths),
        noise_multiplier=0,
    )
    batches = iter(training.loader)

    def plain(batch: dict[str, Tensor]) -> None:
        classification_loss(model, batch).mean().backward()
        model.zero_grad()

    for cut.length in settings.lengths:
        batch = cut(rows[: settings.batch_size])
        times = [seconds(plain, batch) for _ in range(6)]
        usual = statistics.median(times[1:])
        first, _, *others = [seconds(training.step, next(batches)) for _ in range(6)]  # the second is a proof, too
        print(
            f"{settings.batch_size} x {cut.length}: plain {usual:.3f} s, private {statistics.median(others):.3f} s, "
            f"first private {first:.2f} s ({first / usual:.0f} plain)"
        )


if __name__ == "__main__":
    main(tyro.cli(Settings))
